"""Latents to tokens and back: patches and the grid positions of their centres."""

from __future__ import annotations

import torch
from einops import rearrange

from dfm_nb.base.records import SampleError


def patchify(latent: torch.Tensor, patch_spatial: int, patch_temporal: int = 1) -> torch.Tensor:
    """[C, T, H, W] -> [T/pt * H/ps * W/ps, C * pt * ps * ps], tokens ordered by frame, row, column."""
    check_divides(latent, patch_spatial, patch_temporal)
    return rearrange(
        latent, "c (t pt) (h ph) (w pw) -> (t h w) (c pt ph pw)", pt=patch_temporal, ph=patch_spatial, pw=patch_spatial
    )


def check_divides(latent: torch.Tensor, patch_spatial: int, patch_temporal: int, name: str = "a latent") -> None:
    """Raise SampleError if [C, T, H, W] does not divide into patches."""
    _, t, h, w = latent.shape
    if t % patch_temporal or h % patch_spatial or w % patch_spatial:
        step = 4 * patch_temporal  # 1 + 4k frames are 1 + k latents
        fitting = f"{step - 3}, {2 * step - 3}, {3 * step - 3}"
        frames = f"clips of {fitting}, ... frames and no stills, or model.patch_temporal=1"
        fix = frames if t % patch_temporal else f"image sides divisible by {8 * patch_spatial} px"
        must = f"{name} must divide into patches of {patch_temporal}x{patch_spatial}x{patch_spatial} (T, H, W)"
        raise SampleError("odd_size", f"{must}; got {t}x{h}x{w}; choose {fix}")


def unpatchify(
    tokens: torch.Tensor, grid: tuple[int, int, int], patch_spatial: int, patch_temporal: int = 1
) -> torch.Tensor:
    """Inverse of `patchify`; `grid` is (T/pt, H/ps, W/ps), the number of patches along each dim."""
    t, h, w = grid
    sizes = {"t": t, "h": h, "w": w, "pt": patch_temporal, "ph": patch_spatial, "pw": patch_spatial}
    return rearrange(tokens, "(t h w) (c pt ph pw) -> c (t pt) (h ph) (w pw)", **sizes)


def grid_positions(grid: tuple[int, int, int], centred: bool = True) -> torch.Tensor:
    """float32 [t*h*w, 3] in patches: frame from the first; row and column from the picture's centre or corner."""
    t, h, w = grid
    frames = torch.arange(t, dtype=torch.float32)
    rows = torch.arange(h, dtype=torch.float32)
    columns = torch.arange(w, dtype=torch.float32)
    if centred:
        rows -= (h - 1) / 2
        columns -= (w - 1) / 2
    return torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij"), -1).reshape(-1, 3)
