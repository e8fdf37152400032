"""`dfm export`: consolidated weights from a run or checkpoint, in one process whatever layout they were trained in.

The one file, `model.safetensors` or `model.pth`, is all that generation needs (`checkpoints.exported`). LoRA adapters
are merged into the weights, or written to `model.lora.safetensors` next to the base: generation reads either.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.argv import quietly
from dfm_nb.base.options import Options, option
from dfm_nb.checkpoints import exported, loading, tensor_files, wan_folder
from dfm_nb.checkpoints.consolidated import whole_weights, without_updates, write_weights
from dfm_nb.model.build import ALONE

LORA_FILE = "pytorch_lora_weights.safetensors"
"""As diffusers looks for it in a folder."""
DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


class ExportOptions(Options):
    """Write consolidated weights."""

    prog = "dfm export"
    source: str = option(help="run folder, iter_* folder, exported file or packaged model", positional=True)
    output: str = option(help="FILE.safetensors or FILE.pth; with --format diffusers a folder", output=True)
    format: Literal["dfm", "diffusers"] = option(
        "dfm", "diffusers: a Wan for WanPipeline; with --lora apart only the adapters, which ComfyUI loads too"
    )
    ema_sigma_rel: float | None = option(None, "relative length of the weight average to reconstruct")
    raw: bool = option(False, "export the weights instead of an average")
    lora: Literal["merged", "apart"] = option("merged", "adapters: merged into the weights, or in a separate file")
    overwrite: bool = option(False, "replace existing files")
    dtype: Literal["fp32", "bf16"] | None = option(None, "of the stored weights; default: fp32, or an exported file's")


@quietly()
def export_weights(source: str | os.PathLike, output: str | os.PathLike, **flags: Any) -> Path:
    """Consolidated weights of a run or checkpoint in one file, whose path is returned.

    Parameters
    ----------
    output : FILE.safetensors or FILE.pth. **flags : the other flags of `dfm export` with underscores.

    >>> export_weights("runs/pretrain", "model.safetensors")  # doctest: +SKIP
    """
    asked = ExportOptions(source=os.fspath(source), output=os.fspath(output), **flags)
    file, dtype = Path(asked.output), DTYPES[asked.dtype]
    if asked.format == "dfm" and file.suffix not in (".safetensors", ".pth"):
        raise ValueError(f"--output must end in .safetensors or .pth; got {file}")
    weights = loading.find_weights(asked.source)
    read = (weights.file, loading.lora_file(weights.file)) if weights.file else ()
    if file.resolve() in [path.resolve() for path in read]:
        raise ValueError(f"--output {file} would overwrite the weights that are read; choose another file")
    written = [file, loading.lora_file(file)] if asked.lora == "apart" else [file]
    held = [f for f in written if (any(f.iterdir()) if f.is_dir() else f.exists())]
    if held and not asked.overwrite:
        raise FileExistsError(f"{held[0]} exists; pass --overwrite or another --output")
    # layout and folders of the machine that trained it mean nothing elsewhere
    weights.config.model = weights.config.model.model_copy(update=ALONE)
    weights.config.dataset.path, weights.config.checkpoint = None, type(weights.config.checkpoint)()
    parallel.init()
    average = "auto" if asked.ema_sigma_rel is None else asked.ema_sigma_rel
    tensors = whole_weights(weights, None if asked.raw else average)
    file.parent.mkdir(parents=True, exist_ok=True)
    if asked.format == "dfm":
        write_weights(tensors, file, weights, asked.lora, dtype)
    else:
        _write_diffusers(asked, tensors, weights.config, dtype)
    parallel.shutdown()
    return file


def _write_diffusers(
    asked: ExportOptions, tensors: Mapping[str, torch.Tensor], config: cfg.Config, dtype: torch.dtype | None
) -> None:
    """Write the folder of a Wan, or its LoRA adapters alone."""
    model, output = config.model, Path(asked.output)
    if (model.variant, model.objective) != ("wan", "flow"):
        raise ValueError(f"--format diffusers needs model.variant=wan and flow; got {model.variant}, {model.objective}")
    if model.lora.rank and asked.lora == "apart":
        output.mkdir(parents=True, exist_ok=True)
        adapters = {n: t.to(dtype or t.dtype) for n, t in wan_folder.updates_out(tensors, model).items()}
        tensor_files.write(output / LORA_FILE, adapters, {"format": "pt"})
        print(f"[INFO] wrote {output / LORA_FILE}: {len(adapters)} tensors")
        return
    whole = without_updates(tensors, model)
    wan_folder.write_folder(output, exported.as_dtype(whole, dtype), model, config.generation.shift)
    print(f"[INFO] wrote {output}: {len(whole)} tensors")


def result(argv: list[str]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"output": ExportOptions.parse(argv).output}


def main(argv: list[str] | None = None) -> int:
    export_weights(**dict(ExportOptions.parse(argv)))
    return 0
