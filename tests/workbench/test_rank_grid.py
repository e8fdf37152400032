import pytest

from workbench.rank_grid import AXES, RankGrid


@pytest.mark.parametrize("world,tp,cp,pp", [(1, 1, 1, 1), (8, 2, 2, 2), (16, 2, 1, 4), (24, 2, 3, 2), (12, 1, 2, 1)])
def test_groups_are_those_of_megatron_core(world, tp, cp, pp):
    from megatron.core.parallel_state import RankGenerator

    grid = RankGrid(world, tp, cp, pp)
    theirs = RankGenerator(tp=tp, ep=1, dp=grid.dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for axis in AXES:
        assert grid.groups(axis) == sorted(theirs.get_ranks(axis))


def test_every_rank_is_drawn_once_with_its_copy_and_stage():
    page = RankGrid(8, tp=2, pp=2)._repr_html_()
    assert all(page.count(f">rank {r}<") == 1 for r in range(8))
    assert "stage 1 of 2" in page and "dp 1" in page and "cp 0" not in page


def test_degrees_that_do_not_fit_say_what_would():
    with pytest.raises(ValueError, match=r"2 \* 1 \* 2 = 4 must divide .* got 6; take 8 processes"):
        RankGrid(6, tp=2, pp=2)
    with pytest.raises(ValueError, match="an axis is one of tp, cp, dp, pp; got 'ep'"):
        RankGrid(2).groups("ep")
