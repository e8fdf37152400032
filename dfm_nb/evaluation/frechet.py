"""How far features of samples are from those of real ones: Frechet (FID) and kernel distance (KID), with intervals.

Written here and not taken from torchmetrics: torchmetrics' KID is over random subsets, and neither has an interval.

Intervals are value -+ t s, with the 97.5 % quantile t of Student's t. The standard error s is that of the statistic's
first-order expansion: each sample's influence is the change of the distance per change of the sample's weight. An
interval is for the expectation at these numbers of samples, which for Frechet's differs from the limit. Between sets of
one distribution the first order vanishes: intervals are then up to 1.4 times too wide.

n, m : samples of two sets. D : features. All sums are float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


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

    Notes
    -----
    tr (C_x C_y)^(1/2) is the sum of the singular values of F_x F_y^T for any factors C = F^T F; the centred samples
    are such factors, exact for fewer samples than features. The estimate is biased upwards by something like 1/n
    (Chong & Forsyth 2020): compare sets of the same size only. With fewer samples than twice the features it can rank
    a model whose samples are too alike above a right one; `compare` then leaves it out.
    """
    return _frechet(x, y)[0]


def frechet_estimate(x: np.ndarray, y: np.ndarray) -> Estimate:
    """`frechet_distance` and its interval, which does not account for the bias of a finite number of samples."""
    return _interval(*_frechet(x, y))


def _frechet(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The distance, and the influences of the rows of x [n] and y [m]."""
    x, y = _checked(x, y)
    shift = x.mean(0) - y.mean(0)
    a, b = x - x.mean(0), y - y.mean(0)
    (f_a, q_a), (f_b, q_b) = _factor(a / (len(a) - 1) ** 0.5), _factor(b / (len(b) - 1) ** 0.5)
    u, s, v_t = np.linalg.svd(f_a @ f_b.T, full_matrices=False)
    distance = (shift**2).sum() + (f_a**2).sum() + (f_b**2).sum() - 2 * s.sum()

    def influence(a: np.ndarray, q: np.ndarray | None, u: np.ndarray, shift: np.ndarray) -> np.ndarray:
        n = len(a)
        # A weight w_i scales row i of the factor by sqrt(n w_i), and the sum of singular values of U S V^T changes by
        # n / 2 (U S U^T)_ii; the mean's change moves the covariance in second order only.
        coupling = ((u if q is None else q @ u) ** 2) @ s
        return 2 * a @ shift + (a**2).sum(1) * n / (n - 1) - n * coupling

    return float(max(distance, 0.0)), influence(a, q_a, u, shift), influence(b, q_b, v_t.T, -shift)


def _factor(a: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """A factor F with F^T F = a^T a and as few rows as can be, and Q with a = Q F; None for the identity."""
    if len(a) <= a.shape[1]:
        return a, None
    q, r = np.linalg.qr(a)
    return r, q


def polynomial_kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(x . y / D + 1)^3, [n, m] (Binkowski et al. 2018)."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def kernel_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Squared maximum mean discrepancy with the cubic kernel, unbiased (Binkowski et al. 2018, Eq. 4).

    Zero on average, and so as often negative as positive, when both sets come from one distribution. x, y : [n, D] and
    [m, D], two or more rows each.
    """
    return _kernel(x, y)[0]


def kernel_estimate(x: np.ndarray, y: np.ndarray) -> Estimate:
    """`kernel_distance` and its interval, from the variance of the U-statistic's projections."""
    return _interval(*_kernel(x, y))


def _kernel(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The distance, and the influences of the rows of x [n] and y [m]."""
    x, y = _checked(x, y)
    k_xx, k_yy, k_xy = polynomial_kernel(x, x), polynomial_kernel(y, y), polynomial_kernel(x, y)
    within_x, within_y = ((k.sum(1) - np.diag(k)) / (len(k) - 1) for k in (k_xx, k_yy))
    distance = within_x.mean() + within_y.mean() - 2 * k_xy.mean()
    return float(distance), 2 * (within_x - k_xy.mean(1)), 2 * (within_y - k_xy.mean(0))


def mean_estimate(values: np.ndarray) -> Estimate:
    """Mean of [n] numbers and its interval by Student's t."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        raise ValueError(f"an interval needs two or more values; got {len(values)}")
    return _interval(float(values.mean()), values)


def _interval(value: float, *influences: np.ndarray) -> Estimate:
    """Value -+ t s; the degrees of freedom are those of the smallest set."""
    error = sum(i.var(ddof=1) / len(i) for i in influences) ** 0.5
    half = _student_t(min(map(len, influences)) - 1) * error
    return Estimate(value, float(value - half), float(value + half))


@functools.cache
def _student_t(df: int) -> float:
    """97.5 % quantile of Student's t: with t = sqrt(df) tan(a), the density of a is proportional to cos(a)^(df - 1)."""
    a = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(a) ** (df - 1)
    share = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return float(df**0.5 * np.tan(np.interp(0.95, share / share[-1], a)))


def temporal_consistency(features: np.ndarray) -> float:
    """How much a clip stays the same thing: mean over frames t >= 1 of (cos(f_t, f_(t-1)) + cos(f_t, f_0)) / 2.

    Parameters
    ----------
    features : [T, D], one row a frame, T >= 2.

    Notes
    -----
    The definition of subject consistency in VBench (Huang et al. 2024), on whatever features are given. A frozen clip
    has 1, so read it together with a measure of motion, and against real clips.
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
    `frechet_distance` is absent with fewer samples than twice the features; `notes`, a list of sentences, then says so.

    Parameters
    ----------
    samples, asked, others : features [T, D] of each sample; `asked` and `others` are disjoint and real.
    """
    ours, same, other = (np.stack([f[len(f) // 2] for f in clips]) for clips in (samples, asked, others))
    measures, notes = {"kernel_distance": (kernel_estimate(ours, other), kernel_distance(same, other))}, []
    fewest, least = min(map(len, (ours, same, other))), 2 * ours.shape[1]
    # Simulated with spectra i^-2a, a from 1/8 to 1: below 2 D samples a model whose samples are contracted by 40 % can
    # have a lower distance than the right one (at D, where the spectrum is nearly flat).
    if fewest < least:
        notes.append(
            f"No Frechet distance: it needs {least} samples in each set, twice the network's features; the smallest "
            f"has {fewest}. With fewer, samples that are too alike can have a lower one than right samples."
        )
    else:
        measures["frechet_distance"] = frechet_estimate(ours, other), frechet_distance(same, other)
    if min(map(len, samples)) > 1:
        consistent, real = ([temporal_consistency(f) for f in clips] for clips in (samples, asked))
        measures["temporal_consistency"] = mean_estimate(np.array(consistent)), float(np.mean(real))
    return {name: {**asdict(estimate), "real": real} for name, (estimate, real) in measures.items()} | {"notes": notes}


def _checked(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(
            "two sets of features must be [n, D] and [m, D] with two or more rows; "
            f"got {list(x.shape)} and {list(y.shape)}"
        )
    return x, y
