"""Lanes and balanced steps: each sample once an epoch, one order in every layout, exact restarts, little memory."""

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_nb.config import Config
from dfm_nb.data.loader import PackedLoader
from dfm_nb.data.pack_plan import Order, PackPlan, StepPlan, lane_ranges, lanes_for
from dfm_nb.data.stores import MockStore
from dfm_nb.packs.packs import PackSettings

SETTINGS = PackSettings.of(Config(), seed=3)
SIZES = [(1, 8, 8), (3, 4, 8), (1, 6, 4), (2, 8, 4), (1, 2, 2), (5, 8, 8)]


def plan(lanes=1, length=300, window=32, capacity=96, buffer=6):
    store = MockStore(SIZES, text_tokens=3, channels=4, text_dim=6, length=length)
    return PackPlan(store, SETTINGS, capacity, buffer, lanes=lanes, lane_window=window)


def steps(packs_per_step=4, window=1, **of_plan):
    return StepPlan(plan(**of_plan), packs_per_step, window)


def saved(state):
    return json.loads(json.dumps(state))


@given(
    shards=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=12).filter(
        lambda s: sum(n for n, _ in s)
    ),
    lanes=st.integers(1, 20),
    missing=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_lanes_share_all_samples_evenly(shards, lanes, missing):
    sizes, each = [n for n, _ in shards], [weight for _, weight in shards]
    samples = max(1, sum(sizes) - missing)
    lanes = min(lanes, samples)

    def deal(weights):
        found = lane_ranges(sizes, np.array(weights), samples, lanes, seed=1)
        dealt = [[i for a, b in ranges for i in range(a, b)] for ranges in found]
        assert sorted(i for lane in dealt for i in lane) == list(range(samples)) and all(dealt)
        return dealt

    dealt = deal(sizes)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    weights = [n * weight for n, weight in shards]
    of = np.repeat(each, sizes)
    heavy = [sum(of[i] for i in lane) for lane in deal(weights)]
    if not missing and samples >= 2 * lanes and min(each) > 0:
        assert max(heavy) - min(heavy) <= 4 * max(each)  # a sample at each end, and where a shard was cut


def test_an_older_state_says_what_reads_it():
    state = saved(plan(lanes=1).state())
    older = state | state.pop("lanes")[0]
    with pytest.raises(ValueError, match="d3d8367"):
        plan(lanes=1).restore(older)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), window=st.integers(1, 50), epoch=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_an_epoch_of_a_lane_has_each_sample_once(lengths, window, epoch):
    starts = np.cumsum([0, *lengths[:-1]]) * 3  # with gaps: other lanes' pieces
    order = Order(np.stack((starts, starts + lengths), 1), window, seed=2, lane=5)
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
    s, samples, tokens = steps(window=5, lanes=3), 0, 0
    for _ in range(12):
        for pack in s.next():
            samples += len(pack)
            tokens += sum(s.plan.tokens_of(i) for _, i in pack)
        assert (s.state()["samples"], s.state()["tokens"]) == (samples, tokens)


@pytest.mark.parametrize("packs_per_step", [3, 8])
def test_another_batch_size_loses_and_repeats_no_sample(packs_per_step):
    one = steps(window=5, lanes=3)
    used = [item for _ in range(7) for pack in one.next() for item in pack]
    two = steps(packs_per_step, window=5, lanes=3)
    two.restore(saved(one.state()))
    used += [item for _ in range(60) for pack in two.next() for item in pack]
    waiting = [item for lane in two.plan.lanes for item, _ in lane.packer.waiting]
    ahead = [item for pack, _ in two._queue for item in pack]
    everything = used + ahead + waiting
    assert len(set(everything)) == len(everything)
    for epoch in range(two.plan.epoch):
        assert {i for e, i in everything if e == epoch} == set(range(300))


def test_any_number_of_ranks_sees_the_same_packs_of_lanes():
    def loader(rank, size):
        return PackedLoader(plan(lanes=8), 4, rank, size, num_workers=0, balance_steps=3)

    whole, ranks = loader(0, 1), [loader(r, 4) for r in range(4)]
    for _ in range(7):
        parts = [x.next_step() for x in ranks]
        merged = [parts[i][0] for i in range(4)]
        for mine, theirs in zip(merged, whole.next_step(), strict=True):
            assert mine.keys == theirs.keys and mine.noise.equal(theirs.noise)


def test_a_rank_reads_from_its_own_lanes():
    """With lanes a multiple of the ranks: a quarter of the data set each, of four ranks."""
    p = plan(lanes=8, length=4000)
    packs = [p.next() for _ in range(240)]
    ranks = [{i for pack in packs[r::4] for _, i in pack} for r in range(4)]
    own = [{i for lane in p.lanes[r::4] for a, b in lane.order.ranges for i in range(a, b)} for r in range(4)]
    assert all(seen <= mine for seen, mine in zip(ranks, own)) and len(own[0]) == 1000


def test_balanced_steps_are_the_same_packs_and_alike_in_work():
    plain, balanced = steps(8, 1, capacity=640, buffer=20), steps(8, 16, capacity=640, buffer=20)
    work = lambda s, pack: sum(s.plan.tokens_of(i) ** 2 for _, i in pack)  # noqa: E731
    windows = [[s.next() for _ in range(16)] for s in (plain, balanced)]
    flat = [sorted(chain(*w)) for w in windows]
    assert flat[0] == flat[1]
    apart = [np.mean([max(c) / np.mean(c) for c in ([work(s, p) for p in step] for step in w)]) - 1
             for s, w in zip((plain, balanced), windows)]  # fmt: skip
    assert apart[1] < 0.2 * apart[0]


def test_a_window_bounds_what_is_held_of_an_epoch():
    order = Order(np.array([[0, 10**7]]), 1024, seed=0, lane=0)
    found = order.samples(1, 9_700)
    assert len(found) == 1024 and sorted(found) == list(range(9_700 * 1024, 9_701 * 1024))


def test_lanes_are_as_many_as_the_data_set_bears():
    with pytest.raises(ValueError, match="dataset.lanes.*300"):
        plan(lanes=301)
    assert lanes_for(60_000) == 1 and lanes_for(100_000_000) == 256
