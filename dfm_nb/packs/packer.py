"""Patches, positions and packs: pure functions and one small streaming packer; knows no files and no processes.

Enters: latents [C, T, H, W], lengths in tokens. Leaves: token matrices, positions, groups of samples that fill a capacity.
Guarantees: `unpatchify` inverts `patchify`; positions are computed, not looked up, so no size can alias or run out of a table;
the packer is a deterministic function of the order of its input, starves no sample and never splits one.
Cost: one pack from a buffer of 100 samples and a capacity of 15,360 tokens takes well under a millisecond (bit-set subset sum).
"""

from __future__ import annotations

import math
from math import gcd
from typing import Iterable, Iterator, Sequence

import torch
from einops import rearrange


def patchify(latent: torch.Tensor, patch_spatial: int, patch_temporal: int = 1) -> torch.Tensor:
    """[C, T, H, W] -> [T/pt * H/ps * W/ps, C * pt * ps * ps], tokens ordered by frame, row, column."""
    _, t, h, w = latent.shape
    if t % patch_temporal or h % patch_spatial or w % patch_spatial:
        raise ValueError(
            f"a latent must divide into patches of {patch_temporal}x{patch_spatial}x{patch_spatial} (T, H, W); "
            f"got {t}x{h}x{w}; choose image sides divisible by {8 * patch_spatial} px"
        )
    return rearrange(
        latent, "c (t pt) (h ph) (w pw) -> (t h w) (c pt ph pw)", pt=patch_temporal, ph=patch_spatial, pw=patch_spatial
    )


def unpatchify(
    tokens: torch.Tensor, grid: tuple[int, int, int], patch_spatial: int, patch_temporal: int = 1
) -> torch.Tensor:
    """Inverse of `patchify`; `grid` is (T/pt, H/ps, W/ps), the number of patches along each dim."""
    t, h, w = grid
    return rearrange(
        tokens,
        "(t h w) (c pt ph pw) -> c (t pt) (h ph) (w pw)",
        t=t, h=h, w=w, pt=patch_temporal, ph=patch_spatial, pw=patch_spatial,
    )  # fmt: skip


def grid_positions(grid: tuple[int, int, int]) -> torch.Tensor:
    """float32 [t*h*w, 3]: frame index from the clip's first frame; row and column from the picture's centre, in patches."""
    t, h, w = grid
    frames = torch.arange(t, dtype=torch.float32)
    rows = torch.arange(h, dtype=torch.float32) - (h - 1) / 2
    columns = torch.arange(w, dtype=torch.float32) - (w - 1) / 2
    return torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij"), -1).reshape(-1, 3)


def factorised_sincos(positions: torch.Tensor, dim: int, max_period: float = 1e4) -> torch.Tensor:
    """Factorised 3-D sine-cosine embedding (Vaswani et al. 2017, one third of the channels per axis).

    positions : float [N, 3]; returns float32 [N, dim]. Computed from the coordinates, so any size and any length has
    distinct values; channels left over after the division by 6 are zero.
    """
    per_axis = dim // 6
    omega = max_period ** (-torch.arange(per_axis, device=positions.device, dtype=torch.float32) / per_axis)
    angles = positions.float()[:, :, None] * omega
    out = torch.cat((angles.sin(), angles.cos()), -1).flatten(1)
    return torch.nn.functional.pad(out, (0, dim - out.shape[1]))


def rotary_angles(positions: torch.Tensor, head_dim: int, theta: float = 100.0) -> torch.Tensor:
    """Angles of an axial rotary embedding (Su et al. 2021; theta as in Heo et al. 2024 for pictures).

    positions : float [N, 3]; returns float32 [N, head_dim // 2] in radians: three eighths of the pairs turn with the row, as many
    with the column, the rest with the frame; the fastest by a quarter turn per patch, so that neighbours differ also on
    a grid of 4 x 4. Differences of angles depend on differences of positions only.
    """
    pairs = head_dim // 2
    per_side = pairs * 3 // 8
    angles = []
    for axis, count in ((0, pairs - 2 * per_side), (1, per_side), (2, per_side)):
        omega = math.pi / 2 * theta ** (-torch.arange(count, device=positions.device, dtype=torch.float32) / max(count, 1))
        angles.append(positions[:, axis : axis + 1].float() * omega)
    return torch.cat(angles, 1)


def fill(lengths: Sequence[int], capacity: int) -> list[int]:
    """Indices of a subset that contains item 0 and whose lengths sum as close to `capacity` as any such subset.

    Exact subset sum over a bit set. Among equal sums the earlier items win, so that old samples leave first.
    """
    if lengths[0] > capacity:
        raise ValueError(f"a sample of {lengths[0]} tokens does not fit a pack of {capacity}")
    unit = gcd(capacity, *lengths)
    room, first = capacity // unit, lengths[0] // unit
    within = (1 << (room + 1)) - 1
    reachable = [1 << first]  # reachable[i]: sums possible with items 0..i
    for length in lengths[1:]:
        before = reachable[-1]
        reachable.append(before | ((before << (length // unit)) & within))
    total = reachable[-1].bit_length() - 1
    chosen = []
    for i in range(len(lengths) - 1, 0, -1):
        if not (reachable[i - 1] >> total) & 1:
            chosen.append(i)
            total -= lengths[i] // unit
    return [0, *reversed(chosen)]


class Packer:
    """Streaming packs: keeps waiting samples and emits the fullest pack that holds the oldest of them.

    At least `buffer_size` samples wait, and enough of them for two packs, so that small samples fill large packs too.

    A sample that fits no pack now waits, and becomes the oldest in time: nothing is dropped and nothing starves.

    Parameters
    ----------
    capacity : tokens of one pack.
    buffer_size : samples to choose from; more give fuller packs and a longer wait.
    """

    def __init__(self, capacity: int, buffer_size: int, waiting: Iterable[tuple] = ()):
        if buffer_size < 1:
            raise ValueError(f"dataset.packing_buffer_size must be at least 1; got {buffer_size}")
        self.capacity = capacity
        self.buffer_size = buffer_size
        self.waiting: list[tuple] = list(waiting)  # (item, length), oldest first

    def next(self, stream: Iterator[tuple]) -> list:
        """The next pack's items; [] when `stream` of (item, length) and the buffer are exhausted."""
        tokens = sum(length for _, length in self.waiting)
        while len(self.waiting) < self.buffer_size or tokens < 2 * self.capacity:
            try:
                self.waiting.append(next(stream))
            except StopIteration:
                break
            tokens += self.waiting[-1][1]
        if not self.waiting:
            return []
        chosen = fill([length for _, length in self.waiting], self.capacity)
        taken = set(chosen)
        items = [self.waiting[i][0] for i in chosen]
        self.waiting = [w for i, w in enumerate(self.waiting) if i not in taken]
        return items
