"""Prompt adherence for data without a classifier, by features of a frozen network.

The sample for a caption is compared with that caption's picture and with pictures of other captions. It is right if its
own picture is the nearest of `ways` (20: chance is 5 %). A perfect model scores like real pictures after a round trip
through the tokenizer. `wrong_passes` is how often another caption's sample counts as right. Copies of training samples
count as right, so read it together with the share of copies (`diversity.copied`), and on unseen captions.
"""

import math

import numpy as np

from dfm_nb.measure.distance import Estimate, share_estimate

WAYS = 20
FEWEST_WAYS = 4
"""Where there are fewer pictures than `WAYS`: with three, guessing is right too often."""


def similarities(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cosines [n, m] of [n, D] and [m, D] about the mean of y, which all pictures share and which tells nothing."""
    mean = y.astype(np.float64).mean(0)
    x = x - mean
    y = y - mean
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)[None]
    return x @ y.T / np.maximum(lengths, 1e-12)


def retrieval(generated: np.ndarray, real: np.ndarray, ways: int = WAYS) -> Estimate:
    """Share of samples whose own real one is the nearest of itself and `ways - 1` others, over all choices of these.

    Of N - 1 others, k are at least as near as the own one. A choice of w - 1 has none of these k in
    C(N - 1 - k, w - 1) of C(N - 1, w - 1) cases: with N = 40 and w = 20, k = 0 gives 1, k = 1 gives 20 / 39.

    Parameters
    ----------
    generated, real : features [n, D] and [N, D]; row i of both is of caption i, and further rows of `real` are only
        compared with. N >= ways.
    """
    near = similarities(generated, real)
    # the own one is among those at least as near, and does not count
    nearer = (near >= np.diag(near)[:, None]).sum(1) - 1
    others = len(real) - 1
    right = sum(math.comb(others - int(k), ways - 1) for k in nearer) / math.comb(others, ways - 1)
    return share_estimate(right, len(near))  # too wide where captions are right at times


def wrong_passes(right: float, captions: int, ways: int = WAYS) -> float:
    """How often a sample passes for another of N pictures with `captions`, by the share that is `right` for its own.

    Each choice of w pictures has one nearest. So over the N pictures that a sample can be judged by, each with w - 1
    others, it passes for 1 / w on average: right + (N - 1) wrong = N / w. Ties, which no caption wins, are left out.

    >>> round(wrong_passes(1.0, 64), 3), wrong_passes(0.05, 64)
    (0.035, 0.05)
    """
    return (captions / ways - right) / (captions - 1)
