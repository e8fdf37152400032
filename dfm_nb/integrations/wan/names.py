"""Weights of `transformer.Wan` by diffusers' names (`WanTransformer3DModel`), both ways and one at a time.

A `Place` is one of our tensors, with the diffusers tensors that it consists of. Queries, keys and values are one matrix
here, head by head; our rotations act on other pairs of channels; the numbers of an output patch have another order. All
of this only reorders: a round trip gives the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from dfm_nb.config.schema import ModelConfig

LINEAR = ("weight", "bias")
NORM = ("weight",)
LAYER: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("self_attention.linear_qkv", ("attn1.to_q", "attn1.to_k", "attn1.to_v"), LINEAR),
    ("self_attention.linear_proj", ("attn1.to_out.0",), LINEAR),
    ("self_attention.q_layernorm", ("attn1.norm_q",), NORM),
    ("self_attention.k_layernorm", ("attn1.norm_k",), NORM),
    ("cross_attention.linear_q", ("attn2.to_q",), LINEAR),
    ("cross_attention.linear_kv", ("attn2.to_k", "attn2.to_v"), LINEAR),
    ("cross_attention.linear_proj", ("attn2.to_out.0",), LINEAR),
    ("cross_attention.q_layernorm", ("attn2.norm_q",), NORM),
    ("cross_attention.k_layernorm", ("attn2.norm_k",), NORM),
    ("cross_norm", ("norm2",), LINEAR),
    ("mlp.linear_fc1", ("ffn.net.0.proj",), LINEAR),
    ("mlp.linear_fc2", ("ffn.net.2",), LINEAR),
)
"""Modules of a layer: our name, theirs, and their parameters."""

OUTER = (
    ("x_embedder", "patch_embedding"),
    ("sigma_embedder.fc1", "condition_embedder.time_embedder.linear_1"),
    ("sigma_embedder.fc2", "condition_embedder.time_embedder.linear_2"),
    ("sigma_embedder.proj", "condition_embedder.time_proj"),
    ("text_embedder.fc1", "condition_embedder.text_embedder.linear_1"),
    ("text_embedder.fc2", "condition_embedder.text_embedder.linear_2"),
    ("final", "proj_out"),
)
"""Modules outside of layers."""

TURNED = ("attn1.to_q", "attn1.to_k", "attn1.norm_q", "attn1.norm_k")
"""Their tensors whose rows are rotated channels."""

Change = Callable[[Tensor], Tensor]
Changes = tuple[Change, Change]
UNCHANGED: Changes = (lambda x: x), (lambda x: x)
TABLE: Changes = itemgetter(0), (lambda x: x[None])
"""Conversions from theirs to ours, and back. Their tables of modulations have a leading axis of size 1."""


@dataclass(frozen=True)
class Place:
    """One tensor of ours: `ours(their tensors)`, and `theirs(our tensor)`."""

    name: str
    sources: tuple[str, ...]
    ours: Callable[[Sequence[Tensor]], Tensor]
    theirs: Callable[[Tensor], list[Tensor]]


def halves(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * d, ...] whose rotated pairs are (2i, 2i + 1) -> pairs (i, i + d/2).

    With 2 heads of 4: 0 1 2 3 | 4 5 6 7 -> 0 2 1 3 | 4 6 5 7.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Inverse of `halves`."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def joined(parts: Sequence[Tensor], modules: Sequence[str], heads: int) -> Tensor:
    """Join the rows of several products [heads * d, ...] into one, head by head, in the order of `modules`.

    q0 q1, k0 k1, v0 v1 -> q0 k0 v0 q1 k1 v1, megatron-core's order: tp then splits between heads.
    """
    parts = [halves(x, heads) if name.endswith(TURNED) else x for x, name in zip(parts, modules, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return torch.stack([x.unflatten(0, (heads, -1)) for x in parts], 1).flatten(0, 2)


def parted(rows: Tensor, modules: Sequence[str], heads: int) -> list[Tensor]:
    """Inverse of `joined`."""
    parts = [rows]
    if len(modules) > 1:
        parts = [x.flatten(0, 1) for x in rows.unflatten(0, (heads, len(modules), -1)).unbind(1)]
    return [neighbours(x, heads) if name.endswith(TURNED) else x for x, name in zip(parts, modules)]


def places(model: ModelConfig) -> Iterator[Place]:
    """Every tensor of the network."""
    heads = model.num_attention_heads
    channels = model.in_channels
    assert channels is not None
    patch = (channels, model.patch_temporal, model.patch_spatial, model.patch_spatial)
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}."
        block = f"blocks.{layer}."
        yield _single(f"{prefix}scale_shift_table", f"{block}scale_shift_table", *TABLE)
        for name, modules, kinds in LAYER:
            ours = partial(joined, modules=modules, heads=heads)
            theirs = partial(parted, modules=modules, heads=heads)
            for kind in kinds:
                sources = tuple(f"{block}{module}.{kind}" for module in modules)
                yield Place(f"{prefix}{name}.{kind}", sources, ours, theirs)
    # rows of an output patch: theirs by place and channel, ours by channel and place
    output: Changes = partial(_swapped, sizes=(-1, channels)), partial(_swapped, sizes=(channels, -1))
    convolution: Changes = partial(torch.flatten, start_dim=1), lambda weight: weight.unflatten(1, patch)
    changes = {"x_embedder.weight": convolution, "final.weight": output, "final.bias": output}
    for name, module in OUTER:
        for kind in LINEAR:
            yield _single(f"{name}.{kind}", f"{module}.{kind}", *changes.get(f"{name}.{kind}", UNCHANGED))
    yield _single("final_table", "scale_shift_table", *TABLE)


def _single(name: str, source: str, ours: Change, theirs: Change) -> Place:
    return Place(name, (source,), lambda parts: ours(parts[0]), lambda whole: [theirs(whole)])


def _swapped(rows: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Rows ordered by (a, b), of `sizes`, reordered by (b, a)."""
    return rows.unflatten(0, sizes).transpose(0, 1).flatten(0, 1)
