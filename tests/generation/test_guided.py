"""Guidance with networks that are known in closed form: what is combined, and what is computed at all."""

import pytest
import torch

from dfm_nb.generation.guided import GuidedDenoiser
from dfm_nb.generation.request import Request

X = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CAPTION, EMPTY, WEAK = 2.0, 5.0, 11.0
SIGMA = torch.tensor(1.0)


class Constant:
    """For each value, an estimate of that value for every latent; counts its calls."""

    def __init__(self, *values):
        self.values, self.calls = values, 0

    def __call__(self, x, sigma):
        self.calls += 1
        return torch.cat([torch.full_like(x, value) for value in self.values])


def guided(start=X, free=None, guide=True, **settings):
    weak = Constant(WEAK) if guide else None
    return GuidedDenoiser(Request("a", **settings), start, Constant(CAPTION), Constant(CAPTION, EMPTY), weak, free)


@pytest.mark.parametrize(
    "settings, guide, want",
    [
        ({"guidance": 1.0}, False, CAPTION),
        ({"guidance": 3.0}, False, EMPTY + 3 * (CAPTION - EMPTY)),
        ({"guidance": 3.0}, True, WEAK + 3 * (CAPTION - WEAK)),
        ({"guidance": 3.0, "autoguidance": 4.0}, True, EMPTY + 3 * (CAPTION - EMPTY) + 3 * (CAPTION - WEAK)),
        ({"guidance": 3.0, "guidance_interval": (2.0, 9.0)}, False, CAPTION),
    ],
)
def test_estimates_are_combined_as_defined(settings, guide, want):
    torch.testing.assert_close(guided(guide=guide, **settings)(X, SIGMA), torch.full_like(X, want))


def test_only_what_is_needed_is_computed():
    outside = guided(guidance=3.0, autoguidance=4.0, guidance_interval=(2.0, 9.0))
    outside(X, SIGMA)
    assert (outside.cond.calls, outside.both.calls, outside.guide.calls) == (1, 0, 0)
    outside(X, torch.tensor(3.0))
    assert (outside.cond.calls, outside.both.calls, outside.guide.calls) == (1, 1, 1)


def test_given_frames_stay_as_they_are():
    start, free = torch.randn_like(X), torch.tensor([False, True])[:, None, None]
    D = guided(start, free, guide=False, guidance=3.0)(X, SIGMA)
    assert torch.equal(D[:, :, 0], start[:, :, 0]) and (D[:, :, 1] == EMPTY + 3 * (CAPTION - EMPTY)).all()
