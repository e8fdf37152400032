"""Shards written from samples at hand."""

from collections.abc import Iterable
from pathlib import Path

from dfm_nb.base.records import EncodedClip
from dfm_nb.data.shards import ShardWriter


def write_shard(path: Path, samples: Iterable[EncodedClip]) -> tuple[str, int]:
    """A whole shard, or none when `samples` breaks off; returns (sha256, bytes)."""
    writer = ShardWriter(path)
    try:
        for clip in samples:
            writer.add(clip)
        return writer.close()
    except BaseException:
        writer.abort()
        raise
