"""Attention over packed ("thd") sequences: the one place for back ends and for context parallelism.

A `SegmentLayout` has the bounds of segments: segment i of q attends to all of segment i of k and v (no causal mask) and
to nothing else. Padding is a segment of its own. The bounds are on the host as well, so no back end waits for the
device. On CPU, consecutive segments of equal length go through one batched SDPA call.

Context parallelism: the queries are dealt like cards, token t to rank t modulo the group's size. So every rank has the
same share of each segment, and the same work (there is no causal mask, so any share does). Self attention all-gathers
K and V (backward: reduce-scatter). Cross attention needs no communication: the text is on every rank.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

FLOAT32_BELOW = 512
"""Below so many queries a segment on average, attention is float32 on CPUs.

torch's bfloat16 kernel takes ten times as long at 16 queries, and is even at 512.
"""
KEY_MULTIPLE = 16
"""Keys of segments of unequal length are padded to a multiple of this."""


def cumulative(lengths: Sequence[int]) -> list[int]:
    """[l0, l1, ...] -> [0, l0, l0 + l1, ...], as in `cu_seqlens`."""
    return [0, *accumulate(lengths)]


@dataclass(slots=True)
class _Run:
    """Consecutive segments with equally many queries: one batched call."""

    count: int
    q_len: int
    kv_len: int  # of the longest
    kv_mask: torch.Tensor | None  # bool [count, 1, 1, kv_len], True = attend; None: all are as long as the longest


@dataclass(slots=True)
class _Calls:
    """All runs in the order of the queries, and their K/V rows in that order: `kv_index`, or from `kv_start` on."""

    runs: list[_Run]
    kv_start: int
    kv_index: torch.Tensor | None  # int64 [sum of count * kv_len]


@dataclass
class SegmentLayout:
    """Bounds of the segments, on the host (`cu_q`, `cu_kv`, ints) and on the device (`cu_seqlens_*`, int32)."""

    cu_q: list[int]
    cu_kv: list[int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        assert len(self.cu_q) == len(self.cu_kv), (len(self.cu_q), len(self.cu_kv))

    @functools.cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        return torch.tensor(self.cu_q, dtype=torch.int32).to(self.device, non_blocking=True)

    @functools.cached_property
    def cu_seqlens_kv(self) -> torch.Tensor:
        return torch.tensor(self.cu_kv, dtype=torch.int32).to(self.device, non_blocking=True)

    @functools.cached_property
    def max_q(self) -> int:
        return max(b - a for a, b in zip(self.cu_q, self.cu_q[1:]))

    @functools.cached_property
    def max_kv(self) -> int:
        return max(b - a for a, b in zip(self.cu_kv, self.cu_kv[1:]))

    def dealt(self, rank: int, size: int) -> SegmentLayout:
        """The layout of this context-parallel rank: its queries (`deal`) against all keys."""
        return SegmentLayout([-(-max(c - rank, 0) // size) for c in self.cu_q], self.cu_kv, self.device)

    def bounds(self) -> list[tuple[int, int, int, int]]:
        """(q start, q stop, kv start, kv stop) of each segment that has queries."""
        spans = zip(self.cu_q, self.cu_q[1:], self.cu_kv, self.cu_kv[1:])
        return [s for s in spans if s[1] > s[0]]

    @functools.cached_property
    def calls(self) -> _Calls:
        """Neighbouring segments with equally many queries are one batch; their keys are padded to the longest of them.

        `pack_draws` sorts samples by length, so that there are few runs.
        """
        runs, indices = [], []
        for q_len, group in groupby(self.bounds(), key=lambda s: s[1] - s[0]):
            starts, stops = torch.tensor([s[2:] for s in group]).T
            lengths = stops - starts
            longest = int(lengths.max())
            if longest > int(lengths.min()):  # masked anyway, and CPU kernels are a third slower at other lengths
                longest = -(-longest // KEY_MULTIPLE) * KEY_MULTIPLE
            offset = torch.arange(longest)
            valid = offset < lengths[:, None]
            indices.append((starts[:, None] + offset * valid).flatten())
            mask = None if bool(valid.all()) else valid[:, None, None].to(self.device, non_blocking=True)
            runs.append(_Run(len(starts), q_len, longest, mask))
        index = torch.cat(indices)
        first = int(index[0])
        adjacent = torch.equal(index, torch.arange(first, first + len(index)))
        return _Calls(runs, first, None if adjacent else index.to(self.device, non_blocking=True))


def pick_backend(name: str, device: torch.device) -> str:
    """Resolve "auto", and refuse what is not installed or cannot run on `device` with the reason."""
    cuda = device.type == "cuda"
    if name == "auto":
        if not cuda:
            return "sdpa"
        return "flash_attn" if importlib.util.find_spec("flash_attn") else "varlen"
    if name in ("varlen", "flash_attn") and not cuda:
        raise ValueError(f"model.attention_backend={name} needs a CUDA device; use auto or sdpa on {device.type}")
    if name == "flash_attn" and not importlib.util.find_spec("flash_attn"):
        raise ValueError("model.attention_backend=flash_attn needs the flash-attn package; install it or use varlen")
    return name


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: SegmentLayout,
    backend: str = "sdpa",
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v within each segment; [t, heads, d]. `scale` defaults to 1 / sqrt(d)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return BACKENDS[backend](q, k, v, layout, scale)


def _sdpa(q, k, v, layout, scale):
    runs, start, index = layout.calls.runs, layout.calls.kv_start, layout.calls.kv_index
    dtype = q.dtype
    if dtype == torch.bfloat16 and not q.is_cuda and len(q) < FLOAT32_BELOW * sum(r.count for r in runs):
        q, k, v = q.float(), k.float(), v.float()
    kv_rows = [r.count * r.kv_len for r in runs]
    if index is not None:
        k, v = k.index_select(0, index), v.index_select(0, index)
    elif sum(kv_rows) < len(k):
        k, v = k.narrow(0, start, sum(kv_rows)), v.narrow(0, start, sum(kv_rows))
    # `split`, because its backward writes each gradient once; that of a slice fills a whole tensor with zeros
    parts = zip(runs, q.split([r.count * r.q_len for r in runs]), k.split(kv_rows), v.split(kv_rows), strict=True)
    outs = []
    for r, *qkv in parts:
        batched = (x.unflatten(0, (r.count, -1)).transpose(1, 2) for x in qkv)
        o = F.scaled_dot_product_attention(*batched, r.kv_mask, scale=scale)
        outs.append(o.transpose(1, 2).flatten(0, 1))
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(dtype)


def _varlen(q, k, v, layout, scale):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_kv, layout.max_q, layout.max_kv, scale=scale)


def _flash_attn(q, k, v, layout, scale):
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_kv, layout.max_q, layout.max_kv, softmax_scale=scale
    )


BACKENDS = {"sdpa": _sdpa, "varlen": _varlen, "flash_attn": _flash_attn}
"""By the names that `model.attention_backend` takes beside "auto"."""


def deal(rank: int, size: int) -> slice:
    """Which tokens of a pack a context-parallel rank has."""
    return slice(rank, None, size)


def collect(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What was dealt along dim 0 over a group, whole again on every rank."""
    out = share.new_empty(group.size(), *share.shape)
    dist.all_gather_into_tensor(out.flatten(0, 1), share.contiguous(), group=group)
    return out.transpose(0, 1).flatten(0, 1)


