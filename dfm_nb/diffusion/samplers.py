"""Samplers and guidance: pure functions on EDM's parametrisation, x = y + sigma * eps.

All samplers have the same first four arguments. State and coefficients are float64, so a bfloat16 network does not
reduce the solver's accuracy. No global random number is used: a sample depends only on its own noise.

To add a sampler, write one function with its decorator; a schedule is a function with a name in `SCHEDULES`. A
package's sampler is an entry point of `dfm_nb.samplers`, a function of the same arguments; without the decorator it is
taken for one of order 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from dfm_nb.base import plugins

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""denoise(x, sigma): float64 x of any shape and a 0-dim float64 sigma -> D_x of the shape of x, any float type."""

Callback = Callable[[int, int, Tensor, Tensor], None]
"""callback(step, num_steps, x, D_x) after step 1 ... num_steps, with the new state and the newest denoised estimate."""

Noise = Sequence[torch.Generator] | None
"""One generator per sample of the batch, so that a sample's noise does not depend on the others."""


# ---- registry -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampler:
    """A sampler's function and its properties.

    order : of convergence, without noise. evaluations_per_step : calls of `denoise`; the step to 0 has one.
    stochastic : it needs `noise=`.
    """

    function: Callable[..., Tensor]
    order: int
    evaluations_per_step: int = 1
    stochastic: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


SAMPLERS: dict[str, Sampler] = {}

Function = Callable[..., Tensor]


def sampler(
    name: str, order: int, evaluations_per_step: int = 1, stochastic: bool = False
) -> Callable[[Function], Function]:
    """Decorator: register a function in `SAMPLERS`."""

    def register(function: Function) -> Function:
        SAMPLERS[name] = Sampler(function, order, evaluations_per_step, stochastic)
        return function

    return register


def names() -> list[str]:
    """Names of all samplers, those of packages last; these are imported when one of them is asked for."""
    return list(dict.fromkeys((*SAMPLERS, *plugins.names("samplers"))))


def find(name: str) -> Sampler:
    """The sampler of that name, or `module:name`, for names that a user gives; ValueError when there is none."""
    if name not in SAMPLERS:
        given = plugins.find("samplers", name, SAMPLERS)
        known = (s for s in SAMPLERS.values() if given in (s, s.function))
        SAMPLERS[name] = next(known, None) or Sampler(given, order=1)
    return SAMPLERS[name]


def evaluations(name: str, num_steps: int) -> int:
    """Calls of `denoise` for a schedule of `num_steps` levels and a final 0."""
    return find(name).evaluations_per_step * (num_steps - 1) + 1


# ---- noise levels -------------------------------------------------------------------------------------------------


def karras_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """Noise levels evenly spaced in sigma^(1/rho) (Karras et al. 2022, Eq. 5), and a final 0.

    Returns
    -------
    float64 [num_steps + 1], strictly decreasing from sigma_max over sigma_min to 0.
    """
    _check_range(sigma_min, sigma_max)
    ramp = _ramp(num_steps)
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    return _finish((high + ramp * (low - high)) ** rho, sigma_min, sigma_max)


def exponential_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0) -> Tensor:
    """Noise levels evenly spaced in ln(sigma), and a final 0; float64 [num_steps + 1]."""
    _check_range(sigma_min, sigma_max)
    return _finish(
        torch.exp(math.log(sigma_max) + _ramp(num_steps) * math.log(sigma_min / sigma_max)), sigma_min, sigma_max
    )


def focused_sigmas(
    num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, sigma_data: float = 0.5, focus: float = 0.3
) -> Tensor:
    """Noise levels denser around `sigma_data`, where the denoiser changes from the mean to a mode, and a final 0.

    The density of steps in ln(sigma) is (1 - focus) uniform + focus N(ln sigma_data, 1.5^2), truncated to the range. It
    is our own, for UniPC with about 20 evaluations; benchmarks/samplers.py compares it with the other schedules. With a
    focus of 0.3 the ends of the range keep 70 % of the steps that they have in `exponential_sigmas`.

    Returns
    -------
    float64 [num_steps + 1].
    """
    _check_range(sigma_min, sigma_max)
    logs = _focused_logs(num_steps, math.log(sigma_min), math.log(sigma_max), math.log(sigma_data), focus)
    return _finish(torch.exp(logs), sigma_min, sigma_max)


