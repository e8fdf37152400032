"""How far features of samples are from those of real ones: Frechet (FID) and kernel distance (KID), with intervals.

Written here and not taken from torchmetrics: this one is exact for fewer samples than features and quick enough for 200
bootstrap distances, and torchmetrics' KID is over random subsets.

n, m : samples of two sets. D : features. All sums are float64, and the same seed gives the same interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

NUM_BOOTSTRAP = 200


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def frechet_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Between the Gaussians fitted to two sets (Heusel et al. 2017, Eq. 6).

    |mean_x - mean_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2))

    Parameters
    ----------
    x, y : [n, D] and [m, D], two or more rows each.

    Notes ----- tr (C_x C_y)^(1/2) is the sum of the singular values of F_x F_y^T for any factors C = F^T F; the
    centred samples are such factors. The estimate is biased upwards by something like 1/n (Chong & Forsyth 2020):
    compare sets of the same size only.
    """
    x, y = _checked(x, y)
    a, b = x - x.mean(0), y - y.mean(0)
    a, b = a / (len(x) - 1) ** 0.5, b / (len(y) - 1) ** 0.5
    coupling = np.linalg.svd(_factor(a) @ _factor(b).T, compute_uv=False).sum()
    distance = ((x.mean(0) - y.mean(0)) ** 2).sum() + (a**2).sum() + (b**2).sum() - 2 * coupling
    return float(max(distance, 0.0))


def _factor(a: np.ndarray) -> np.ndarray:
    """A factor F with F^T F = a^T a and as few rows as can be."""
    if len(a) <= a.shape[1]:
        return a
    r: np.ndarray = np.asarray(np.linalg.qr(a, mode="r"))
    return r


def polynomial_kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(x . y / D + 1)^3, [n, m] (Binkowski et al. 2018)."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def kernel_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Squared maximum mean discrepancy with the cubic kernel, unbiased (Binkowski et al. 2018, Eq. 4).

    Zero on average, and so as often negative as positive, when both sets come from one distribution.
    """
    x, y = _checked(x, y)
    kernels = polynomial_kernel(x, x), polynomial_kernel(y, y), polynomial_kernel(x, y)
    return _weighted_mmd(*kernels, np.ones(len(x)), np.ones(len(y)))


def _weighted_mmd(k_xx: np.ndarray, k_yy: np.ndarray, k_xy: np.ndarray, u: np.ndarray, v: np.ndarray) -> float:
    """The estimate with multiplicities u [n], v [m]; a sample is never paired with itself, nor with its copies."""

    def within(k: np.ndarray, w: np.ndarray) -> float:
        pairs = w.sum() ** 2 - (w**2).sum()
        return (w @ k @ w - (w**2) @ np.diag(k)) / pairs if pairs else np.nan  # one sample, drawn every time

    return float(within(k_xx, u) + within(k_yy, v) - 2 * (u @ k_xy @ v) / (u.sum() * v.sum()))


def frechet_estimate(x: np.ndarray, y: np.ndarray, num_bootstrap: int = NUM_BOOTSTRAP, seed: int = 0) -> Estimate:
    """`frechet_distance` and its interval at these numbers of samples.

    Resampling with replacement lowers the rank of the covariances and so raises the distance; that shift is taken
    off, so the interval tells how much another draw of as many samples would scatter, not the bias that a finite
    number brings.
    """
    x, y = _checked(x, y)
    value = frechet_distance(x, y)
    draws = _bootstrap(lambda i, j: frechet_distance(x[i], y[j]), len(x), len(y), num_bootstrap, seed)
    return _interval(value, draws - draws.mean() + value)


def kernel_estimate(x: np.ndarray, y: np.ndarray, num_bootstrap: int = NUM_BOOTSTRAP, seed: int = 0) -> Estimate:
    """`kernel_distance` and its percentile interval."""
    x, y = _checked(x, y)
    kernels = polynomial_kernel(x, x), polynomial_kernel(y, y), polynomial_kernel(x, y)

    def resampled(i: np.ndarray, j: np.ndarray) -> float:
        return _weighted_mmd(*kernels, np.bincount(i, minlength=len(x)), np.bincount(j, minlength=len(y)))

    draws = _bootstrap(resampled, len(x), len(y), num_bootstrap, seed)
    return _interval(_weighted_mmd(*kernels, np.ones(len(x)), np.ones(len(y))), draws)


def mean_estimate(values: np.ndarray, num_bootstrap: int = 1000, seed: int = 0) -> Estimate:
    """Mean of [n] numbers and its percentile interval."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        raise ValueError(f"an interval needs two or more values; got {len(values)}")
    rng = np.random.default_rng(seed)
    draws = values[rng.integers(len(values), size=(num_bootstrap, len(values)))].mean(1)
    return _interval(float(values.mean()), draws)


def temporal_consistency(features: np.ndarray) -> float:
    """How much a clip stays the same thing: mean over frames t >= 1 of (cos(f_t, f_(t-1)) + cos(f_t, f_0)) / 2.

    Parameters
    ----------
    features : [T, D], one row a frame, T >= 2.

    Notes ----- The definition of subject consistency in VBench (Huang et al. 2024), on whatever features are given. A
    frozen clip has 1, so read it together with a measure of motion, and against real clips.
    """
    f = np.asarray(features, np.float64)
    if f.ndim != 2 or len(f) < 2:
        raise ValueError(f"temporal consistency needs features [T, D] of two or more frames; got {list(f.shape)}")
    f = f / np.maximum(np.linalg.norm(f, axis=1, keepdims=True), 1e-12)
    return float(((f[1:] * f[:-1]).sum(1) + f[1:] @ f[0]).mean() / 2)


def compare(
    samples: Sequence[np.ndarray], asked: Sequence[np.ndarray], others: Sequence[np.ndarray]
) -> dict[str, dict[str, float]]:
    """Distances of samples to other real samples, and the temporal consistency of clips.

    Each measure has its value, its interval (`low`, `high`) and `real`: the same of the real samples whose captions
    were asked for, which is what a perfect model would get. Clips count with their middle frames in the distances.

    Parameters
    ----------
    samples, asked, others : features [T, D] of each sample; `asked` and `others` are disjoint and real.
    """
    ours, same, other = (np.stack([f[len(f) // 2] for f in clips]) for clips in (samples, asked, others))
    measures = {
        "frechet_distance": (frechet_estimate(ours, other), frechet_distance(same, other)),
        "kernel_distance": (kernel_estimate(ours, other), kernel_distance(same, other)),
    }
    if min(map(len, samples)) > 1:
        consistent, real = ([temporal_consistency(f) for f in clips] for clips in (samples, asked))
        measures["temporal_consistency"] = mean_estimate(np.array(consistent)), float(np.mean(real))
    return {name: {**asdict(estimate), "real": real} for name, (estimate, real) in measures.items()}


def _bootstrap(
    statistic: Callable[[np.ndarray, np.ndarray], float], n: int, m: int, num_bootstrap: int, seed: int
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([statistic(rng.integers(n, size=n), rng.integers(m, size=m)) for _ in range(num_bootstrap)])


def _interval(value: float, draws: np.ndarray) -> Estimate:
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))


def _checked(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(
            "two sets of features must be [n, D] and [m, D] with two or more rows; "
            f"got {list(x.shape)} and {list(y.shape)}"
        )
    return x, y
