"""`dfm import`: weights of NeMo DFM's DiT as a file that `dfm generate` and `dfm pretrain` take.

It reads a consolidated `model.pth`, or a `torch_dist` folder of Megatron-Bridge (`iter_*`, or the folder around them);
of either only tensors. Every key must be one of the network's, and every weight of the network must be there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.run import iteration_folders
from dfm_nb.checkpoints import exported
from dfm_nb.checkpoints.index import CheckpointError, load_foreign, reason
from dfm_nb.config.sizes import LATENT_CHANNELS
from dfm_nb.model.build import on_meta
from dfm_nb.model.dfm import POSITIONS, position_embedding
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

TABLE, UNUSED = "pos_embedder.pos_embedding.weight", "affline_norm.weight"
"""The table of positions, which is computed here, and a weight that no forward pass of NeMo DFM uses."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = ArgumentParser(prog="dfm import", description="Take over weights of NeMo DFM's DiT.")
    p.add_argument("source", help="model.pth, an iter_* folder (torch_dist), or the folder around those")
    p.add_argument("--output", required=True, help="FILE.safetensors or FILE.pth, as dfm export writes")
    p.add_argument("--tokenizer", default="cosmos_cv", help="tokenizer of the data it was trained on")
    p.add_argument("--text-encoder", default="t5", help="text encoder of the data it was trained on")
    p.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings that differ from NeMo DFM's own")
    return p.parse_args(argv)


def read_source(path: Path) -> dict[str, Tensor]:
    """Weights by NeMo DFM's names, layers numbered, without the wrappers' `module.`."""
    if path.is_dir():
        folders = [path] if (path / ".metadata").is_file() else [p for _, p in iteration_folders(path)]
        if not folders:
            raise FileNotFoundError(
                f"{path} must hold a checkpoint in torch_dist (.metadata, or iter_*/); it has neither"
            )
        found: Mapping = load_foreign(folders[-1])
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} is damaged or holds more than tensors: {reason(error)}") from None
    out: dict[str, Tensor] = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        name = re.sub(r"^(module\.)+", "", str(key))
        if name.endswith("._extra_state"):  # Transformer Engine's, of its 8-bit recipes
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path} must hold weights by name; {name!r:.80} is no tensor")
        inner = re.fullmatch(r"decoder\.layers\.(\D.*)", name)
        # torch_dist keeps the weights of all layers in one tensor
        out |= {f"decoder.layers.{i}.{inner[1]}": v for i, v in enumerate(value)} if inner else {name: value}
    for name in (TABLE, *SHAPED):
        if name not in out:
            raise ValueError(f"{path} must hold all weights of NeMo DFM's DiT; it lacks {name}")
    return out


def settings_of(weights: Mapping[str, Tensor]) -> list[str]:
    """Those of `model` that the weights' shapes tell."""
    (width, numbers), (ffn, _), (_, text), (rank, _), (head,) = (weights[name].shape for name in SHAPED)
    values = {
        "num_layers": 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("decoder.layers.")),
        "hidden_size": width,
        "num_attention_heads": width // head,
        "ffn_hidden_size": ffn,
        "text_dim": text,
        "adaln_lora_dim": rank,
        "in_channels": LATENT_CHANNELS,
        "patch_spatial": math.isqrt(numbers // LATENT_CHANNELS),
    }
    return ["model.variant=dfm", *(f"model.{k}={v}" for k, v in values.items())]


def check_positions(table: Tensor, width: int) -> None:
    """ValueError unless the table is the one that the network here computes."""
    rows = math.prod(POSITIONS)
    ours = position_embedding(grid_positions(POSITIONS, centred=False), width) if len(table) == rows else None
    if ours is None or not torch.allclose(table.double(), ours, atol=0.01):  # it may be bfloat16
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


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    source, output = Path(args.source), Path(args.output)
    if output.suffix not in (".safetensors", ".pth"):
        raise ValueError(f"--output must end in .safetensors or .pth; got {output}")
    weights = read_source(source)
    resolved = cfg.resolve(None, overrides=[*settings_of(weights), "mixed_precision=bf16", *args.settings])
    model = resolved.config.model
    check_positions(weights[TABLE], model.hidden_size)
    tensors = converted(weights, model.patch_spatial)
    parallel.init()
    wanted = dict(on_meta(model).named_parameters())
    parallel.shutdown()
    for name in sorted(wanted.keys() ^ tensors.keys()):
        fault = "lacks the weight" if name in wanted else "holds the unknown weight"
        raise ValueError(f"{source} {fault} {name} (by its name here): it is not a DiT of NeMo DFM's published source")
    for name, value in tensors.items():
        if value.shape != wanted[name].shape:
            fits = f"must have shape {list(wanted[name].shape)}; it has {list(value.shape)}"
            raise ValueError(f"{source}: the weight {name} (by its name here) {fits}")
    manifest = {
        "tokenizer": {"name": args.tokenizer},
        "text_encoder": {"name": args.text_encoder},
        "latent_mean": [0.0] * LATENT_CHANNELS,  # NeMo DFM multiplies latents by sigma_data and nothing else
        "latent_std": [1.0] * LATENT_CHANNELS,
    }
    files = {"manifest.json": json.dumps(manifest).encode(), "config.yaml": cfg.to_yaml(resolved).encode()}
    output.parent.mkdir(parents=True, exist_ok=True)
    exported.write(output, tensors, files)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
