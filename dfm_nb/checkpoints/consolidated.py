"""Whole weights by name, one in memory at a time, are written as one file."""

import json
from collections.abc import Mapping
from itertools import filterfalse
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
    assets = folders.read_assets(source.folder)
    if folders.MANIFEST in assets:
        manifest = folders.read_manifest(source.folder)
        # only what generation reads
        kept = {key: manifest[key] for key in (*folders.ENCODERS, "latent_mean", "latent_std")}
        assets[folders.MANIFEST] = json.dumps(kept).encode()
    tensors = exported.as_dtype(tensors, dtype)
    if source.config.model.lora.rank:
        updates = Lazy(filter(is_lora, tensors), tensors.__getitem__)
        exported.write(loading.lora_file(output), updates, {})
        tensors = Lazy(filterfalse(is_lora, tensors), tensors.__getitem__)
    resolved = cfg.Resolved(source.config, cfg.from_yaml(source.folder / "config.yaml").provenance)
    assets["config.yaml"] = cfg.to_yaml(resolved).encode()
    assets[samples.FILE] = source.config.samples.model_dump_json().encode()
    exported.write(output, tensors, assets)


def without_updates(tensors: Mapping[str, Tensor], model: cfg.ModelConfig) -> Mapping[str, Tensor]:
    """The weights with LoRA weights added; `model` is changed to have none."""
    if not model.lora.rank:
        return tensors
    scale = model.lora.scale
    model.lora.rank = model.lora.alpha = None
    return Lazy(filterfalse(is_lora, tensors), lambda name: merged(tensors, name, scale))
