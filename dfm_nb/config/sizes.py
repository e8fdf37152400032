"""Tables of DiT sizes, with their sources, and of GPU peaks. The cost of a size is in `counts`."""

from typing import Any

from dfm_nb.config import networks
from dfm_nb.config.networks import size_row

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


SIZES: dict[str, dict[str, Any]] = {
    # ours, for unit tests; minutes on two CPU cores; the packaged model, four hours
    "tiny": size_row(2, 64, 4),
    "demo": size_row(4, 192, 6),
    "base": size_row(6, 192, 6),
    # Peebles & Xie 2023, Scalable Diffusion Models with Transformers, Table 1. With cross attention, full-rank adaLN
    # would raise the paper's 458 and 675 M to 637 and 938 M; rank 256, as in NeMo DFM, gives 473 and 686 M.
    "DiT-S": size_row(12, 384, 6),
    "DiT-B": size_row(12, 768, 12),
    "DiT-L": size_row(24, 1024, 16, 256),
    "DiT-XL": size_row(28, 1152, 16, 256),
    "DiT-7B": size_row(28, 4096, 32, 256),  # the trunk of Cosmos 1.0 7B (arXiv 2501.03575)
}


for _variant in networks.names():
    SIZES |= {name: {**row, "variant": _variant} for name, row in networks.find(_variant).sizes.items()}


def find_size(name: object) -> str | None:
    """The name of the row, ignoring case and a patch suffix (`dit-xl/2`); None if there is none."""
    return {row.lower(): row for row in SIZES}.get(str(name).strip().lower().removesuffix("/2"))
