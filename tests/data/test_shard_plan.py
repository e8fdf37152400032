import pytest

from dfm_nb.data import shard_plan

KEYS = [f"k{i}" for i in range(101)]


def test_reference_split_of_834_over_4():
    assert shard_plan.balanced_ranges(834, 4) == [(0, 208), (208, 416), (416, 625), (625, 834)]


@pytest.mark.parametrize("count, parts", [(0, 3), (1, 4), (10, 3), (7, 7), (1000, 6)])
def test_ranges_are_contiguous_and_balanced(count, parts):
    ranges = shard_plan.balanced_ranges(count, parts)
    assert ranges[0][0] == 0 and ranges[-1][1] == count
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
    sizes = [b - a for a, b in ranges]
    assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1


@pytest.mark.parametrize("world", [1, 3, 8])
def test_every_item_is_in_one_shard_of_one_split(world):
    splits = shard_plan.splits_of(KEYS, 0.1, 0.05)
    plans = [p for rank in shard_plan.plan_all(splits, world, 7) for p in rank]
    assert sorted(i for p in plans for i in p.items) == list(range(101))
    assert len({p.name for p in plans}) == len(plans) and max(len(p.items) for p in plans) <= 7
    assert all(splits[i] == p.split for p in plans for i in p.items)


def test_split_of_an_item_stays_when_the_source_grows():
    few = shard_plan.splits_of(KEYS, 0.1, 0.1)
    many = shard_plan.splits_of(KEYS + [f"new{i}" for i in range(400)], 0.1, 0.1)
    assert few == many[:101]
    assert 25 < many.count("val") < 75


def test_twenty_items_always_have_a_validation_item():
    keys = [k for k in KEYS if shard_plan.split_of(k, 0.02, 0) == "train"][:20]
    assert shard_plan.splits_of(keys, 0.02, 0).count("val") == 1
    assert "val" not in shard_plan.splits_of(keys[:19], 0.02, 0)
    assert "val" not in shard_plan.splits_of(keys, 0.0, 0)
