"""Features of this machine's processors. torch is imported on the first call."""


def fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16), several times as fast as float32."""
    import torch

    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def precision(asked: str) -> str:
    """`mixed_precision` on this machine: `auto` is bf16 if the CPU or GPU multiplies it in hardware, else fp32."""
    if asked != "auto":
        return asked
    import torch

    cuda = torch.cuda.is_available()
    return "bf16" if (torch.cuda.is_bf16_supported(including_emulation=False) if cuda else fast_bf16()) else "fp32"
