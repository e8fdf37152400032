"""Tables of DiT sizes, each with its source, and of GPU peaks. The cost of a size is in `counts`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

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


@dataclass(frozen=True)
class Size:
    """A row of the table; `source` is the origin of the numbers."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    source: str
    adaln_lora_dim: int | None = None
    ffn_hidden_size: int | None = None
    variant: str | None = None

    def settings(self) -> dict[str, int | str | None]:
        """The keys of `model` that this size sets; a null `ffn_hidden_size` means four times the width."""
        left = ("name", "source") if self.variant else ("name", "source", "variant")
        return {key: value for key, value in asdict(self).items() if key not in left}


_WAN = "Wan 2.1 (arXiv 2503.20314), text to video"
_DIT = "Peebles & Xie 2023, Scalable Diffusion Models with Transformers, Table 1"

SIZES: dict[str, Size] = {
    row.name: row
    for row in (
        Size("tiny", 2, 64, 4, "ours: unit tests"),
        Size("demo", 4, 192, 6, "ours: minutes on two CPU cores"),
        Size("base", 6, 192, 6, "ours: the packaged model, two hours on two CPU cores"),
        Size("DiT-S", 12, 384, 6, _DIT),
        Size("DiT-B", 12, 768, 12, _DIT),
        # With cross attention, full-rank adaLN would raise the paper's 458 and 675 M to 637 and 938 M; rank 256, as in
        # NeMo DFM, gives 473 and 686 M.
        Size("DiT-L", 24, 1024, 16, _DIT, adaln_lora_dim=256),
        Size("DiT-XL", 28, 1152, 16, _DIT, adaln_lora_dim=256),
        Size("DiT-7B", 28, 4096, 32, "Cosmos 1.0 7B (arXiv 2501.03575), its trunk", adaln_lora_dim=256),
        Size("Wan-tiny", 2, 64, 4, "ours: unit tests", ffn_hidden_size=160, variant="wan"),
        Size("Wan-1.3B", 30, 1536, 12, _WAN, ffn_hidden_size=8960, variant="wan"),
        Size("Wan-14B", 40, 5120, 40, _WAN, ffn_hidden_size=13824, variant="wan"),
    )
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


def find_size(name: str) -> Size | None:
    """The row of that name, ignoring case and a patch suffix (`dit-xl/2`)."""
    by_lower = {row.lower(): size for row, size in SIZES.items()}
    return by_lower.get(name.strip().lower().removesuffix("/2"))
