"""Shares with an interval, and how far features of samples are from those of real ones: the kernel distance (KID).

torchmetrics' KID is not used: it samples random subsets and has no interval.

Intervals are value -+ t s, with the 97.5 % quantile t of Student's t. The standard error s is that of the statistic's
first-order expansion: each sample's influence is the change of the distance per change of the sample's weight.
Between sets of one distribution the first order vanishes: intervals are then up to 1.4 times too wide.

n, m : samples of two sets. D : features. All sums are float64.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def share_estimate(successes: float, trials: int) -> Estimate:
    """A share with its 95 % Wilson score interval."""
    z = 1.96
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # the maximum: for no success, rounding would show -0.0 %
    return Estimate(share, max(centre - half, 0.0) / scale, (centre + half) / scale)


def polynomial_kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(x . y / D + 1)^3, [n, m] (Binkowski et al. 2018)."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def kernel_estimate(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Squared maximum mean discrepancy with the cubic kernel, unbiased (Binkowski et al. 2018, Eq. 4).

    Zero on average, and so as often negative as positive, when both sets come from one distribution. Its interval is
    from the variance of the U-statistic's projections. x, y : [n, D] and [m, D], two or more rows each.
    """
    return estimate(*kernel_influences(x, y))


def paired_kernel_influences(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """The distance and its influences [n] where row i of x is the sample for the caption of row i of y.

    Such pairs do not count (Gretton et al. 2012, Eq. 4), or a copy would bring its own picture nearer than any other
    one can be.
    """
    x = np.asarray(x, np.float64)
    y = np.asarray(y, np.float64)
    across = polynomial_kernel(x, y)
    h = polynomial_kernel(x, x) + polynomial_kernel(y, y) - across - across.T
    rows = _mean_with_others(h)
    return float(rows.mean()), 2 * rows


def _mean_with_others(kernel: np.ndarray) -> np.ndarray:
    """Mean of each row [n] of a set's kernel with itself [n, n], without the sample's own entry."""
    return (kernel.sum(1) - np.diag(kernel)) / (len(kernel) - 1)


def kernel_influences(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The value of `kernel_estimate`, and the influences on it of the rows of x [n] and of y [m]."""
    x = np.asarray(x, np.float64)
    y = np.asarray(y, np.float64)
    within_x = _mean_with_others(polynomial_kernel(x, x))
    within_y = _mean_with_others(polynomial_kernel(y, y))
    k_xy = polynomial_kernel(x, y)
    distance = within_x.mean() + within_y.mean() - 2 * k_xy.mean()
    return float(distance), 2 * (within_x - k_xy.mean(1)), 2 * (within_y - k_xy.mean(0))


def difference(one: tuple, other: tuple) -> Estimate:
    """One kernel distance less another, with their influences, to the same y.

    Row i of both x is of one prompt and one seed, so what they share falls out: the interval is narrower than those of
    the two distances.
    """
    return estimate(*(a - b for a, b in zip(one, other)))


def mean_estimate(values: np.ndarray) -> Estimate:
    """Mean of [n] numbers, n > 1, and its interval by Student's t."""
    values = np.asarray(values, np.float64)
    return estimate(float(values.mean()), values)


def estimate(value: float, *influences: np.ndarray) -> Estimate:
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
    """Temporal consistency of a clip: mean over frames t >= 1 of (cos(f_t, f_(t-1)) + cos(f_t, f_0)) / 2.

    Parameters
    ----------
    features : [T, D], one row a frame, T >= 2.

    Notes
    -----
    The definition of subject consistency in VBench (Huang et al. 2024), on whatever features are given. A frozen clip
    has 1, so read it together with a measure of motion, and against real clips.
    """
    f = np.asarray(features, np.float64)
    f = f / np.maximum(np.linalg.norm(f, axis=1, keepdims=True), 1e-12)
    return float(((f[1:] * f[:-1]).sum(1) + f[1:] @ f[0]).mean() / 2)