@functools.cache  # a request's levels are computed several times, and this takes 1.5 ms
def _focused_logs(num_steps: int, low: float, high: float, centre: float, focus: float) -> Tensor:
    def cumulative(log_sigma: Tensor) -> Tensor:
        return torch.special.ndtr((log_sigma - centre) / 1.5)

    ends = cumulative(torch.tensor([low, high], dtype=torch.float64))
    goal = 1 - _ramp(num_steps)
    a, b = torch.full_like(goal, low), torch.full_like(goal, high)
    for _ in range(60):  # bisection: the share of steps below a level increases with it
        middle = (a + b) / 2
        share = (1 - focus) * (middle - low) / (high - low) + focus * (cumulative(middle) - ends[0]) / (
            ends[1] - ends[0]
        )
        a, b = torch.where(share < goal, middle, a), torch.where(share < goal, b, middle)
    return (a + b) / 2


def flow_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, shift: float = 1.0) -> Tensor:
    """Flow matching's schedule: evenly spaced times, sigma = shift t / (1 - t) (Esser et al. 2024, Eq. 23).

    Returns
    -------
    float64 [num_steps + 1], from sigma_max to 0; the 0 replaces sigma_min, as in Wan's scheduler.
    """
    _check_range(sigma_min, sigma_max)
    first, last = (sigma / (shift + sigma) for sigma in (sigma_max, sigma_min))
    t = first + torch.linspace(0, 1, num_steps + 1, dtype=torch.float64) * (last - first)
    sigmas = shift * t / (1 - t)
    sigmas[0], sigmas[-1] = sigma_max, 0  # not rounded
    return sigmas


SCHEDULES: dict[str, Function] = {
    "karras": karras_sigmas,
    "exponential": exponential_sigmas,
    "focused": focused_sigmas,
    "flow": flow_sigmas,
}
"""A schedule gets its arguments by name: fields of `Request`, and the model's `sigma_data`."""


def _ramp(num_steps: int) -> Tensor:
    return torch.linspace(0, 1, num_steps, dtype=torch.float64)  # one step: [0]


def _finish(sigmas: Tensor, sigma_min: float, sigma_max: float) -> Tensor:
    """Replace rounded ends by exact ones, and append the final 0."""
    sigmas[-1], sigmas[0] = sigma_min, sigma_max
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def _check_range(sigma_min: float, sigma_max: float) -> None:
    if not (0 < sigma_min < sigma_max < math.inf):
        raise ValueError(f"noise levels must satisfy 0 < sigma_min < sigma_max; got {sigma_min} and {sigma_max}")


def check_sigmas(sigmas: Tensor | Sequence[float]) -> Tensor:
    """The levels as float64 on the CPU; ValueError unless two or more, strictly decreasing and not negative."""
    levels = torch.as_tensor(sigmas, dtype=torch.float64).cpu()
    if levels.ndim != 1 or len(levels) < 2:
        raise ValueError(f"sigmas must be a list of at least two noise levels; got shape {list(levels.shape)}")
    if not (torch.isfinite(levels).all() and (levels.diff() < 0).all() and levels[-1] >= 0):
        raise ValueError(f"sigmas must strictly decrease to 0 or more; got {[round(v, 6) for v in levels.tolist()]}")
    return levels


def tail(sigmas: Tensor, strength: float) -> Tensor:
    """The last `strength` share of the steps, for starting from a noised clip: `x = y + tail[0] * eps`.

    Parameters
    ----------
    strength : in (0, 1]; 1 keeps every step (almost no influence of the clip), small values stay close to the clip.
    """
    steps = len(sigmas) - 1
    return sigmas[steps - max(1, round(strength * steps)) :]


# ---- plumbing -----------------------------------------------------------------------------------------------------


