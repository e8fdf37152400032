"""Attention over packed ("thd") sequences, with all back ends and context parallelism.

A `SegmentBounds` has the bounds of segments: segment i of q attends to all of segment i of k and v (no causal mask) and
to nothing else. Padding is a separate segment. The bounds are also on the host, so no back end waits for the device. On
CPU, consecutive segments of equal length are one batched SDPA call.

Context parallelism: the queries are assigned round-robin, token t to rank t modulo the group's size. So every rank has
the same share of each segment, and the same work (without a causal mask, any share costs the same). Self attention
all-gathers K and V (backward: reduce-scatter). Cross attention needs no communication: the text is on every rank.

Shapes, in the names of tensors: Q queries of this rank, K keys, H heads of this tp rank, D channels of a head.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Callable, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from dfm_nb.packs.packs import pinned

FLOAT32_BELOW = 512
"""Below this average number of queries per segment, attention is float32 on CPUs, from the norms of queries on.

torch's bfloat16 kernel is ten times slower at 16 queries, and equal at 512.
"""
KEY_MULTIPLE = 16
"""Keys of segments with unequal lengths are padded to a multiple of this."""


def cumulative(lengths: Sequence[int]) -> list[int]:
    """[l0, l1, ...] -> [0, l0, l0 + l1, ...], as in `cu_seqlens`."""
    return [0, *accumulate(lengths)]


@dataclass(slots=True)
class _Run:
    """Consecutive segments with equally many queries: one batched call."""

    count: int
    q_len: int
    kv_len: int  # of the longest
    kv_mask: torch.Tensor | None  # bool [count, 1, 1, kv_len], True = attend; None: all have the longest length


class Varlen(NamedTuple):
    """What CUDA's kernels take after q, k and v: bounds, int32 on the device, and the longest segment of each."""

    cu_q: torch.Tensor
    cu_kv: torch.Tensor
    max_q: int
    max_kv: int

    def on_device(self, _backend: str) -> Varlen:
        return self