class _Collect(torch.autograd.Function):
    """`collect`; backward: each rank gets the sum of the gradients of its tokens (a reduce-scatter)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return collect(x, group)

    @staticmethod
    def backward(ctx, grad):
        by_rank = grad.unflatten(0, (-1, ctx.group.size())).transpose(0, 1).contiguous()
        out = torch.empty_like(by_rank[0])
        dist.reduce_scatter_tensor(out, by_rank.flatten(0, 1), group=ctx.group)
        return out, None


class PackedAttention(MegatronModule):
    """megatron-core's "core attention" for packs.

    Its own `DotProductAttention` takes neither packs nor context parallelism on CPU.

    `packed_seq_params` is a `PackedLayout`; the result is [t, 1, heads * d] on this rank.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=None,
        **kwargs,
    ):
        super().__init__(config)
        self.cp_group = pg_collection.cp
        self.self_attention = attention_type == "self"
        self.scale = softmax_scale
        self.backend = config.packed_attention_backend

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        size = self.cp_group.size()
        layout = packed_seq_params.layout
        if size > 1 and self.self_attention:
            kv = _Collect.apply(torch.cat((key, value), -1), self.cp_group)
            key, value = kv.chunk(2, -1)
        out = packed_attention(query, key, value, layout, self.backend, self.scale)
        return out.reshape(out.shape[0], -1)


class PackedLayout(PackedSeqParams):
    """megatron-core's thd parameters, carrying the `SegmentLayout` that `PackedAttention` uses."""

    def __init__(self, layout: SegmentLayout):
        super().__init__(qkv_format="thd")
        self.layout = layout
