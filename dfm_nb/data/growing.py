"""A finished folder whose source grew: what is new goes into new shards, and what was there stays where it is.

Items are compared by key and content, which their shards' records hold. Of a folder of a.png and b.png:

    c.png is added       c goes into a new shard; the shards of a and b keep their bytes
    b.png is changed     b's old sample leaves its shard, which is rewritten; the new one goes into a new shard
    a.png is gone        a stays, because its folder may only be unmounted

The list of all shards with the keys of their items is stored with the plan and replaces `ShardPlans`. Stored latents
are used for every item whose content some record holds (`Stock`), also one of another folder.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb.base.files import read_json
from dfm_nb.base.log import log
from dfm_nb.base.records import Content, EncodedClip, Source
from dfm_nb.data import shards
from dfm_nb.data.shard_plan import SPLITS, Layout, ShardPlan, drawn_split

CHANGED = "are changed: their old samples are replaced"
UNKNOWN = "are encoded again, as it is not known whether their content has changed"
OTHER_SPLIT = "keep the split that they were prepared in, where the source now gives another (--overwrite moves them)"
GONE = "are gone from the source and kept, as a folder may only be unmounted (--overwrite leaves them out)"


def owner_of(key: str, items: Mapping[str, Any]) -> str:
    """The item whose key begins a clip's."""
    return next((key[:n] for n in range(len(key), 0, -1) if key[:n] in items), key)


def find_copies(source: Source, count: int) -> list[tuple[int, int]]:
    """(item, the first with its content) of items whose content was hashed already."""
    firsts = dict[str, int]()
    copies = list[tuple[int, int]]()
    for index in range(count):
        content = source.content(index, hashed=True)
        if content and firsts.setdefault(content.sha256, index) != index:
            copies.append((index, firsts[content.sha256]))
    return copies


def warn_of_copies(records: Iterable[Mapping[str, Any]]) -> None:
    """Count the items that have the content of an earlier one, and those that are in another split than that."""
    firsts = dict[bytes, tuple[str, str]]()
    copies = list[tuple[str, str]]()
    apart = 0
    for record in records:
        for key, content in record.get("contents", {}).items():
            if content:
                split, first = firsts.setdefault(bytes.fromhex(content[0]), (record["split"], key))
                apart += split != record["split"]
                if first != key:
                    copies.append((key, first))
    if copies:
        said = "%d items are copies of others, %d of them in another split; for example %s of %s"
        log.warning(said, len(copies), apart, *copies[0])


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of all shards; those of a manifest's shards must be there and say what the samples were made of."""
    names = {path.name.removesuffix(".json") for path in (folder / shards.RECORDS).glob("*.tar.json")}
    made = {shard["name"] for shard in read_json(folder / "manifest.json").get("shards", ())}
    for name in sorted(names | made):
        record = shards.read_record(folder, name)
        if record is None or "contents" not in record:
            raise ValueError(
                f"{folder} must have in .dfm what its samples were made of, and does not say it of {name}: an older "
                "version made it, or it was copied without; prepare it again with --overwrite, or another --output-dir"
            )
        yield record


def grow(folder: Path, source: Source, keys: Iterable[str], plan: Mapping[str, Any]) -> Layout:
    """The shards of a finished folder after its source grew; what is gone, changed or unknown is logged.

    Raises
    ------
    ValueError : the records do not say what the samples were made of.
    """
    records = list(_records(folder))
    held = dict[str, tuple[Content | None, dict[str, Any]]]()
    dropped = set[str]()
    for record in records:
        dropped.update(drop["key"] for drop in record["drops"])
        for key, content in record["contents"].items():
            held[key] = content and Content(*content), record
    split_of = {content.sha256: record["split"] for content, record in held.values() if content}
    leaving = defaultdict[str, list[str]](list)
    new = defaultdict[str, list[str]](list)
    told = defaultdict[str, list[str]](list)

    def content_of(numbered: tuple[int, str]) -> tuple[int, str, Content | None]:
        index, key = numbered
        return index, key, source.content(index, held[key][0] if key in held else None)

    gone = dict.fromkeys(held)
    with ThreadPool() as pool:
        for index, key, content in pool.imap(content_of, enumerate(keys), 16):
            gone.pop(key, None)
            given = source.item_split(index)
            split = None
            if key in held:
                before, record = held[key]
                split = record["split"]
                if content and before:
                    unchanged = content.same(before)
                else:
                    unchanged = content is before and key in dropped
                if unchanged:
                    if given not in (None, split):
                        told[OTHER_SPLIT].append(key)
                    continue
                leaving[record["name"]].append(key)
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
    layout = list[dict[str, Any]]()
    for record in records:
        those = leaving[record["name"]]
        stay = sorted(record["contents"].keys() - those)
        layout.append({"name": record["name"], "split": record["split"], "keys": stay, "leaving": those})
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

    ranges = None

    def __init__(self, keys: Iterable[str], layout: Layout):
        index_of = {key: index for index, key in enumerate(keys)}
        self.num_items = sum(len(shard["keys"]) for shard in layout)
        self._plans = list[ShardPlan]()
        for shard in layout:
            items = [index_of[key] for key in shard["keys"] if key in index_of]
            indices = np.array(items, np.uint32)
            plan = ShardPlan(shard["name"], shard["split"], indices, leaving=shard["leaving"])
            self._plans.append(plan)

    def items_of(self, split: str) -> np.ndarray:
        """Indices of the items of a split."""
        return np.concatenate([np.empty(0, np.uint32), *(p.items for p in self._plans if p.split == split)])

    def all(self) -> Iterator[ShardPlan]:
        """The shards of all ranks, in order."""
        yield from self._plans

    def share(self, rank: int, world: int) -> list[ShardPlan]:
        """The shards that rank `rank` of `world` makes."""
        return self._plans[rank::world]


class Stock:
    """Stored samples of finished folders, and of one that grows, by the content of their items."""

    def __init__(self, folders: Iterable[Path]):
        self._places = dict[Any, tuple[Path, str]]()  # by hash and weight
        for folder in folders:
            for shard in read_json(folder / "manifest.json").get("shards", ()):
                record = shards.read_record(folder, shard["name"]) or {}
                dropped = {drop["key"] for drop in record.get("drops", ())}
                for key, content in record.get("contents", {}).items():
                    if content and key not in dropped:
                        self._places[content[0], content[2]] = folder / shard["name"], key

    def samples(self, content: Content | None) -> list[tuple[str, EncodedClip]]:
        """Of an item with this content: what follows the item's key in the key of each sample, and the sample."""
        tar, item = self._places.get(content and content[::2], (None, ""))
        try:
            return [(e.key.removeprefix(item), e.read()) for e in _items_of(tar)[item]] if tar else []
        except (KeyError, ValueError, OSError):  # the shard was just rewritten, or is damaged: the item is read again
            return []


@lru_cache(4)
def _items_of(tar: Path) -> dict[str, list[shards.SampleEntry]]:
    """The samples of a shard by the item that they are of."""
    record = shards.read_record(tar.parent, tar.name) or {"contents": {}}
    entries = defaultdict[str, list[shards.SampleEntry]](list)
    for entry in shards.samples_of(tar):
        entries[owner_of(entry.key, record["contents"])].append(entry)
    return dict(entries)
