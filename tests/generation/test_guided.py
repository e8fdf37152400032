"""Guidance with networks that are known in closed form: what is combined, and what is computed at all."""

import pytest
import torch

from dfm_nb.generation.guided import GuidedDenoiser
from dfm_nb.generation.request import Request

X = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CAPTION, EMPTY = 2.0, 5.0
SIGMA = torch.tensor(1.0)


class Constant:
    """For each value, an estimate of that value for every latent; counts its calls."""

    def __init__(self, *values):
        self.values, self.calls = values, 0

    def __call__(self, x, sigma):
        self.calls += 1
        return torch.cat([torch.full_like(x, value) for value in self.values])


def guided(start=X, free=None, **settings):
    return GuidedDenoiser(Request("a", **settings), start, Constant(CAPTION), Constant(CAPTION, EMPTY), free)


@pytest.mark.parametrize(
    "settings, want, calls",
    [
        ({"guidance": 1.0}, CAPTION, (1, 0)),
        ({"guidance": 3.0}, EMPTY + 3 * (CAPTION - EMPTY), (0, 1)),
        ({"guidance": 3.0, "guidance_interval": (2.0, 9.0)}, CAPTION, (1, 0)),
        ({"guidance": 3.0, "guidance_interval": (0.5, 2.0)}, EMPTY + 3 * (CAPTION - EMPTY), (0, 1)),
    ],
)
def test_estimates_are_combined_as_defined_and_no_other_is_computed(settings, want, calls):
    D = guided(**settings)
    torch.testing.assert_close(D(X, SIGMA), torch.full_like(X, want))
    assert (D.cond.calls, D.both.calls) == calls


def test_rescale_pulls_the_deviation_back_to_the_conditional():
    """Of the guided estimate, not of the sample (Lin et al. 2024)."""
    scaled = lambda *shares: lambda x, sigma: torch.cat([share * x for share in shares])  # noqa: E731
    for rescale, share in ((0.0, 4.0), (0.5, 3.0), (1.0, 2.0)):
        request = Request("a", guidance=3.0, guidance_rescale=rescale)
        D = GuidedDenoiser(request, X, scaled(2.0), scaled(2.0, 1.0), None)(X, SIGMA)
        torch.testing.assert_close(D, share * X)


def test_given_frames_stay_as_they_are():
    start, free = torch.randn_like(X), torch.tensor([False, True])[:, None, None]
    D = guided(start, free, guidance=3.0)(X, SIGMA)
    assert torch.equal(D[:, :, 0], start[:, :, 0]) and (D[:, :, 1] == EMPTY + 3 * (CAPTION - EMPTY)).all()
