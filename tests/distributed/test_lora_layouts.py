"""Low-rank updates (LoRA) in parallel layouts: same losses and gradients as on one process."""

import pytest

from dfm_nb.model.linear import is_lora
from tests.conftest import run_ranks
from tests.distributed.layouts import largest_relative_difference, losses_and_gradients

LORA = ["model.lora.rank=3", "model.lora.alpha=6"]


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, losses_and_gradients, LORA)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["model.tensor_model_parallel_size=2"],
        ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        ["model.pipeline_model_parallel_size=2"],
        ["model.context_parallel_size=2"],
        [],
    ],
    ids=["TP2", "TP2+SP", "PP2", "CP2", "DP2"],
)
def test_updates_are_the_same_in_every_layout(alone, layout):
    got = run_ranks(2, losses_and_gradients, [*LORA, *layout])[0]
    assert all(is_lora(n) for n in got["gradients"]) and got["gradients"].keys() == alone["gradients"].keys()
    assert got["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    difference, where = largest_relative_difference(got["gradients"], alone["gradients"])
    assert difference < 1e-4, where
