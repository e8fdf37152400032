"""Confidence intervals of proportions."""

import math


def wilson(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a share."""
    n = trials
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # the maximum: for no success, rounding would show -0.0 %
    return max(centre - half, 0.0) / (1 + z * z / n), (centre + half) / (1 + z * z / n)
