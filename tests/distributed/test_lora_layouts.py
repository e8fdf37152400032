"""Low-rank updates (LoRA) in parallel layouts: same losses and gradients as on one process."""

import functools

import pytest

from dfm_nb.model.linear import is_lora
from tests.conftest import run_ranks
from tests.distributed.layouts import LAYOUTS, largest_relative_difference, losses_and_gradients
from tests.tiny_run import VARIANTS

LORA = ["model.lora.rank=3", "model.lora.alpha=6"]


@functools.cache
def alone(variant):
    return run_ranks(1, losses_and_gradients, [*LORA, *VARIANTS[variant]])[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("dit", name) for name in ("TP2", "TP2+SP", "PP2", "CP2", "DP2 distributed optimizer")),
        *(("wan", name) for name in ("TP2+SP", "PP2")),
    ],
)
def test_updates_are_the_same_in_every_layout(variant, name):
    (world, layout), want = LAYOUTS[name], alone(variant)
    got = run_ranks(world, losses_and_gradients, [*LORA, *VARIANTS[variant], *layout])[0]
    assert all(is_lora(n) for n in got["gradients"]) and got["gradients"].keys() == want["gradients"].keys()
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
    difference, where = largest_relative_difference(got["gradients"], want["gradients"])
    assert difference < 1e-4, where
