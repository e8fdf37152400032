"""Whole weights by name, one in memory at a time, are written as one file."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dfm_nb import config as cfg
from dfm_nb.checkpoints import exported, folders, loading
from dfm_nb.checkpoints.tensor_files import Lazy
from dfm_nb.config import samples
from dfm_nb.model.linear import is_lora, merged


def write_weights(
    tensors: Mapping[str, Tensor], output: Path, source: loading.Weights, dtype: torch.dtype | None = None
) -> None:
    """Write `output`, and LoRA weights to a second file.

    tensors : floating point; stored as `dtype` (None: unchanged). source : has the small files and the settings.
    """
    assets = assets_of(source.folder)
    if source.config.model.lora.rank:
        updates = Lazy(filter(is_lora, tensors), tensors.__getitem__)
        exported.write(loading.lora_file(output), exported.as_dtype(updates, dtype), {})
        tensors = Lazy((n for n in tensors if not is_lora(n)), tensors.__getitem__)
    resolved = cfg.Resolved(source.config, cfg.from_yaml(source.folder / "config.yaml").provenance)
    small = {"config.yaml": cfg.to_yaml(resolved), samples.FILE: source.config.samples.model_dump_json()}
    exported.write(
        output, exported.as_dtype(tensors, dtype), assets | {name: text.encode() for name, text in small.items()}
    )


def without_updates(tensors: Mapping[str, Tensor], model: cfg.ModelConfig) -> Mapping[str, Tensor]:
    """The weights with LoRA weights added; `model` is changed to have none."""
    if not model.lora.rank:
        return tensors
    whole, scale = tensors, model.lora.scale
    model.lora.rank = model.lora.alpha = None
    return Lazy((n for n in whole if not is_lora(n)), lambda name: merged(whole, name, scale))


def assets_of(folder: Path) -> dict[str, bytes]:
    """The small files of a checkpoint; the manifest has only the keys that generation reads."""
    assets = folders.read_assets(folder)
    if "manifest.json" in assets:
        manifest = folders.read_manifest(folder)
        kept = {k: manifest[k] for k in ("tokenizer", "text_encoder", "latent_mean", "latent_std")}
        assets["manifest.json"] = json.dumps(kept).encode()
    return assets
