"""How near features of samples are to those of real ones, with intervals: the kernel distance (KID), and retrieval.

torchmetrics' KID is not used: it samples random subsets and has no interval.

Retrieval is prompt adherence for data without a classifier. The sample for a caption is compared with that caption's
picture and with pictures of other captions. It is right if its own picture is the nearest of `ways` (20: chance is
5 %). A perfect model scores like real pictures after a round trip through the tokenizer. `wrong_passes` is how often
another caption's sample counts as right. Copies of training samples count as right, so read it together with the share
of copies (`diversity.copied`), and on unseen captions.

Intervals are value -+ t s, with the 97.5 % quantile t of Student's t. The standard error s is that of the statistic's
first-order expansion: each sample's influence is the change of the distance per change of the sample's weight.
Between sets of one distribution the first order vanishes: intervals are then up to 1.4 times too wide.

n, m : samples of two sets. D : features. All sums are float64.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

WAYS = 20
FEWEST_WAYS = 4
"""Where there are fewer pictures than `WAYS`: with three, guessing is right too often."""

Rows = Sequence[np.ndarray]
"""Features [T, D] of each sample."""
Estimate = dict[str, float]
"""A `value` with its 95 % interval, `low` and `high`."""


def share_estimate(successes: float, trials: int) -> Estimate:
    """A share with its 95 % Wilson score interval."""
    z = 1.96
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # the maximum: for no success, rounding would show -0.0 %
    return {"value": share, "low": max(centre - half, 0.0) / scale, "high": (centre + half) / scale}


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
    return {"value": value, "low": float(value - half), "high": float(value + half)}


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


def similarities(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cosines [n, m] of [n, D] and [m, D] about the mean of y, which all pictures share and which tells nothing."""
    mean = y.astype(np.float64).mean(0)
    x = x - mean
    y = y - mean
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)[None]
    return x @ y.T / np.maximum(lengths, 1e-12)


def retrieval(generated: np.ndarray, real: np.ndarray, ways: int = WAYS) -> Estimate:
    """Share of samples whose own real one is the nearest of itself and `ways - 1` others, over all choices of these.

    Parameters
    ----------
    generated, real : features [n, D] and [N, D]; row i of both is of caption i, and further rows of `real` are only
        compared with. N >= ways.
    """
    right = chances(generated, real, ways)
    return share_estimate(right.sum(), len(right))  # too wide where captions are right at times


def chances(generated: np.ndarray, real: np.ndarray, ways: int = WAYS) -> np.ndarray:
    """How often each sample of `retrieval` is right, [n].

    Of N - 1 others, k are at least as near as the own one. A choice of w - 1 has none of these k in
    C(N - 1 - k, w - 1) of C(N - 1, w - 1) cases: with N = 40 and w = 20, k = 0 gives 1, k = 1 gives 20 / 39.
    """
    near = similarities(generated, real)
    # the own one is among those at least as near, and does not count
    nearer = (near >= np.diag(near)[:, None]).sum(1) - 1
    others = len(real) - 1
    return np.array([math.comb(others - int(k), ways - 1) / math.comb(others, ways - 1) for k in nearer])


def wrong_passes(right: float, captions: int, ways: int = WAYS) -> float:
    """How often a sample passes for another of N pictures with `captions`, by the share that is `right` for its own.

    Each choice of w pictures has one nearest. So over the N pictures that a sample can be judged by, each with w - 1
    others, it passes for 1 / w on average: right + (N - 1) wrong = N / w. Ties, which no caption wins, are left out.

    >>> round(wrong_passes(1.0, 64), 3), wrong_passes(0.05, 64)
    (0.035, 0.05)
    """
    return (captions / ways - right) / (captions - 1)


def compare(samples: Rows, asked: Rows, through: Rows, others: Rows = ()) -> dict:
    """Distance of samples to the real ones of their captions, retrieval, and the temporal consistency of clips.

    Each measure has its value, its interval (`low`, `high`) and `real`: the same of the real samples, which is what a
    perfect model would get; in the distance of one half of them to the other, in retrieval `through` the tokenizer.
    There `wrong` is how often another caption's sample passes. Clips count with their middle frames in the distance and
    in retrieval. What too few samples do not tell is left out.
    """
    ours = _middle_frames(samples)
    real = _middle_frames(asked)
    half = len(real) // 2
    ways = min(WAYS, len(real) + len(others))
    measures: dict = {}
    if half > 1:  # a distance needs two of each
        found = estimate(*paired_kernel_influences(ours, real))
        measures["kernel_distance"] = found | {"real": kernel_estimate(real[:half], real[half:])["value"]}
    if ways >= FEWEST_WAYS:
        all_real = _middle_frames([*asked, *others[: max(0, WAYS - len(real))]])
        found = retrieval(ours, all_real, ways)
        measures["retrieval"] = found | {
            "real": retrieval(_middle_frames(through), all_real, ways)["value"],
            "wrong": wrong_passes(found["value"], len(all_real), ways),
            "ways": ways,
        }
    if len(samples) > 1 and min(map(len, samples)) > 1:
        found = mean_estimate(_consistencies(samples))
        measures["temporal_consistency"] = found | {"real": float(_consistencies(asked).mean())}
    return measures


def _middle_frames(clips: Rows) -> np.ndarray:
    return np.stack([features[len(features) // 2] for features in clips])


def _consistencies(clips: Rows) -> np.ndarray:
    return np.array(list(map(temporal_consistency, clips)))
