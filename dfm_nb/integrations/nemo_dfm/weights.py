"""Weights of NeMo DFM's DiT: read, told the settings of, and renamed for `model.variant=dfm`.

A consolidated `model.pth`, or a `torch_dist` folder of Megatron-Bridge (`iter_*`, or the folder around them); of either
only tensors.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dfm_nb.base.limits import MOST_LAYERS
from dfm_nb.base.run import iteration_folders
from dfm_nb.checkpoints.consolidated import Foreign, check_shapes
from dfm_nb.checkpoints.exported import read_saved
from dfm_nb.checkpoints.tensor_files import CheckpointError
from dfm_nb.config.schema import ModelConfig
from dfm_nb.config.sizes import LATENT_CHANNELS
from dfm_nb.integrations.nemo_dfm.torch_dist import load_foreign
from dfm_nb.integrations.nemo_dfm.transformer import POSITIONS, position_embedding
from dfm_nb.model.build import on_meta
from dfm_nb.packs.patches import grid_positions

RENAMED = (
    ("full_self_attention.", "self_attention."),
    ("adaLN.adaLN_modulation.1.", "adaln.down."),
    ("adaLN.adaLN_modulation.2.", "adaln.up."),
    ("fps_embedder.1.linear_", "fps_embedder.fc"),
    ("t_embedder.1.linear_", "sigma_embedder.fc"),
    ("final_layer_linear.", "final."),
)
SHAPED = (
    "x_embedder.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.cross_attention.linear_kv.weight",
    "decoder.layers.0.adaLN.adaLN_modulation.1.weight",
    "decoder.layers.0.full_self_attention.q_layernorm.weight",
)
"""Weights whose shapes tell the settings."""

TABLE = "pos_embedder.pos_embedding.weight"
"""The table of positions, which is computed here."""
UNUSED = "affline_norm.weight"
"""A weight that no forward pass of NeMo DFM uses."""


def read(path: Path) -> Foreign | None:
    """A file, or a folder with a checkpoint in torch_dist (.metadata, or iter_*/)."""
    source = path
    if path.is_dir() and not (path / ".metadata").is_file():
        folders = iteration_folders(path)
        if not folders:
            return None
        source = folders[-1][1]
    weights = read_source(source)
    return Foreign(settings_of(weights), manifest_of(), partial(read_weights, weights, path))


def read_source(path: Path) -> dict[str, Tensor]:
    """Weights by NeMo DFM's names, layers numbered, without the wrappers' `module.`."""
    stored: Mapping = load_foreign(path) if path.is_dir() else read_saved(path)
    out: dict[str, Tensor] = {}
    for key, value in stored.items():
        name = re.sub(r"^(module\.)+", "", str(key))
        if name.endswith("._extra_state"):  # Transformer Engine's, of its 8-bit recipes
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path} must hold weights by name; {name!r:.80} is no tensor")
        inner = re.fullmatch(r"decoder\.layers\.(\D.*)", name)
        if not inner:
            out[name] = value
            continue
        if not value.dim() or len(value) > MOST_LAYERS:
            raise CheckpointError(f"{path} must hold up to {MOST_LAYERS} layers; {name!r:.80} is {list(value.shape)}")
        for i, layer in enumerate(value):  # torch_dist keeps the weights of all layers in one tensor
            out[f"decoder.layers.{i}.{inner[1]}"] = layer
    for name in (TABLE, *SHAPED):
        shape = out[name].shape if name in out else ()
        if 0 in shape or len(shape) != (1 if name == SHAPED[-1] else 2):
            raise ValueError(f"{path} must hold all weights of NeMo DFM's DiT; it lacks {name}, or has it as no matrix")
    return out


def settings_of(weights: Mapping[str, Tensor]) -> list[str]:
    """Those of `model` that the weights' shapes tell."""
    shapes = [weights[name].shape for name in SHAPED]
    (width, numbers), (ffn, _), (_, text), (rank, _), (head,) = shapes
    values = {
        "num_layers": len({n.split(".")[2] for n in weights if n.startswith("decoder.layers.")}),
        "hidden_size": width,
        "num_attention_heads": width // head,
        "ffn_hidden_size": ffn,
        "text_dim": text,
        "adaln_lora_dim": rank,
        "in_channels": LATENT_CHANNELS,
        "patch_spatial": math.isqrt(numbers // LATENT_CHANNELS),
    }
    return [
        "model.variant=dfm",
        "generation.fps=30",  # it always was, whatever the clip's rate
        *(f"model.{k}={v}" for k, v in values.items()),
    ]


def manifest_of() -> dict[str, Any]:
    """What latents and texts mean to it: it multiplies latents by sigma_data, and nothing else."""
    return {
        "tokenizer": {"name": "cosmos_cv"},
        "text_encoder": {"name": "t5"},
        "latent_mean": [0.0] * LATENT_CHANNELS,
        "latent_std": [1.0] * LATENT_CHANNELS,
    }


def check_positions(table: Tensor, width: int) -> None:
    """ValueError unless the table is the one that the network here computes."""
    same = len(table) == math.prod(POSITIONS)
    if same:
        ours = position_embedding(grid_positions(POSITIONS, centred=False), width)
        same = torch.allclose(table.double(), ours, atol=0.01)  # it may be bfloat16
    if not same:
        raise ValueError(
            f"{TABLE} must be NeMo DFM's table of {' x '.join(map(str, POSITIONS))} positions (max_frames 34, "
            f"max_img_h and max_img_w 80); it has {len(table)} rows or other values, and cannot be imported"
        )


def converted(weights: Mapping[str, Tensor], patch: int) -> dict[str, Tensor]:
    """Our names; the numbers of a patch, there by row, column and channel, by channel, row and column."""
    out: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name in (TABLE, UNUSED):
            continue
        for theirs, ours in RENAMED:
            name = name.replace(theirs, ours)
        if name == "x_embedder.weight":
            value = value.unflatten(1, (patch, patch, -1)).permute(0, 3, 1, 2).flatten(1)
        elif name.startswith("final."):
            value = value.unflatten(0, (patch, patch, -1)).movedim(2, 0).flatten(0, 2)
        out[name] = value.clone(memory_format=torch.contiguous_format)
    return out


def read_weights(weights: Mapping[str, Tensor], source: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Our tensors by our names; ValueError naming what is missing, unknown or of another shape."""
    check_positions(weights[TABLE], model.hidden_size)
    out = converted(weights, model.patch_spatial)
    shapes = {name: list(t.shape) for name, t in out.items()}
    wanted = {name: list(p.shape) for name, p in on_meta(model).named_parameters()}
    check_shapes(source, shapes, wanted, " (by its name here)")
    return out