@dataclass
class SegmentBounds:
    """Bounds of the segments among queries and keys, on the host; `on_device` is what a back end takes.

    longest : at least the queries and keys of each segment; None: as many as the longest has.
    """

    cu_q: list[int]
    cu_kv: list[int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    longest: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert len(self.cu_q) == len(self.cu_kv), (len(self.cu_q), len(self.cu_kv))

    def on_device(self, backend: str) -> SegmentBounds | Varlen:
        """The `bounds` of `BACKENDS[backend]`."""
        if "a CUDA device" not in NEEDS.get(backend, ()):
            return self
        q, kv = (pinned(torch.tensor(cu, dtype=torch.int32)) for cu in (self.cu_q, self.cu_kv))
        longest = self.longest or (int(q.diff().max()), int(kv.diff().max()))  # on the host: nothing waits
        return Varlen(q.to(self.device, non_blocking=True), kv.to(self.device, non_blocking=True), *longest)

    @functools.cached_property
    def in_float32(self) -> bool:
        """Whether queries, keys and values are to be float32: see `FLOAT32_BELOW`."""
        return self.device.type == "cpu" and self.cu_q[-1] < FLOAT32_BELOW * len(self.segments())

    def dealt(self, rank: int, size: int) -> SegmentBounds:
        """The bounds of this context-parallel rank: its queries (`deal`) against all keys."""
        return replace(self, cu_q=[-(-max(c - rank, 0) // size) for c in self.cu_q])

    def segments(self) -> list[tuple[int, int, int, int]]:
        """(q start, q stop, kv start, kv stop) of each segment that has queries."""
        spans = zip(pairwise(self.cu_q), pairwise(self.cu_kv))
        return [(*q, *kv) for q, kv in spans if q[1] > q[0]]

    @functools.cached_property
    def calls(self) -> tuple[list[_Run], int, torch.Tensor | None]:
        """Neighbouring segments with equally many queries are one batch, with keys padded to the batch's longest.

        Returns all runs in the order of the queries, and their K/V rows in that order: the first one if they are
        adjacent, and their numbers, int64 [sum of count * kv_len], if not.

        `pack_draws` sorts samples by length, so that there are few runs. For example, segments with 4, 4 and 9 queries
        and with 3, 5 and 6 keys (rows 0-2, 3-7 and 8-13 of K and V):

            run 1: 2 segments of 4 queries and 16 keys: rows 0 1 2 0 0 ... | 3 4 5 6 7 3 3 ..., the repeated ones masked
            run 2: 1 segment of 9 queries and 6 keys:   rows 8 9 ... 13, no mask
            rows = both, concatenated. With 5 and 5 keys they would be 0, 1, 2, ...: then the first is enough.
        """
        runs = []
        indices = []
        for q_len, group in groupby(self.segments(), key=lambda s: s[1] - s[0]):
            starts, stops = torch.tensor([s[2:] for s in group]).T
            lengths = stops - starts
            longest = int(lengths.max())
            # these are masked, and torch's CPU kernels are a third slower at other lengths
            if longest > int(lengths.min()):
                longest = -(-longest // KEY_MULTIPLE) * KEY_MULTIPLE
            offset = torch.arange(longest)
            valid = offset < lengths[:, None]  # [segments, longest]
            indices.append((starts[:, None] + offset * valid).flatten())  # past its end, a segment's first row again
            mask = None if bool(valid.all()) else valid[:, None, None].to(self.device, non_blocking=True)
            runs.append(_Run(len(starts), q_len, longest, mask))
        index = torch.cat(indices)
        first = int(index[0])
        adjacent = torch.equal(index, torch.arange(first, first + len(index)))
        return runs, first, None if adjacent else index.to(self.device, non_blocking=True)


def pick_backend(name: str, device: torch.device, mixed_precision: str = "bf16") -> str:
    """Resolve "auto"; ValueError for a back end that is not installed, or cannot run on `device` in that arithmetic."""
    there = {
        "a CUDA device": device.type == "cuda",
        "mixed_precision=bf16": mixed_precision == "bf16",
        "the flash-attn package": importlib.util.find_spec("flash_attn"),
    }
    lacking = {b: [need for need in NEEDS.get(b, ()) if not there[need]] for b in BACKENDS}
    if name == "auto":  # the fastest
        return next(b for b in ("flash_attn", "varlen", "sdpa") if not lacking[b])
    if lacking[name]:
        raise ValueError(f"model.attention_backend={name} needs {lacking[name][0]}, which is not available; use auto")
    return name


def use_flash_attention_3(device: torch.device) -> None:
    """Let torch's FlashAttention be version 3, written for Hopper GPUs, where torch offers it and it is installed."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    installed = importlib.util.find_spec("flash_attn_interface")
    if activate and installed and torch.cuda.get_device_capability(device)[0] == 9:
        activate("FA3")


def sdpa(q_QHD, k_KHD, v_KHD, bounds, scale):
    """torch's SDPA, batched by `SegmentBounds.calls`."""
    runs, start, index = bounds.calls
    kv_rows = [r.count * r.kv_len for r in runs]
    if index is not None:
        k_KHD, v_KHD = k_KHD.index_select(0, index), v_KHD.index_select(0, index)
    elif sum(kv_rows) < len(k_KHD):
        k_KHD, v_KHD = k_KHD.narrow(0, start, sum(kv_rows)), v_KHD.narrow(0, start, sum(kv_rows))
    # `split`, because its backward writes each gradient once; a slice's backward fills a complete tensor with zeros
    q_parts = q_QHD.split([r.count * r.q_len for r in runs])
    outs = []
    for r, *qkv in zip(runs, q_parts, k_KHD.split(kv_rows), v_KHD.split(kv_rows), strict=True):
        batched = (x.unflatten(0, (r.count, -1)).transpose(1, 2) for x in qkv)  # [segments, H, queries or keys, D]
        o = F.scaled_dot_product_attention(*batched, r.kv_mask, scale=scale)
        outs.append(o.transpose(1, 2).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def varlen(q_QHD, k_KHD, v_KHD, bounds, scale):
    """torch's FlashAttention for packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q_QHD, k_KHD, v_KHD, *bounds, scale=scale)


def flash_attn(q_QHD, k_KHD, v_KHD, bounds, scale):
    """FlashAttention of the package flash-attn."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(q_QHD, k_KHD, v_KHD, *bounds, softmax_scale=scale)


BACKENDS: dict[str, Callable[..., torch.Tensor]] = {f.__name__: f for f in (sdpa, varlen, flash_attn)}
"""Values of `model.attention_backend` in addition to "auto", whose order is in `pick_backend`; the default `scale` of
each is 1 / sqrt(D)."""
_FLASH = ["a CUDA device", "mixed_precision=bf16"]  # FlashAttention has no float32
NEEDS = {"varlen": _FLASH, "flash_attn": [*_FLASH, "the flash-attn package"]}
"""Requirements of a back end."""


def deal(rank: int, size: int) -> slice:
    """Which tokens of a pack a context-parallel rank has."""
    return slice(rank, None, size)


def collect(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Inverse of `deal` along dim 0: the complete tensor on every rank of the group."""
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

    megatron-core's `DotProductAttention` supports neither packs nor context parallelism on CPU (0.16 to 0.19: both need
    Transformer Engine).
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale, pg_collection, **_kwargs):
        super().__init__(config)
        self.cp_group = pg_collection.cp
        self.collects = attention_type == "self" and self.cp_group.size() > 1
        self.scale = softmax_scale
        self.backend = config.packed_attention_backend

    def forward(self, q_QHD, k_KHD, v_KHD, bounds: SegmentBounds | Varlen):
        """[Q, H * D]."""
        if self.collects:
            kv = _Collect.apply(torch.cat((k_KHD, v_KHD), -1), self.cp_group)
            k_KHD, v_KHD = kv.chunk(2, -1)
        return BACKENDS[self.backend](q_QHD, k_KHD, v_KHD, bounds, self.scale).flatten(1)
