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


def pack_order(lanes=1, shards=24, window=32, capacity=96, buffer=6, clip_weight=1.0):
    """Of shards of 12 samples each, two of each size."""
    config = Config()
    config.dataset.clip_weight = clip_weight
    store = MockStore(SIZES, text_tokens=3, channels=4, text_dim=6, length=12 * shards)
    store.shards = [Shard("", 12, 2 * sum(map(math.prod, SIZES)), 320)] * shards
    return PackOrder(store, PackSettings(config, store.statistics), capacity, buffer, lanes=lanes, lane_window=window)


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


def test_packs_of_one_shape_stay_within_it_on_every_device():
    """Captions differ in length, so some packs end before their tokens are full; a run goes on as it began."""
    order = pack_order()
    order.store.columns["text_tokens"] = np.resize([3, 20, 1, 7, 50], len(order.store))
    free = saved(order.state())
    order.restore(free | {"one_shape": True})
    shape = order.settings.shape
    packs = [order.next() for _ in range(1000)]
    assert max(sum(item.text for item in pack) for pack in packs) < shape.text
    assert max(sum(item.rows for item in pack) for pack in packs) < shape.rows
    assert max(map(len, packs)) < shape.segments
    seen = Counter(item.sample for pack in packs for item in pack)
    assert len(seen) == 288 and max(seen.values()) - min(seen.values()) <= 2
    other = pack_order()
    other.store = order.store
    other.restore(saved(order.state()))
    assert other.settings.shape == shape and other.next() == order.next()
    other.restore({key: value for key, value in free.items() if key != "one_shape"})  # an older checkpoint's
    assert other.settings.shape is None


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), window=st.integers(1, 50), epoch=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_an_epoch_of_a_lane_has_each_sample_once(lengths, window, epoch):
    starts = np.cumsum([0, *lengths[:-1]]) * 3  # with gaps: other lanes' shards
    order = SampleOrder(np.stack((starts, starts + lengths), 1), window, seed=2, lane=5)
    seen = [order.uses(epoch, w)[:, 1].tolist() for w in range(-(-order.size(epoch) // window))]
    assert all(len(s) == window for s in seen[:-1])
    assert sorted(chain(*seen)) == [i for a, n in zip(starts, lengths) for i in range(a, a + n)]


@given(
    weights=st.lists(st.sampled_from([0.01, 0.25, 0.7, 1.0, 2.5, 10.0]), min_size=1, max_size=40),
    window=st.integers(1, 60),
    epochs=st.integers(1, 12),
)
@settings(max_examples=100, deadline=None)
def test_epochs_use_a_sample_as_often_as_its_weight_says(weights, window, epochs):
    half = len(weights) // 2
    order = SampleOrder(np.array([[0, half], [half, len(weights)]]), window, 2, lane=5, weights=np.array(weights))
    uses = [
        tuple(use)
        for epoch in range(epochs)
        for at in range(-(-order.size(epoch) // window))
        for use in order.uses(epoch, at).tolist()
    ]
    for sample, weight in enumerate(weights):
        numbers = sorted(number for number, used in uses if used == sample)
        assert numbers == list(range(len(numbers))), "each has noise of its own"
        assert abs(len(numbers) - epochs * weight) < 1


def test_samples_of_equal_weight_take_turns():
    order = SampleOrder(np.array([[0, 40]]), 100, 2, lane=None, weights=np.full(40, 0.25))
    assert {order.size(epoch) for epoch in range(8)} <= {8, 9, 10, 11, 12}, "a quarter of them on average"


def test_clips_of_less_weight_take_less_of_each_pack():
    shares = []
    for weight in (1.0, 0.25):
        items = [
            item for order in [pack_order(lanes=4, clip_weight=weight)] for _ in range(900) for item in order.next()
        ]
        clips = sum(item.tokens for item in items if SIZES[item.sample % 6][0] > 1)
        shares.append(clips / (sum(item.tokens for item in items) - clips))
    assert shares[1] == pytest.approx(shares[0] / 4, rel=0.05)


@pytest.mark.parametrize(("lanes", "window", "clip_weight"), [(1, 1, 1.0), (6, 5, 1.0), (1, 5, 2.5), (6, 1, 0.3)])
@pytest.mark.parametrize("taken", [0, 7])
def test_restored_steps_go_on_with_the_same_packs(lanes, window, clip_weight, taken):
    """Whatever the settings of the second one that are of the run: it keeps its order."""
    one = steps(window=window, lanes=lanes, clip_weight=clip_weight)
    for _ in range(taken):
        one.next()
    state = saved(one.state())
    want = [one.next() for _ in range(12)]
    two = steps(window=3, lanes=2, clip_weight=clip_weight)
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


@pytest.mark.parametrize(
    "where, name, number",
    [("steps", "window", 10**8), ("steps", "taken", -1), ("steps", "packs_per_step", 10**12)]
    + [(0, "cursor", -5), (0, "epoch", 10**400), (None, "lane_window", 0), (None, "lanes", [])],
)
def test_a_position_that_no_run_reaches_is_refused(where, name, number):
    one = steps(window=2, lanes=2)
    one.next()
    state = saved(one.state())
    place = state if where is None else state["steps"] if where == "steps" else state["lanes"][where]
    place[name] = number
    with pytest.raises(IndexError):
        steps(window=2, lanes=2).restore(state)
