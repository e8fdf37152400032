"""Tables of DiT sizes, with their sources, and of GPU peaks. The cost of a size is in `counts`."""

from __future__ import annotations

from typing import Any

LATENT_CHANNELS, TEXT_DIM = 16, 384
"""Assumed inputs of a model without a data set: 16-channel tokenizers and MiniLM."""

PEAK_FLOPS: dict[str, float] = {
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s by a part of torch's name of a GPU, the more specific first.

They are half of what data sheets print "with sparsity".
"""


def peak_flops(gpu: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, None if it is not in the table."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in gpu), None)


def _size(
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    adaln_lora_dim: int | None = None,
    ffn_hidden_size: int | None = None,
    **variant: str,
) -> dict[str, Any]:
    """The keys of `model` that a size sets; a null `ffn_hidden_size` means four times the width."""
    shape = {"num_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": num_attention_heads}
    return {**shape, "adaln_lora_dim": adaln_lora_dim, "ffn_hidden_size": ffn_hidden_size, **variant}


SIZES: dict[str, dict[str, Any]] = {
    # ours, for unit tests; minutes on two CPU cores; the packaged model, two hours on two CPU cores
    "tiny": _size(2, 64, 4),
    "demo": _size(4, 192, 6),
    "base": _size(6, 192, 6),
    # Peebles & Xie 2023, Scalable Diffusion Models with Transformers, Table 1. With cross attention, full-rank adaLN
    # would raise the paper's 458 and 675 M to 637 and 938 M; rank 256, as in NeMo DFM, gives 473 and 686 M.
    "DiT-S": _size(12, 384, 6),
    "DiT-B": _size(12, 768, 12),
    "DiT-L": _size(24, 1024, 16, adaln_lora_dim=256),
    "DiT-XL": _size(28, 1152, 16, adaln_lora_dim=256),
    "DiT-7B": _size(28, 4096, 32, adaln_lora_dim=256),  # the trunk of Cosmos 1.0 7B (arXiv 2501.03575)
    # ours, for unit tests; Wan 2.1 (arXiv 2503.20314), text to video
    "Wan-tiny": _size(2, 64, 4, ffn_hidden_size=160, variant="wan"),
    "Wan-1.3B": _size(30, 1536, 12, ffn_hidden_size=8960, variant="wan"),
    "Wan-14B": _size(40, 5120, 40, ffn_hidden_size=13824, variant="wan"),
}


VARIANTS: dict[str, dict[str, int | float | bool | str]] = {
    "dfm": {
        "adaln_lora_dim": 256,
        "layernorm_epsilon": 1e-5,  # its 1e-6 is not a field of the dataclass, so megatron-core's default applies
        "qk_layernorm": True,
        "pooled_text": False,
        "rope": False,
        "patch_temporal": 1,
        "text_padding": 512,
    },
    "wan": {
        "patch_spatial": 2,
        "patch_temporal": 1,
        "qk_layernorm": True,
        "pooled_text": False,
        "rope": True,
        "layernorm_epsilon": 1e-6,
        "text_padding": 512,
        "objective": "flow",
        "sigma_data": 1.0,
        "P_mean": 0.0,
        "P_std": 1.0,
    },
}
"""The keys of `model` that a variant of the network sets."""

SUGGESTED = ("layernorm_epsilon", "text_padding", "objective", "sigma_data", "P_mean", "P_std")
"""Keys of these that may be overridden."""


def find_size(name: str) -> str | None:
    """The name of the row, ignoring case and a patch suffix (`dit-xl/2`)."""
    return {row.lower(): row for row in SIZES}.get(name.strip().lower().removesuffix("/2"))
