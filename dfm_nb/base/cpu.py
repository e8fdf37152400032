"""Features of this machine's processors. torch is imported on the first call."""


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
