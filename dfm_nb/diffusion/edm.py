"""EDM: preconditioning, the noise levels of training and validation, and the loss (Karras et al. 2022, "EDM").

What enters: latents, unit noise and noise levels as tensors that broadcast against one another, so that every sample of
a pack can have its own. What leaves: tensors of the same shapes. Guarantees: pure functions without random numbers of
their own (the caller draws, and so decides about seeds, ranks and stages); nothing here is computed below float32.
Cost: elementwise.

Symbols as in the paper: y clean latent, n = sigma * eps noise, x = y + n, D_x denoised, F_x network output.
"""

from __future__ import annotations

import math
from typing import Callable

import torch
from torch import Tensor

Network = Callable[[Tensor, Tensor], Tensor]
"""F(c_in * x, c_noise) -> F_x."""


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in float64 if one of them is, else in float32."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [t.to(dtype) for t in tensors]


def _check_sigma_data(sigma_data: float) -> float:
    if not (math.isfinite(sigma_data) and sigma_data > 0):
        raise ValueError(f"sigma_data must be a positive number (the latents' standard deviation); got {sigma_data}")
    return float(sigma_data)


# ---- preconditioning: Eq. 7 and Table 1, column "Ours" ------------------------------------------------------------


def c_skip(sigma: Tensor, sigma_data: float) -> Tensor:
    """sigma_data^2 / (sigma^2 + sigma_data^2): 1 without noise, 0 in pure noise."""
    (sigma,) = _wide(sigma)
    return sigma_data**2 / (sigma**2 + sigma_data**2)


def c_out(sigma: Tensor, sigma_data: float) -> Tensor:
    """sigma * sigma_data / sqrt(sigma^2 + sigma_data^2)."""
    (sigma,) = _wide(sigma)
    return sigma * sigma_data / torch.sqrt(sigma**2 + sigma_data**2)


def c_in(sigma: Tensor, sigma_data: float) -> Tensor:
    """1 / sqrt(sigma^2 + sigma_data^2): the network's input has unit variance."""
    (sigma,) = _wide(sigma)
    return torch.rsqrt(sigma**2 + sigma_data**2)


def c_noise(sigma: Tensor) -> Tensor:
    """ln(sigma) / 4: what the network is told of the noise level. `sigma` must be positive."""
    (sigma,) = _wide(sigma)
    return torch.log(sigma) / 4


def precondition(F: Network, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """D(x; sigma) = c_skip x + c_out F(c_in x; c_noise), Eq. 7.

    Parameters
    ----------
    F : the network; it may compute in bfloat16, its output is widened before it is used.
    x : noisy latents, float32 or float64 (narrower ones are widened), any shape.
    sigma : noise levels, broadcastable to `x`; `c_noise` reaches the network in this shape.
    sigma_data : standard deviation of the clean latents.

    Returns
    -------
    D_x : like `x`, float32 or float64.
    """
    _check_sigma_data(sigma_data)
    x, sigma = _wide(x, sigma)
    F_x = F(c_in(sigma, sigma_data) * x, c_noise(sigma))
    return denoised(F_x, x, sigma, sigma_data)


def denoised(F_x: Tensor, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """D_x from a network output: the second half of `precondition`, for callers that pack the input themselves."""
    F_x, x, sigma = _wide(F_x, x, sigma)
    return c_skip(sigma, sigma_data) * x + c_out(sigma, sigma_data) * F_x


# ---- noise levels -------------------------------------------------------------------------------------------------


def sigma_from_normal(normal: Tensor, P_mean: float = -1.2, P_std: float = 1.2) -> Tensor:
    """ln(sigma) ~ N(P_mean, P_std^2), Table 1, from standard normal draws; same shape, float32 or float64."""
    (normal,) = _wide(normal)
    return torch.exp(P_mean + P_std * normal)


def sigma_from_uniform(uniform: Tensor, P_mean: float = -1.2, P_std: float = 1.2) -> Tensor:
    """The quantile function of the training noise: exp(P_mean + P_std * ndtri(u)) for u in (0, 1).

    Stratified u (see `stratified`) give stratified noise levels, which lowers the variance of the loss. A u of 0 or 1
    is moved to the nearest float inside, so that no level is 0 or infinite.
    """
    (uniform,) = _wide(uniform)
    tiny = torch.finfo(uniform.dtype).eps / 2
    return sigma_from_normal(torch.special.ndtri(uniform.clamp(tiny, 1 - tiny)), P_mean, P_std)


def stratified(index: Tensor, count: int, offset: Tensor | float) -> Tensor:
    """Point `index` of `count` systematic points in (0, 1): (index + offset) / count, wrapped; float64.

    One uniform `offset` for the whole batch makes every point uniform, and puts exactly one point in each of the
    `count` strata. Any split of the indices over ranks gives the same set.

    Parameters
    ----------
    index : integers in [0, count), any shape.
    count : samples that share the offset.
    offset : in [0, 1).
    """
    if count < 1:
        raise ValueError(f"stratified draws need a count of at least 1; got {count}")
    return ((index.double() + offset) / count) % 1.0


def validation_sigmas(num_sigmas: int, P_mean: float = -1.2, P_std: float = 1.2) -> Tensor:
    """Fixed levels for validation, ascending: the (i + 1/2) / num_sigmas quantiles of the training noise.

    Returns
    -------
    float64 [num_sigmas]; the plain mean of the losses at these levels estimates the training loss.
    """
    if num_sigmas < 1:
        raise ValueError(f"num_sigmas must be at least 1; got {num_sigmas}")
    middle = (torch.arange(num_sigmas, dtype=torch.float64) + 0.5) / num_sigmas
    return sigma_from_uniform(middle, P_mean, P_std)


# ---- loss ---------------------------------------------------------------------------------------------------------


def loss_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 = 1 / c_out^2, Table 1."""
    (sigma,) = _wide(sigma)
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def effective_target(y: Tensor, eps: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """What F should give: (y - c_skip (y + sigma eps)) / c_out, Eq. 8; unit variance at every noise level.

    Written as (sigma / sigma_data * y - sigma_data * eps) / sqrt(sigma^2 + sigma_data^2), which is the same number
    without the cancellation of y against c_skip y at small sigma.
    """
    y, eps, sigma = _wide(y, eps, sigma)
    return (sigma / sigma_data * y - sigma_data * eps) * torch.rsqrt(sigma**2 + sigma_data**2)


def loss(F_x: Tensor, y: Tensor, eps: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """lambda(sigma) |D_x - y|^2 elementwise, Eq. 8: the caller masks, averages and reduces over ranks.

    Equal to (F_x - effective_target)^2, which is how it is computed; a network that gives zeros has expectation 1.

    Parameters
    ----------
    F_x : network output, any float type.
    y : clean latents; `eps` : unit normal noise; `sigma` : noise levels; all broadcastable to `F_x`.

    Returns
    -------
    float32 or float64, the shape of `F_x`.
    """
    F_x, target = _wide(F_x, effective_target(y, eps, sigma, _check_sigma_data(sigma_data)))
    return (F_x - target) ** 2
