"""Which source item goes into which shard of which rank: a pure function of the items' keys and the flags.

Every item is in one shard, and a shard belongs to one split. The split depends on the key alone, so it survives a
change of the ranks and a source that grows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

SPLITS = ("train", "val", "test")
VAL_FROM_ITEMS = 20


@dataclass(frozen=True)
class ShardPlan:
    """One shard: its file name, its split and the indices of the source items that go into it."""

    name: str
    split: str
    items: tuple[int, ...]


def balanced_ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous ranges whose sizes differ by at most one, larger ones last: 834 over 4 is 208, 208, 209, 209."""
    base, extra = divmod(count, parts)
    out, start = [], 0
    for part in range(parts):
        stop = start + base + (part >= parts - extra)
        out.append((start, stop))
        start = stop
    return out


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def split_of(key: str, val_fraction: float, test_fraction: float) -> str:
    """train, val or test from a hash of the item's key."""
    u = int.from_bytes(_hash(key)[:8], "big") / 2**64
    return "val" if u < val_fraction else "test" if u < val_fraction + test_fraction else "train"


def splits_of(keys: list[str], val_fraction: float, test_fraction: float) -> list[str]:
    """The split of each item. Of 20 items or more one is for validation whenever a fraction was asked for."""
    splits = [split_of(k, val_fraction, test_fraction) for k in keys]
    if val_fraction > 0 and len(keys) >= VAL_FROM_ITEMS and "val" not in splits:
        splits[min(range(len(keys)), key=lambda i: _hash(keys[i]))] = "val"
    return splits


def plan_all(splits: list[str], world: int, shard_size: int) -> list[list[ShardPlan]]:
    """The shards of each rank from the split of each item: first training, then validation, then test."""
    ranks = []
    for rank, (start, stop) in enumerate(balanced_ranges(len(splits), world)):
        plans: list[ShardPlan] = []
        for split in SPLITS:
            items = [i for i in range(start, stop) if splits[i] == split]
            for first in range(0, len(items), shard_size):
                name = f"rank{rank}-{len(plans):06d}.tar"
                plans.append(ShardPlan(name, split, tuple(items[first : first + shard_size])))
        ranks.append(plans)
    return ranks


def evenly(items: list[int], count: int) -> list[int]:
    """At most `count` of `items`, evenly spaced."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
