"""Features and speed of this machine's CPU. torch is imported on the first call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

TOKENS = 512
"""Rows of the timed MLP: enough to keep a core busy, few enough for a result in a tenth of a second."""


def fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16), several times as fast as float32."""
    import torch

    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def precision(asked: str) -> str:
    """`mixed_precision` on this machine: `auto` is bf16 if the CPU or GPU multiplies it in hardware, else fp32."""
    if asked != "auto":
        return asked
    import torch

    cuda = torch.cuda.is_available()
    return "bf16" if (torch.cuda.is_bf16_supported(including_emulation=False) if cuda else fast_bf16()) else "fp32"


def mlp_flops_per_s(width: int, inner: int, bf16: bool, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of this process: forward and backward of LayerNorm and MLP of these widths."""
    import torch
    import torch.nn.functional as F

    dtype = torch.bfloat16 if bf16 else torch.float32
    own = torch.Generator().manual_seed(0)  # does not advance the run's random numbers
    shapes = (TOKENS, width), (inner, width), (width, inner)
    x, up, down = (torch.randn(s, generator=own).to(dtype).requires_grad_() for s in shapes)
    best_s = float("inf")
    for _ in range(3):  # the first compiles oneDNN's kernels
        began = clock()
        F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[1:]), up)), down).sum().backward()
        best_s = min(best_s, clock() - began)
    return 3 * 2 * 2 * TOKENS * width * inner / best_s


def cpu_flops(bf16: bool, width: int = 192) -> float:
    """FLOP/s of all cores of this machine when idle, on a small network; 0 if a GPU would do the work."""
    import torch

    if torch.cuda.is_available():
        return 0.0
    own = mlp_flops_per_s(width, 4 * width, bf16, time.thread_time)  # not counted while others use the core
    return own * (os.cpu_count() or 1) / torch.get_num_threads()
