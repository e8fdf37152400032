"""Where a token is: factorised sin-cos embeddings and rotary angles."""

from __future__ import annotations

import math

import torch


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

    positions : float [N, 3]; returns float32 [N, head_dim // 2] in radians: three eighths of the pairs turn with the
    row, as many with the column, the rest with the frame; the fastest by a quarter turn per patch, so that neighbours
    differ also on a grid of 4 x 4. Differences of angles depend on differences of positions only.
    """
    pairs = head_dim // 2
    per_side = pairs * 3 // 8
    angles = []
    for axis, count in ((0, pairs - 2 * per_side), (1, per_side), (2, per_side)):
        omega = (
            math.pi / 2 * theta ** (-torch.arange(count, device=positions.device, dtype=torch.float32) / max(count, 1))
        )
        angles.append(positions[:, axis : axis + 1].float() * omega)
    return torch.cat(angles, 1)
