"""Samplers against closed forms: a Gaussian (exact flow) and a Gaussian mixture (exact denoiser)."""

import math

import pytest
import torch

from dfm_nb.diffusion import samplers as S
from tests.refusals import refused

SIGMA_DATA = 0.5
STOCHASTIC = [name for name, sampler in S.SAMPLERS.items() if sampler.stochastic]
DETERMINISTIC = [name for name in S.SAMPLERS if name not in STOCHASTIC]


def gaussian(x, sigma):
    """Posterior mean for data N(0, SIGMA_DATA^2)."""
    return SIGMA_DATA**2 / (SIGMA_DATA**2 + sigma**2) * x


def start(n=64, sigma=80.0, seed=0, dtype=torch.float64):
    return sigma * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gaussian_error(name, steps):
    """Relative error against the exact flow x(sigma) = x_0 sqrt((sigma^2 + s^2) / (sigma_0^2 + s^2)) at sigma_min."""
    sigmas, x = S.karras_sigmas(steps)[:-1], start()
    out = S.SAMPLERS[name](gaussian, x, sigmas)
    exact = x * math.sqrt((0.002**2 + SIGMA_DATA**2) / (80**2 + SIGMA_DATA**2))
    return ((out - exact).norm() / exact.norm()).item()


def mixture(means, tau):
    def denoise(x, sigma):
        v = tau**2 + sigma**2
        weights = (-(torch.cdist(x, means) ** 2) / (2 * v)).softmax(-1)
        return (tau**2 / v) * x + (1 - tau**2 / v) * (weights @ means)

    return denoise


MEANS = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.3, -1.2]], dtype=torch.float64)


# ---- schedules


def test_karras_sigmas_follow_equation_5():
    sigmas = S.karras_sigmas(18)
    assert sigmas.dtype == torch.float64 and sigmas.shape == (19,)
    assert sigmas[0] == 80 and sigmas[17] == 0.002 and sigmas[18] == 0
    roots = sigmas[:-1] ** (1 / 7)
    torch.testing.assert_close(roots.diff(), roots.diff()[:1].expand(17))
    assert (sigmas.diff() < 0).all()


def test_exponential_sigmas_are_geometric():
    sigmas = S.exponential_sigmas(10, 0.01, 10)
    ratios = sigmas[1:-1] / sigmas[:-2]
    torch.testing.assert_close(ratios, torch.full_like(ratios, (0.01 / 10) ** (1 / 9)))
    assert sigmas[-1] == 0


def test_focused_sigmas_are_densest_at_sigma_data_and_exponential_without_focus():
    torch.testing.assert_close(S.focused_sigmas(12, focus=0.0), S.exponential_sigmas(12))
    steps = -S.focused_sigmas(41, sigma_data=0.5)[:-1].log().diff()
    assert abs(S.focused_sigmas(41)[steps.argmin()].log() - math.log(0.5)) < 0.6
    assert steps.min() < 0.7 * steps.max() and (steps > 0).all()


@pytest.mark.parametrize("low, high", [(0, 80), (2, 1), (1, math.inf)])
def test_schedule_refuses_bad_ranges(low, high):
    refused("noise levels", S.karras_sigmas, 5, low, high)


@pytest.mark.parametrize("levels", [[1.0], [1.0, 2.0], [1.0, -1.0], [math.nan, 0.0]])
def test_check_sigmas_refuses(levels):
    refused("sigmas", S.check_sigmas, levels)


def test_tail_keeps_the_last_steps():
    sigmas = S.karras_sigmas(10)
    assert torch.equal(S.tail(sigmas, 1.0), sigmas)
    assert torch.equal(S.tail(sigmas, 0.3), sigmas[7:])
    assert len(S.tail(sigmas, 1e-9)) == 2


# ---- orders of convergence


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_sampler_error_falls_with_its_order(name):
    """UniPC-p is of order p + 1 with its corrector (Zhao et al. 2023, Proposition 3.1 and Theorem 3.1)."""
    order = S.SAMPLERS[name].order
    steps = 160 if order == 1 else 80
    rate = math.log2(gaussian_error(name, steps) / gaussian_error(name, 2 * steps))
    assert rate == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_sampler_reaches_the_flow_of_a_mixture(name):
    denoise = mixture(MEANS, 0.2)
    x = start(128).reshape(64, 2)
    reference = S.sample_heun(denoise, x, S.karras_sigmas(1000))
    steps = {"euler": 600, "heun": 60}.get(name, 100)
    assert (S.SAMPLERS[name](denoise, x, S.karras_sigmas(steps)) - reference).abs().median() < 4e-3


@pytest.mark.parametrize("h", [1e-6, 0.49, 0.51, 10.0])
def test_unipc_moments_are_accurate_at_every_step_size(h):
    u = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    for j, moment in enumerate(S._moments(h, 4)):
        exact = torch.trapezoid(torch.exp((u - 1) * h) * u**j, u).item() * h
        assert moment == pytest.approx(exact, rel=1e-7)


