"""`dfm doctor`: what this machine has, and what is missing, each line with the fix.

Exit code 1 when something needed is missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator

from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.cpu import fast_bf16

NEEDED = (
    "torch",
    "megatron-core",
    "megatron-energon",
    "webdataset",
    "transformers",
    "safetensors",
    "av",
    "skia-python",
    "pydantic",
)
OPTIONAL = {
    "flash-attn": "faster packed attention on CUDA (otherwise torch's varlen attention)",
    "transformer-engine": "fused optimizer kernels on CUDA",
    "wandb": "logger.wandb_project",
    "jupyterlab": "notebooks",
    "mediapy": "clips.show() and galleries in notebooks",
}


def packages() -> Iterator[tuple[str, str]]:
    """(ok, note or MISSING, a sentence) of each package."""
    for name in (*NEEDED, *OPTIONAL):
        try:
            yield "ok", f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            if name in OPTIONAL:
                yield "note", f"{name} is not installed: {OPTIONAL[name]}"
            else:
                yield "MISSING", f"{name} is not installed; pip install -c constraints.txt -e ."


def machine() -> Iterator[tuple[str, str]]:
    """The same of processors, disk and memory."""
    import psutil
    import torch

    yield "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield "ok", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        slow = "bf16 is about ten times slower than fp32 here: use mixed_precision=fp32"
        bf16 = "bf16 is fast here" if fast_bf16() else slow
        yield "note", f"no CUDA device: gloo on {os.cpu_count()} CPU cores; {bf16}"
    disk, memory = shutil.disk_usage("."), psutil.virtual_memory()
    free = f"{disk.free / 2**30:.0f} GiB of disk free here, {memory.available / 2**30:.0f} GiB of memory available"
    yield "ok" if disk.free > 5 * 2**30 else "note", free


def parts() -> Iterator[tuple[str, str]]:
    """The same of what has to fit together: megatron-core on this device, and the weights of the text encoder."""
    import torch

    from dfm_nb.data.text_encoders import minilm

    try:
        from dfm_nb import parallel  # noqa: F401

        yield "ok", "megatron-core imports" + ("" if torch.cuda.is_available() else " with CPU support")
    except ImportError as error:
        yield "MISSING", str(error)
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
