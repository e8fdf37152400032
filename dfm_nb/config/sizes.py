"""One row per DiT size, with its source; and what a size costs in parameters and floating point operations.

What enters: a model configuration (anything with the fields of `config.ModelConfig`) and, for the cost of a step, the
true lengths of the packed segments. What leaves: shapes, a parameter count and FLOPs, all closed form; a test holds the
count against the built model. Cost: microseconds, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from dfm_nb.base.nearest import nearest

SINUSOID_DIM = 256
"""Width of the sinusoidal embedding of c_noise and of the frame rate (DiT, Peebles & Xie 2023)."""

VECTORS_PER_LAYER = 9
"""Shift, scale and gate for self attention, cross attention and MLP (adaLN-zero)."""


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
"""Dense bf16 FLOP/s by a part of the name that torch gives a GPU, the more special first; half of what data sheets print "with sparsity"."""


def peak_flops(gpu: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, None when it is not in the table."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in gpu), None)


@dataclass(frozen=True)
class Size:
    """A row of the table. `source` says where the numbers are from; `default` fields of a model follow from the row."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    source: str
    adaln_lora_dim: int | None = None
    ffn_hidden_size: int | None = None

    def settings(self) -> dict[str, int | None]:
        """The keys of `model` that this size sets; a null `ffn_hidden_size` means four times the width."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "ffn_hidden_size": self.ffn_hidden_size,
            "adaln_lora_dim": self.adaln_lora_dim,
        }


_DIT = "Peebles & Xie 2023, Scalable Diffusion Models with Transformers, Table 1"

SIZES: dict[str, Size] = {
    row.name: row
    for row in (
        Size("tiny", 2, 64, 4, "ours: unit tests"),
        Size("demo", 4, 192, 6, "ours: minutes on two CPU cores"),
        Size("DiT-S", 12, 384, 6, _DIT),
        Size("DiT-B", 12, 768, 12, _DIT),
        Size("DiT-L", 24, 1024, 16, _DIT),
        Size("DiT-XL", 28, 1152, 16, _DIT),
        Size("DiT-7B", 28, 4096, 32, "Cosmos 1.0 7B (arXiv 2501.03575), its trunk", adaln_lora_dim=256),
    )
}


def find_size(name: str) -> Size:
    """The row of that name, in any case and with or without a patch suffix (`dit-xl/2`).

    Raises
    ------
    ValueError : there is none; the message lists the rows and the nearest name.
    """
    known = {row.lower(): row for row in SIZES}
    wanted = name.strip().lower().removesuffix("/2")
    if wanted in known:
        return SIZES[known[wanted]]
    near = nearest(wanted, SIZES, 0.5)
    hint = f"; did you mean {near!r}?" if near else ""
    raise ValueError(f"model.size must be one of {', '.join(SIZES)}; got {name!r}{hint}")


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that fix its parameters, with every null filled in."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    adaln_lora_dim: int | None
    in_channels: int
    text_dim: int
    patch_spatial: int
    patch_temporal: int
    qk_layernorm: bool
    pooled_text: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in one token of the latent: in_channels * patch_temporal * patch_spatial^2."""
        return self.in_channels * self.patch_temporal * self.patch_spatial**2


def resolve_size(model: Any) -> Shape:
    """The full shape of a `ModelConfig`; null channels mean 16, a null text width 384, a null MLP 4 * hidden_size.

    `model.size` has been expanded into the other keys by `config.resolve`; here only those keys count.
    """
    hidden = model.hidden_size
    return Shape(
        num_layers=model.num_layers,
        hidden_size=hidden,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size or 4 * hidden,
        adaln_lora_dim=model.adaln_lora_dim,
        in_channels=model.in_channels or 16,
        text_dim=model.text_dim or 384,
        patch_spatial=model.patch_spatial,
        patch_temporal=model.patch_temporal,
        qk_layernorm=model.qk_layernorm,
        pooled_text=model.pooled_text,
    )


def _shape(config: Any) -> Shape:
    return config if isinstance(config, Shape) else resolve_size(getattr(config, "model", config))


def _linear(fan_in: int, fan_out: int, bias: bool = True) -> int:
    return fan_in * fan_out + (fan_out if bias else 0)


def parameter_table(config: Any) -> dict[str, int]:
    """Parameters of each part of the network; `layers` counts all layers together.

    Parameters
    ----------
    config : a `Config`, a `ModelConfig` or a `Shape`.
    """
    s = _shape(config)
    h, f, norm = s.hidden_size, s.ffn_hidden_size, 2 * s.head_dim if s.qk_layernorm else 0
    scalar_embedder = _linear(SINUSOID_DIM, h) + _linear(h, h)
    self_attention = _linear(h, 3 * h) + _linear(h, h) + norm
    cross_attention = _linear(h, h) + _linear(h, 2 * h) + _linear(h, h)
    mlp = _linear(h, f) + _linear(f, h)
    vectors = VECTORS_PER_LAYER * h
    rank = s.adaln_lora_dim
    adaln = _linear(h, vectors) if rank is None else _linear(h, rank, bias=False) + _linear(rank, vectors)
    return {
        "x_embedder": _linear(s.patch_dim, h),
        "sigma_embedder": scalar_embedder,
        "fps_embedder": scalar_embedder,
        "text_embedder": _linear(s.text_dim, h) + h,
        "pooled_text": _linear(h, h) if s.pooled_text else 0,
        "layers": s.num_layers * (self_attention + cross_attention + mlp + adaln),
        "final_layer": _linear(h, 2 * h) + _linear(h, s.patch_dim),
    }


def parameter_count(config: Any) -> int:
    """Trainable parameters of the DiT, without LoRA (closed form, no model is built)."""
    return sum(parameter_table(config).values())


def forward_flops(config: Any, q_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
    """Floating point operations of one forward over packed samples: matrix products only, a multiply-add is two.

    Parameters
    ----------
    q_lens : video tokens of each sample, [num_samples].
    kv_lens : text tokens of each sample, [num_samples].

    Notes
    -----
    Attention is counted on true segment lengths (L^2 for self, L * L_text for cross attention), so padding and the
    zeros between packed samples earn nothing. Modulation vectors are computed once per sample.
    """
    if len(q_lens) != len(kv_lens):
        raise ValueError(
            f"one text length per sample is needed; got {len(q_lens)} video and {len(kv_lens)} text lengths"
        )
    s = _shape(config)
    h, f, n = s.hidden_size, s.ffn_hidden_size, len(q_lens)
    video, text = sum(q_lens), sum(kv_lens)
    self_pairs = sum(q * q for q in q_lens)
    cross_pairs = sum(q * k for q, k in zip(q_lens, kv_lens))
    per_token = 3 * h * h + h * h + 2 * h * h + 2 * h * f  # self qkv and proj, cross q and proj, MLP
    vectors, rank = VECTORS_PER_LAYER * h, s.adaln_lora_dim
    modulation = h * vectors if rank is None else h * rank + rank * vectors
    layer = per_token * video + 2 * h * h * text + 2 * h * (self_pairs + cross_pairs) + modulation * n
    embedders = 2 * (SINUSOID_DIM * h + h * h) + 2 * h * h + (h * h if s.pooled_text else 0)
    outside = 2 * s.patch_dim * h * video + s.text_dim * h * text + embedders * n
    return 2 * (s.num_layers * layer + outside)


def model_flops(config: Any, q_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
    """Model FLOPs of one training step over these samples: forward and backward, three times `forward_flops`.

    Recomputed activations are not counted (model FLOPs, as in MFU of Chowdhery et al. 2022).
    """
    return 3 * forward_flops(config, q_lens, kv_lens)
