import tracemalloc

import numpy as np
import pytest

from dfm_nb.data import shard_plan
from dfm_nb.data.shard_plan import ShardPlans

KEYS = [f"k{i}" for i in range(101)]


@pytest.mark.parametrize("count, parts", [(0, 3), (1, 4), (1000, 6)])
def test_ranges_are_contiguous_and_balanced(count, parts):
    ranges = shard_plan.balanced_ranges(count, parts)
    assert ranges[0][0] == 0 and ranges[-1][1] == count
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
    sizes = [b - a for a, b in ranges]
    assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1


@pytest.mark.parametrize("world", [1, 8])
def test_every_item_is_in_one_shard_of_one_split(world):
    plans = list(ShardPlans(KEYS, 0.1, 0.05, world, 7).all())
    assert sorted(i for p in plans for i in p.items) == list(range(101))
    assert len({p.name for p in plans}) == len(plans) and max(len(p.items) for p in plans) <= 7
    # the split does not depend on the ranks
    split = {i: p.split for p in ShardPlans(KEYS, 0.1, 0.05, 1, 50).all() for i in p.items}
    assert all(split[i] == p.split for p in plans for i in p.items) and len(set(split.values())) == 3


@pytest.mark.parametrize("world", [2, 3, 40])
def test_any_number_of_processes_shares_the_shards_of_every_part_of_the_source(world):
    plans = ShardPlans(KEYS, 0.1, 0.05, 3, 7)
    shares = [shard_plan.share(plans, rank, world) for rank in range(world)]
    assert sorted(p.name for share in shares for p in share) == sorted(p.name for p in plans.all())
    items = np.array([np.histogram([i for p in share for i in p.items], [0, 50, 101])[0] for share in shares])
    assert np.ptp(items, 0).max() <= 7


@pytest.mark.parametrize("world", [1, 3])
def test_a_split_that_the_source_says_is_kept_and_the_fractions_share_the_rest(world):
    plans = ShardPlans(KEYS[:40], 1e-9, 0.0, world, 7, lambda i: "test" if i >= 20 else None)
    assert plans.items_of("test").tolist() == list(range(20, 40))
    assert len(plans.items_of("val")) == 1 and plans.items_of("val")[0] < 20


def test_split_of_an_item_stays_when_the_source_grows():
    few = ShardPlans(KEYS, 0.1, 0.1)
    many = ShardPlans(KEYS + [f"new{i}" for i in range(400)], 0.1, 0.1)
    for split in shard_plan.SPLITS:
        assert few.items_of(split).tolist() == [i for i in many.items_of(split) if i < 101]
    assert 25 < len(many.items_of("val")) < 75


@pytest.mark.parametrize(
    "count, val, test", [(1, 0.5, 0), (2, 0.5, 0), (3, 0.34, 0.34), (5, 0.7, 0.2), (20, 0.02, 0.02)]
)
def test_each_split_of_which_an_item_was_asked_for_has_one_and_training_always(count, val, test):
    for first in range(40):
        plans = ShardPlans([f"{first}-{i}" for i in range(count)], val, test)
        wanted = {
            "train": 1,
            "val": count >= 20 or val * count >= 1,
            "test": test and (count >= 20 or test * count >= 1),
        }
        assert all(len(plans.items_of(split)) for split, asked in wanted.items() if asked)


def test_many_items_of_a_thousand_ranks_take_a_byte_each():
    tracemalloc.start()
    plans = ShardPlans(map(str, range(200_000)), 0.05, 0.0, 1000, 50)
    mine = shard_plan.share(plans, 999, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plans.num_items == 200_000 and sum(len(p.items) for p in mine) == 200
    assert peak < 1 << 20
