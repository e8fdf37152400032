"""Do samples cover the variety of real ones, and are they copies of training samples?

A copy is much nearer to one training picture than to the second nearest. Distances are between pixels at 32 x 32, which
detect a smudged copy that features miss. The ratio of both is near 1 for a new picture, also for a plain or blurred
one, which is near to many; a copy has a ratio below that of 99 % of held-out pictures.
"""

from collections.abc import Sequence

import numpy as np

from dfm_nb.base import video
from dfm_nb.measure.distance import Estimate, share_estimate

NEIGHBOURS = 5
LEVEL = 0.01
"""Share of real held-out pictures that count as copies."""
SIDE_PX = 32
SAME = 0.02
"""Root mean square of pixels in [0, 1] up to which two pictures are one, stored twice. A drawing stored again, smaller
and as JPEG, had up to 0.019; a teddy bear with and without a bow tie 0.037, an emoji in two skin tones 0.021."""


def pairwise(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Euclidean distances [n, m] of [n, D] and [m, D]."""
    x = np.asarray(x, np.float64)
    y = np.asarray(y, np.float64)
    squared = (x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2 * x @ y.T
    return np.sqrt(np.maximum(squared, 0))


def recall(generated: np.ndarray, real: np.ndarray) -> float:
    """Share of real samples nearer to a generated one than its `NEIGHBOURS`-th (Kynkaanniemi et al. 2019, Eq. 2)."""
    if len(generated) <= NEIGHBOURS:
        raise ValueError(f"recall takes {NEIGHBOURS} neighbours and needs more samples than that; got {len(generated)}")
    radii = np.partition(pairwise(generated, generated), NEIGHBOURS, axis=1)[
        :, NEIGHBOURS
    ]  # the nearest is the row itself
    return float((pairwise(real, generated) <= radii).any(1).mean())


def scatter(groups: np.ndarray) -> float:
    """Root mean square distance of samples to the mean of their group [G, n, D], with n - 1 in its denominator.

    A group is the samples of one prompt with n seeds: 0 when the seed does not matter.
    """
    squares = ((groups - groups.mean(1, keepdims=True)) ** 2).sum((1, 2)) / (groups.shape[1] - 1)
    return float(np.sqrt(squares.mean()))


def thumbnails(frames: Sequence[np.ndarray]) -> np.ndarray:
    """First frames of uint8 [T, H, W, 3], as float32 [N, 3072]; Euclidean distance is root mean square of pixels."""
    small = np.concatenate([video.resize(f[:1], SIDE_PX, SIDE_PX) for f in frames])
    return small.reshape(len(small), -1) / np.float32(255 * small[0].size ** 0.5)


def nearness(x: np.ndarray, training: np.ndarray) -> np.ndarray:
    """Distance to the nearest training picture over that to the nearest other one, [n]; 0 is a copy, 1 none.

    x, training : thumbnails [n, D] and [m, D]. Pictures within `SAME` of the nearest are no other ones.
    """
    distances = pairwise(x, training)
    near = distances.argmin(1)
    others = np.where(pairwise(training[near], training) > SAME, distances, np.inf)
    return distances.min(1) / others.min(1)


def copied(nearest: np.ndarray, held_out: np.ndarray) -> Estimate:
    """Share of samples that are copies, by the `nearness` of samples [n] and of held-out pictures [m]."""
    copies = int((nearest < np.quantile(held_out, LEVEL)).sum())
    return share_estimate(copies, len(nearest))
