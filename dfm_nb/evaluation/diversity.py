"""Do samples cover what real ones show, and are they copies of training samples? On features or pixels, [n, D] rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from dfm_nb.evaluation.features import FeatureNetwork
from dfm_nb.evaluation.frechet import kernel_distance, kernel_estimate

NEIGHBOURS = 5


def pairwise(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Euclidean distances [n, m] of [n, D] and [m, D]."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    squared = (x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2 * x @ y.T
    return np.sqrt(np.maximum(squared, 0))


def _radii(x: np.ndarray, k: int) -> np.ndarray:
    """Distance of each row to its k-th neighbour among the others."""
    if len(x) <= k:
        raise ValueError(f"coverage and recall take {k} neighbours and need more samples than that; got {len(x)}")
    return np.partition(pairwise(x, x), k, axis=1)[:, k]  # the nearest is the row itself


def coverage(generated: np.ndarray, real: np.ndarray, k: int = NEIGHBOURS) -> float:
    """Share of real samples within whose k-th-neighbour ball a generated one lies (Naeem et al. 2020, Eq. 4)."""
    return float((pairwise(real, generated).min(1) <= _radii(real, k)).mean())


def recall(generated: np.ndarray, real: np.ndarray, k: int = NEIGHBOURS) -> float:
    """Share of real samples within a generated one's k-th-neighbour ball (Kynkaanniemi et al. 2019, Eq. 2)."""
    return float((pairwise(real, generated) <= _radii(generated, k)[None]).any(1).mean())


def nearest(x: np.ndarray, training: np.ndarray, rows: int = 256) -> np.ndarray:
    """Distance of each row to the nearest training sample [n]."""
    return np.concatenate([pairwise(x[i : i + rows], training).min(1) for i in range(0, len(x), rows)])


def memorised(generated: np.ndarray, held_out: np.ndarray, training: np.ndarray) -> float:
    """Share of generated samples that are nearer to a training sample than 99 % of held-out real ones are.

    0.01 is what real samples that were not trained on give.
    """
    return float((nearest(generated, training) < np.quantile(nearest(held_out, training), 0.01)).mean())


def against_renders(
    sets: Mapping[str, Sequence[np.ndarray]], networks: Sequence[FeatureNetwork]
) -> dict[str, dict[str, float]]:
    """Kernel distance, coverage and recall of samples to real renders, in each network.

    Parameters
    ----------
    sets : "samples", "decoded" (real renders through the tokenizer), "as_drawn" (real renders) and "real" (others, to
        which all three are compared), of equal numbers, uint8 [T, H, W, 3]. Of a clip one frame is taken, the i-th
        clip's frame i modulo T, so that all phases of a wing beat count.

    Returns
    -------
    By network: `kernel_distance` with `low` and `high`, and `coverage`, `recall`; the same with `_decoded` and
    `_as_drawn` after the name.
    """
    frames = {name: np.stack([v[i % len(v)] for i, v in enumerate(videos)]) for name, videos in sets.items()}
    out = {}
    for network in networks:
        of = {name: network(pictures, progress=True) for name, pictures in frames.items()}
        estimate = asdict(kernel_estimate(of["samples"], of["real"]))
        row = {"kernel_distance": estimate.pop("value"), **estimate}
        for name, suffix in (("samples", ""), ("decoded", "_decoded"), ("as_drawn", "_as_drawn")):
            if suffix:
                row[f"kernel_distance{suffix}"] = kernel_distance(of[name], of["real"])
            row[f"coverage{suffix}"] = coverage(of[name], of["real"])
            row[f"recall{suffix}"] = recall(of[name], of["real"])
        out[network.name] = row
    return out
