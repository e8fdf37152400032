"""`dfm doctor`: what this machine has, and what is missing, each line with the fix.

Exit code 1 when something needed is missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass

from dfm_nb.base.argv import ArgumentParser, guard

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


@dataclass
class Finding:
    """One line of the report. level : ok, note or missing."""

    level: str
    text: str


def packages() -> list[Finding]:
    absent = {
        name: Finding("missing", f"{name} is not installed; pip install -c constraints.txt -e .") for name in NEEDED
    }
    absent |= {name: Finding("note", f"{name} is not installed: {use}") for name, use in OPTIONAL.items()}
    out = []
    for name, finding in absent.items():
        try:
            out.append(Finding("ok", f"{name} {importlib.metadata.version(name)}"))
        except importlib.metadata.PackageNotFoundError:
            out.append(finding)
    return out


def fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16), several times as fast as float32."""
    import torch

    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def devices() -> list[Finding]:
    import torch

    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [Finding("ok", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB") for gpu in gpus]
    slow = "bf16 is about ten times slower than fp32 here: use mixed_precision=fp32"
    bf16 = "bf16 is fast here" if fast_bf16() else slow
    return [Finding("note", f"no CUDA device: gloo on {os.cpu_count()} CPU cores; {bf16}")]


def megatron() -> list[Finding]:
    import torch

    try:
        from dfm_nb import parallel  # noqa: F401
    except ImportError as error:
        return [Finding("missing", str(error))]
    return [Finding("ok", "megatron-core imports" + ("" if torch.cuda.is_available() else " with CPU support"))]


def encoders() -> list[Finding]:
    from dfm_nb.data.text_encoders import minilm

    try:
        minilm.find_weights()
        return [Finding("ok", "text encoder minilm: weights found and checked")]
    except (FileNotFoundError, ValueError) as error:
        return [Finding("missing", str(error))]


def room() -> list[Finding]:
    import psutil

    disk, memory = shutil.disk_usage("."), psutil.virtual_memory()
    said = f"{disk.free / 2**30:.0f} GiB of disk free here, {memory.available / 2**30:.0f} GiB of memory available"
    return [Finding("ok" if disk.free > 5 * 2**30 else "note", said)]


def main(argv: list[str] | None = None) -> int:
    ArgumentParser(prog="dfm doctor", description="What this machine has, and what is missing.").parse_args(argv)
    findings = [Finding("ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")]
    for check in (packages, devices, megatron, encoders, room):
        findings += check()
    for f in findings:
        print(f"{ {'ok': 'ok     ', 'note': 'note   ', 'missing': 'MISSING'}[f.level] } {f.text}")
    missing = sum(f.level == "missing" for f in findings)
    print(f"\n{missing} thing(s) missing" if missing else "\neverything that is needed is here")
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(guard(main))
