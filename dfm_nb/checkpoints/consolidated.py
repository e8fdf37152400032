"""Whole weights by name, ours or of other tools, are written as the one file that `exported` reads."""

import json
import math
import re
from collections.abc import Callable, Mapping
from itertools import filterfalse
from pathlib import Path
from typing import NamedTuple

import torch

from dfm_nb import config as cfg
from dfm_nb.base.files import Json, replacing
from dfm_nb.checkpoints import folders, loading, tensor_files
from dfm_nb.checkpoints.exported import BYTES, KEY, TEXT, About, checksum
from dfm_nb.checkpoints.tensor_files import Lazy, Tensors
from dfm_nb.config import samples
from dfm_nb.model.linear import is_lora, merged


class Foreign(NamedTuple):
    """Weights of another tool: settings as overrides, a manifest of their data, and the tensors of a model."""

    settings: list[str]
    manifest: Json
    tensors: Callable[[cfg.ModelConfig], Tensors]


def as_dtype(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Rounded to `dtype`, one at a time; None leaves each as it is."""
    return Lazy(tensors, lambda name: tensors[name].to(dtype or tensors[name].dtype))


def write(output: Path, weights: Tensors, files: Mapping[str, bytes]) -> None:
    """Write weights [on the CPU] and the small files (name -> content) as one file, whole or absent.

    A `.safetensors` is written one tensor at a time; each is requested three times.
    """
    texts = {name: content.decode() for name, content in files.items() if re.fullmatch(TEXT, name)}
    small = {}
    for name, content in files.items():
        if name not in texts:
            small[BYTES + name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    tensors = Lazy([*weights, *small], lambda name: small[name] if name in small else weights[name])
    kinds = {name: (t.dtype, list(t.shape)) for name, t in tensors.items()}
    about = {KEY: About(files=texts, sha256=checksum(texts, tensors)).json_text()}
    if output.suffix == ".safetensors":
        tensor_files.write(output, tensors, about, kinds)
    else:
        with replacing(output) as temporary:
            torch.save(dict(tensors) | about, temporary)
    count = sum(math.prod(kinds[name][1]) for name in weights)
    print(f"[INFO] wrote {output}: {len(weights)} tensors, {count / 1e6:.2f} M parameters")


def check_shapes(source: Path, found: Mapping[str, list], wanted: Mapping[str, list], note: str = "") -> None:
    """ValueError with the name of a weight that is missing, unknown or of another shape."""
    for name in sorted(found.keys() ^ wanted.keys()):
        fault = "lacks the weight" if name in wanted else "holds the unknown weight"
        raise ValueError(f"{source} {fault} {name}{note}: the file is not from the published network")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{source}: the weight {name}{note} must have shape {shape}; it has {found[name]}")


def write_weights(tensors: Tensors, output: Path, source: loading.Weights, dtype: torch.dtype | None = None) -> None:
    """Write `output`, and LoRA weights to a second file.

    tensors : floating point; stored as `dtype` (None: unchanged). source : has the small files and the settings.
    """
    assets = folders.read_assets(source.folder)
    if folders.MANIFEST in assets:
        manifest = folders.read_manifest(source.folder)
        # only what generation reads
        kept = {key: manifest[key] for key in (*folders.ENCODERS, "latent_mean", "latent_std")}
        assets[folders.MANIFEST] = json.dumps(kept).encode()
    tensors = as_dtype(tensors, dtype)
    if source.config.model.lora.rank:
        updates = Lazy(filter(is_lora, tensors), tensors.__getitem__)
        write(loading.lora_file(output), updates, {})
        tensors = Lazy(filterfalse(is_lora, tensors), tensors.__getitem__)
    resolved = cfg.Resolved(source.config, cfg.from_yaml(source.folder / "config.yaml").provenance)
    assets["config.yaml"] = cfg.to_yaml(resolved).encode()
    assets[samples.FILE] = source.config.samples.file
    if source.config.samples.anchors:
        number = len(source.config.samples.anchors.texts)
        print(f"[INFO] {output} holds {number} training captions, as prompts need them (generation.anchor)")
    write(output, tensors, assets)


def without_updates(tensors: Tensors, model: cfg.ModelConfig) -> Tensors:
    """The weights with LoRA weights added; `model` is changed to have none."""
    if not model.lora.rank:
        return tensors
    scale = model.lora.scale
    model.lora.rank = model.lora.alpha = None
    return Lazy(filterfalse(is_lora, tensors), lambda name: merged(tensors, name, scale))
