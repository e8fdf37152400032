"""Which source item goes into which shard of which rank: a pure function of the items' keys and the flags.

Every item is in one shard, and a shard belongs to one split. Unless the source sets it, the split depends on the key
alone, so it stays the same with other ranks and when the source grows. An item takes one byte of memory, and four on
the rank that makes its shard.

In a finished folder whose source grew, what is new goes into new shards, and what was there stays where it is.

Items are compared by key and content, which their shards' records hold. Of a folder of a.png and b.png:

    c.png is added       c goes into a new shard; the shards of a and b keep their bytes
    b.png is changed     b's old sample leaves its shard, which is rewritten; the new one goes into a new shard
    a.png is gone        a stays, because its folder may only be unmounted

The list of all shards with the keys of their items is stored with the plan and replaces `ShardPlans`. Stored latents
are used for every item whose content some record holds (`Stock`), also one of another folder.
"""

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dfm_nb.base.files import Json, read_json
from dfm_nb.base.log import log
from dfm_nb.base.records import Content, EncodedClip, Source
from dfm_nb.data import shards
from dfm_nb.data.shards import SPLITS

VAL_FROM_ITEMS = 20  # of fewer, one item would be more than the default --val-fraction of 5 %

CHANGED = "are changed: their old samples are replaced"
UNKNOWN = "are encoded again, as it is not known whether their content has changed"
OTHER_SPLIT = "keep the split that they were prepared in, where the source now gives another (--overwrite moves them)"
GONE = "are gone from the source and kept, as a folder may only be unmounted (--overwrite leaves them out)"

Layout = list[Json]
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

    def has(self, record: shards.ShardRecord) -> bool:
        """Whether a shard's record is of this plan: it has the newest captions, and nothing that leaves."""
        return record.texts >= self.texts and record.contents.keys().isdisjoint(self.leaving)


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
            own = given(i)
            codes.append(SPLITS.index(own or drawn_split(key, val_fraction, test_fraction)))
            drawn_items += not own
            if not own and i not in first_of:
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
        self._shard_size = shard_size
        self._ranges = balanced_ranges(len(codes), world)
        self.num_items = len(codes)

    def items_of(self, split: str) -> np.ndarray:
        """Indices of the items of a split."""
        return np.flatnonzero(self._codes == SPLITS.index(split))

    def all(self) -> Iterator[ShardPlan]:
        """The shards of all ranks, in order: of each first training, then validation, then test."""
        for rank, (start, stop) in enumerate(self._ranges):
            number = 0
            for code, split in enumerate(SPLITS):
                items = (np.flatnonzero(self._codes[start:stop] == code) + start).astype(np.uint32)
                for first in range(0, len(items), self._shard_size):
                    yield ShardPlan(f"rank{rank}-{number:06d}.tar", split, items[first : first + self._shard_size])
                    number += 1


def share(plans: "ShardPlans | GrownPlans", rank: int, world: int) -> list[ShardPlan]:
    """The shards that rank `rank` of `world` makes.

    They are dealt to and fro, the largest first: shares are about as large, and each has items of all parts of a large
    source, whose stills and clips may be apart.
    """
    sizes = [len(plan.items) for plan in plans.all()]
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    both = 2 * world
    dealt = {*order[rank::both], *order[both - 1 - rank :: both]}
    return [plan for i, plan in enumerate(plans.all()) if i in dealt]


