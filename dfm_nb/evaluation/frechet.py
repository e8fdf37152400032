"""How far features of samples are from those of real ones: Frechet (FID) and kernel distance (KID), with intervals.

Written here and not taken from torchmetrics: this one is exact for fewer samples than features and quick enough for a
jackknife, and torchmetrics' KID is over random subsets.

n, m : samples of two sets. D : features. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

FEATURES_PER_SAMPLE = 5
"""With fewer samples than a fifth of the features, the Frechet distance is refused: there a model whose samples are
contracted by 40 % gets a lower one than the right model (16 and 64 samples of 1,280 features, simulated)."""


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
    return kernel_estimate(x, y).value


def kernel_estimate(x: np.ndarray, y: np.ndarray) -> Estimate:
    """`kernel_distance` and its interval, by the jackknife: the variance over leaving out each sample in turn."""
    x, y = _checked(x, y)
    n, m = len(x), len(y)
    k_xx, k_yy, k_xy = polynomial_kernel(x, x), polynomial_kernel(y, y), polynomial_kernel(x, y)
    own_x, own_y = (k.sum(1) - np.diag(k) for k in (k_xx, k_yy))  # of each sample with the others of its set
    value = own_x.sum() / (n * (n - 1)) + own_y.sum() / (m * (m - 1)) - 2 * k_xy.mean()
    if min(n, m) < 3:
        return Estimate(float(value), float("nan"), float("nan"))
    without_x = (own_x.sum() - 2 * own_x) / ((n - 1) * (n - 2)) - 2 * (k_xy.sum() - k_xy.sum(1)) / ((n - 1) * m)
    without_y = (own_y.sum() - 2 * own_y) / ((m - 1) * (m - 2)) - 2 * (k_xy.sum() - k_xy.sum(0)) / (n * (m - 1))
    return _jackknife(value, without_x, without_y)


def frechet_estimate(x: np.ndarray, y: np.ndarray) -> Estimate:
    """`frechet_distance` and its interval, by the jackknife.

    It tells how much another draw of as many samples would scatter, not the bias that a finite number brings.
    """
    x, y = _checked(x, y)
    without_x = np.array([frechet_distance(np.delete(x, i, 0), y) for i in range(len(x))])
    without_y = np.array([frechet_distance(x, np.delete(y, i, 0)) for i in range(len(y))])
    return _jackknife(frechet_distance(x, y), without_x, without_y)


def _jackknife(value: float, *without: np.ndarray) -> Estimate:
    """95 % interval of a statistic from its values with each sample of each set left out (Efron & Stein 1981)."""
    variance = sum((len(w) - 1) / len(w) * ((w - w.mean()) ** 2).sum() for w in without)
    half = NormalDist().inv_cdf(0.975) * variance**0.5
    return Estimate(float(value), float(value - half), float(value + half))


def mean_estimate(values: np.ndarray) -> Estimate:
    """Mean of [n] numbers and its interval, by Student's t."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        raise ValueError(f"an interval needs two or more values; got {len(values)}")
    half = _student_t(len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return Estimate(float(values.mean()), float(values.mean() - half), float(values.mean() + half))


def _student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: from the normal one by Cornish and Fisher's series, exact for 1 and 2."""
    z = NormalDist().inv_cdf(0.975)
    if degrees < 3:
        return {1: 12.7062, 2: 4.30265}[degrees]
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**k for k, term in enumerate(terms, 1))


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


def compare(samples: Sequence[np.ndarray], asked: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> dict[str, Any]:
    """Distances of samples to other real samples, and the temporal consistency of clips.

    Each measure has its value, its interval (`low`, `high`) and `real`: the same of the real samples whose captions
    were asked for, which is what a perfect model would get. Clips count with their middle frames in the distances.
    `notes` says what is left out, and why.

    Parameters
    ----------
    samples, asked, others : features [T, D] of each sample; `asked` and `others` are disjoint and real.
    """
    ours, same, other = (np.stack([f[len(f) // 2] for f in clips]) for clips in (samples, asked, others))
    measures = {"kernel_distance": (kernel_estimate(ours, other), kernel_distance(same, other))}
    notes, need = [], -(-ours.shape[1] // FEATURES_PER_SAMPLE)
    if min(len(ours), len(other)) < need:
        notes.append(
            f"No Frechet distance: {need} samples or more are needed, a fifth of the network's {ours.shape[1]} "
            f"features; there are {min(len(ours), len(other))}. With fewer, samples that are too alike get a lower one."
        )
    else:
        measures["frechet_distance"] = frechet_estimate(ours, other), frechet_distance(same, other)
    if min(map(len, samples)) > 1:
        consistent, real = ([temporal_consistency(f) for f in clips] for clips in (samples, asked))
        measures["temporal_consistency"] = mean_estimate(np.array(consistent)), float(np.mean(real))
    found = {name: {**asdict(estimate), "real": real} for name, (estimate, real) in measures.items()}
    return {**found, "notes": notes}


def _checked(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(
            "two sets of features must be [n, D] and [m, D] with two or more rows; "
            f"got {list(x.shape)} and {list(y.shape)}"
        )
    return x, y
