"""Lanes and balanced steps: each sample once an epoch, one order in every layout, exact restarts, little memory."""

import json
import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_nb.config import Config
from dfm_nb.data.loader import PackedLoader
from dfm_nb.data.order import UNEVEN, PackOrder, SampleOrder, StepOrder, deal_shards
from dfm_nb.data.sample_index import Shard
from dfm_nb.data.stores import MockStore
from dfm_nb.packs.packs import PackSettings

SIZES = [(1, 8, 8), (3, 4, 8), (1, 6, 4), (2, 8, 4), (1, 2, 2), (5, 8, 8)]


def pack_order(lanes=1, shards=24, window=32, capacity=96, buffer=6):
    """Of shards of 12 samples each, two of each size."""
    store = MockStore(SIZES, text_tokens=3, channels=4, text_dim=6, length=12 * shards)
    store.shards = [Shard("", 12, 2 * sum(map(math.prod, SIZES)), 320)] * shards
    return PackOrder(store, PackSettings(Config(), store.statistics), capacity, buffer, lanes=lanes, lane_window=window)


def steps(packs_per_step=4, window=1, **of_order):
    return StepOrder(pack_order(**of_order), packs_per_step, window)


def saved(state):
    return json.loads(json.dumps(state))


def places(packs):
    return [(item.epoch, item.sample) for pack in packs for item in pack]


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=60), lanes=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_lanes_share_whole_shards_evenly(weights, lanes):
    dealt = deal_shards(np.array(weights), lanes)
    assert sorted(chain(*dealt)) == list(range(len(weights))) and all(map(len, dealt))
    loads = [sum(weights[i] for i in shards) for shards in dealt]
    assert max(loads) - min(loads) <= UNEVEN * np.mean(loads)
    assert len(deal_shards(np.ones(10_000), 256)) == 128  # 39 or 40 shards a lane are 2.6 % apart


def test_samples_of_all_lanes_are_seen_equally_often():
    order = pack_order(lanes=8)
    assert len(order.lanes) == 8
    seen = Counter(item.sample for _ in range(2000) for item in order.next())
    assert len(seen) == 288 and max(seen.values()) - min(seen.values()) <= 2


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), window=st.integers(1, 50), epoch=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_an_epoch_of_a_lane_has_each_sample_once(lengths, window, epoch):
    starts = np.cumsum([0, *lengths[:-1]]) * 3  # with gaps: other lanes' shards
    order = SampleOrder(np.stack((starts, starts + lengths), 1), window, seed=2, lane=5)
    seen = [order.samples(epoch, w).tolist() for w in range(-(-order.size // window))]
    assert all(len(s) == window for s in seen[:-1])
    assert sorted(chain(*seen)) == [i for a, n in zip(starts, lengths) for i in range(a, a + n)]


@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (6, 5)])
@pytest.mark.parametrize("taken", [0, 7])
def test_restored_steps_go_on_with_the_same_packs(lanes, window, taken):
    """Whatever the settings of the second one: a run keeps its order."""
    one = steps(window=window, lanes=lanes)
    for _ in range(taken):
        one.next()
    state = saved(one.state())
    want = [one.next() for _ in range(12)]
    two = steps(window=3, lanes=2)
    two.restore(state)
    assert [two.next() for _ in range(12)] == want and two.state() == one.state()


def test_states_count_what_was_used():
    s, used = steps(window=5, lanes=3), []
    for _ in range(12):
        used += [item for pack in s.next() for item in pack]
        assert (s.state()["samples"], s.state()["tokens"]) == (len(used), sum(item.tokens for item in used))


@pytest.mark.parametrize("packs_per_step", [3, 8])
def test_another_batch_size_loses_and_repeats_no_sample(packs_per_step):
    one = steps(window=5, lanes=3)
    used = places(pack for _ in range(7) for pack in one.next())
    two = steps(packs_per_step, window=5, lanes=3)
    two.restore(saved(one.state()))
    used += places(pack for _ in range(60) for pack in two.next())
    waiting = [(item.epoch, item.sample) for lane in two.packs.lanes for item in lane.packer.waiting]
    everything = used + places(two._queue) + waiting
    assert len(set(everything)) == len(everything)
    for epoch in range(min(lane.epoch for lane in two.packs.lanes)):
        assert {i for e, i in everything if e == epoch} == set(range(288))


def test_any_number_of_ranks_sees_the_same_packs_of_lanes():
    def loader(rank, size):
        return PackedLoader(pack_order(lanes=8), 4, rank, size, num_workers=0, balance_steps=3)

    whole, ranks = loader(0, 1), [loader(r, 4) for r in range(4)]
    for _ in range(7):
        parts = [x.next_step() for x in ranks]
        merged = [parts[i][0] for i in range(4)]
        for mine, theirs in zip(merged, whole.next_step(), strict=True):
            assert mine.keys == theirs.keys and mine.noise.equal(theirs.noise)


def test_a_rank_reads_from_its_own_lanes():
    """With lanes a multiple of the ranks: a quarter of the shards each, of four ranks."""
    order = pack_order(lanes=8)
    packs = [order.next() for _ in range(240)]
    shards = [{item.sample // 12 for pack in packs[r::4] for item in pack} for r in range(4)]
    assert sorted(chain(*shards)) == list(range(24)) and {len(s) for s in shards} == {6}


def test_balanced_steps_are_the_same_packs_and_alike_in_work():
    plain, balanced = steps(8, 1, capacity=640, buffer=20), steps(8, 16, capacity=640, buffer=20)
    work = lambda pack: sum(item.tokens**2 for item in pack)  # noqa: E731
    windows = [[s.next() for _ in range(16)] for s in (plain, balanced)]
    flat = [sorted(chain(*w)) for w in windows]
    assert flat[0] == flat[1]
    apart = [np.mean([max(c) / np.mean(c) for c in ([work(p) for p in step] for step in w)]) - 1 for w in windows]
    assert apart[1] < 0.2 * apart[0]
