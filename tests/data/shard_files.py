"""Shards written from samples at hand."""

from collections.abc import Iterable
from pathlib import Path

from dfm_nb.base.records import EncodedClip
from dfm_nb.data.shards import ShardWriter


def write_shard(path: Path, samples: Iterable[EncodedClip]) -> tuple[str, int]:
    """(sha256, bytes) of the shard."""
    writer = ShardWriter(path)
    for clip in samples:
        writer.add(clip)
    return writer.close()
