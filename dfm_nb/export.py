"""`dfm export`: consolidated weights from a run or checkpoint, in one process whatever layout they were trained in.

The one file, `model.safetensors` or `model.pth`, is all that generation needs (`checkpoints.exported`). Low-rank
updates are added to their weights, or left apart in `model.lora.safetensors` beside the base: generation reads either.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import plugins
from dfm_nb.base.argv import ArgumentParser, guard, quietly
from dfm_nb.checkpoints import exported, wan_folder
from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.checkpoints.consolidated import assets_of, whole_weights, without_updates, write_weights
from dfm_nb.data.prepared_folder import TOKENIZER
from dfm_nb.model.build import ALONE

LORA_FILE = "pytorch_lora_weights.safetensors"
"""As diffusers looks for it in a folder."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="dfm export", description="Write consolidated weights.")
    p.add_argument("source", help="run folder, iter_* folder, exported file or packaged model")
    p.add_argument("--output", required=True, help="FILE.safetensors or FILE.pth; with --format diffusers a folder")
    p.add_argument(
        "--format",
        choices=("dfm", "diffusers"),
        default="dfm",
        help="diffusers: of a Wan, what WanPipeline opens; with --lora apart the updates alone, as ComfyUI loads too",
    )
    p.add_argument("--ema-sigma-rel", type=float, help="relative length of the weight average to rebuild")
    p.add_argument("--raw", action="store_true", help="the weights themselves instead of an average")
    p.add_argument(
        "--lora",
        choices=("merged", "apart"),
        default="merged",
        help="low-rank updates: added to their weights, or in a file of their own beside the base's",
    )
    p.add_argument("--tokenizer-path", help="take along this tokenizer's decoder; its encoder must be the same")
    p.add_argument("--dtype", choices=DTYPES, help="of the stored weights; by default fp32, or an exported file's")
    return p


def with_decoder(assets: dict[str, bytes], path: str) -> dict[str, bytes]:
    """The small files with another tokenizer of the same latents: a better decoder needs no other weights."""
    manifest = json.loads(assets["manifest.json"])
    name = manifest["tokenizer"]["name"]
    plugin = plugins.load("tokenizers", name)
    if not hasattr(plugin, "same_latents"):
        raise ValueError(f"--tokenizer-path is for tokenizers that travel with a checkpoint; this one has {name}")
    other = plugin.build(path)
    if not plugin.same_latents(other, plugin.build(exported.unpacked(assets))):
        raise ValueError(f"--tokenizer-path {path} has another encoder than that of the training; leave it out")
    with tempfile.TemporaryDirectory() as folder:
        other.save(Path(folder, TOKENIZER))
        content = Path(folder, TOKENIZER).read_bytes()
    manifest["tokenizer"] |= other.identity()
    return assets | {TOKENIZER: content, "manifest.json": json.dumps(manifest).encode()}


def as_diffusers(
    tensors: Mapping[str, torch.Tensor], config: cfg.Config, output: Path, lora: str, dtype: torch.dtype | None
) -> None:
    """Write the folder of a Wan, or its low-rank updates alone."""
    model = config.model
    if (model.variant, model.objective) != ("wan", "flow"):
        raise ValueError(f"--format diffusers needs model.variant=wan and flow; got {model.variant}, {model.objective}")
    if model.lora.rank and lora == "apart":
        output.mkdir(parents=True, exist_ok=True)
        updates = {n: t.to(dtype or t.dtype) for n, t in wan_folder.updates_out(tensors, model).items()}
        exported.save(output / LORA_FILE, updates, {"format": "pt"})
        print(f"[INFO] wrote {output / LORA_FILE}: {len(updates)} tensors")
        return
    whole = without_updates(tensors, model)
    wan_folder.write_folder(output, exported.as_dtype(whole, dtype), model, config.generation.shift)
    print(f"[INFO] wrote {output}: {len(whole)} tensors")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    output = Path(args.output)
    if args.format == "dfm" and output.suffix not in (".safetensors", ".pth"):
        raise ValueError(f"--output must end in .safetensors or .pth; got {output}")
    source = checkpoint.find_weights(args.source)
    if source.file is not None and output.resolve() in (
        source.file.resolve(),
        checkpoint.lora_file(source.file).resolve(),
    ):
        raise ValueError(f"--output {output} would replace the weights that are read; name another file")
    provenance = cfg.from_yaml(source.folder / "config.yaml").provenance
    # layout and folders of the machine that trained it mean nothing elsewhere
    source.config.model = source.config.model.model_copy(update=ALONE)
    source.config.dataset.path, source.config.checkpoint = None, type(source.config.checkpoint)()
    parallel.init()
    average = "auto" if args.ema_sigma_rel is None else args.ema_sigma_rel
    tensors = whole_weights(source, None if args.raw else average)
    output.parent.mkdir(parents=True, exist_ok=True)
    resolved = cfg.Resolved(source.config, provenance)
    assets = assets_of(source.folder)
    if args.tokenizer_path:
        assets = with_decoder(assets, args.tokenizer_path)
    dtype = DTYPES[args.dtype] if args.dtype else None
    if args.format == "diffusers":
        as_diffusers(tensors, source.config, output, args.lora, dtype)
    else:
        write_weights(tensors, output, resolved, args.lora, assets, dtype)
    parallel.shutdown()
    return 0


@quietly()
def export_weights(source: str | os.PathLike, output: str | os.PathLike, **flags: Any) -> Path:
    """Consolidated weights of a run or checkpoint in one file, whose path is returned.

    Parameters
    ----------
    output : FILE.safetensors or FILE.pth. **flags : the other flags of `dfm export` with underscores.

    >>> export_weights("runs/pretrain", "model.safetensors")  # doctest: +SKIP
    """
    words = parser().words({"source": source, "output": output, **flags})
    parser().read(words)
    main(words)
    return Path(output)


if __name__ == "__main__":
    raise SystemExit(guard(main))