def evenly(items: Sequence[int] | np.ndarray, count: int) -> list[int]:
    """At most `count` of `items`, evenly spaced."""
    count = min(count, len(items))
    return [int(items[i * len(items) // count]) for i in range(count)]


# ---- a source that grew ---------------------------------------------------------------------------


def owner_of(key: str, items: Container[str]) -> str:
    """The item whose key begins a clip's."""
    return next((key[:n] for n in range(len(key), 0, -1) if key[:n] in items), key)


def copies_of(contents: Iterable[tuple[Any, Content | None]]) -> list[tuple[Any, Any]]:
    """(item, the first with its content), of items with what is known of their content."""
    firsts = dict[str, Any]()
    copies = []
    for item, content in contents:
        first = firsts.setdefault(content.sha256, item) if content else item
        if first != item:
            copies.append((item, first))
    return copies


def _placed(records: Iterable[shards.ShardRecord]) -> Iterator[tuple[tuple[str, str], Content | None]]:
    """Key, split and content of each item."""
    for record in records:
        for key, content in record.contents.items():
            yield (key, record.split), content


def warn_of_copies(records: Iterable[shards.ShardRecord]) -> None:
    """Count the items that have the content of an earlier one, and those that are in another split than that."""
    copies = copies_of(_placed(records))
    if copies:
        apart = sum(split != of_first for (_, split), (_, of_first) in copies)
        (key, _), (first, _) = copies[0]
        said = "%d items are copies of others, %d of them in another split; for example %s of %s"
        log.warning(said, len(copies), apart, key, first)


def _records(folder: Path) -> Iterator[shards.ShardRecord]:
    """The records of all shards; those of a manifest's shards must be there and say what the samples were made of."""
    names = {path.name.removesuffix(".json") for path in (folder / shards.RECORDS).glob("*.tar.json")}
    made = {shard["name"] for shard in read_json(folder / "manifest.json").get("shards", ())}
    for name in sorted(names | made):
        record = shards.read_record(folder, name)
        if record is None or (record.samples and not record.contents):
            raise ValueError(
                f"{folder} must have in .dfm what its samples were made of, and does not say it of {name}: an older "
                "version made it, or it was copied without; prepare it again with --overwrite, or another --output-dir"
            )
        yield record


def grow(folder: Path, source: Source, keys: Iterable[str], plan: Json) -> Layout:
    """The shards of a finished folder after its source grew; what is gone, changed or unknown is logged.

    Raises
    ------
    ValueError : the records do not say what the samples were made of.
    """
    records = list(_records(folder))
    held = dict[str, shards.ShardRecord]()
    dropped = set[str]()
    split_of = dict[str, str]()
    for record in records:
        dropped.update(drop["key"] for drop in record.drops)
        held |= dict.fromkeys(record.contents, record)
        split_of |= {content.sha256: record.split for content in record.contents.values() if content}
    leaving = defaultdict(list)
    new = defaultdict(list)
    told = defaultdict(list)
    every = list(keys)
    before_of = [held[key].contents[key] if key in held else None for key in every]
    gone = dict.fromkeys(held)
    with ThreadPool() as pool:
        contents = pool.imap(lambda index: source.content(index, before_of[index]), range(len(every)), 16)
        for index, (key, before, content) in enumerate(zip(every, before_of, contents)):
            gone.pop(key, None)
            given = source.item_split(index)
            split = None
            if key in held:
                record = held[key]
                split = record.split
                if content and before:
                    unchanged = content.sample == before.sample
                else:
                    unchanged = content is before and key in dropped
                if unchanged:
                    if given not in (None, split):
                        told[OTHER_SPLIT].append(key)
                    continue
                leaving[record.name].append(key)
                told[CHANGED if content and before else UNKNOWN].append(key)
            split = given or (content and split_of.get(content.sha256)) or split
            split = split or drawn_split(key, plan["val_fraction"], plan["test_fraction"])
            if content:
                split_of.setdefault(content.sha256, split)
            new[split].append(key)
    told[GONE] = list(gone)
    log.info("%d items are new or changed; %d were prepared before", sum(map(len, new.values())), len(held))
    for what, whose in told.items():
        if whose:
            log.warning("%d items %s; for example %s", len(whose), what, whose[0])
    layout = list[Json]()
    for record in records:
        those = leaving[record.name]
        stay = sorted(record.contents.keys() - those)
        layout.append({"name": record.name, "split": record.split, "keys": stay, "leaving": those})
    # after the last shard, so that samples keep their positions
    rank, number = max(tuple(map(int, re.findall(r"\d+", shard["name"]))) for shard in layout)
    for split in SPLITS:
        for first in range(0, len(new[split]), plan["shard_size"]):
            number += 1
            part = new[split][first : first + plan["shard_size"]]
            layout.append({"name": f"rank{rank}-{number:06d}.tar", "split": split, "keys": part, "leaving": []})
    return layout


class GrownPlans:
    """As `ShardPlans`, of a layout; what is gone from the source is in no plan."""

    def __init__(self, keys: Iterable[str], layout: Layout):
        index_of = {key: index for index, key in enumerate(keys)}
        self.num_items = sum(len(shard["keys"]) for shard in layout)
        self._plans = []
        for shard in layout:
            items = [index_of[key] for key in shard["keys"] if key in index_of]
            self._plans.append(ShardPlan(shard["name"], shard["split"], items, leaving=shard["leaving"]))

    def items_of(self, split: str) -> list[int]:
        """Indices of the items of a split."""
        return list(itertools.chain.from_iterable(plan.items for plan in self._plans if plan.split == split))

    def all(self) -> Iterator[ShardPlan]:
        """The shards of all ranks, in order."""
        yield from self._plans


class Stock:
    """Stored samples of finished folders, and of one that grows, by the content of their items."""

    def __init__(self, folders: Iterable[Path]):
        self._places = dict[Any, tuple[Path, str]]()  # by hash and weight
        for folder in folders:
            for shard in read_json(folder / "manifest.json").get("shards", ()):
                record = shards.read_record(folder, shard["name"])
                if record is None:
                    continue
                dropped = {drop["key"] for drop in record.drops}
                for key, content in record.contents.items():
                    if content and key not in dropped:
                        self._places[content.sample] = folder / record.name, key

    def samples(self, content: Content | None) -> list[tuple[str, EncodedClip]]:
        """Of an item with this content: what follows the item's key in the key of each sample, and the sample."""
        tar, item = self._places.get(content and content.sample, (None, ""))
        try:
            return [(e.key.removeprefix(item), e.read()) for e in _items_of(tar)[item]] if tar else []
        except (KeyError, ValueError, OSError):  # the shard was just rewritten, or is damaged: the item is read again
            return []


@lru_cache(4)
def _items_of(tar: Path) -> dict[str, list[shards.SampleEntry]]:
    """The samples of a shard by the item that they are of."""
    record = shards.read_record(tar.parent, tar.name)
    items = record.contents if record else {}
    entries = defaultdict(list)
    for entry in shards.samples_of(tar):
        entries[owner_of(entry.key, items)].append(entry)
    return dict(entries)
