"""Flow matching beside EDM: one denoiser for the same samplers, its times, and diffusers' own sampler as the judge."""

import numpy as np
import pytest
import torch

from dfm_nb.diffusion import edm, samplers
from dfm_nb.diffusion.objective import EDM, HUBER, Flow, pseudo_huber

SIGMA = torch.tensor([1e-3, 0.2, 1.0, 30.0, 1e4], dtype=torch.float64)[:, None]


def draws(width=64):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(len(SIGMA), width, generator=g, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("objective", [EDM(0.5), EDM(1.0), Flow()])
def test_target_gives_the_clean_latent_and_no_loss(objective):
    y, eps, F = draws()
    x = y + SIGMA * eps
    target = edm.effective_target(y, eps, SIGMA, objective.sigma_data) if isinstance(objective, EDM) else eps - y
    torch.testing.assert_close(objective.denoised(target, x, SIGMA), y, rtol=1e-9, atol=1e-9)
    assert objective.loss(target, y, eps, SIGMA).max() == 0
    # any output: the loss is the denoised error, weighted by noise level alone
    ratio = objective.loss(F, y, eps, SIGMA) / (objective.denoised(F, x, SIGMA) - y) ** 2
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5, atol=0)


@pytest.mark.parametrize("objective", [EDM(0.5), Flow()])
def test_residual_of_a_student_is_the_difference_of_outputs(objective):
    x, F, other = draws()
    residual = objective.residual(F, objective.denoised(other, x, SIGMA), x, SIGMA)
    torch.testing.assert_close(residual.abs(), (F - other).abs(), rtol=1e-4, atol=1e-4)


def test_pseudo_huber_is_a_square_of_small_residuals_and_the_length_of_large_ones():
    token = torch.tensor([3.0, -4.0, 0.0, 0.0], dtype=torch.float64)  # root mean square 2.5
    small, large = (pseudo_huber(scale * token) for scale in (1e-4, 1e4))
    assert small.item() == pytest.approx((2.5e-4) ** 2 / (2 * HUBER), rel=1e-3)
    assert large.item() == pytest.approx(2.5e4, rel=1e-5)


def is_uniform(u: torch.Tensor) -> bool:
    """Kolmogorov and Smirnov at 1 %."""
    even = (torch.arange(len(u), dtype=torch.float64) + 0.5) / len(u)
    return (u.sort().values - even).abs().max().item() < 1.63 / len(u) ** 0.5


def test_times_are_logit_normal_or_uniform():
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sigma = edm.sigma_from_normal(normal, 0.3, 0.8)
    assert is_uniform(torch.special.ndtr((torch.logit(sigma / (1 + sigma)) - 0.3) / 0.8))
    sigma = edm.sigma_from_normal(normal, 0.0, 1.0, "uniform")
    assert is_uniform(sigma / (1 + sigma))
    levels = edm.validation_sigmas(8, 0.0, 1.0, "uniform")
    torch.testing.assert_close(levels / (1 + levels), (torch.arange(8, dtype=torch.float64) + 0.5) / 8)
    far = edm.sigma_from_normal(torch.tensor([-8.0, 8.0]), 0.0, 1.0, "uniform")
    assert far.isfinite().all() and (far > 0).all() and far[1] == pytest.approx(1 / far[0].item(), rel=1e-4)


@pytest.mark.parametrize("name", ["euler", "unipc_2"])
def test_samplers_are_those_of_diffusers(name):
    """The same velocities, through their scheduler in t and through our sampler in sigma."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    g = torch.Generator().manual_seed(2)
    A = torch.randn(6, 6, generator=g, dtype=torch.float64) / 3
    velocity = lambda x_t, t: torch.tanh(x_t @ A) * (1 + t)  # noqa: E731
    unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler = unipc if name == "unipc_2" else FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=np.linspace(0.97, 0.03, 12))
    times = scheduler.sigmas.double()
    start = torch.randn(4, 6, generator=g, dtype=torch.float64)
    theirs = start.clone()
    for step, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(velocity(theirs, times[step]), timestep, theirs).prev_sample.double()

    def denoise(x, sigma):
        return Flow().denoised(velocity(Flow().scaled(x, sigma), sigma / (1 + sigma)), x, sigma)

    ours = samplers.SAMPLERS[name](denoise, start / (1 - times[0]), times / (1 - times))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # theirs keeps times in float32


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_schedule_is_that_of_wans_scheduler(shift):
    from diffusers import UniPCMultistepScheduler

    theirs = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    theirs.set_timesteps(20)
    sigmas = samplers.flow_sigmas(20, shift / 999, 1e6, shift)
    torch.testing.assert_close(sigmas / (1 + sigmas), theirs.sigmas.double(), rtol=0, atol=1e-5)
    assert sigmas[0] == 1e6 and sigmas[-1] == 0