class _Sampling:
    """State of one sampling run: float64 levels, a denoiser with float64 output, noise by step, and the callback."""

    def __init__(self, denoise: Denoiser, x: Tensor, sigmas: Tensor, callback: Callback | None, noise: Noise = None):
        self.levels = check_sigmas(sigmas).tolist()
        self.num_steps = len(self.levels) - 1
        self.dtype, self.x = x.dtype, x.to(torch.float64)
        self._denoise, self._callback, self._noise = denoise, callback, noise

    def steps(self):
        """(step, sigma, sigma_next) as an int and floats."""
        return ((i, self.levels[i], self.levels[i + 1]) for i in range(self.num_steps))

    def D(self, x: Tensor, sigma: float) -> Tensor:
        D_x = self._denoise(x, x.new_tensor(sigma))
        assert D_x.shape == x.shape, (D_x.shape, x.shape)
        return D_x.to(torch.float64)

    def eps(self, x: Tensor) -> Tensor:
        """Unit normal noise like x."""
        if self._noise is None or len(self._noise) != len(x):
            given = "none" if self._noise is None else len(self._noise)
            raise ValueError(f"a stochastic sampler needs noise=, one generator per sample; got {given} for {len(x)}")
        shape = x.shape[1:]
        drawn = [torch.randn(shape, generator=g, device=g.device, dtype=torch.float32) for g in self._noise]
        return torch.stack(drawn).to(x)

    def report(self, step: int, D_x: Tensor) -> None:
        if self._callback is not None:
            self._callback(step + 1, self.num_steps, self.x, D_x)

    def result(self) -> Tensor:
        return self.x.to(self.dtype)


# ---- deterministic samplers ---------------------------------------------------------------------------------------


@sampler("euler", order=1)
def sample_euler(denoise: Denoiser, x: Tensor, sigmas: Tensor, callback: Callback | None = None) -> Tensor:
    """Euler steps of dx/dsigma = (x - D(x; sigma)) / sigma: first order, one evaluation per step (DDIM).

    Parameters
    ----------
    denoise : `(x, sigma) -> D_x`, see `Denoiser`.
    x : the start, N(0, sigmas[0]^2); any shape and float type.
    sigmas : strictly decreasing noise levels, usually with a final 0, [num_steps + 1].
    callback : see `Callback`.

    Returns
    -------
    The state at sigmas[-1], in the shape and dtype of `x`.
    """
    run = _Sampling(denoise, x, sigmas, callback)
    for i, s, s_next in run.steps():
        D_x = run.D(run.x, s)
        run.x = D_x + (s_next / s) * (run.x - D_x)
        run.report(i, D_x)
    return run.result()


@sampler("heun", order=2, evaluations_per_step=2)
def sample_heun(
    denoise: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    callback: Callback | None = None,
    noise: Noise = None,
    S_churn: float = 0.0,
    S_tmin: float = 0.05,
    S_tmax: float = 50.0,
    S_noise: float = 1.003,
) -> Tensor:
    """Karras et al. 2022: second order, two evaluations per step, one in the step to 0.

    Algorithm 1, whose correction is evaluated at (x_next, sigma_next); or with `S_churn` Algorithm 2, where noise is
    added back before each step. Other arguments as in `sample_euler`.

    Parameters
    ----------
    noise : see `Noise`; needed with `S_churn`, the total amount of noise.
    S_tmin, S_tmax : levels between which noise is added.
    S_noise : its standard deviation. The defaults are the paper's for ImageNet-64 (Table 5), with its S_churn of 40.
    """
    assert S_churn >= 0 and S_noise >= 0, (S_churn, S_noise)
    run = _Sampling(denoise, x, sigmas, callback, noise)
    for i, s, s_next in run.steps():
        x = run.x
        # at most sqrt(2) - 1: never more new noise than there is
        gamma = min(S_churn / run.num_steps, math.sqrt(2) - 1) if S_tmin <= s <= S_tmax else 0.0
        s_hat = s * (1 + gamma)
        if gamma > 0:
            x = x + math.sqrt(s_hat**2 - s**2) * S_noise * run.eps(x)
        D_x = run.D(x, s_hat)
        d = (x - D_x) / s_hat
        x_next = x + (s_next - s_hat) * d if s_next > 0 else D_x
        if s_next > 0:
            D_x = run.D(x_next, s_next)
            d_next = (x_next - D_x) / s_next
            x_next = x + (s_next - s_hat) * (d + d_next) / 2
        run.x = x_next
        run.report(i, D_x)
    return run.result()


