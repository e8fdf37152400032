"""What this machine's CPU can do."""

from __future__ import annotations


def fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16), several times as fast as float32."""
    import torch

    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
