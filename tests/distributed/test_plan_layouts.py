import pytest

from dfm_nb import parallel
from dfm_nb.model import attention
from dfm_nb.planner.layouts import GpuLayout
from dfm_nb.planner.step_cost import parameters
from tests.conftest import run_ranks
from tests.networks import cases
from tests.planner.test_training_memory import NETWORKS, estimated_layer, model_of, one_layer

pytestmark = pytest.mark.slow


def on_this_rank(layout: GpuLayout, overrides: list[str]) -> tuple[int, tuple[int, int]]:
    """(bytes a layer keeps for backward, parameters of a model of two layers and those that are trained)."""
    from dfm_nb.model.build import build_chunks

    parallel.init(parallel.Layout(layout.tp, layout.pp, layout.cp, None, layout.sp), seed=1)
    attention.FLOAT32_BELOW = 0  # bfloat16 stays bfloat16, as on a GPU
    asked = [*layout.overrides()[:-2], *overrides]
    _, (chunk,) = build_chunks(model_of("model.num_layers=2", *asked), "bf16", seed=1)
    sizes = [(p.numel(), p.numel() * p.requires_grad) for p in chunk.parameters()]
    held, trained = map(sum, zip(*sizes))
    return (one_layer(asked, "bf16") if layout.pp == 1 else 0), (held, trained)


PLANNED = cases("PLANNED", {"dit": [GpuLayout(tp=2, sp=True)]})


@pytest.mark.parametrize(
    "network, layout", [(network, layout) for network, layouts in PLANNED.items() for layout in layouts], ids=str
)
def test_parallel_layers_keep_and_hold_what_is_estimated(network, layout):
    _, overrides = NETWORKS[network]
    model = model_of("model.num_layers=2", *overrides)
    for rank, (counted, held) in enumerate(run_ranks(2, on_this_rank, layout, overrides)):
        assert held == parameters(model, layout, rank if layout.pp > 1 else 0)
        if layout.pp == 1:
            assert estimated_layer(layout, overrides, "bf16") == pytest.approx(counted, rel=0.03), (rank, counted)
