"""Weights of `transformer.Wan` by diffusers' names (`WanTransformer3DModel`), both ways and one at a time.

A `Place` is one of our tensors, with the diffusers tensors that it consists of. Queries, keys and values are one matrix
here, head by head; our rotations act on other pairs of channels; the numbers of an output patch have another order. All
of this only reorders: a round trip gives the same bits.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dfm_nb.config.schema import ModelConfig

LINEAR = ("weight", "bias")
LAYER = {
    "self_attention.linear_qkv": "attn1.to_q attn1.to_k attn1.to_v",
    "self_attention.linear_proj": "attn1.to_out.0",
    "self_attention.q_layernorm": "attn1.norm_q",
    "self_attention.k_layernorm": "attn1.norm_k",
    "cross_attention.linear_q": "attn2.to_q",
    "cross_attention.linear_kv": "attn2.to_k attn2.to_v",
    "cross_attention.linear_proj": "attn2.to_out.0",
    "cross_attention.q_layernorm": "attn2.norm_q",
    "cross_attention.k_layernorm": "attn2.norm_k",
    "cross_norm": "norm2",
    "mlp.linear_fc1": "ffn.net.0.proj",
    "mlp.linear_fc2": "ffn.net.2",
}
"""Modules of a layer by our name, and theirs; norms of queries and keys have no bias."""

OUTER = {
    "x_embedder": "patch_embedding",
    "sigma_embedder.fc1": "condition_embedder.time_embedder.linear_1",
    "sigma_embedder.fc2": "condition_embedder.time_embedder.linear_2",
    "sigma_embedder.proj": "condition_embedder.time_proj",
    "text_embedder.fc1": "condition_embedder.text_embedder.linear_1",
    "text_embedder.fc2": "condition_embedder.text_embedder.linear_2",
    "final": "proj_out",
}
"""Modules outside of layers."""

TURNED = re.compile(r"attn1\.(to|norm)_[qk]\.")
"""Their tensors whose rows are rotated channels: the pairs (2i, 2i + 1) of a head there, (i, i + d/2) here."""
TURN, BACK = "(n d two) ... -> (n two d) ...", "(n two d) ... -> (n d two) ..."
"""Of n heads. With 2 heads of 4: 0 1 2 3 | 4 5 6 7 -> 0 2 1 3 | 4 6 5 7."""

ALONE = "1 ... -> ..."
JOINED = "k (n d) ... -> (n k d) ..."
"""q0 q1, k0 k1, v0 v1 -> q0 k0 v0 q1 k1 v1, megatron-core's order: tp then splits between heads."""
TABLE = "1 1 ... -> ..."
"""Their tables of modulations have a leading axis of size 1."""
PATCH = "1 out c t h w -> out (c t h w)"
OUTPUT = "1 (place c) ... -> (c place) ..."


@dataclass(frozen=True, eq=False)
class Place:
    """One tensor of ours, and the names of the diffusers tensors that it consists of.

    order : einops' pattern from theirs, stacked, to ours, and turned round the way back. sizes : of its axes.
    """

    name: str
    sources: tuple[str, ...]
    heads: int
    order: str = ALONE
    sizes: dict[str, int] = field(default_factory=dict)

    def ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return rearrange(torch.stack(self._turned(theirs, TURN)), self.order, **self.sizes)

    def theirs(self, ours: Tensor) -> list[Tensor]:
        there, here = self.order.split(" -> ")
        return self._turned(rearrange(ours, f"{here} -> {there}", **self.sizes).unbind(), BACK)

    def _turned(self, theirs: Sequence[Tensor], how: str) -> list[Tensor]:
        parts = zip(self.sources, theirs, strict=True)
        return [rearrange(x, how, n=self.heads, two=2) if TURNED.search(name) else x for name, x in parts]


def places(model: ModelConfig) -> Iterator[Place]:
    """Every tensor of the network."""
    heads = model.num_attention_heads
    channels = model.in_channels
    assert channels is not None
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}."
        block = f"blocks.{layer}."
        yield Place(f"{prefix}scale_shift_table", (f"{block}scale_shift_table",), heads, TABLE)
        for name, theirs in LAYER.items():
            modules = theirs.split()
            order: tuple[Any, ...] = ()
            if len(modules) > 1:
                order = JOINED, {"n": heads, "k": len(modules)}
            for kind in LINEAR[:1] if name.endswith("_layernorm") else LINEAR:
                sources = tuple(f"{block}{module}.{kind}" for module in modules)
                yield Place(f"{prefix}{name}.{kind}", sources, heads, *order)
    patch = {"c": channels, "t": model.patch_temporal, "h": model.patch_spatial, "w": model.patch_spatial}
    # rows of an output patch: theirs by place and channel, ours by channel and place
    output = OUTPUT, {"c": channels}
    orders = {"x_embedder.weight": (PATCH, patch), "final.weight": output, "final.bias": output}
    for name, module in OUTER.items():
        for kind in LINEAR:
            ours = f"{name}.{kind}"
            yield Place(ours, (f"{module}.{kind}",), heads, *orders.get(ours, ()))
    yield Place("final_table", ("scale_shift_table",), heads, TABLE)
