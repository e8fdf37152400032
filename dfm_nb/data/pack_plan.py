"""Which samples make which pack, and which packs make a step: a plan that can be resumed exactly and in any layout.

The samples are dealt to *lanes* of the same number of tokens. A lane is an endless stream: epochs over its own samples,
shuffled within windows, and a packer. Pack g is the next one of lane g modulo the number of lanes. So what a rank reads
lies together where lanes are a multiple of the data-parallel size, memory is bounded by the windows, and nothing
depends on ranks, workers, restarts or time. Where there is one lane its window is the whole data set.

Learned from: mosaicml's streaming (canonical nodes, shuffles within blocks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from dfm_nb.base.files import older
from dfm_nb.base.records import SampleError
from dfm_nb.base.seeds import generator_for
from dfm_nb.data.stores import SampleStore
from dfm_nb.packs.packer import Packer
from dfm_nb.packs.packs import PackSettings

Item = tuple[int, int]
"""(epoch, sample index)."""

ONE_LANE_BELOW, LANES = 1 << 20, 256
LANE_WINDOW = 8192


def lanes_for(samples: int) -> int:
    """Lanes of a data set whose settings name none."""
    return 1 if samples < ONE_LANE_BELOW else LANES


class Order:
    """The order of one lane's samples, a window at a time: a function of (seed, lane, epoch, window).

    Parameters
    ----------
    ranges : int64 [R, 2], first sample and the one after the last of each piece of the lane. window : samples that are
        shuffled with one another.
    """

    def __init__(self, ranges: np.ndarray, window: int, seed: int, lane: int):
        self.ranges, self.window, self.seed, self.lane = ranges, window, seed, lane
        self.size = int((ranges[:, 1] - ranges[:, 0]).sum())
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def samples(self, epoch: int, window: int) -> np.ndarray:
        """int64, the samples at positions [window * self.window, ...) of an epoch."""
        if self._epoch is None or self._epoch[0] != epoch:
            ranges = self.ranges[torch.randperm(len(self.ranges), generator=self._generator("ranges", epoch)).numpy()]
            self._epoch = epoch, ranges, np.cumsum(ranges[:, 1] - ranges[:, 0])
        _, ranges, ends = self._epoch
        start = window * self.window
        stop = min(start + self.window, self.size)
        first, last = np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop, "left")
        pieces = np.concatenate([np.arange(a, b) for a, b in ranges[first : last + 1]])
        pieces = pieces[start - (ends[first - 1] if first else 0) :][: stop - start]
        return pieces[torch.randperm(len(pieces), generator=self._generator("window", epoch, window)).numpy()]

    def _generator(self, *key: object) -> torch.Generator:
        return generator_for(self.seed, "lane", self.lane, *key)


class OneOrder:
    """The order of a data set that has one lane: one permutation an epoch, or as the samples lie."""

    def __init__(self, size: int, seed: int, shuffle: bool):
        self.size = self.window = size
        self.seed, self.shuffle = seed, shuffle

    def samples(self, epoch: int, window: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        return torch.randperm(self.size, generator=generator_for(self.seed, "order", epoch)).numpy()


def lane_ranges(shards: Sequence[int], weights: np.ndarray, samples: int, lanes: int, seed: int) -> list[np.ndarray]:
    """The pieces of each lane, int64 [R, 2]: all lanes have the same weight, as far as shards are even inside.

    Lanes give their packs in turn. So if one had as many samples as another but shorter ones, it would go through them
    more often: the weights are the shards' tokens, or what is in proportion to them.

    Parameters
    ----------
    shards : samples of each, in order. samples : of all, which is less where some cannot be used.
    """
    bounds = np.unique(np.minimum(np.concatenate(([0], np.cumsum(shards))), samples))
    bounds = np.append(bounds, samples) if bounds[-1] < samples else bounds
    if (pieces := -(-lanes // (len(bounds) - 1))) > 1:  # of a small set, lanes are cut out of a shard
        at = [np.linspace(a, b, pieces + 1).astype(np.int64) for a, b in zip(bounds, bounds[1:])]
        bounds = np.unique(np.concatenate(at))
    before = np.interp(bounds, *_cumulated(shards, weights))
    order = torch.randperm(len(bounds) - 1, generator=generator_for(seed, "lanes")).numpy()
    starts, stops = bounds[:-1][order], bounds[1:][order]
    # in the dealt order, which is cut into lanes of equal weight, each with a sample at least
    sizes, heavy = stops - starts, np.diff(before)[order]
    ends, heavy = _cumulated(sizes, heavy if heavy.any() else sizes)
    number = np.arange(lanes + 1)
    cuts = np.floor(np.interp(number / lanes, heavy / heavy[-1], ends) + 1e-6).astype(np.int64)
    cuts = np.minimum(np.maximum.accumulate(cuts - number) + number, samples - lanes + number)
    cuts[0], cuts[-1] = 0, samples  # shards without weight at an end are someone's too
    out = []
    for low, high in zip(cuts, cuts[1:]):
        first, last = np.searchsorted(ends[1:], low, "right"), np.searchsorted(ends[1:], high, "left")
        ranges = np.stack((starts[first : last + 1], stops[first : last + 1]), 1)
        ranges[0, 0] += low - ends[first]
        ranges[-1, 1] -= ends[last + 1] - high
        out.append(ranges)
    return out


def _cumulated(counts: Sequence[int] | np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples and weight before each shard, and at the end."""
    return np.concatenate(([0], np.cumsum(counts))), np.concatenate(([0], np.cumsum(weights)))


