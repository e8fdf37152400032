"""Embeddings of numbers and positions: sinusoids, factorised sin-cos and rotary angles."""

import math

import torch


def sinusoids(value: torch.Tensor, dim: int, shift: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[N] -> [N, dim]: sines, then cosines, of angular frequencies 1e4^(-i / (dim / 2 - shift))."""
    exponent = torch.arange(dim // 2, device=value.device, dtype=dtype) / (dim // 2 - shift)
    angle = value[:, None].to(dtype) * torch.exp(-math.log(1e4) * exponent)
    return torch.cat((angle.sin(), angle.cos()), -1)


def factorised_sincos(positions: torch.Tensor, dim: int, max_period: float = 1e4) -> torch.Tensor:
    """Factorised 3-D sine-cosine embedding (Vaswani et al. 2017, one third of the channels per axis).

    positions : float [N, 3]; returns float32 [N, dim]. Computed from the coordinates, so any size and any length has
    distinct values; channels left over after the division by 6 are zero.

        dim 14: 2 sines and 2 cosines per axis, with periods 2 pi and 2 pi * 100 (max_period ** (1 / 2)) patches
        (frame, row, column) = (1, 0, 2) -> [sin 1, sin .01, cos 1, cos .01 | 0, 0, 1, 1 | sin 2, sin .02, ... | 0, 0]
    """
    per_axis = dim // 6
    omega_F = max_period ** (-torch.arange(per_axis, device=positions.device, dtype=torch.float32) / per_axis)
    angles_N3F = positions.float()[:, :, None] * omega_F
    out = torch.cat((angles_N3F.sin(), angles_N3F.cos()), -1).flatten(1)
    return torch.nn.functional.pad(out, (0, dim - out.shape[1]))


def rotary_angles(positions: torch.Tensor, head_dim: int, theta: float = 100.0) -> torch.Tensor:
    """Angles of an axial rotary embedding (Su et al. 2021; theta as in Heo et al. 2024 for pictures).

    positions : float [N, 3]; returns float32 [N, head_dim // 2] in radians: three eighths of the pairs rotate with the
    row, as many with the column, the rest with the frame; the fastest by a quarter turn per patch, so that neighbours
    differ also on a grid of 4 x 4. Differences of angles depend only on differences of positions.

        head_dim 32: 16 pairs, 4 rotate with the frame, 6 with the row, 6 with the column
        (0, 1, 0) -> [0 x 4 | pi/2 * (1, .46, .22, .1, .046, .022) | 0 x 6]
    """
    pairs = head_dim // 2
    per_side = pairs * 3 // 8  # rows and columns of a picture need finer steps than the few frames of a clip
    angles = []
    for axis, count in ((0, pairs - 2 * per_side), (1, per_side), (2, per_side)):
        index = torch.arange(count, device=positions.device, dtype=torch.float32)
        omega = math.pi / 2 * theta ** (-index / max(count, 1))
        angles.append(positions[:, axis : axis + 1].float() * omega)
    return torch.cat(angles, 1)
