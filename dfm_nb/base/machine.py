"""What this machine has: free memory, and the precision in which it is fast. torch is imported on a call."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 1 << 30


def available_bytes(device: "torch.device") -> int:
    """Free memory for this process: on the GPU, or on the machine and in its control group."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(kept.get("inactive_file", 0)))
    return free


def fast_bf16() -> bool:
    """Whether this CPU computes in bfloat16 faster than in float32: with AMX, or with AVX512-BF16 if not of Intel.

    Intel's AVX512-BF16 alone is slower than its float32 (benchmarks/results/optimizers.md).
    """
    import torch

    has = torch.cpu.get_capabilities()
    return bool(has.get("amx_bf16") or (has.get("avx512_bf16") and "Intel" not in has.get("cpu_name", "")))


def precision(asked: str) -> str:
    """`mixed_precision` on this machine: `auto` is bf16 if the CPU or GPU is faster in it, else fp32."""
    if asked != "auto":
        return asked
    import torch

    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = fast_bf16()
    return "bf16" if fast else "fp32"
