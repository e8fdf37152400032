"""Invariant 1: loss and gradients are the same for one process and for every layout (fp32 on gloo)."""

import functools

import pytest

from tests.conftest import run_ranks
from tests.distributed.layouts import LAYOUTS, largest_relative_difference, losses_and_gradients
from tests.tiny_run import VARIANTS

pytestmark = pytest.mark.slow


@functools.cache
def reference():
    return run_ranks(1, losses_and_gradients, [])[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name):
    world, overrides = LAYOUTS[name]
    got, want = run_ranks(world, losses_and_gradients, overrides)[0], reference()
    difference, where = largest_relative_difference(got["gradients"], want["gradients"])
    assert difference <= 1e-5, where
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
    assert len(want["gradients"]) > 80 and want["losses"][0] > 0


OTHERS = {
    "dfm": (["model.variant=dfm", "model.rope=false", "model.hidden_size=256", "model.num_attention_heads=4"], 64),
    "wan": (VARIANTS["wan"], 99),
}


@functools.cache
def reference_of(variant):
    return run_ranks(1, losses_and_gradients, OTHERS[variant][0], 1)[0]


@pytest.mark.parametrize(
    "name", ["TP2", "TP2+SP", "PP2", "CP2", "PP2 virtual", "DP2", "recompute full", "recompute selective"]
)
@pytest.mark.parametrize("variant", OTHERS)
def test_layout_equals_one_process_with_another_network(name, variant):
    (settings, tensors), (world, overrides) = OTHERS[variant], LAYOUTS[name]
    got, want = run_ranks(world, losses_and_gradients, [*settings, *overrides], 1)[0], reference_of(variant)
    difference, where = largest_relative_difference(got["gradients"], want["gradients"])
    assert difference <= 1e-5, where
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
    assert len(want["gradients"]) == tensors and want["losses"][0] > 0
