"""Power-function EMA of the weights (Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion
Models").

After t steps the average has weight ~ (step/t)^gamma on each step, so its length is a fixed fraction sigma_rel of the
run. Several lengths are kept, each as a float32 copy of this rank's parameters: of the optimizer's float32 ones, but of
the bfloat16 ones with the distributed optimizer, whose float32 ones are in shards. `combine_weights` reconstructs other
lengths from stored ones (post-hoc EMA).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

MAX_SIGMA_REL = 12**-0.5
"""Relative length of the mean over all steps (gamma 0); every average is shorter."""


def sigma_rel_to_gamma(sigma_rel: float) -> float:
    """Exponent gamma of the power profile whose relative standard deviation is `sigma_rel` (appendix C)."""
    # sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)), as a polynomial in gamma; one of its roots is positive
    inverse = sigma_rel**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return float(roots[np.isreal(roots)].real.max())


def power_beta(step: int, sigma_rel: float) -> float:
    """Decay at 1-based `step`: average <- beta * average + (1 - beta) * weights; 0 at the first step."""
    return (1 - 1 / step) ** (sigma_rel_to_gamma(sigma_rel) + 1)


class PowerEMA:
    """Averages of several lengths of the trained parameters of this rank's model chunks."""

    def __init__(self, chunks: Sequence[nn.Module], sigma_rels: Sequence[float]):
        self.chunks = list(chunks)
        self.sigma_rels = list(sigma_rels)
        self._names = [[name for name, p in chunk.named_parameters() if p.requires_grad] for chunk in self.chunks]
        self.parameters = [c.get_parameter(name) for c, names in zip(self.chunks, self._names) for name in names]
        self.averages = {s: [p.detach().float().clone() for p in self.parameters] for s in self.sigma_rels}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """`step` counts optimizer steps from 1."""
        if not self.averages:
            return
        weights = [_precise(p) for p in self.parameters]
        for sigma_rel, average in self.averages.items():
            # one kernel for all parameters instead of one each
            torch._foreach_lerp_(average, weights, 1 - power_beta(step, sigma_rel))

    @contextmanager
    def applied(self, sigma_rel: float) -> Iterator[None]:
        """Use the averaged weights within the block."""
        kept = [p.detach().clone() for p in self.parameters]
        self.set_parameters(self.averages[sigma_rel])
        try:
            yield
        finally:
            self.set_parameters(kept)

    @torch.no_grad()
    def set_parameters(self, values: Sequence[torch.Tensor]) -> None:
        """Set the parameters to these values, rounded to their dtype."""
        for p, value in zip(self.parameters, values):
            p.copy_(value)

    def named(self, sigma_rel: float) -> list[dict[str, torch.Tensor]]:
        """Per chunk: parameter name -> average."""
        values = iter(self.averages[sigma_rel])
        return [{name: next(values) for name in names} for names in self._names]


def _precise(p: nn.Parameter) -> torch.Tensor:
    """A parameter in float32: megatron-core's master copy where this rank has it whole."""
    if getattr(p, "main_param_sharded", False):  # the distributed optimizer's
        return p.float()
    return getattr(p, "main_param", p)


def profile_dot(t_a: float, gamma_a: float, t_b: float, gamma_b: float) -> float:
    """Inner product of two power profiles that end at t_a and t_b (appendix C)."""
    t_min, (t_max, gamma_of_later) = min(t_a, t_b), max((t_a, gamma_a), (t_b, gamma_b))
    return (gamma_a + 1) * (gamma_b + 1) / ((gamma_a + gamma_b + 1) * t_max) * (t_min / t_max) ** gamma_of_later


def combine_weights(stored: Sequence[tuple[float, float]], target: tuple[float, float]) -> tuple[np.ndarray, float]:
    """Least-squares weights, summing to 1, that reconstruct the profile (t, sigma_rel) from stored ones (appendix C).

    Returns
    -------
    The weights, and the relative error |rebuilt - wanted profile| / |wanted profile|; infinite for impossible lengths.
    """
    if not 0 < target[1] < MAX_SIGMA_REL:
        return np.zeros(len(stored)), math.inf
    pairs = [(t, sigma_rel_to_gamma(s)) for t, s in stored]
    goal = (target[0], sigma_rel_to_gamma(target[1]))
    matrix = np.array([[profile_dot(*a, *b) for b in pairs] for a in pairs])
    right = np.array([profile_dot(*a, *goal) for a in pairs])
    weights = np.linalg.solve(matrix, right)
    weights /= weights.sum()  # they nearly sum to 1; exactly, so that frozen weights do not change
    square = profile_dot(*goal, *goal)
    return weights, math.sqrt(max(0.0, weights @ matrix @ weights - 2 * weights @ right + square) / square)


def rebuildable(stored: Sequence[tuple[float, float]], t: float, max_error: float) -> list[tuple[float, float]]:
    """Ranges of sigma_rel, in steps of 0.001, that stored profiles reconstruct at step t with at most this error."""
    ranges: list[tuple[float, float]] = []
    for i in range(1, 289):  # 0.288 is the last below `MAX_SIGMA_REL`
        if combine_weights(stored, (t, i / 1000))[1] <= max_error:
            joined = ranges and ranges[-1][1] == (i - 1) / 1000
            ranges[-1:] = [(ranges[-1][0], i / 1000)] if joined else [*ranges[-1:], (i / 1000, i / 1000)]
    return ranges
