"""`dfm export`: consolidated weights from a run or checkpoint, in one process whatever layout they were trained in.

The one file, `model.safetensors` or `model.pth`, is all that generation needs (`checkpoints.exported`). LoRA adapters
are merged into the weights, or written to `model.lora.safetensors` next to the base: generation reads either.
"""

import os
from pathlib import Path
from typing import Any, Literal

import torch

from dfm_nb import parallel
from dfm_nb.base import argv, plugins
from dfm_nb.base.files import check_free
from dfm_nb.base.options import option
from dfm_nb.base.verb import FileVerb
from dfm_nb.checkpoints import loading
from dfm_nb.checkpoints.consolidated import without_updates, write_weights
from dfm_nb.config import networks
from dfm_nb.parallel.groups import Layout

FORMATS = sorted(set().union(*(networks.find(variant).exporters for variant in networks.names())))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ExportOptions(FileVerb):
    """Write consolidated weights."""

    prog = "dfm export"
    source: str = option(help="run folder, iter_* folder, exported file or packaged model", positional=True)
    output: str = option(help="FILE.safetensors or FILE.pth; with --format diffusers a folder", output=True)
    format: str = option("dfm", f"dfm, or of the network: {', '.join(FORMATS)}, with --lora apart only the adapters")
    ema_sigma_rel: float | None = option(None, "relative length of the weight average to reconstruct")
    raw: bool = option(False, "export the weights instead of an average")
    lora: Literal["merged", "apart"] = option("merged", "adapters: merged into the weights, or in a separate file")
    dtype: Literal["fp32", "bf16"] | None = option(None, "of the stored weights; default: fp32, or an exported file's")

    @argv.quietly()
    def run(self) -> Path:
        file = Path(self.output)
        dtype = DTYPES.get(self.dtype or "")
        if self.format == "dfm" and file.suffix not in (".safetensors", ".pth"):
            raise ValueError(f"--output must end in .safetensors or .pth; got {file}")
        weights = loading.find_weights(self.source)
        exporters = weights.config.model.network.exporters
        if self.format not in ("dfm", *exporters):
            raise ValueError(
                f"--format must be one of {', '.join(['dfm', *exporters])} with "
                f"model.variant={weights.config.model.variant}; got {self.format}"
            )
        written = [file]
        if self.lora == "apart":
            written.append(loading.lora_file(file))
        for path in written:
            empty = path.is_dir() and not any(path.iterdir())
            check_free(path, self.overwrite or empty)
        # layout and folders of the machine that trained it mean nothing elsewhere
        weights.config.model = weights.config.model.model_copy(update=Layout().settings)
        weights.config.dataset.path = None
        weights.config.checkpoint = type(weights.config.checkpoint)()
        parallel.init()
        average = "auto" if self.ema_sigma_rel is None else self.ema_sigma_rel
        tensors = weights.whole(None if self.raw else average)
        if self.lora == "merged":
            tensors = without_updates(tensors, weights.config.model)
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.format == "dfm":
            write_weights(tensors, file, weights, dtype)
        else:
            plugins.code(exporters[self.format])(file, tensors, weights.config, dtype)
        parallel.shutdown()
        return file


main = ExportOptions.main


def export_weights(source: str | os.PathLike, output: str | os.PathLike, **flags: Any) -> Path:
    """Consolidated weights of a run or checkpoint in one file, whose path is returned.

    Parameters
    ----------
    output : FILE.safetensors or FILE.pth. **flags : the other flags of `dfm export` with underscores.

    >>> export_weights("runs/pretrain", "model.safetensors")  # doctest: +SKIP
    """
    return ExportOptions(source=os.fspath(source), output=os.fspath(output), **flags).run()
