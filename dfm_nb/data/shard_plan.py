"""Which source item goes into which shard of which rank: a pure function of the items' keys and the flags.

Every item is in one shard, and a shard belongs to one split. Unless the source sets it, the split depends on the key
alone, so it stays the same with other ranks and when the source grows. An item takes one byte of memory, and four on
the planned rank.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SPLITS = ("train", "val", "test")
VAL_FROM_ITEMS = 20  # of fewer, one item would be more than the default --val-fraction of 5 %


Layout = list[dict[str, Any]]
"""Of each shard its name, split, keys of items, and those that are leaving it."""


class ShardPlan(NamedTuple):
    """One shard: its name in the folder, its split and the indices of the source items that go into it.

    texts : number of times that the folder's captions were encoded again.
    leaving : keys of items whose samples leave the shard.
    """

    name: str
    split: str
    items: Sequence[int] | np.ndarray
    texts: int = 0
    leaving: Sequence[str] = ()

    def has(self, record: Mapping[str, Any]) -> bool:
        """Whether a shard's record is of this plan: it has the newest captions, and nothing that leaves."""
        return record["texts"] >= self.texts and record.get("contents", {}).keys().isdisjoint(self.leaving)


def drawn_split(key: str, val_fraction: float, test_fraction: float) -> str:
    """The split of an item for which the source gives none."""
    u = int.from_bytes(_digest(key)[:8], "big") / 2**64
    return "val" if u < val_fraction else "test" if u < val_fraction + test_fraction else "train"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def balanced_ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous ranges whose sizes differ by at most one, larger ones last: 834 over 4 is 208, 208, 209, 209."""
    base, extra = divmod(count, parts)
    starts = [part * base + max(0, part - (parts - extra)) for part in range(parts + 1)]
    return list(itertools.pairwise(starts))


class ShardPlans:
    """The shards of a preparation that `world` processes started.

    Parameters
    ----------
    keys : of the items, in order; read once. Training always has an item. Another split has one if its fraction is an
        item or more, or if there are 20 items or more and its fraction is not 0.
    given : an item's split by its index, from the source; None to use the fractions.
    copies : (item, the first with its content); it has the split of that one.

    Attributes
    ----------
    ranges : the items of each rank, first and one past the last.
    """

    def __init__(
        self,
        keys: Iterable[str],
        val_fraction: float,
        test_fraction: float,
        world: int = 1,
        shard_size: int = 250,
        given: Callable[[int], str | None] = lambda index: None,
        copies: Iterable[Sequence[int]] = (),
    ):
        first_of = {item: first for item, first in copies if not given(item)}
        codes = bytearray()
        drawn_items = 0
        lowest = list[tuple[bytes, int]]()  # two hashes, and whose they are
        highest = (b"", 0)
        for i, key in enumerate(keys):
            digest = _digest(key)
            codes.append(SPLITS.index(given(i) or drawn_split(key, val_fraction, test_fraction)))
            drawn_items += not given(i)
            if not given(i) and i not in first_of:
                lowest = sorted([*lowest, (digest, i)])[:2]
                highest = max(highest, (digest, i))
        # train takes the highest hash, val the lowest and test the next, so that none takes
        # another's only item
        takers = (highest, lowest[0], lowest[-1]) if lowest else ()
        for code, (fraction, (_, item)) in enumerate(zip((1, val_fraction, test_fraction), takers)):
            wanted = fraction * drawn_items >= 1 or (fraction > 0 and drawn_items >= VAL_FROM_ITEMS)
            if wanted and code not in codes:
                codes[item] = code
        for item, first in first_of.items():
            codes[item] = codes[first]
        self._codes = np.frombuffer(codes, np.uint8)
        self._world = world
        self._shard_size = shard_size
        self.ranges = balanced_ranges(len(codes), world)
        sizes = [np.bincount(self._codes[start:stop], minlength=len(SPLITS)) for start, stop in self.ranges]
        self.num_items = len(codes)
        self.num_shards = int((-(-np.array(sizes) // shard_size)).sum())

    def items_of(self, split: str) -> np.ndarray:
        """Indices of the items of a split."""
        return np.flatnonzero(self._codes == SPLITS.index(split))

    def of_rank(self, rank: int) -> Iterator[ShardPlan]:
        """The shards of one original rank: first training, then validation, then test."""
        start, stop = self.ranges[rank]
        number = 0
        for code, split in enumerate(SPLITS):
            items = (np.flatnonzero(self._codes[start:stop] == code) + start).astype(np.uint32)
            for first in range(0, len(items), self._shard_size):
                yield ShardPlan(f"rank{rank}-{number:06d}.tar", split, items[first : first + self._shard_size])
                number += 1

    def all(self) -> Iterator[ShardPlan]:
        """The shards of all ranks, in order."""
        for rank in range(self._world):
            yield from self.of_rank(rank)

    def share(self, rank: int, world: int) -> list[ShardPlan]:
        """The shards that rank `rank` of `world` makes: its own, or an equal part of all if another world started."""
        if world == self._world:
            return list(self.of_rank(rank))
        return list(itertools.islice(self.all(), *balanced_ranges(self.num_shards, world)[rank]))


def evenly(items: Sequence[int] | np.ndarray, count: int) -> list[int]:
    """At most `count` of `items`, evenly spaced."""
    count = min(count, len(items))
    return [int(items[i * len(items) // count]) for i in range(count)]
