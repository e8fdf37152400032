"""One context-parallel rank's part of a pack, and how its layers attend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state as mpu

from dfm_nb.model.attention import SegmentBounds, Varlen, deal
from dfm_nb.packs.packs import PackLayout


@dataclass
class PackSlice:
    """The network's inputs from a pack except noisy tokens and noise levels, on this rank's device.

    tokens : indices of this rank's S tokens in the pack (`attention.deal`).
    row, positions : int64 [S], token -> conditioning row, and float32 [S, 3].
    text, fps, pool : [K, D], float32 [R] and [R, K], complete on every rank; each row of `pool` averages its own text.
    self_bounds, cross_bounds : the segments within which the S tokens attend.
    text_cache : each layer's keys and values of the text, kept from the first call; None: computed in every call.
    """

    tokens: slice
    row: torch.Tensor
    positions: torch.Tensor
    text: torch.Tensor
    pool: torch.Tensor
    fps: torch.Tensor
    self_bounds: SegmentBounds | Varlen
    cross_bounds: SegmentBounds | Varlen
    device: torch.device
    text_cache: dict | None = None

    @classmethod
    def of(cls, pack: PackLayout, device: torch.device) -> PackSlice:
        size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        length = pack.cu_q[-1]
        assert length % size == 0, (length, size)
        tokens = deal(rank, size)

        def to(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return cls(
            tokens,
            to(pack.row[tokens]),
            to(pack.positions[tokens]),
            to(pack.text),
            to(pack.pool),
            to(pack.fps),
            SegmentBounds(pack.cu_q, pack.cu_q, device, pack.longest and pack.longest[:1] * 2).dealt(rank, size),
            SegmentBounds(pack.cu_q, pack.cu_kv, device, pack.longest).dealt(rank, size),
            device,
        )

    def for_backend(self, backend: str) -> PackSlice:
        """With the bounds that this back end of attention takes, on the device."""
        return replace(
            self, self_bounds=self.self_bounds.on_device(backend), cross_bounds=self.cross_bounds.on_device(backend)
        )

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of a [S, ...] CPU tensor of the complete pack, on the device."""
        return tensor[self.tokens].to(self.device, non_blocking=True)