class Lane:
    """Where a lane is: an epoch, a position in it, and the samples that wait for room in a pack."""

    def __init__(self, order: Order | OneOrder, packer: Packer, tokens_of_all: Callable[[np.ndarray], np.ndarray]):
        self.order, self.packer, self._tokens_of_all = order, packer, tokens_of_all
        self.epoch = self.cursor = 0
        self._window: tuple[int, int, np.ndarray, np.ndarray] | None = None

    def items(self) -> Iterator[tuple[Item, int]]:
        """Samples and their tokens."""
        while True:
            if self.cursor == self.order.size:
                self.epoch, self.cursor = self.epoch + 1, 0
            window, at = divmod(self.cursor, self.order.window)
            if self._window is None or self._window[:2] != (self.epoch, window):
                samples = self.order.samples(self.epoch, window)
                self._window = self.epoch, window, samples, self._tokens_of_all(samples)
            self.cursor += 1
            yield (self.epoch, int(self._window[2][at])), int(self._window[3][at])


class PackPlan:
    """The endless global sequence of packs, as lists of (epoch, sample index).

    Parameters
    ----------
    capacity : tokens of a pack. buffer_size : of the packer. lanes : 0, as many as suit the data set (`lanes_for`).
    lane_window : samples of a lane that are shuffled with one another.

    Attributes
    ----------
    packs, samples, tokens : given out so far. lengths : tokens of each sample of the last pack.

    Raises
    ------
    ValueError : a sample is longer than a pack, or there are fewer samples than lanes.
    """

    def __init__(
        self,
        store: SampleStore,
        settings: PackSettings,
        capacity: int,
        buffer_size: int,
        shuffle: bool = True,
        lanes: int = 1,
        lane_window: int = LANE_WINDOW,
    ):
        self.store, self.settings, self.shuffle = store, settings, shuffle
        self._volume = settings.patch_temporal * settings.patch_spatial**2
        self._no_room: set[int] = set()
        for index in store.larger_than((capacity + 1) * self._volume - 1):
            if _can_be_read(store, index):
                raise ValueError(
                    f"a pack must hold the longest sample: sample {index} has {self.tokens_of(index)} tokens and a "
                    f"pack {capacity} (train.micro_batch_size * dataset.task_encoder_seq_length); set "
                    f"dataset.task_encoder_seq_length={self.tokens_of(index)} or more"
                )
            self._no_room.add(index)  # its size is a lie: it takes no room, and is named when its turn comes
        self.capacity, self.buffer_size = capacity, buffer_size
        self.packs = self.samples = self.tokens = 0
        self.lengths: list[int] = []
        self._make_lanes(lanes or lanes_for(len(store)), lane_window)

    def _make_lanes(self, lanes: int, window: int) -> None:
        size, seed = len(self.store), self.settings.seed
        if lanes > size:
            raise ValueError(f"dataset.lanes must be at most the {size} samples of the data set; got {lanes}")
        self.lane_window = window
        orders: list[Order | OneOrder] = [OneOrder(size, seed, self.shuffle)]
        if lanes > 1:
            ranges = lane_ranges(self.store.shard_sizes, self.store.shard_voxels, size, lanes, seed)
            orders = [Order(r, window, seed, i) for i, r in enumerate(ranges)]
        self.lanes = [Lane(order, Packer(self.capacity, self.buffer_size), self.tokens_of_all) for order in orders]
        self._states = [self._state_of(lane) for lane in self.lanes]

    @property
    def epoch(self) -> int:
        """Of the lane that is furthest behind."""
        return min(lane.epoch for lane in self.lanes)

    def tokens_of(self, index: int) -> int:
        return int(self.tokens_of_all(np.array([index]))[0])

    def tokens_of_all(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of each sample, int64."""
        tokens = self.store.voxels(samples) // self._volume
        return np.where(np.isin(samples, list(self._no_room)), 0, tokens) if self._no_room else tokens

    def next(self) -> list[Item]:
        number = self.packs % len(self.lanes)
        lane = self.lanes[number]
        items = lane.packer.next(lane.items())
        self._states[number] = self._state_of(lane)
        self.lengths = lane.packer.lengths
        self.packs += 1
        self.samples += len(items)
        self.tokens += sum(self.lengths)
        return items

    def _state_of(self, lane: Lane) -> dict:
        waiting = [[e, i] for (e, i), _ in lane.packer.waiting]
        return {"epoch": lane.epoch, "cursor": lane.cursor, "waiting": waiting}

    def state(self) -> dict:
        """JSON-able; `restore` of it continues with the next pack."""
        return {
            "fingerprint": self.store.fingerprint,
            "capacity": self.capacity,
            "samples": self.samples,
            "tokens": self.tokens,
            "packs": self.packs,
            "lane_window": self.lane_window,
            "lanes": list(self._states),
        }

    def restore(self, state: dict) -> None:
        """Go on from a state, in its order: its number of lanes and its window count, not those of the settings."""
        if state.keys() - {"steps"} != self.state().keys():
            fix = "or start from its weights with checkpoint.pretrained=<checkpoint>"
            raise ValueError(older("the checkpoint's place in the data", fix))
        if state["fingerprint"] != self.store.fingerprint:
            raise ValueError(
                "the data set differs from the one the checkpoint was trained on, so its place in the data has no "
                "meaning; use the same dataset.path, or another --run-dir, with checkpoint.pretrained=<checkpoint>"
            )
        self.samples, self.tokens, self.packs = state["samples"], state["tokens"], state["packs"]
        self._make_lanes(len(state["lanes"]), state["lane_window"])
        for lane, at in zip(self.lanes, state["lanes"]):
            lane.epoch, lane.cursor = at["epoch"], at["cursor"]
            tokens = self.tokens_of_all(np.array([i for _, i in at["waiting"]], np.int64)).tolist()
            lane.packer.waiting = [((e, i), n) for (e, i), n in zip(at["waiting"], tokens)]
        self._states = [self._state_of(lane) for lane in self.lanes]


class StepPlan:
    """Which packs make a step.

    Packs are equal in tokens and not in work, as attention grows with the square of a sample's length; and all ranks
    wait for the slowest. So the packs of `window` steps are planned at once and sorted by work, neighbours make a step,
    and the steps of a window come in random order.
    """

    def __init__(self, plan: PackPlan, packs_per_step: int, window: int = 1):
        self.plan, self.packs_per_step, self.window = plan, packs_per_step, window
        self._begin()

    def _begin(self) -> None:
        """The window is used up."""
        self._start, self._planned = self.plan.state(), self.packs_per_step
        self._queue: deque[tuple[list[Item], int]] = deque()  # with the tokens of each
        self._taken = self._samples_ahead = self._tokens_ahead = 0

    def _plan_window(self) -> None:
        n = self._planned
        planned = [(self.plan.next(), self.plan.lengths) for _ in range(self.window * n)]
        packs, lengths = [p for p, _ in planned], [of_pack for _, of_pack in planned]
        by_work = sorted(range(len(packs)), key=lambda p: sum(length**2 for length in lengths[p]))
        g = generator_for(self.plan.settings.seed, "steps", self._start["samples"])
        order = [p for step in torch.randperm(self.window, generator=g).tolist() for p in by_work[step * n :][:n]]
        self._queue.extend((packs[p], sum(lengths[p])) for p in order)
        self._samples_ahead, self._tokens_ahead = sum(map(len, packs)), sum(map(sum, lengths))

    def _take(self) -> list[Item]:
        items, tokens = self._queue.popleft()
        self._samples_ahead -= len(items)
        self._tokens_ahead -= tokens
        self._taken += 1
        return items

    def next(self) -> list[list[Item]]:
        """The packs of the next step."""
        if self.window == 1:
            packs = [self.plan.next() for _ in range(self.packs_per_step)]
            self._start = self.plan.state()
            return packs
        if not self._queue:
            self._plan_window()
        packs = [self._take() for _ in range(min(self.packs_per_step, len(self._queue)))]
        packs += [self.plan.next() for _ in range(self.packs_per_step - len(packs))]  # a window of another batch size
        if not self._queue:
            self._begin()
        return packs

    def state(self) -> dict:
        """JSON-able; `restore` of it continues with the next step."""
        if self.window == 1:
            return self._start
        counts = {"samples": self.plan.samples - self._samples_ahead, "tokens": self.plan.tokens - self._tokens_ahead}
        begun = {name: self._start[name] for name in counts}
        steps = {"window": self.window, "packs_per_step": self._planned, "taken": self._taken, "begun": begun}
        return self._start | counts | {"steps": steps}

    def restore(self, state: dict) -> None:
        """Go on from a state, in its order: its window counts, not that of the settings."""
        steps = state.get("steps", {"window": 1, "packs_per_step": self.packs_per_step, "taken": 0, "begun": {}})
        self.plan.restore(state | steps["begun"])
        self.window = steps["window"]
        self._begin()
        if steps["taken"]:
            self._planned = steps["packs_per_step"]
            self._plan_window()
            for _ in range(steps["taken"]):
                self._take()


def _can_be_read(store: SampleStore, index: int) -> bool:
    try:
        store.read(index)
    except SampleError:
        return False
    return True
