"""Do samples cover the variety of real ones, and are they copies of training samples? On [n, D] features or pixels."""

from __future__ import annotations

import numpy as np

NEIGHBOURS = 5


def pairwise(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Euclidean distances [n, m] of [n, D] and [m, D]."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    squared = (x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2 * x @ y.T
    return np.sqrt(np.maximum(squared, 0))


def recall(generated: np.ndarray, real: np.ndarray, k: int = NEIGHBOURS) -> float:
    """Share of real samples within a generated one's k-th-neighbour ball (Kynkaanniemi et al. 2019, Eq. 2)."""
    if len(generated) <= k:
        raise ValueError(f"recall takes {k} neighbours and needs more samples than that; got {len(generated)}")
    radii = np.partition(pairwise(generated, generated), k, axis=1)[:, k]  # the nearest is the row itself
    return float((pairwise(real, generated) <= radii).any(1).mean())


def nearest(x: np.ndarray, training: np.ndarray, rows: int = 256) -> np.ndarray:
    """Distance of each row to the nearest training sample [n]."""
    return np.concatenate([pairwise(x[i : i + rows], training).min(1) for i in range(0, len(x), rows)])


def memorised(generated: np.ndarray, held_out: np.ndarray, training: np.ndarray) -> float:
    """Share of generated samples that are nearer to a training sample than 99 % of held-out real ones are.

    Real samples that were not trained on give 0.01.
    """
    return float((nearest(generated, training) < np.quantile(nearest(held_out, training), 0.01)).mean())