# ---- stochastic samplers


def seeded(x):
    return [torch.Generator().manual_seed(5000 + i) for i in range(len(x))]


@pytest.mark.parametrize(
    "name, plain, none", [("heun_stochastic", "heun", "S_churn"), ("dpmpp_2m_sde", "dpmpp_2m", "eta")]
)
def test_stochastic_sampler_without_noise_is_the_deterministic_one(name, plain, none):
    x, sigmas = start(), S.karras_sigmas(9)
    assert torch.equal(S.SAMPLERS[name](gaussian, x, sigmas, **{none: 0}), S.SAMPLERS[plain](gaussian, x, sigmas))


@pytest.mark.parametrize("name, steps, kwargs", [("heun_stochastic", 240, {"S_noise": 1.0}), ("dpmpp_2m_sde", 60, {})])
def test_stochastic_sampler_keeps_the_distribution(name, steps, kwargs):
    """Data N(0, 0.5^2): samples spread by 0.5 (20,000 draws tell that to 0.5 %), and they forget their start."""
    x = start(20_000)[None]
    out = S.SAMPLERS[name](gaussian, x, S.karras_sigmas(steps), noise=seeded(x), **kwargs)
    assert out.std().item() == pytest.approx(0.5, rel=0.02)
    correlation = torch.corrcoef(torch.cat([x, out]))[0, 1].item()
    assert correlation < 0.99  # the deterministic flow would give 1


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_sampler_is_the_same_for_any_batch(name):
    denoise, x = mixture(MEANS, 0.2), start(8).reshape(4, 2)

    def run(rows):
        noise = [torch.Generator().manual_seed(i) for i in rows]
        return S.SAMPLERS[name](denoise, x[rows], S.karras_sigmas(12), noise=noise)

    whole = run([0, 1, 2, 3])
    torch.testing.assert_close(torch.cat([run([0]), run([1, 2]), run([3])]), whole, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(whole[0], whole[1])


def test_stochastic_sampler_asks_for_noise():
    refused("noise", S.SAMPLERS["dpmpp_2m_sde"], gaussian, start(), S.karras_sigmas(4))


# ---- what all samplers share


@pytest.mark.parametrize("name", S.SAMPLERS)
def test_sampler_keeps_type_calls_back_and_counts_evaluations(name):
    calls, steps = [0], []

    def denoise(x, sigma):
        assert x.dtype == torch.float64 and sigma.dtype == torch.float64 and sigma.ndim == 0
        calls[0] += 1
        return gaussian(x, sigma).bfloat16()

    def callback(step, num_steps, x, D_x):
        steps.append((step, num_steps, x.shape, D_x.shape))

    x = start(6, dtype=torch.float32).reshape(2, 3)
    extra = {"noise": seeded(x)} if name in STOCHASTIC else {}
    before = x.clone()
    out = S.SAMPLERS[name](denoise, x, S.karras_sigmas(5), callback, **extra)
    assert out.dtype == torch.float32 and out.shape == x.shape and torch.equal(x, before)
    assert calls[0] == S.evaluations(name, 5)
    assert steps == [(i, 5, x.shape, x.shape) for i in range(1, 6)]


def test_sampler_state_survives_a_bfloat16_network():
    """The state is float64: only the network's rounding is left, which the preconditioning scales by c_out."""
    from dfm_nb.diffusion import edm

    def denoiser(dtype):
        def denoise(x, sigma):
            return edm.denoised((0.3 * torch.tanh(edm.c_in(sigma, SIGMA_DATA) * x)).to(dtype), x, sigma, SIGMA_DATA)

        return denoise

    x = start()
    a, b = (S.sample_heun(denoiser(t), x, S.karras_sigmas(18)) for t in (torch.bfloat16, torch.float64))
    assert ((a - b).norm() / b.norm()).item() < 2e-3


# ---- guidance


def test_guidance_at_respects_the_interval():
    assert S.guidance_at(1.0, 5.0) == 5.0
    assert [S.guidance_at(s, 5.0, (0.3, 2.0)) for s in (0.1, 0.3, 0.31, 2.0, 2.1)] == [1, 1, 5, 5, 1]


def test_rescale_restores_the_deviation_per_sample():
    cond = torch.randn(3, 4, 5)
    guided = S.classifier_free(cond, torch.randn(3, 4, 5), 6.0)
    assert torch.equal(S.rescale(guided, cond, 0.0), guided)
    full = S.rescale(guided, cond, 1.0)
    torch.testing.assert_close(full.std((1, 2)), cond.std((1, 2)))
    torch.testing.assert_close(S.rescale(guided, cond, 0.5), (full + guided) / 2)
