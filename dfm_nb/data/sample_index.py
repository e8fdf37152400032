"""The index of a split: position and size of each sample, as columns of one memory-mapped file.

`train.index.arrow` next to the shards is an uncompressed Arrow IPC file of one batch. A row is a usable sample, in the
order of the shards and of the samples in them:

    key      shard  t  h  w  text_tokens  offset   size
    image-7      0  1  8  8           12  403456  20480      `shard` counts the names in the schema's metadata

The folder's listing (`prepared_folder`) has its checksum, which is compared once, when the index is opened.
"""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dfm_nb.base import files, geometry
from dfm_nb.base.log import tqdm
from dfm_nb.base.records import SampleError
from dfm_nb.data import prepared_folder
from dfm_nb.data.captioning import LEAST_WEIGHT, MOST_WEIGHT, weight_of
from dfm_nb.data.shards import SPLITS, SampleEntry, Splits, samples_of

SCHEMA = pa.schema(
    [("key", pa.large_string()), ("shard", pa.uint32()), ("t", pa.uint16()), ("h", pa.uint16()), ("w", pa.uint16())]
    + [("text_tokens", pa.uint32()), ("offset", pa.uint64()), ("size", pa.uint64())]
)
"""t, h, w: of the latent. text_tokens: 0 if unknown. offset, size: of the sample in its tar, in bytes."""
OPTIONAL = {"weight": (pa.float32(), 1), "given": (pa.uint32(), 0), "more_text": (pa.uint32(), 0)}
"""Columns with type and usual value; one with no other value is left out. given: voxels of what is given beside it.
more_text: tokens of the longest caption after the first one."""


def schema_with(optional: Iterable[str]) -> pa.Schema:
    """`SCHEMA` and some columns of `OPTIONAL`."""
    return pa.schema([*SCHEMA, *((name, OPTIONAL[name][0]) for name in optional)])


class Shard(NamedTuple):
    """A tar as it was indexed.

    samples: including unusable ones. voxels, largest: sum and maximum of T * H * W, with what is given, of the usable.
    """

    name: str
    samples: int
    voxels: int
    largest: int


Measure = Callable[[SampleEntry], Sequence[int] | None]
"""Latent T, H, W and text tokens of a sample; None for a sample without a row. SampleError: it cannot be used."""


def described(entry: SampleEntry) -> list[int]:
    """A `Measure`: the sizes in the .json, or those of the latent itself."""
    size = entry.meta.get("latent_shape") or entry.read().latent.shape
    return [*size[-3:], entry.meta.get("text_tokens") or 0]


# ---- writing -------------------------------------------------------------------------------------


def write_indexes(folder: Path, splits: Splits, measure: Measure = described) -> None:
    """The index of each split, next to its shards, from headers and .json parts; a split without shards has none."""
    for split in SPLITS:
        if not splits.get(split):
            index_path(folder, split).unlink(missing_ok=True)
    with tqdm(total=sum(map(len, splits.values())), desc="index", unit="shard", delay=3) as bar:
        for split, names in splits.items():
            if names:
                _index_split(folder, split, names, measure, bar)


def _index_split(folder: Path, split: str, names: list[str], measure: Measure, bar: Any) -> None:
    tables, shards, dropped = [], [], []
    for number, name in enumerate(names):
        entries = samples_of(folder / name)
        rows = []
        voxels = []
        for entry in entries:
            try:
                size = measure(entry)
                if size is None:
                    continue
                # a false value that does not fit its column is reported when the sample is read
                t, h, w, tokens = (min(max(n, 0), 0xFFFF) for n in size)
                weight = weight_of(entry.meta.get("weight"), f"{entry.key} of {entry.shard}")
            except SampleError as error:
                dropped.append((error.reason, error.detail))
                continue
            given = sum(map(math.prod, entry.meta.get("given_shapes") or ()))
            voxels.append(t * h * w + given)
            rows.append(
                {
                    "key": entry.key,
                    "shard": number,
                    "t": t,
                    "h": h,
                    "w": w,
                    "text_tokens": tokens,
                    "offset": entry.offset,
                    "size": entry.size,
                    "weight": weight,
                    "given": given,
                    "more_text": min(max(entry.meta.get("more_text_tokens") or [0]), 0xFFFF),
                }
            )
        tables.append(pa.Table.from_pylist(rows, schema_with(OPTIONAL)))
        shards.append(Shard(name, len(entries), sum(voxels), max(voxels, default=0)))
        bar.update()
    table = pa.concat_tables(tables)
    varied = [name for name, (_, usual) in OPTIONAL.items() if (table[name].to_numpy() != usual).any()]
    write_index(index_path(folder, split), table.select([*SCHEMA.names, *varied]), shards, dropped)


def write_index(path: Path, table: pa.Table, shards: list[Shard], dropped: list[tuple[str, str]]) -> None:
    """table : of `schema_with` some columns. dropped : (reason, detail) of samples that have no row."""
    about = {"shards": json.dumps(shards), "dropped": json.dumps(dropped)}
    (batch,) = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], SCHEMA)]
    schema = batch.schema.with_metadata(about)
    with files.replacing(path) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
        writer.write_batch(batch)


