"""EDM against the identities of Karras et al. 2022 (Eq. 7 and 8, Table 1)."""

import math

import torch

from dfm_nb.diffusion import edm

SIGMAS = torch.logspace(-4, 3, 29, dtype=torch.float64)
SIGMA_DATA = 0.5


def test_c_in_gives_unit_variance():
    total = edm.c_in(SIGMAS, SIGMA_DATA) ** 2 * (SIGMAS**2 + SIGMA_DATA**2)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_c_noise_is_a_quarter_of_the_logarithm():
    torch.testing.assert_close(edm.c_noise(torch.tensor([1.0, math.e**4])), torch.tensor([0.0, 1.0]))


def test_c_skip_minimises_c_out():
    """Eq. 133 of the paper's appendix: c_out^2 = (1 - c_skip)^2 sigma_data^2 + c_skip^2 sigma^2, at its minimum."""
    skip = edm.c_skip(SIGMAS, SIGMA_DATA)

    def variance(c):
        return (1 - c) ** 2 * SIGMA_DATA**2 + c**2 * SIGMAS**2

    torch.testing.assert_close(edm.c_out(SIGMAS, SIGMA_DATA) ** 2, variance(skip))
    assert (variance(skip) <= variance(skip + 1e-3)).all() and (variance(skip) <= variance(skip - 1e-3)).all()


def test_effective_target_float32_does_not_cancel_at_small_sigma():
    g = torch.Generator().manual_seed(0)
    y, eps = torch.randn(2, 1000, generator=g, dtype=torch.float64)
    sigma = torch.tensor(1e-4, dtype=torch.float64)
    exact = edm.effective_target(y, eps, sigma, 0.5)
    narrow = edm.effective_target(y.float(), eps.float(), sigma.float(), 0.5)
    assert narrow.dtype == torch.float32
    assert (narrow - exact).abs().max() < 1e-6


def test_loss_is_the_weighted_denoising_error():
    g = torch.Generator().manual_seed(0)
    F_x, y, eps = torch.randn(3, 29, 50, generator=g, dtype=torch.float64)
    sigma = SIGMAS[:, None]
    D_x = edm.denoised(F_x, y + sigma * eps, sigma, SIGMA_DATA)
    weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2  # lambda(sigma) of Table 1
    literal = weight * (D_x - y) ** 2
    torch.testing.assert_close(edm.loss(F_x, y, eps, sigma, SIGMA_DATA), literal, rtol=1e-7, atol=1e-7)


def test_sigma_from_uniform_is_the_quantile_function():
    sigma = edm.sigma_from_uniform(torch.tensor([0.5, 0.8413447460685429], dtype=torch.float64), -1.2, 1.2)
    torch.testing.assert_close(sigma.log(), torch.tensor([-1.2, 0.0], dtype=torch.float64))
    ends = edm.sigma_from_uniform(torch.tensor([0.0, 1.0]), -1.2, 1.2)
    assert torch.isfinite(ends).all() and (ends > 0).all()


def test_validation_sigmas_are_equal_probability_quantiles():
    sigma = edm.validation_sigmas(8, -1.2, 1.2)
    assert sigma.dtype == torch.float64 and (sigma.diff() > 0).all()
    quantile = 0.5 * (1 + torch.erf((sigma.log() + 1.2) / 1.2 / math.sqrt(2)))
    torch.testing.assert_close(quantile, (torch.arange(8, dtype=torch.float64) + 0.5) / 8)
