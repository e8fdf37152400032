"""`dfm doctor`: what this machine has, and what is missing, each line with the fix.

Exit code 1 when something needed is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator

from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.cpu import fast_bf16

NEEDED = {
    "torch": "torch",
    "megatron-core": "dfm_nb.parallel",
    "megatron-energon": "megatron.energon",
    "webdataset": "webdataset",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "av": "av",
    "pydantic": "pydantic",
}
"""Distributions and what is imported of them, since wheels also fail for want of a system library."""
OPTIONAL = {
    "skia-python": ("skia", "drawing butterflies; it needs libGL and libEGL (apt-get install libgl1 libegl1)"),
    "flash-attn": ("flash_attn", "faster packed attention on CUDA (otherwise torch's varlen attention)"),
    "transformer-engine": ("transformer_engine", "fused optimizer kernels on CUDA"),
    "wandb": ("wandb", "logger.wandb_project"),
    "jupyterlab": ("jupyterlab", "notebooks"),
    "mediapy": ("mediapy", "looking into latents in notebook 03"),
}


def packages() -> Iterator[tuple[str, str]]:
    """(ok, note or MISSING, a sentence) of each package."""
    fix = "pip install -c constraints.txt -e ."
    for name, (module, use) in {**{n: (m, fix) for n, m in NEEDED.items()}, **OPTIONAL}.items():
        try:
            importlib.import_module(module)
            yield "ok", f"{name} {importlib.metadata.version(name)}"
        except (ImportError, OSError) as error:
            yield "note" if name in OPTIONAL else "MISSING", f"{name}: {error}; {use}"


def machine() -> Iterator[tuple[str, str]]:
    """The same of processors, disk and memory."""
    import psutil
    import torch

    yield "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield "ok", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        bf16 = "bf16" if fast_bf16() else "fp32, as bf16 is about ten times slower here"
        yield "note", f"no CUDA device: gloo on {os.cpu_count()} CPU cores; mixed_precision=auto is {bf16}"
    disk, memory = shutil.disk_usage("."), psutil.virtual_memory()
    free = f"{disk.free / 2**30:.0f} GiB of disk free here, {memory.available / 2**30:.0f} GiB of memory available"
    yield "ok" if disk.free > 5 * 2**30 else "note", free


def parts() -> Iterator[tuple[str, str]]:
    """The same of the text encoder's weights."""
    from dfm_nb.data.text_encoders import minilm

    try:
        minilm.find_weights()
        yield "ok", "text encoder minilm: weights found and checked"
    except (FileNotFoundError, ValueError) as error:
        yield "MISSING", str(error)


def main(argv: list[str] | None = None) -> int:
    ArgumentParser(prog="dfm doctor", description="What this machine has, and what is missing.").parse_args(argv)
    missing = 0
    for check in (packages, machine, parts):
        for level, text in check():
            print(f"{level:<7} {text}")
            missing += level == "MISSING"
    print(f"\n{missing} thing(s) missing" if missing else "\neverything that is needed is here")
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(guard(main))
