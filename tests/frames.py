"""Pictures and clips for tests."""

import numpy as np
from PIL import Image


def black(*shape: int) -> np.ndarray:
    """uint8 [*shape, 3] of zeros."""
    return np.zeros((*shape, 3), np.uint8)


def noise(*shape: int) -> np.ndarray:
    """uint8 [*shape, 3], always the same."""
    return np.random.default_rng(0).integers(0, 255, (*shape, 3), np.uint8)


def gradient(t=9, h=48, w=64):
    """A smooth moving picture, cheap to compress well."""
    y, x, k = np.mgrid[0:h, 0:w][0], np.mgrid[0:h, 0:w][1], np.arange(t)[:, None, None]
    planes = [128 + 100 * np.sin(x / 15 + k / 3), 255 * y / h + 0 * k, 60 + 20 * k + 0 * x]
    return np.stack([np.broadcast_to(p, (t, h, w)) for p in planes], -1).clip(0, 255).astype(np.uint8)


def counting_clip(t, step=8, side=32):
    """uint8 [T, side, side, 3] whose frame k has the level step * k."""
    return np.broadcast_to((np.arange(t) * step).astype(np.uint8)[:, None, None, None], (t, side, side, 3))


def off(a, b) -> int:
    """The largest difference."""
    return np.abs(np.asarray(a).astype(int) - b).max()


def picture(path, colour="red", size=(24, 32), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)


def pictures(folder, *names):
    for name in names:
        picture(folder / name)


def animate(path, frames, **options):
    first, *rest = map(Image.fromarray, frames)
    first.save(path, save_all=True, append_images=rest, **options)
