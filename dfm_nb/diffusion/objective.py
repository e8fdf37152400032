"""A network's input and target: EDM's preconditioning, or flow matching.

Both are linear in the noisy latent and the network's output, so D(x; sigma) is all that a sampler needs. Flow matching
(Lipman et al. 2023; Liu et al. 2023) moves along x_t = (1 - t) y + t eps, and the network predicts the velocity
v = eps - y. With sigma = t / (1 - t) its state is x_t = x / (1 + sigma), where x = y + sigma eps is EDM's state: the
same paths at another scale. Noise levels are drawn by `edm.sigma_from_normal`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dfm_nb.diffusion import edm

HUBER = 0.03
"""Residuals below this are squared in `pseudo_huber`."""


@dataclass(frozen=True)
class EDM:
    """Eq. 7 and 8 of Karras et al. 2022. sigma_data : standard deviation of the clean latents.

    F is the network, x = y + sigma eps its noisy latent; sigma broadcasts to x, and all is float32 or float64.
    """

    sigma_data: float

    def scaled(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The network's input."""
        return edm.c_in(sigma, self.sigma_data) * x

    def denoised(self, F_x: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """D(x; sigma) from the network's output."""
        return edm.denoised(F_x, x, sigma, self.sigma_data)

    def loss(self, F_x: Tensor, y: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
        """The elementwise loss of a network's output; the caller masks and averages."""
        return edm.loss(F_x, y, eps, sigma, self.sigma_data)

    def residual(self, F_x: Tensor, D: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """F_x minus the output whose estimate is D, up to its sign: the error of a student whose target is D."""
        return (self.denoised(F_x, x, sigma) - D) / edm.c_out(sigma, self.sigma_data)


@dataclass(frozen=True)
class Flow:
    """Rectified flow: F predicts eps - y. The methods are those of `EDM`."""

    def scaled(self, x: Tensor, sigma: Tensor) -> Tensor:
        x, sigma = edm.wide(x, sigma)
        return x / (1 + sigma)

    def denoised(self, F_x: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """x_t - t v = (x - sigma v) / (1 + sigma)."""
        F_x, x, sigma = edm.wide(F_x, x, sigma)
        return (x - sigma * F_x) / (1 + sigma)

    def loss(self, F_x: Tensor, y: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
        """|v - (eps - y)|^2; in terms of D its weight is ((1 + sigma) / sigma)^2."""
        F_x, y, eps = edm.wide(F_x, y, eps)
        return (F_x - (eps - y)) ** 2

    def residual(self, F_x: Tensor, D: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        return (self.denoised(F_x, x, sigma) - D) * (1 + sigma) / sigma


Objective = EDM | Flow


def pseudo_huber(residual: Tensor) -> Tensor:
    """Of a token's residual [S, p]: its length sqrt(mean square + c^2) - c (Song & Dhariwal 2023), [S].

    Some tokens are much harder for a student than others, and a square would follow them.
    """
    return (residual.square().mean(-1) + HUBER**2).sqrt() - HUBER


def get_objective(name: str, sigma_data: float) -> Objective:
    """The objective of the name in `model.objective`."""
    return Flow() if name == "flow" else EDM(sigma_data)
