import pytest

from dfm_nb import parallel
from dfm_nb.config import counts
from dfm_nb.plan import Plan
from tests.conftest import run_ranks
from tests.test_plan import estimated_layer, model_of, one_layer

pytestmark = pytest.mark.slow


def on_this_rank(layout: Plan) -> tuple[int, int]:
    """(bytes a layer keeps for backward, parameters of a model of two layers)."""
    from dfm_nb.model.build import build_chunks

    parallel.init(parallel.Layout(layout.tp, layout.pp, layout.cp, None, layout.sp), seed=1)
    asked = layout.overrides()[:-2]
    _, (chunk,) = build_chunks(model_of("model.num_layers=2", *asked), "fp32", seed=1)
    count = sum(p.numel() for p in chunk.parameters())
    return (one_layer(asked, "fp32") if layout.pp == 1 else 0), count


@pytest.mark.parametrize("layout", [Plan(tp=2), Plan(tp=2, sp=True), Plan(cp=2), Plan(pp=2)], ids=str)
def test_parallel_layers_keep_and_hold_what_is_estimated(layout):
    model = model_of("model.num_layers=2")
    for rank, (counted, parameters) in enumerate(run_ranks(2, on_this_rank, layout)):
        assert parameters == counts.parameter_count(model, layout.tp, layout.pp, rank if layout.pp > 1 else 0)
        if layout.pp == 1:
            assert estimated_layer(layout, [], "fp32") == pytest.approx(counted, rel=0.03), (rank, counted)
