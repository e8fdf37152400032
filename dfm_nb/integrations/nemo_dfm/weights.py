"""Weights of NeMo DFM's DiT: read, told the settings of, and renamed for `model.variant=dfm`.

A consolidated `model.pth`, or a `torch_dist` folder of Megatron-Bridge (`iter_*`, or the folder around them); of either
only tensors. The index of such a folder, `.metadata`, is a pickle. It is read by `checkpoints.exported`, which runs no
code from it, and only what has the form of an index of tensors is used.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dfm_nb.base.files import UNLIMITED, plain
from dfm_nb.base.limits import MOST_LAYERS
from dfm_nb.base.run import iteration_folders
from dfm_nb.checkpoints.consolidated import Foreign, check_shapes
from dfm_nb.checkpoints.exported import Record, read_pickle, read_saved
from dfm_nb.checkpoints.tensor_files import CheckpointError, assembled, reason
from dfm_nb.config.schema import ModelConfig
from dfm_nb.config.sizes import LATENT_CHANNELS
from dfm_nb.data import tensor_bytes
from dfm_nb.integrations.nemo_dfm.transformer import POSITIONS, position_embedding
from dfm_nb.model.build import on_meta
from dfm_nb.packs.patches import grid_positions

INDEX = ".metadata"
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

MANIFEST = {
    "tokenizer": {"name": "cosmos_cv"},
    "text_encoder": {"name": "t5"},
    "latent_mean": [0.0] * LATENT_CHANNELS,
    "latent_std": [1.0] * LATENT_CHANNELS,
}
"""What latents and texts mean to it: it multiplies latents by sigma_data, and nothing else."""

TABLE = "pos_embedder.pos_embedding.weight"
"""The table of positions, which is computed here."""
UNUSED = "affline_norm.weight"
"""A weight that no forward pass of NeMo DFM uses."""


def read(path: Path) -> Foreign | None:
    """A file, or a folder with a checkpoint in torch_dist (.metadata, or iter_*/)."""
    source = path
    if path.is_dir() and not (path / INDEX).is_file():
        folders = iteration_folders(path)
        if not folders:
            return None
        source = folders[-1][1]
    weights = read_source(source)
    return Foreign(settings_of(weights), MANIFEST, partial(read_weights, weights, path))


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
            value = rearrange(value, "out (h w c) -> out (c h w)", h=patch, w=patch)
        elif name.startswith("final."):
            value = rearrange(value, "(h w c) ... -> (c h w) ...", h=patch, w=patch)
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


# ---- torch_dist -----------------------------------------------------------------------------------------------------


def _fields(value: Any, *names: str) -> list[Any]:
    """Those of a record's state."""
    state = value.state if type(value) is Record else None
    if not isinstance(state, dict) or not state.keys() >= set(names):
        raise ValueError(f"it has something else in place of an object with {', '.join(names)}")
    return [state[name] for name in names]


def _size(value: Any) -> list[int]:
    """Of a `torch.Size`."""
    (sizes,) = value.arguments if type(value) is Record and len(value.arguments) == 1 else (None,)
    if not isinstance(sizes, tuple) or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError("it has something else in place of a size")
    return list(sizes)


def _chunk(folder: Path, info: Any) -> Tensor:
    """A part of a tensor, as torch.save wrote it into a file of the folder."""
    name, offset, length = _fields(info, "relative_path", "offset", "length")
    if type(name) is not str or Path(name).name != name:
        raise ValueError(f"{name!r:.80} must be the plain name of a file in the folder")
    path = plain(folder / name, None, UNLIMITED)
    size = path.stat().st_size
    if not all(type(n) is int and 0 <= n <= size for n in (offset, length)) or info.state.get("transform_descriptors"):
        raise ValueError(f"a part of {name} must lie in it, untransformed")
    with path.open("rb") as f:
        f.seek(offset)
        value = tensor_bytes.read_saved(f.read(length))
    if not isinstance(value, Tensor):
        raise ValueError(f"a part of {name} is no tensor")
    return value


def _tensors(folder: Path) -> dict[str, Tensor]:
    index = read_pickle(plain(folder / INDEX).read_bytes())
    entries, storage = _fields(index, "state_dict_metadata", "storage_data")
    chunks: dict[str, list[tuple[list[int], Any]]] = {}
    for where, info in storage.items():
        (name,) = _fields(where, "fqn")
        if type(name) is not str:
            raise ValueError("the name of a tensor must be text")
        # without a size it is bytes, as random states
        if "size" in (entries[name].state or ()) and not name.startswith(("optimizer.", "chained_")):
            chunks.setdefault(name, []).append((_size(*_fields(where, "offset")), info))
    out = {}
    for name, parts in chunks.items():
        read = [(offset, _chunk(folder, info)) for offset, info in parts]
        out[name] = assembled(f"{name!r:.120}", _size(*_fields(entries[name], "size")), read)
    return out


def load_foreign(folder: Path) -> dict[str, Tensor]:
    """All whole tensors of a folder of another program, less its optimizer's; CheckpointError when it is damaged."""
    try:
        return _tensors(folder)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{folder / INDEX} is damaged or holds more than tensors: {reason(error)}") from None
