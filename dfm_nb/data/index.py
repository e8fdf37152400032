"""The index of a split: where each sample lies and how large it is, as columns of one memory-mapped file.

`train.index.arrow` beside the shards is an uncompressed Arrow IPC file. A row is a sample, in the order in which
Energon counts them. Opening reads its last batch's seal alone: shards with sizes and checksums, and of each batch a
checksum and the largest latent. A batch is checked when it is first asked for. A data set without an index has the
same columns made in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dfm_nb.base.files import lies_inside, replacing, sha256
from dfm_nb.base.progress import tqdm
from dfm_nb.base.records import SampleError
from dfm_nb.data.prepared_folder import INDEX, STATISTICS, PreparedFolder, is_adopted, read_manifest, shard_digests
from dfm_nb.data.shard_plan import SPLITS
from dfm_nb.data.shards import (
    PARTS,
    SampleEntry,
    decode_meta,
    decode_sample,
    entries_at,
    how_to_adopt,
    read_parts,
    read_record,
    record_path,
    shards_of,
)

BATCH_ROWS = 1 << 13
SIZES = ("t", "h", "w")
SCHEMA = pa.schema(
    [("key", pa.string()), ("shard", pa.uint32()), ("t", pa.uint16()), ("h", pa.uint16()), ("w", pa.uint16())]
    + [("text_tokens", pa.uint32())]
    + [(f"{part}_{what}", kind()) for part in PARTS for what, kind in (("offset", pa.uint64), ("size", pa.uint32))]
)
"""t, h, w: of the latent. text_tokens: 0 where unknown. Offsets and sizes in bytes; the offset 0: no such part."""

SPLIT_FILES = (".nv-meta/.info.json", ".nv-meta/split.yaml")


class Shard(NamedTuple):
    """A tar as it was indexed. samples: as Energon counts them, those that cannot be used among them."""

    name: str
    samples: int
    bytes: int
    sha256: str


def index_path(folder: str | Path, split: str) -> Path:
    return Path(folder) / f"{split}{INDEX}"


# ---- writing ------------------------------------------------------------------------------------------------------


class IndexWriter:
    """Writes rows in batches, and the seal with the last of them; holds one batch.

    Parameters
    ----------
    sink : path or Arrow stream. shards : all of the split, in order. metadata : checksums of the `SPLIT_FILES`.
    """

    def __init__(self, sink: Any, split: str, shards: list[Shard], metadata: Mapping[str, str]):
        self._writer = pa.ipc.new_file(sink, SCHEMA)
        self._pending = SCHEMA.empty_table()
        self.rows = 0
        self._batches: list[list[int]] = []  # checksum and largest latent of each
        self._dropped: list[list[str]] = []
        self._split, self._shards, self._metadata = split, shards, metadata
        self._voxels = np.zeros(len(shards), np.int64)

    def add(self, rows: pa.Table, dropped: Iterable[tuple[str, str]] = ()) -> None:
        """rows : of `SCHEMA`. dropped : (reason, detail) of samples that have no row."""
        self._pending = pa.concat_tables([self._pending, rows])
        self._dropped += [list(d) for d in dropped]
        while self._pending.num_rows > BATCH_ROWS:  # the last batch waits for the seal
            self._write()

    def close(self) -> None:
        self._write(seal=True)  # also without a row: the schema is written with the first batch
        self._writer.close()

    def _write(self, seal: bool = False) -> None:
        rows = self._pending.slice(0, BATCH_ROWS)
        batch = pa.record_batch([column.combine_chunks() for column in rows.columns], schema=SCHEMA)
        self._pending = self._pending.slice(BATCH_ROWS)
        columns = _columns(batch)
        voxels = _voxels(columns)
        self._batches.append([_crc32(columns), int(voxels.max(initial=0))])
        count = len(self._voxels)
        self._voxels += np.bincount(columns["shard"], voxels, count)[:count].astype(np.int64)
        self.rows += batch.num_rows
        self._writer.write_batch(batch, self._seal() if seal else None)

    def _seal(self) -> dict[str, str]:
        seal = {
            "split": self._split,
            "rows": self.rows,
            "batch_rows": BATCH_ROWS,
            "shards": self._shards,
            "batches": self._batches,
            "voxels": self._voxels.tolist(),
            "dropped": self._dropped,
            "metadata": self._metadata,
        }
        text = json.dumps(seal)
        return {"seal": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _columns(batch: pa.RecordBatch) -> dict[str, np.ndarray]:
    """Views of a batch: a number a row; of the keys their bytes one after another, and where each ends."""
    columns = {name: batch[name].to_numpy(zero_copy_only=True) for name in SCHEMA.names[1:]}
    keys = batch["key"]
    _, offsets, data = keys.buffers()
    ends = np.frombuffer(offsets or bytes(4), np.int32)[keys.offset : keys.offset + len(keys) + 1]
    columns["key"] = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    columns["key_ends"] = ends
    return columns


def _crc32(columns: dict[str, np.ndarray]) -> int:
    ends = columns["key_ends"]
    checksum = zlib.crc32((ends - ends[0]).data)  # a slice's do not begin at 0
    for name in ("key", *SCHEMA.names[1:]):
        checksum = zlib.crc32(columns[name].data, checksum)
    return checksum


def _voxels(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.prod([columns[name].astype(np.int64) for name in SIZES], axis=0)


# ---- from shards --------------------------------------------------------------------------------------------------


def index_split(
    sink: Any, folder: Path, split: str, digests: Mapping[str, str], adopted: bool = False, progress: bool = False
) -> int:
    """Write a split's index from its shards' headers and .json parts, shard by shard; returns its samples.

    Parameters
    ----------
    digests : sha256 by shard, "" where unknown. adopted : `dfm adopt` has measured the samples.
    """
    found = shards_of(folder, split)
    shards = [Shard(s.name, s.count, _bytes(folder / s.name), digests.get(s.name, "")) for s in found]
    writer = IndexWriter(sink, split, shards, split_files(folder))
    total = sum(shard.samples for shard in shards)
    with tqdm(total=total, desc=f"index {split}", unit="sample", disable=not progress or total < 5000) as bar:
        for number, shard in enumerate(shards):
            writer.add(*_scan(folder, number, shard, adopted))
            bar.update(shard.samples)
    writer.close()
    return writer.rows


def write_indexes(
    folder: Path, digests: Mapping[str, str], adopted: bool = False, keep: bool = False
) -> dict[str, int]:
    """The index of each split beside the shards; returns their samples. A split without shards has none.

    Parameters
    ----------
    keep : an index that is whole and fits the shards stays as it is.
    """
    written = {}
    for split in SPLITS:
        path = index_path(folder, split)
        if not shards_of(folder, split):
            path.unlink(missing_ok=True)
            continue
        if keep:
            with contextlib.suppress(ValueError):
                if (held := open_index(folder, split)) is not None:
                    held.check_fits(digests)
                    held.check_whole()
                    written[split] = len(held)
                    continue
        with replacing(path) as temporary:
            written[split] = index_split(str(temporary), folder, split, digests, adopted, progress=True)
    return written


def index_dataset(folder: str | Path) -> dict[str, int]:
    """Write the index of each split of a prepared folder that has none, or whose shards were changed on purpose.

    Returns
    -------
    Samples that can be used, by split.

    Raises
    ------
    ValueError, FileNotFoundError : one sentence with what must hold and how to mend it.
    """
    place = PreparedFolder(folder)
    manifest = read_manifest(place.path, STATISTICS)
    if manifest is None and place.held_plan() is not None:
        raise ValueError(f"{place.path} holds an unfinished preparation; finish it: dfm prepare with --resume")
    digests = shard_digests(manifest)
    with place.turn(), place.full_disk_explained():
        for shard in (s for split in SPLITS for s in shards_of(place.path, split)):
            if shard.name not in digests:
                digests[shard.name] = sha256(place.path / shard.name)
        return write_indexes(place.path, digests, is_adopted(manifest))


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0  # a shard without samples may be gone


def split_files(folder: Path) -> dict[str, str]:
    """Checksums of what says which shards are of a split."""
    return {name: sha256(folder / name) for name in SPLIT_FILES if (folder / name).is_file()}


def _scan(folder: Path, number: int, shard: Shard, adopted: bool) -> tuple[pa.Table, list[tuple[str, str]]]:
    """The rows of a shard, and (reason, detail) of samples that cannot be used and that no manifest names."""
    measured, named = _adopted(folder, shard.name) if adopted else ({}, set())
    rows, dropped = [], []
    for entry in entries_at(folder / shard.name, shard.samples):
        try:
            if isinstance(entry, SampleError):
                raise entry
            if entry.key not in named:
                *grid, tokens = measured.get(entry.key) or _size(entry)
                small = [min(max(n, 0), 0xFFFF) for n in grid]  # a lie is named when the sample is read
                parts = [min(n, 0xFFFFFFFF) for p in PARTS for n in entry.parts.get(p, (0, 0))]
                rows.append((entry.key, number, *small, min(max(tokens, 0), 0xFFFFFFFF), *parts))
        except SampleError as error:
            dropped.append((error.reason, error.detail))
    columns = zip(*rows) if rows else ([] for _ in SCHEMA)
    return pa.table(list(map(list, columns)), schema=SCHEMA), dropped


def _adopted(folder: Path, name: str) -> tuple[dict[str, list[int]], set[str]]:
    """What `dfm adopt` noted of a shard: latent T, H, W and text tokens by key; keys of what cannot be used."""
    record = read_record(folder, name) or {}
    try:
        measured = {key: [int(n) for n in size] for key, size in record.get("measured", {}).items()}
        if not all(len(size) == len(SIZES) + 1 for size in measured.values()):
            raise ValueError
        return measured, {drop["key"] for drop in record.get("drops", [])}
    except (AttributeError, TypeError, KeyError, ValueError):
        raise ValueError(f"{record_path(folder, name)} is damaged; remove it and {how_to_adopt(folder)}") from None


def _size(entry: SampleEntry) -> list[int]:
    """Latent T, H, W and text tokens: as the .json says, or of the latent itself."""
    described = dataclasses.replace(entry, parts={p: span for p, span in entry.parts.items() if p == "json"})
    meta = decode_meta(read_parts(described).get("json"), entry.key)
    said, tokens = meta.get("latent_shape"), meta.get("text_tokens") or 0
    if said is None:
        said = decode_sample(read_parts(entry), entry.key).latent.shape
    return [*said[-3:], tokens]


# ---- reading ------------------------------------------------------------------------------------------------------


class SampleIndex:
    """The rows of a split as columns, none of them copied; safe to use from several threads.

    Parameters
    ----------
    source : Arrow's memory map or buffer. name : of the file, for messages.

    Attributes
    ----------
    shards : all of the split, in order. shard_voxels : int64, the sum of T * H * W of each one's samples.
    dropped : (reason, detail) of samples that have no row.

    Raises
    ------
    ValueError : it is damaged, or does not fit the shards.
    """

    def __init__(self, folder: str | Path, split: str, source: Any, name: str | Path):
        self.folder, self._name = Path(folder), name
        self._batches: dict[int, dict[str, np.ndarray]] = {}
        self._lock = threading.Lock()  # a reader of Arrow is one thread's at a time
        try:
            self._reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False))
            count = self._reader.num_record_batches
            if not count or self._reader.schema != SCHEMA:
                raise ValueError("it has other columns")
            last = self._reader.get_batch_with_custom_metadata(count - 1)[1]
            seal = json.loads(last[b"seal"])
            if hashlib.sha256(last[b"seal"]).hexdigest().encode() != last[b"sha256"]:
                raise ValueError("its seal does not fit its checksum")
            self._rows, self._batch_rows = int(seal["rows"]), int(seal["batch_rows"])
            batches = max(1, -(-self._rows // max(1, self._batch_rows)))
            if seal["split"] != split or self._rows < 0 or not batches == count == len(seal["batches"]):
                raise ValueError("its seal does not fit its rows")
            self.shards = [Shard(str(n), int(c), int(b), str(d)) for n, c, b, d in seal["shards"]]
            self.dropped = [(str(reason), str(detail)) for reason, detail in seal["dropped"]]
            self._checksums, self._largest = np.array(seal["batches"], np.int64).reshape(count, 2).T
            self._ends = np.array([shard.bytes for shard in self.shards], np.uint64)
            self.shard_voxels = np.array(seal["voxels"], np.int64)
            if self.shard_voxels.shape != (len(self.shards),) or self.shard_voxels.min(initial=0) < 0:
                raise ValueError("its seal does not fit its shards")
            self._metadata = dict(seal["metadata"])
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise self._damaged(error) from None
        self._split = split

    def _damaged(self, why: object) -> ValueError:
        said = " ".join(str(why).split())[:200]
        return ValueError(f"{self._name} is damaged ({said}); restore it, or write it again: dfm index {self.folder}")

    def fingerprint(self, digests: Mapping[str, str]) -> str:
        """By which a checkpoint knows the data set, whether its index is a file or not. digests : of the manifest."""
        shards = [[s.name, s.samples, digests.get(s.name, s.bytes)] for s in self.shards]
        return hashlib.sha256(json.dumps([self._split, self._rows, shards]).encode()).hexdigest()[:16]

    def check_fits(self, digests: Mapping[str, str], here: bool = True) -> None:
        """ValueError when it was made of other shards or splits.

        Parameters
        ----------
        digests : sha256 by shard, as the manifest says. here : whether the shards lie beside it.
        """
        for shard in self.shards:
            path = self.folder / shard.name
            other = here and _bytes(path) != shard.bytes
            if not lies_inside(shard.name) or other or digests.get(shard.name, shard.sha256) != shard.sha256:
                break
        else:
            if split_files(self.folder) == self._metadata:
                return
            path = self.folder / SPLIT_FILES[1]
        raise ValueError(
            f"{self._name} does not fit {path}, which has changed since, or is gone; restore that, or, where the "
            f"change is meant, write the index again: dfm index {self.folder}"
        )

    def __len__(self) -> int:
        return self._rows

    def _row(self, index: int) -> tuple[dict[str, np.ndarray], int]:
        batch, row = divmod(index, self._batch_rows)
        return self._batches.get(batch) or self.batch(batch), row

    def batch(self, number: int) -> dict[str, np.ndarray]:
        """Columns of the rows of a batch; ValueError when they are damaged."""
        with self._lock:
            if number not in self._batches:
                try:
                    found = self._reader.get_batch(number)
                    found.validate(full=True)
                    columns = _columns(found)
                    self._check(number, found, columns)
                except (pa.ArrowException, OSError, ValueError) as error:
                    raise self._damaged(error) from None
                self._batches[number] = columns
            return self._batches[number]

    def _check(self, number: int, batch: pa.RecordBatch, columns: dict[str, np.ndarray]) -> None:
        if batch.num_rows != min(self._batch_rows, self._rows - number * self._batch_rows):
            raise ValueError(f"batch {number} has {batch.num_rows} rows")
        if _crc32(columns) != self._checksums[number]:
            raise ValueError(f"batch {number} does not fit its checksum")
        # whoever made it may have sealed a lie
        largest = _voxels(columns).max(initial=0)
        if columns["shard"].max(initial=0) >= len(self.shards) or largest != self._largest[number]:
            raise ValueError(f"batch {number} names a shard that is not listed, or a larger latent")
        ends = self._ends[columns["shard"]]
        for part in PARTS:
            offset, size = columns[f"{part}_offset"], columns[f"{part}_size"]
            if (offset > ends).any() or (size > ends - offset).any():
                raise ValueError(f"batch {number} names bytes beyond the end of a shard")

    def check_whole(self) -> None:
        """ValueError when any batch is damaged."""
        for number in range(len(self._checksums)):
            self.batch(number)

    def larger_than(self, voxels: int) -> Iterator[int]:
        """Samples whose latent has more than T * H * W voxels; by batch, the largest first."""
        for number in np.argsort(-self._largest, kind="stable"):
            if self._largest[number] <= voxels:
                return
            sizes = _voxels(self.batch(int(number)))
            for row in np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes > voxels)]:
                yield int(number) * self._batch_rows + int(row)

    def voxels(self, samples: np.ndarray) -> np.ndarray:
        """T * H * W of the latents, int64."""
        out = np.empty(len(samples), np.int64)
        batches = samples // self._batch_rows
        for number in np.unique(batches):
            here, columns = batches == number, self.batch(int(number))
            rows = samples[here] % self._batch_rows
            out[here] = _voxels({name: columns[name][rows] for name in SIZES})
        return out

    def grid(self, index: int) -> tuple[int, int, int]:
        """Latent T, H, W."""
        columns, row = self._row(index)
        return int(columns["t"][row]), int(columns["h"][row]), int(columns["w"][row])

    def entry(self, index: int) -> SampleEntry:
        """Where a sample lies; without its .json."""
        columns, row = self._row(index)
        start, end = columns["key_ends"][row : row + 2] - columns["key_ends"][0]
        key = columns["key"][start:end].tobytes().decode()
        spans = {p: (int(columns[f"{p}_offset"][row]), int(columns[f"{p}_size"][row])) for p in PARTS}
        shard = self.folder / self.shards[columns["shard"][row]].name
        return SampleEntry(key, shard, {p: span for p, span in spans.items() if span[0]}, {})


def open_index(folder: str | Path, split: str) -> SampleIndex | None:
    """The index beside the shards, memory-mapped; None when there is none."""
    path = index_path(folder, split)
    return _open(path, split) if path.is_file() else None


def _open(path: Path, split: str) -> SampleIndex:
    try:
        source = pa.memory_map(str(path))
    except (OSError, ValueError) as error:  # an empty file
        raise ValueError(f"{path} is damaged ({error}); write it again: dfm index {path.parent}") from None
    return SampleIndex(path.parent, split, source, path)


def is_whole(path: Path, split: str) -> bool:
    """Whether a file is an index of the split, with every batch undamaged."""
    try:
        _open(path, split).check_whole()
    except ValueError:
        return False
    return True


def index_in_memory(
    folder: str | Path, split: str, digests: Mapping[str, str], adopted: bool, progress: bool
) -> SampleIndex:
    """What `dfm index` would write."""
    sink = pa.BufferOutputStream()
    index_split(sink, Path(folder), split, digests, adopted, progress)
    return SampleIndex(folder, split, sink.getvalue(), index_path(folder, split))
