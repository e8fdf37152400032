"""Do samples cover the variety of real ones, and are they copies of training samples? On [n, D] features or pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from dfm_nb.evaluation.distance import kernel_distance, kernel_estimate
from dfm_nb.evaluation.features import NAME, Features

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


def against_renders(sets: Mapping[str, Sequence[np.ndarray]], network: Features) -> dict[str, dict[str, float]]:
    """Kernel distance and recall of samples to real renders.

    Parameters
    ----------
    sets : "samples", "decoded" (real renders through the tokenizer), "as_drawn" (real renders) and "real" (others, to
        which all three are compared), of equal numbers, uint8 [T, H, W, 3]. Of a clip one frame is taken, the i-th
        clip's frame i modulo T, so that all phases of a wing beat count.

    Returns
    -------
    By network: `kernel_distance` with `low` and `high`, and `recall`; the same with `_decoded` and `_as_drawn` after
    the name.
    """
    of = {
        name: network(np.stack([v[i % len(v)] for i, v in enumerate(videos)]), progress=True)
        for name, videos in sets.items()
    }
    estimate = asdict(kernel_estimate(of["samples"], of["real"]))
    row = {"kernel_distance": estimate.pop("value"), **estimate, "recall": recall(of["samples"], of["real"])}
    for name in ("decoded", "as_drawn"):
        row[f"kernel_distance_{name}"] = kernel_distance(of[name], of["real"])
        row[f"recall_{name}"] = recall(of[name], of["real"])
    return {NAME: row}
