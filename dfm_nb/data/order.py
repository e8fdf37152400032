"""The order of the data: which samples make which pack, and which packs make a step, resumed exactly in any layout.

The shards are dealt to *lanes* of the same number of tokens. A lane is an endless stream: epochs over its own samples,
shuffled within windows, and a packer. Pack g is the next one of lane g modulo the number of lanes. So if the number of
lanes is a multiple of the data-parallel size, a rank reads contiguous data, unless `dataset.balance_steps` regroups
packs; memory is bounded by the windows, and nothing depends on ranks, workers, restarts or time. A single lane's window
is the complete data set.

    shards                      a = 0 1 2 3    b = 4 5 6 7    c = 8 9 10 11    d = 12 13 14 15
    two lanes                   a, d           b, c
    an epoch of the second one  8 9 10 11 4 5 6 7        its shards in a random order,
    in windows of 6             10 4 9 8 5 11 | 7 6      shuffled within each window

A sample of weight w is used in each epoch as often as floor(epoch * w + phase) grows, with a phase of its own: at 2.5
twice or three times, at 0.25 once in four epochs, and the samples of equal weight in turn. The number of its uses so
far takes the place of the epoch in its draws, so that each use has its own noise, caption and noise level.

Learned from: mosaicml's streaming (canonical nodes, shuffles within blocks).
"""

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from dfm_nb.base.limits import MOST_PACKS
from dfm_nb.base.log import log
from dfm_nb.base.records import SampleError
from dfm_nb.base.seeds import generator_for
from dfm_nb.data.stores import SampleStore
from dfm_nb.packs.packer import Packer, PackItem, PackShape
from dfm_nb.packs.packs import PackSettings

# One permutation of a million samples is 8 MB and read in milliseconds; of 100 million, it takes
# seconds and gigabytes.
ONE_LANE_BELOW = 1 << 20
LANES = 256  # divides by the data-parallel sizes of most layouts
LANE_WINDOW = 8192
# the window of a single lane: weights change the number of uses in an epoch
WHOLE_SET = sys.maxsize
SHAPE_PACKS = 64  # packs of a run's order, the largest of which decide the shape of all
# of the mean; in 50 epochs the samples of the lightest lane are seen once more than others
UNEVEN = 0.02