SAMPLERS["heun_stochastic"] = Sampler(
    functools.partial(sample_heun, S_churn=40.0), order=2, evaluations_per_step=2, stochastic=True
)


@sampler("dpmpp_2m", order=2)
def sample_dpmpp_2m(
    denoise: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    callback: Callback | None = None,
    noise: Noise = None,
    eta: float = 0.0,
) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022b, Algorithm 2): second order, one evaluation per step.

    Two-step exponential integrator in lambda = -ln(sigma) on the denoised estimate; the first step and the step to 0
    are first order. Other arguments as in `sample_euler`.

    Parameters
    ----------
    noise : see `Noise`; needed with `eta`.
    eta : 0 is the ODE; 1 the same extrapolation for the reverse SDE, SDE-DPM-Solver++(2M); values between interpolate.
    """
    assert eta >= 0, eta
    run = _Sampling(denoise, x, sigmas, callback, noise)
    D_old, h_old = None, 0.0
    for i, s, s_next in run.steps():
        D_x = run.D(run.x, s)
        if s_next == 0:
            run.x = D_x
        else:
            h = math.log(s / s_next)
            # D at the middle of the step, from the line through the last two estimates
            D_mid = D_x if D_old is None else D_x + (h / h_old) / 2 * (D_x - D_old)
            decay = math.exp(-(1 + eta) * h)
            run.x = decay * run.x + (1 - decay) * D_mid
            if eta > 0:
                run.x = run.x + s_next * math.sqrt(-math.expm1(-2 * eta * h)) * run.eps(run.x)
            D_old, h_old = D_x, h
        run.report(i, D_x)
    return run.result()


SAMPLERS["dpmpp_2m_sde"] = Sampler(functools.partial(sample_dpmpp_2m, eta=1.0), order=2, stochastic=True)


@sampler("unipc", order=4)
def sample_unipc(
    denoise: Denoiser, x: Tensor, sigmas: Tensor, callback: Callback | None = None, order: int = 3
) -> Tensor:
    """UniPC (Zhao et al. 2023) on the denoised estimate: order 2 or 3, one evaluation per step.

    Each step extrapolates `order` past estimates (predictor UniP) and, once the next estimate is known, repeats the
    step with it among the nodes (corrector UniC), which costs no evaluation and adds one order of accuracy. The weights
    integrate the interpolating polynomial against exp(lambda) exactly, so the paper's B(h) cancels. With order 2 a step
    from two estimates has the paper's weight 1/2 instead (see `_exponential_step`). The first steps use the available
    estimates; the step to 0 is first order. Below about 15 steps order 2 is safer, because cubic extrapolation
    overshoots over such long steps. Other arguments as in `sample_euler`.
    """
    assert order in (2, 3), order
    run = _Sampling(denoise, x, sigmas, callback)
    D_x = run.D(run.x, run.levels[0])
    nodes: list[tuple[float, Tensor]] = []  # (lambda, D) of the last steps, newest last
    for i, s, s_next in run.steps():
        if s_next == 0:
            run.x = D_x
            run.report(i, D_x)
            break
        start, lam = run.x, -math.log(s)
        nodes = [*nodes, (lam, D_x)][-order:]
        lam_next = -math.log(s_next)
        run.x = _exponential_step(start, nodes, lam, lam_next, half=order == 2)
        if i + 1 < run.num_steps:  # the next estimate is needed anyway, and corrects this step first
            D_x = run.D(run.x, s_next)
            run.x = _exponential_step(start, [*nodes, (lam_next, D_x)], lam, lam_next, half=order == 2)
        run.report(i, D_x)
    return run.result()


SAMPLERS["unipc_2"] = Sampler(functools.partial(sample_unipc, order=2), order=3)


def _exponential_step(
    x: Tensor, nodes: list[tuple[float, Tensor]], lam: float, lam_next: float, half: bool = False
) -> Tensor:
    """Exact step of dx/dlambda = D(lambda) - x (lambda = -ln sigma), D the polynomial through the nodes.

    x(lam + h) = e^-h x + int_0^h e^(u - h) D(lam + u) du; with D = sum_k w_k D_k the weights solve the moment equations
    sum_k w_k u_k^j = m_j, m_j = int_0^h e^(u - h) u^j du = h^j - j m_(j-1).

    half : with two nodes, use m_1 = m_0 / 2 (u in units of h), which is correct to first order in h. This is the
    constant a_1 = 1/2 that Zhao et al. 2023 use if only one is unknown. Over the long steps of few evaluations it is
    more accurate than the exact moment.
    """
    h = lam_next - lam
    offsets = [(node - lam) / h for node, _ in nodes]  # in units of h, for a well-conditioned system
    moments = _moments(h, len(nodes))
    if half and len(nodes) == 2:
        moments[1] = moments[0] / 2
    powers = torch.tensor([[u**j for u in offsets] for j in range(len(nodes))], dtype=torch.float64)
    weights = torch.linalg.solve(powers, torch.tensor(moments, dtype=torch.float64)).tolist()
    out = math.exp(-h) * x
    for weight, (_, D_k) in zip(weights, nodes):
        out = out + weight * D_k
    return out


def _moments(h: float, count: int) -> list[float]:
    """int_0^h e^(u - h) (u / h)^j du for j < count; a series where the recursion would cancel."""
    if h > 0.5:
        out = [-math.expm1(-h)]
        for j in range(1, count):
            out.append(1 - j * out[-1] / h)
        return out
    # e^(u-h) = e^-h sum_k u^k / k!, integrated term by term: e^-h h sum_k h^k / (k! (k + j + 1)).
    # 18 terms, because the 19th is below 1e-21 for h <= 0.5.
    return [
        math.exp(-h) * h * math.fsum(h**k / (math.factorial(k) * (k + j + 1)) for k in range(18)) for j in range(count)
    ]


# ---- guidance -----------------------------------------------------------------------------------------------------


def classifier_free(D_cond: Tensor, D_uncond: Tensor, guidance: float) -> Tensor:
    """D_uncond + guidance * (D_cond - D_uncond): 1 is no guidance, 0 ignores the prompt (Ho & Salimans 2022).

    `D_uncond` is the estimate for the empty caption, or for the negative prompt.
    """
    return D_uncond + guidance * (D_cond - D_uncond)


def guidance_at(sigma: float, guidance: float, interval: tuple[float, float] | None = None) -> float:
    """Guidance at a noise level: `guidance` if interval[0] < sigma <= interval[1], else 1 (Kynkaanniemi et al. 2024).

    A value of 1 means that the unconditional estimate need not be computed.
    """
    if interval is None:
        return guidance
    low, high = interval
    if not 0 <= low < high:
        raise ValueError(f"a guidance interval must be two noise levels, 0 <= low < high; got {low} and {high}")
    return guidance if low < sigma <= high else 1.0


def rescale(D_guided: Tensor, D_cond: Tensor, amount: float) -> Tensor:
    """Guidance rescale (Lin et al. 2024, Eq. 15 and 16): pull each sample's standard deviation back to that of D_cond.

    Parameters
    ----------
    D_guided, D_cond : [B, ...]; the deviation is taken over all dims but the first.
    amount : 0 keeps D_guided, 1 rescales it to the deviation of D_cond; 0.7 is the paper's choice.
    """
    dims = tuple(range(1, D_guided.ndim))
    std_guided = D_guided.double().std(dims, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    factor = D_cond.double().std(dims, keepdim=True) / std_guided
    return D_guided * (amount * factor + (1 - amount)).to(D_guided.dtype)