# ---- reading -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sizes:
    """Latent sizes of samples. columns : `t`, `h` and `w` of each. shards : that the samples are in."""

    columns: dict[str, np.ndarray]
    shards: list[Shard]

    def __len__(self) -> int:
        return len(self.columns["t"])

    def _column(self, name: str, samples: np.ndarray | slice) -> np.ndarray:
        return self.columns[name][samples].astype(np.int64)

    def voxels(self, samples: np.ndarray | slice) -> np.ndarray:
        """T * H * W of the latents and of what is given beside them, int64."""
        voxels = self._column("t", samples) * self._column("h", samples) * self._column("w", samples)
        return voxels + self._column("given", samples) if self.any_given else voxels

    def text_tokens(self, samples: np.ndarray | slice) -> np.ndarray:
        """Of each sample's longest caption, int64; 0 if unknown."""
        tokens = self._column("text_tokens", samples)
        return np.maximum(tokens, self._column("more_text", samples)) if "more_text" in self.columns else tokens

    @property
    def any_given(self) -> bool:
        """Whether pictures or clips are given beside some sample."""
        return "given" in self.columns

    def weights(self, clip_weight: float) -> np.ndarray | None:
        """How often an epoch uses each sample, float64; None: once. clip_weight : of clips, on top of their own."""
        # the usual case, which takes no memory
        if "weight" not in self.columns and clip_weight == 1:
            return None
        return self.columns.get("weight", 1.0) * np.where(self.columns["t"] > 1, clip_weight, 1.0)

    def larger_than(self, voxels: int) -> np.ndarray:
        """Samples of more voxels, with what is given beside them, the largest first."""
        # the usual case; the sizes of all take memory
        if max(shard.largest for shard in self.shards) <= voxels:
            return np.empty(0, np.int64)
        sizes = self.voxels(slice(None))
        return np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes > voxels)]

    def most_frames(self) -> int:
        """T of the longest latent."""
        return int(self.columns["t"].max(initial=1))

    def of_kind(self, still: bool) -> np.ndarray:
        """All stills, or all clips; int64."""
        return np.flatnonzero((self.columns["t"] == 1) == still)

    def sizes(self, samples: np.ndarray | slice = slice(None)) -> dict[geometry.Size, int]:
        """Number of samples by frames, height and width in px, the smallest first."""
        grids = Counter(zip(*(self.columns[side][samples].tolist() for side in "thw")))
        return {geometry.pixel_size(*grid): count for grid, count in sorted(grids.items())}

    def grid(self, index: int) -> geometry.Size:
        """Latent T, H, W."""
        t, h, w = (int(self.columns[side][index]) for side in "thw")
        return t, h, w


class SampleIndex(Sizes):
    """The rows of a split as columns, none of them copied; safe to use from several threads.

    Parameters
    ----------
    here : whether the shards are next to the index; a server's are not.

    Attributes
    ----------
    shards : all of the split, in order. dropped : (reason, detail) of samples that have no row.

    Raises
    ------
    ValueError : the index or a shard's size does not match the folder's checksums, or it names a shard without one.
    """

    def __init__(self, folder: Path, split: str, here: bool = True):
        self.folder = folder
        self.split = split
        self._listed = prepared_folder.read_checksums(self.folder)
        path = index_path(folder, split)
        fix = prepared_folder.MEND.format(folder)
        files.check(self.folder, self._listed, [path.name], fix)
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            if reader.schema != schema_with(name for name in OPTIONAL if name in reader.schema.names):
                raise ValueError("it has other columns")
            about = reader.schema.metadata
            batch = reader.get_batch(0)
            batch.validate(full=True)  # offsets in a forged file could point beyond its end
            if any(column.null_count for column in batch.columns):
                raise ValueError("it has empty cells")
            self._keys = batch["key"]
            columns = {name: np.from_dlpack(batch[name]) for name in batch.schema.names[1:]}
            shards = [Shard(str(name), *np.array(n, np.int64).tolist()) for name, *n in files.parsed(about[b"shards"])]
            if not all(LEAST_WEIGHT <= w <= MOST_WEIGHT for w in columns.get("weight", ())):
                raise ValueError(f"weights must be from {LEAST_WEIGHT} to {MOST_WEIGHT}")
            super().__init__(columns, shards)
            self.dropped = [(str(reason), str(detail)) for reason, detail in files.parsed(about[b"dropped"])]
            if self.columns["shard"].max(initial=0) >= max(1, len(self.shards)):
                raise ValueError("it has samples of a shard that it does not list")
        # what others may have written decodes to something else
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError, pa.ArrowException) as error:
            raise ValueError(f"{path} is damaged ({' '.join(str(error).split())[:200]}); {fix}") from None
        for shard in self.shards:
            tar = self.folder / shard.name
            listed = self._listed.get(shard.name)
            whole = not here or (listed and tar.is_file() and tar.stat().st_size == listed["bytes"])
            if listed is None or not whole:
                raise ValueError(f"{path} does not fit {tar}, which has changed since or is gone; {fix}")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the shards' names and checksums, by which a checkpoint recognises its data set."""
        shards = [[s.name, s.samples, self._listed[s.name]["sha256"]] for s in self.shards]
        return hashlib.sha256(json.dumps([self.split, len(self), shards]).encode()).hexdigest()[:16]

    @functools.cached_property
    def contents(self) -> list[str]:
        """Short checksums of the folder's tars, by which a folder that grew is recognised."""
        return sorted(file["sha256"][:16] for name, file in self._listed.items() if name.endswith(".tar"))

    @property
    def keys(self) -> list[str]:
        """Keys of all samples, in order: a Python object each."""
        return self._keys.to_pylist()

    def entry(self, index: int) -> SampleEntry:
        """Position of a sample."""
        shard, offset, size = (int(self.columns[name][index]) for name in ("shard", "offset", "size"))
        return SampleEntry(self._keys[index].as_py(), self.folder / self.shards[shard].name, offset, size)


def index_path(folder: Path, split: str) -> Path:
    return folder / f"{split}{prepared_folder.INDEX}"
