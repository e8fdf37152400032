"""Invariant 1: loss and gradients are the same for one process and for every layout (fp32 on gloo).

The demo's network in every layout, where a mix of two axes stands for each of them alone; other networks, LoRA and Muon
in those that cut their tensors differently.
"""

import functools

import pytest

from dfm_nb.model.linear import is_lora
from tests.conftest import run_ranks
from tests.distributed.layouts import LAYOUTS, MUON, largest_relative_difference, losses_and_gradients
from tests.networks import cases

pytestmark = pytest.mark.slow

GIVEN = "given dataset.condition_frames_prob=0.5 dataset.condition_last_prob=0.5".split()
RECOMPUTE = ["recompute full", "recompute selective"]
NETWORKS = {
    # name: (settings, tensors with gradients, layouts)
    "dit": ([], 95, ["TP2+SP", "PP2 virtual", "DP2", "TP2xCP2", "CP2xDP2", "TP2xSPxPP2", *RECOMPUTE]),
    "lora": (["model.lora.rank=3", "model.lora.alpha=6"], 0, ["TP2+SP", "PP2", "DP2 distributed optimizer"]),
    "given": (GIVEN, 95, ["TP2", "CP2", "PP2"]),
    "muon": (MUON, 95, ["TP2+SP", "PP2 virtual", "DP2"]),
}
NETWORKS = cases("PARALLEL", NETWORKS)


@functools.cache
def reference(network):
    return run_ranks(1, losses_and_gradients, NETWORKS[network][0], 3)[0]


@pytest.mark.parametrize(
    ("network", "name"), [(network, name) for network, (_, _, layouts) in NETWORKS.items() for name in layouts]
)
def test_layout_equals_one_process(network, name):
    (settings, tensors, _), (world, layout) = NETWORKS[network], LAYOUTS[name]
    # Muon last: it has no distributed optimizer, which some layouts are about
    got, want = run_ranks(world, losses_and_gradients, [*layout, *settings], 3)[0], reference(network)
    difference, where = largest_relative_difference(got["gradients"], want["gradients"])
    assert difference <= (1e-4 if "lora" in network else 1e-5), where
    for losses in ("losses", "val_losses"):
        assert got[losses] == pytest.approx(want[losses], rel=1e-5), losses
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
    assert len(want["gradients"]) == (tensors or len(want["gradients"])) and want["losses"][0] > 0
    assert "lora" not in network or all(is_lora(n) for n in want["gradients"])
    if network == "muon":  # each matrix is orthogonalised whole
        difference, where = largest_relative_difference(got["weights"], want["weights"])
        assert difference < 1e-4, where
