import pytest

from workbench.rank_grid import AXES, RankGrid


@pytest.mark.parametrize("world,tp,cp,pp", [(1, 1, 1, 1), (8, 2, 2, 2), (16, 2, 1, 4), (24, 2, 3, 2), (12, 1, 2, 1)])
def test_groups_are_those_of_megatron_core(world, tp, cp, pp):
    from megatron.core.parallel_state import RankGenerator

    grid = RankGrid(world, tp, cp, pp)
    theirs = RankGenerator(tp=tp, ep=1, dp=grid.dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for axis in AXES:
        assert grid.groups(axis) == sorted(theirs.get_ranks(axis))


def test_a_layout_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="rank .* got 4"):
        RankGrid(4, rank=4)
    with pytest.raises(ValueError, match="use 8 processes"):
        RankGrid(6, tp=2, pp=4)


def test_marked_ranks_are_those_of_the_groups():
    grid = RankGrid(16, tp=2, cp=2, pp=2, rank=5)
    page = grid._repr_html_()
    marked = {rank: axis for axis in AXES for rank in next(g for g in grid.groups(axis) if 5 in g)} | {5: "this one"}
    for rank in range(16):
        cell = page.split(f">rank {rank}<")[1].split("</small>")[0]
        found = [m for m in (*AXES, "this one") if m in cell]
        assert f"node {rank // 8}" in cell and found == ([marked[rank]] if rank in marked else [])
    assert "pp 1 dp 0" in page and "over 2 nodes" in page
