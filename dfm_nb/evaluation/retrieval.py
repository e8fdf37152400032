"""Do samples show what their captions say, for data that no classifier knows? By features of a frozen network.

A sample of a caption is compared to that caption's own picture and to those of other captions. It is right when its
own is the nearest of `ways` (20: chance is 5 %). Copies of training samples count as right, so the figure stands next
to the share of copies (`diversity.memorised`), and means most for captions that training has not seen.
"""

from __future__ import annotations

import math

import numpy as np

from dfm_nb.base.intervals import wilson
from dfm_nb.evaluation.distance import Estimate

WAYS = 20


def similarities(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cosines [n, m] of [n, D] and [m, D] about the mean of y, which all pictures share and which tells nothing."""
    x, y = (np.asarray(v, np.float64) - np.asarray(y, np.float64).mean(0) for v in (x, y))
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)[None]
    return x @ y.T / np.maximum(lengths, 1e-12)


def retrieval(generated: np.ndarray, real: np.ndarray, ways: int = WAYS) -> Estimate:
    """Share of samples whose own real one is the nearest of itself and `ways - 1` others, over all choices of these.

    Of N - 1 others, k are at least as near as the own one. A choice of w - 1 has none of these k in
    C(N - 1 - k, w - 1) of C(N - 1, w - 1) cases: with N = 40 and w = 20, k = 0 gives 1, k = 1 gives 20 / 39.

    Parameters
    ----------
    generated, real : features [N, D]; row i of both is of caption i. N >= ways.
    """
    if len(generated) != len(real) or len(real) < ways:
        raise ValueError(f"{ways}-way retrieval needs {ways} captions or more; got {len(generated)} and {len(real)}")
    near = similarities(generated, real)
    # the own one is among those at least as near, and does not count
    nearer = (near >= np.diag(near)[:, None]).sum(1) - 1
    others = len(real) - 1
    right = sum(math.comb(others - int(k), ways - 1) for k in nearer) / math.comb(others, ways - 1)
    return Estimate(right / len(real), *wilson(right, len(real)))  # too wide where captions are right at times
