"""`dfm doctor`: what this machine has, and what is missing, each line with the fix.

Exit code 1 when something needed is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterator

from dfm_nb.base.argv import guard
from dfm_nb.base.cpu import fast_bf16
from dfm_nb.base.memory import GIB, available_bytes
from dfm_nb.base.options import Options, option

PACKAGES = {
    "torch": ("torch", ""),
    "megatron-core": ("dfm_nb.parallel", ""),
    "megatron-energon": ("megatron.energon", ""),
    "webdataset": ("webdataset", ""),
    "transformers": ("transformers", ""),
    "safetensors": ("safetensors", ""),
    "av": ("av", ""),
    "pydantic": ("pydantic", ""),
    "skia-python": ("skia", "drawing butterflies; it needs libGL and libEGL (apt-get install libgl1 libegl1)"),
    "flash-attn": ("flash_attn", "faster packed attention on CUDA (otherwise torch's varlen attention)"),
    "transformer-engine": ("transformer_engine", "fused optimizer kernels on CUDA"),
    "wandb": ("wandb", "logger.wandb_project"),
    "jupyterlab": ("jupyterlab", "notebooks"),
    "mediapy": ("mediapy", "looking into latents in notebook 03"),
}
"""By distribution: what is imported of it, since wheels also fail for want of a system library; and what it is for,
"" where it is needed."""


class DoctorOptions(Options):
    """What this machine has, and what is missing."""

    prog = "dfm doctor"
    as_json: bool = option(False, "print JSON", flag="--json")


def findings() -> Iterator[tuple[str, str]]:
    """(ok, note or MISSING, a sentence) of packages, the text encoder's weights, processors, disk and memory."""
    for name, (module, use) in PACKAGES.items():
        try:
            importlib.import_module(module)
            yield "ok", f"{name} {importlib.metadata.version(name)}"
        except (ImportError, OSError) as error:
            yield "note" if use else "MISSING", f"{name}: {error}; {use or 'pip install -c constraints.txt -e .'}"

    import torch

    from dfm_nb.data.text_encoders import minilm

    try:
        minilm.find_weights()
        yield "ok", "text encoder minilm: weights found and checked"
    except (FileNotFoundError, ValueError) as error:
        yield "MISSING", str(error)
    yield "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield "ok", f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB"
    if not torch.cuda.is_available():
        bf16 = "bf16" if fast_bf16() else "fp32, as bf16 is about ten times slower here"
        yield "note", f"no CUDA device: gloo on {os.cpu_count()} CPU cores; mixed_precision=auto is {bf16}"
    disk, memory = shutil.disk_usage(".").free, available_bytes(torch.device("cpu"))
    free = f"{disk / GIB:.0f} GiB of disk free here, {memory / GIB:.0f} GiB of memory available"
    yield "ok" if disk > 5 * GIB else "note", free


def main(argv: list[str] | None = None) -> int:
    asked = DoctorOptions.parse(argv)
    missing, found = 0, []
    for level, text in findings():
        found.append({"level": level, "text": text})
        if not asked.as_json:
            print(f"{level:<7} {text}", flush=True)
        missing += level == "MISSING"
    if asked.as_json:
        print(json.dumps({"missing": missing, "findings": found}, indent=1))
        return int(bool(missing))
    print(f"\n{missing} thing(s) missing" if missing else "\neverything that is needed is here")
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(guard(main))