def deal_shards(weights: np.ndarray, lanes: int) -> list[np.ndarray]:
    """The shards of each lane, with as many lanes as have even weights.

    Lanes give their packs in turn, so a lane with fewer tokens would repeat its samples more often. Shards are dealt
    forwards and backwards, the heaviest first; with weights 9 8 7 6 5 4, two lanes get 9 6 5 and 8 7 4.

    Parameters
    ----------
    weights : the tokens of each shard, or a number in proportion. lanes : the desired number; halved until weights
        differ by at most `UNEVEN`.
    """
    heaviest_first = np.argsort(-weights, kind="stable")
    turn = np.arange(len(weights)) % (2 * lanes)
    turn = np.minimum(turn, 2 * lanes - 1 - turn)
    loads = np.bincount(turn, weights[heaviest_first], lanes)
    if lanes > 1 and np.ptp(loads) > UNEVEN * loads.mean():
        return deal_shards(weights, lanes // 2)
    return [heaviest_first[turn == lane] for lane in range(lanes)]


@dataclass(eq=False)
class SampleOrder:
    """The order of a lane's samples, a window at a time: a function of (seed, lane, epoch, window).

    Parameters
    ----------
    ranges_R2 : int64, first sample and the one after the last of each of the lane's shards. window : uses that are
        shuffled with one another. lane : its number; None if there is only one. shuffle : False keeps the stored order.
    weights : of every sample of the store, above 0; None: 1.
    """

    ranges_R2: np.ndarray
    window: int
    seed: int
    lane: int | None
    shuffle: bool = True
    weights: np.ndarray | None = None

    def size(self, epoch: int) -> int:
        """Uses in an epoch."""
        return int(self._counts(self.ranges_R2, epoch).sum())

    def uses(self, epoch: int, window: int) -> np.ndarray:
        """int64 [N, 2], those at positions [window * self.window, ...) of an epoch: uses so far, and the sample."""
        ranges = self._shuffled(self.ranges_R2, "lane", self.lane, "ranges", epoch)
        ends = np.cumsum(self._counts(ranges, epoch))
        start = window * self.window
        stop = min(start + self.window, int(ends[-1]))
        first = np.searchsorted(ends, start, "right")
        last = np.searchsorted(ends, stop, "left")
        samples = np.concatenate([np.arange(a, b) for a, b in ranges[first : last + 1]])
        after = self._used(samples, epoch + 1)
        counts = after - self._used(samples, epoch)
        again = np.repeat(after - np.cumsum(counts), counts)  # so that a sample's uses count up
        uses_N2 = np.stack((np.arange(len(again)) + again, np.repeat(samples, counts)), 1)
        uses_N2 = uses_N2[start - (ends[first - 1] if first else 0) :][: stop - start]
        # a single lane has one window per epoch, and a key of its own, by which runs and figures
        # are reproduced
        key = ("order", epoch) if self.lane is None else ("lane", self.lane, "window", epoch, window)
        return self._shuffled(uses_N2, *key)

    def _used(self, samples: np.ndarray, epoch: int) -> np.ndarray:
        """How often each sample was used before an epoch."""
        # multiples of the golden ratio spread evenly; exact as a float
        phase = samples * 40503 % 65536 / 65536
        return np.floor(epoch * (1.0 if self.weights is None else self.weights[samples]) + phase).astype(np.int64)

    def _counts(self, ranges_R2: np.ndarray, epoch: int) -> np.ndarray:
        """Uses of each range in an epoch."""
        if self.weights is None:
            return ranges_R2[:, 1] - ranges_R2[:, 0]
        every = (np.arange(a, b) for a, b in ranges_R2)
        return np.array([(self._used(s, epoch + 1) - self._used(s, epoch)).sum() for s in every])

    def _shuffled(self, rows: np.ndarray, *key: object) -> np.ndarray:
        if not self.shuffle:
            return rows
        return rows[torch.randperm(len(rows), generator=generator_for(self.seed, *key)).numpy()]


@dataclass(eq=False)
class Lane:
    """The position of a lane: an epoch, a position in it, and the samples that wait for space in a pack."""

    order: SampleOrder
    packer: Packer
    lengths_of: Callable[[np.ndarray], np.ndarray]
    epoch: int = 0
    cursor: int = 0

    def __post_init__(self) -> None:
        self._stream = self._items()

    def next(self) -> list[PackItem]:
        """The samples of the lane's next pack."""
        return self.packer.next(self._stream)

    def _items(self) -> Iterator[PackItem]:
        """Sample after sample, from the lane's position when the first one is taken."""
        while True:
            if self.cursor >= self.order.size(self.epoch):  # beyond it after a change of weights
                self.epoch += 1
                self.cursor = 0
                continue  # as an epoch of small weights may be empty
            window, at = divmod(self.cursor, self.order.window)
            uses_N2 = self.order.uses(self.epoch, window)
            for (use, sample), lengths in zip(uses_N2[at:].tolist(), self.lengths_of(uses_N2[at:, 1]).tolist()):
                self.cursor += 1
                yield PackItem(use, sample, *lengths)

    def state(self) -> dict:
        waiting = [[item.epoch, item.sample] for item in self.packer.waiting]
        return {"epoch": self.epoch, "cursor": self.cursor, "waiting": waiting}

    def restore(self, state: dict) -> None:
        """Continue from a state; only for an unused lane."""
        self.epoch = state["epoch"]
        self.cursor = state["cursor"]
        lengths = self.lengths_of(np.array([sample for _, sample in state["waiting"]], np.int64)).tolist()
        self.packer.waiting = [PackItem(epoch, i, *each) for (epoch, i), each in zip(state["waiting"], lengths)]


class PackOrder:
    """The endless global sequence of packs, as lists of their samples.

    Parameters
    ----------
    capacity : tokens of a pack. buffer_size : of the packer. lanes : at most; 0: chosen for the data set.
    lane_window : samples of a lane that are shuffled with one another.
    one_shape : every pack also has equally many text tokens, conditioning rows and segments, as many as the largest of
    the first `SHAPE_PACKS` needs. Packs that need more hold fewer samples.

    Raises
    ------
    ValueError : a sample is longer than a pack.
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
        one_shape: bool = False,
    ):
        self.store = store
        self.settings = settings
        self.one_shape = one_shape
        self.shuffle = shuffle
        self.capacity = capacity
        self.buffer_size = buffer_size
        self.packs = 0
        for index in store.larger_than((capacity + 1) * settings.patch_volume - 1):
            with contextlib.suppress(SampleError):  # then its size is false: see `lengths_of`
                store.read(index)
                tokens = int(store.voxels(np.array([index]))[0]) // settings.patch_volume
                raise ValueError(
                    f"a pack has {capacity} tokens and must hold sample {index} of {tokens} "
                    f"tokens; set dataset.task_encoder_seq_length={tokens} or more"
                )
        self._make_lanes(lanes or (1 if len(store) < ONE_LANE_BELOW else LANES), lane_window)
        if len(self.lanes) < lanes:
            log.info("dataset.lanes=%d, but whole shards make only %d even lanes", lanes, len(self.lanes))

    def _make_lanes(self, lanes: int, window: int) -> None:
        size = len(self.store)
        seed = self.settings.config.rng.seed
        self.lane_window = window
        # unusable samples have no number, so the last shards may have fewer samples than they
        # claim, or none
        samples, voxels = np.array([(shard.samples, shard.voxels) for shard in self.store.shards], np.int64).T
        ends = np.minimum(np.cumsum(samples), size)
        ranges_R2 = np.stack((np.append(0, ends[:-1]), ends), 1)
        used = ranges_R2[:, 0] < ranges_R2[:, 1]
        # validation, which does not shuffle, uses each sample alike
        weights = self.store.weights(self.settings.config.dataset.clip_weight) if self.shuffle else None
        if weights is not None:
            voxels[used] = np.add.reduceat(weights * self.store.voxels(slice(None)), ranges_R2[used, 0])
        dealt = deal_shards(voxels[used], max(lanes, 1))
        orders = [SampleOrder(ranges_R2[used][s], window, seed, i, weights=weights) for i, s in enumerate(dealt)]
        if len(orders) == 1:
            orders = [SampleOrder(np.array([[0, size]]), WHOLE_SET, seed, None, self.shuffle, weights)]
        self.settings = replace(self.settings, shape=None)
        self.lanes = self._lanes(orders)
        if self.one_shape:
            self.settings = replace(self.settings, shape=self._shape())
            self.lanes = self._lanes(orders)
        # cached, because those of 256 lanes take 30 ms
        self._states = [lane.state() for lane in self.lanes]

    def _lanes(self, orders: list[SampleOrder]) -> list[Lane]:
        shape = self.settings.shape
        return [Lane(order, Packer(self.capacity, self.buffer_size, shape), self.lengths_of) for order in orders]

    def _shape(self) -> PackShape | None:
        """From the lanes' first packs."""
        if not self.store.text_tokens(slice(None)).all():
            log.info("Packs have several shapes, because the index does not say how long the captions are")
            return None
        packs = [self.lanes[i % len(self.lanes)].next() for i in range(SHAPE_PACKS)]
        longest = min(max(shard.largest for shard in self.store.shards) // self.settings.patch_volume, self.capacity)
        shape = PackShape.of(packs, longest, self.settings.text_multiple, self.settings.row_multiple)
        log.info(
            "Every pack has %d tokens, %d text tokens, %d conditioning rows and up to %d samples",
            self.capacity,
            shape.text,
            shape.rows,
            shape.segments - 1,
        )
        return shape

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Tokens, most text tokens and most conditioning rows of each sample, int64 [N, 3].

        Tokens are 0 for a sample that claims more than a pack: it is reported when it is read.
        """
        d = self.settings.config.dataset
        tokens = self.store.voxels(samples) // self.settings.patch_volume
        text = np.maximum(self.store.text_tokens(samples), len(self.store.empty_text))
        if self.settings.config.model.text_padding:
            text[:] = self.settings.config.model.text_padding
        rows = 1 + (d.condition_frames_prob > 0) + (d.condition_last_prob > 0 or self.store.any_given)
        return np.stack((np.where(tokens > self.capacity, 0, tokens), text, np.full(len(tokens), rows)), 1)

    def next(self) -> list[PackItem]:
        number = self.packs % len(self.lanes)
        lane = self.lanes[number]
        items = lane.next()
        self._states[number] = lane.state()
        self.packs += 1
        return items

    def state(self) -> dict:
        """JSON-able; `restore` of it continues with the next pack."""
        return {
            "fingerprint": self.store.fingerprint,
            "contents": self.store.contents,
            "packs": self.packs,
            "lane_window": self.lane_window,
            "one_shape": self.one_shape,
            "lanes": list(self._states),
        }

    def has_grown(self, state: dict) -> bool:
        """Whether the data set has grown since a state. ValueError : see `restore`."""
        if state["fingerprint"] == self.store.fingerprint:
            return False
        # a changed sample leaves its shard, which is then another one; of a foreign data set none
        # is the same
        kept = set(state.get("contents", ())).intersection(self.store.contents)
        if kept and self.settings.config.dataset.may_grow:
            return True
        fix = "dataset.may_grow=true continues with these samples" if kept else "use that dataset.path"
        raise ValueError(
            f"a resumed run must have the data that it began with; the checkpoint is of other data, and {len(kept)} of "
            f"these {len(self.store.contents)} shards are the same; {fix}, or checkpoint.pretrained starts a new run"
        )

    def restore(self, state: dict) -> bool:
        """Continue from a state. Its number of lanes, its window and whether packs have one shape apply, on any device.

        Of a data set that grew (True), every lane begins a new epoch, which no sample was used in: new noise for each.

        Raises
        ------
        ValueError : the data set is another one, or it grew without `dataset.may_grow`.
        """
        grown = self.has_grown(state)
        self.one_shape = bool(state.get("one_shape"))
        self._make_lanes(len(state["lanes"]), state["lane_window"])
        self.packs = state["packs"]
        if grown:
            epoch = 1 + max(at["epoch"] for at in state["lanes"])
            for lane in self.lanes:
                lane.epoch = epoch
        else:
            for number, lane in enumerate(self.lanes):
                lane.restore(state["lanes"][number])
        self._states = [lane.state() for lane in self.lanes]
        return grown


@dataclass(eq=False)
class StepOrder:
    """Which packs make a step.

    Packs have equal tokens but not equal work, because attention grows with the square of a sample's length, and all
    ranks wait for the slowest. So the packs of `window` steps are sorted by work, neighbours make a step, and the steps
    of a window are shuffled. Six packs with work 5 1 9 4 8 2, two per step, and a window of 3:

        sorted  1 2 4 5 8 9    steps  1 2 | 4 5 | 8 9    in random order  8 9 | 1 2 | 4 5

    Attributes
    ----------
    counts : samples and tokens given out so far.
    """

    packs: PackOrder
    packs_per_step: int
    window: int

    def __post_init__(self) -> None:
        self.counts = {"samples": 0, "tokens": 0}
        self._end_window()

    def _end_window(self) -> None:
        self._queue: deque[list[PackItem]] = deque()
        self._start = self.packs.state()
        self._begun = dict(self.counts)
        self._planned = 0

    def _begin_window(self, packs_per_step: int) -> None:
        self._planned = packs_per_step
        packs = [self.packs.next() for _ in range(self.window * packs_per_step)]
        if self.window <= 1:
            self._queue.extend(packs)
            return
        packs.sort(key=lambda pack: sum(item.tokens**2 for item in pack))
        g = generator_for(self.packs.settings.config.rng.seed, "steps", self._begun["samples"])
        for step in torch.randperm(self.window, generator=g).tolist():
            self._queue.extend(packs[step * packs_per_step : (step + 1) * packs_per_step])

    def _take(self) -> list[PackItem]:
        pack = self._queue.popleft()
        self.counts["samples"] += len(pack)
        self.counts["tokens"] += sum(item.tokens for item in pack)
        if not self._queue:
            self._end_window()
        return pack

    def next(self) -> list[list[PackItem]]:
        """The packs of the next step; it may span two windows if the batch size has changed meanwhile."""
        packs = []
        for _ in range(self.packs_per_step):
            if not self._queue:
                self._begin_window(self.packs_per_step)
            packs.append(self._take())
        return packs

    def state(self) -> dict:
        """JSON-able; `restore` continues with the next step: the start of the window and the steps taken of it."""
        taken = self.window * self._planned - len(self._queue)
        steps = {"window": self.window, "packs_per_step": self._planned, "taken": taken, "begun": self._begun}
        return self._start | self.counts | {"steps": steps}

    def restore(self, state: dict) -> None:
        """Continue from a state. Its window applies, not that of the settings. ValueError : see `PackOrder.restore`."""
        steps = state["steps"]
        planned = steps["window"] * steps["packs_per_step"]
        numbers = [steps["taken"], planned - steps["taken"], MOST_PACKS - planned, state["lane_window"] - 1]
        for lane in state["lanes"]:
            numbers += [lane["epoch"], lane["cursor"]]
        if min(numbers) < 0 or max(numbers) >= 1 << 53:  # it may be somebody else's
            raise IndexError("no position in the data")
        grown = self.packs.restore(state)
        begun = state if grown else steps["begun"]
        self.window = steps["window"]
        self.counts = {name: begun[name] for name in self.counts}
        self._end_window()
        if grown:
            return  # the samples of the window that was begun have other numbers now
        if steps["taken"]:
            self._begin_window(steps["packs_per_step"])
        for _ in range(steps["taken"]):
            self._take()
