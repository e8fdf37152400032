"""Muon in parallel layouts: each matrix is orthogonalised whole, so weights are those of one process."""

import pytest
import torch

from tests.conftest import run_ranks
from tests.distributed.layouts import LAYOUTS, MUON, largest_relative_difference, losses_and_gradients
from tests.distributed.test_checkpoint_layouts import LAYOUTS as SAVED_IN
from tests.distributed.test_checkpoint_layouts import read, write


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, losses_and_gradients, MUON)[0]


@pytest.mark.slow
def test_it_is_not_adamw(alone):
    adam = run_ranks(1, losses_and_gradients, [])[0]
    assert adam["losses"][0] == alone["losses"][0]
    assert largest_relative_difference(adam["weights"], alone["weights"])[0] > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TP2", "TP2+SP", "CP2", "PP2 virtual", "DP2", "TP2xPP2", "CP2xDP2"])
def test_weights_are_the_same_in_every_layout(alone, name):
    world, layout = LAYOUTS[name]
    got = run_ranks(world, losses_and_gradients, [*layout, *MUON])[0]
    assert got["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    difference, where = largest_relative_difference(got["weights"], alone["weights"])
    assert difference < 1e-4, where


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "precision"),
    [("DP2", "TP2", "fp32"), ("TP2+SP", "DP2", "fp32"), ("PP2 virtual", "DP2", "bf16"), ("CP2", "PP2 virtual", "fp32")],
)
def test_checkpoint_of_one_layout_continues_in_another(tmp_path, saved, loaded, precision):
    """Weights and averages bit for bit; after one more step, which shows the momentum, to rounding."""
    folders = [str(tmp_path / kind) for kind in ("blocking", "async")]
    extra = [*MUON, f"mixed_precision={precision}", "optimizer.clip_grad=0"]
    want = run_ranks(2, write, [*SAVED_IN[saved], *extra], folders)[0]
    for got in run_ranks(2, read, [*SAVED_IN[loaded], *extra], folders)[0]:
        assert got.keys() == want.keys()
        stepped = {k for k in want if k.startswith("step ")}
        assert stepped and not [k for k in want.keys() - stepped if not torch.equal(got[k], want[k])]
        difference, where = largest_relative_difference({k: got[k] for k in stepped}, {k: want[k] for k in stepped})
        assert difference < (1e-5 if precision == "fp32" else 1e-2), where
