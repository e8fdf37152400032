"""EDM: preconditioning, the noise levels of training and validation, and the loss (Karras et al. 2022, "EDM").

Pure elementwise functions: noise levels broadcast against latents, so every sample of a pack can have its own. All
arithmetic is float32 or float64, as noise levels are, and no random numbers are drawn here: the caller handles seeds
and ranks.

Symbols as in the paper: y clean latent, n = sigma * eps noise, x = y + n, D_x denoised, F_x network output.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in float64 if one of them is float64, otherwise in float32."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [t.to(dtype) for t in tensors]


# ---- preconditioning: Eq. 7 and Table 1, column "Ours" ------------------------------------------------------------


def c_skip(sigma: Tensor, sigma_data: float) -> Tensor:
    """sigma_data^2 / (sigma^2 + sigma_data^2): 1 without noise, 0 in pure noise."""
    return sigma_data**2 / (sigma**2 + sigma_data**2)


def c_out(sigma: Tensor, sigma_data: float) -> Tensor:
    """sigma * sigma_data / sqrt(sigma^2 + sigma_data^2)."""
    return sigma * sigma_data / torch.sqrt(sigma**2 + sigma_data**2)


def c_in(sigma: Tensor, sigma_data: float) -> Tensor:
    """1 / sqrt(sigma^2 + sigma_data^2): the network's input has unit variance."""
    return torch.rsqrt(sigma**2 + sigma_data**2)


def c_noise(sigma: Tensor) -> Tensor:
    """ln(sigma) / 4: the network's input for the noise level. `sigma` must be positive."""
    return torch.log(sigma) / 4


def denoised(F_x: Tensor, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """D(x; sigma) = c_skip x + c_out F_x with F_x = F(c_in x; c_noise), Eq. 7.

    Parameters
    ----------
    F_x : the network's output; bfloat16 is converted first.
    x : noisy latents. sigma : noise levels, broadcastable to `x`. sigma_data : standard deviation of the clean latents.

    Returns
    -------
    float32, or float64 if one of the tensors is; the shape of `x`.
    """
    F_x, x, sigma = wide(F_x, x, sigma)
    return c_skip(sigma, sigma_data) * x + c_out(sigma, sigma_data) * F_x


# ---- noise levels -------------------------------------------------------------------------------------------------


def sigma_from_normal(normal: Tensor, P_mean: float, P_std: float, times: str = "logit-normal") -> Tensor:
    """Noise levels of training from standard normal draws; same shape, float32 or float64.

    times : "logit-normal", ln(sigma) ~ N(P_mean, P_std^2), Table 1; for flow matching's times t = sigma / (1 + sigma)
        these are the logit-normal ones of Esser et al. 2024. "uniform", ln(sigma) logistic with mean P_mean and scale
        P_std; t is uniform at 0 and 1.
    """
    if times == "uniform":  # the logit of the draw's quantile u, without the cancellation of 1 - u
        normal = torch.special.log_ndtr(normal) - torch.special.log_ndtr(-normal)
    return torch.exp(P_mean + P_std * normal)


def sigma_from_uniform(uniform: Tensor, P_mean: float, P_std: float, times: str = "logit-normal") -> Tensor:
    """The quantile function of the training noise, for u in (0, 1).

    A u of 0 or 1 is moved to the nearest float inside the interval, so that no level is 0 or infinite.
    """
    tiny = torch.finfo(uniform.dtype).eps / 2
    return sigma_from_normal(torch.special.ndtri(uniform.clamp(tiny, 1 - tiny)), P_mean, P_std, times)


def validation_sigmas(num_sigmas: int, P_mean: float, P_std: float, times: str = "logit-normal") -> Tensor:
    """Fixed levels for validation, ascending: the (i + 1/2) / num_sigmas quantiles of the training noise.

    Returns
    -------
    float64 [num_sigmas]; the unweighted mean of the losses at these levels estimates the training loss.
    """
    middle = (torch.arange(num_sigmas, dtype=torch.float64) + 0.5) / num_sigmas
    return sigma_from_uniform(middle, P_mean, P_std, times)


# ---- loss ---------------------------------------------------------------------------------------------------------


def effective_target(y: Tensor, eps: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """The target of F: (y - c_skip (y + sigma eps)) / c_out, Eq. 8; unit variance at every noise level.

    Computed as (sigma / sigma_data * y - sigma_data * eps) / sqrt(sigma^2 + sigma_data^2), which is equal but avoids
    the cancellation of y against c_skip y at small sigma.
    """
    y, eps, sigma = wide(y, eps, sigma)
    return (sigma / sigma_data * y - sigma_data * eps) * torch.rsqrt(sigma**2 + sigma_data**2)


def loss(F_x: Tensor, y: Tensor, eps: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """lambda(sigma) |D_x - y|^2 elementwise, Eq. 8; the caller masks, averages and reduces over ranks.

    lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 = 1 / c_out^2, Table 1. Hence the loss equals (F_x -
    effective_target)^2, which is how it is computed; for a network with output 0 its expectation is 1.

    Parameters
    ----------
    F_x : network output, any float type.
    y : clean latents; `eps` : unit normal noise; `sigma` : noise levels; all broadcastable to `F_x`.

    Returns
    -------
    float32 or float64, the shape of `F_x`.
    """
    F_x, target = wide(F_x, effective_target(y, eps, sigma, sigma_data))
    return (F_x - target) ** 2
