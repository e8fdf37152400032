import torch

from dfm_nb.offline._fitting import reconstruction_loss, windows


def counted(frames, height, width):
    """uint8 [3, T, H, W] whose channels are the frame, the row and the column."""
    grid = torch.meshgrid(*(torch.arange(n, dtype=torch.uint8) for n in (frames, height, width)), indexing="ij")
    return torch.stack(grid)


def test_windows_are_parts_of_videos_in_order_or_mirrored():
    videos = [counted(5, 48, 80), counted(1, 96, 32)]
    found = [windows(videos, 2, 9, torch.Generator().manual_seed(i)) for i in range(30)]
    assert {x.shape[2:] for x in found} == {(5, 48, 64), (1, 48, 32), (1, 64, 32)}
    steps = [x.add(1).mul(127.5).round().diff(dim=4)[:, 2].flatten(1) for x in found]
    assert {tuple(one.unique().tolist()) for both in steps for one in both} == {(1.0,), (-1.0,)}


def test_error_counts_more_where_a_picture_is_flat():
    flat = torch.zeros(1, 3, 1, 32, 32)
    busy = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    error = 0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))
    assert reconstruction_loss(flat + error, flat) > 2 * reconstruction_loss(busy + error, busy)
    assert reconstruction_loss(busy, busy) < 0.01
