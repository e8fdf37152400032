"""`table:FILE`: rows of a CSV, TSV, JSONL or parquet file, each with captions and an image or a video.

The table is a local path, `hf://datasets/...` or an http(s) URL. The media column holds image bytes (raw, or the hub's
struct of bytes and path), a path (absolute, or relative to the table), a file:// URL or an http(s) URL. Of several such
columns (`image`, `image_url`, ...) each row uses the first that is not empty. Nothing that is fetched is kept on disk.
A table that you name may hold any path; one that is fetched only paths below the working directory and addresses of
the internet, unless `allow_outside`. From Python the table may be a DataFrame, whose media column may also hold PIL
images and uint8 arrays. A caption is a text or a list of texts; a column `tags` or `keywords` holds tags.

An empty cell, a null and a NaN are None. No type is guessed in a text file: the caption 007 stays "007", and NA is one.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dfm_nb.base.options import Options, option
from dfm_nb.base.records import Clip, SampleError
from dfm_nb.data.captioning import TAG_COLUMNS, tags_of, texts_of
from dfm_nb.data.sources import _fetch
from dfm_nb.data.sources._media import MediaFlags, MediaOptions, key_of, listing_sha256

if TYPE_CHECKING:
    import pandas as pd


class ColumnFlags(Options):
    image_column: str | None = option(None, "table: column with image bytes, paths or URLs")
    caption_column: str | None = option(None, "table: column with captions")


class Flags(MediaFlags, ColumnFlags):
    pass


MEDIA_COLUMNS = "image video image_path video_path path file file_name filename image_url video_url url".split()
CAPTION_COLUMNS = ("caption", "text", "prompt", "name")
FETCHED = ("hf://", "http://", "https://")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
BINARY = (pa.binary(), pa.large_binary())
GROUPS_HELD = 2  # row groups of a parquet column of pictures that are in memory

Rows = Mapping[str, Sequence[Any]]
"""A table: {column: its values}."""


# ---- reading tables -----------------------------------------------------------------------------------------------


class StoredPictures(Sequence):
    """A parquet column of pictures, read by row groups. Safe to share between threads.

    With groups of 3, 3 and 2 rows they start at rows 0, 3 and 6, and row 4 is row 1 of group 1.
    """

    def __init__(self, path: Path, column: str):
        file, self._lock = pq.ParquetFile(path), threading.Lock()
        self._starts = np.cumsum([0, *(file.metadata.row_group(g).num_rows for g in range(file.num_row_groups))])
        self._group = lru_cache(GROUPS_HELD)(lambda group: file.read_row_group(group, columns=[column]).column(0))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: Any) -> Any:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        with self._lock:  # or threads that miss the same group would all read it
            return self._group(group)[row - int(self._starts[group])].as_py()


def read_rows(path: Path) -> Rows:
    """The rows of a file, read as its suffix says; of parquet, text is held in memory and pictures are not.

    Raises
    ------
    FileNotFoundError : the path. ValueError : its kind or content, with the line where known; or it has no rows.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not a file; name a table ({', '.join(SUFFIXES)}), or a folder as folder:DIR"
        )
    suffix = path.suffix.lower()
    try:
        if suffix not in SUFFIXES:
            raise ValueError(f"it must end in {', '.join(SUFFIXES)}; convert or rename it")
        if suffix != ".parquet":
            return frame_rows(_read_text(path, suffix))
        schema = pq.read_schema(path)
        # and times, which may be none of Python's
        lazy = (pa.types.is_nested, pa.types.is_temporal, BINARY.__contains__)
        stored = {f.name for f in schema if any(of_type(f.type) for of_type in lazy) and not _holds_texts(f.type)}
        held = pq.read_table(path, columns=[name for name in schema.names if name not in stored]).to_pydict()
        rows = {n: StoredPictures(path, n) if n in stored else list(map(_cell, held[n])) for n in schema.names}
        return _some(rows)
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _holds_texts(kind: pa.DataType) -> bool:
    """Whether a column of a parquet file has lists of texts."""
    text = pa.types.is_string, pa.types.is_large_string
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and any(
        of_type(kind.value_type) for of_type in text
    )


def frame_rows(frame: pd.DataFrame) -> Rows:
    """The rows of a DataFrame."""
    objects = frame.astype(object).where(frame.notna(), None)
    return _some({str(name): list(map(_cell, objects[name].tolist())) for name in frame.columns})


def _some(rows: Rows) -> Rows:
    if not any(map(len, rows.values())):
        raise ValueError("the table has no rows: there is nothing to read")
    return rows


def _cell(value: Any) -> Any:
    """None where a cell is empty: also NaN, and text of spaces."""
    if isinstance(value, str):
        return value if value.strip() else None
    return None if isinstance(value, float) and math.isnan(value) else value


def _read_text(path: Path, suffix: str) -> pd.DataFrame:
    import pandas as pd  # half a second, which other sources need not wait for

    if suffix == ".jsonl":
        return pd.DataFrame(list(_records(path)), dtype=object)
    separator = "," if suffix == ".csv" else "\t"
    frame = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    if not isinstance(frame.index, pd.RangeIndex):  # pandas' way with rows longer than the header
        raise ValueError("rows have more cells than the header has columns; quote cells that hold the separator")
    return frame


def _records(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
                raise ValueError(f"line {number} is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise ValueError(f"line {number} must be a JSON object; it is {type(record).__name__}")
            yield record


# ---- the source ---------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """Items are rows.

    label : the table's name in keys, messages and the identity.
    folder : what relative paths in the table refer to.
    media : columns with images or videos, in order of preference.
    reading : with `allow_outside`, paths may leave `folder` and URLs may name this machine's network.
    """

    name: str
    rows: Rows
    label: str
    folder: Path
    media: Sequence[str]
    caption_column: str
    reading: MediaOptions
    limits: _fetch.Limits
    tag_column: str | None = None

    def __len__(self) -> int:
        return len(self.rows[self.caption_column])

    def item_key(self, index: int) -> str:
        return f"{key_of(Path(self.label).name)}-{index:07d}"

    def identity(self) -> dict:
        """The captions and the paths and URLs are hashed, pictures inside the table are not."""
        columns = {name: self.rows[name] for name in self.media}
        texts = ((name, *values) for name, values in columns.items() if not _holds_pictures(values))
        said = [self.rows[name] for name in (self.caption_column, self.tag_column) if name]
        captions = (values for values in said if not _holds_pictures(values))
        return {
            "name": self.name,
            "table": self.label,
            "rows": len(self),
            "media_columns": list(self.media),
            "caption_column": self.caption_column,
            "listing_sha256": listing_sha256(itertools.chain.from_iterable(texts)),
            "captions_sha256": listing_sha256(itertools.chain.from_iterable(captions)),
            **self.reading.identity(),
        }

    def read(self, index: int) -> Iterator[Clip]:
        where = f"row {index + 1} of {self.label}"
        try:
            (caption, *more), tags = self.captions(index)
            value = self._value(index)
            if isinstance(value, str):
                where, value = f"{where} ({value})", self._file(value)
            for key, frames, fps in self.reading.clips(value, self.item_key(index)):
                yield Clip(key, frames, caption, fps, self.name, more_captions=more, tags=tags)
        except SampleError as error:
            raise SampleError(error.reason, f"{where}: {error.detail}") from None

    @property
    def tagged(self) -> bool:
        return self.tag_column is not None

    def captions(self, index: int) -> tuple[list[str], list[str]]:
        """The captions of a row and its tags; the tags are its caption where it has no other."""
        column, tags = self.caption_column, tags_of(self.rows[self.tag_column][index]) if self.tag_column else []
        texts = [] if column == self.tag_column else texts_of(self.rows[column][index], repr(column))
        if not (texts or tags):
            raise SampleError("no_caption", f"{column!r} must be text; it is empty; write a caption there")
        return texts or [", ".join(tags)], tags

    def _value(self, index: int) -> Any:
        """What the row has of a picture: bytes, a PIL image, an array, or a path or URL."""
        for column in self.media:
            value = self.rows[column][index]
            if isinstance(value, Mapping):  # the hub's struct is its bytes, or its path when it has none
                value = value.get("bytes") or value.get("path") or None
            if isinstance(value, (bytearray, memoryview)):
                value = bytes(value)
            if value is not None:
                kept = isinstance(value, (bytes, Image.Image, np.ndarray))
                return value if kept else str(value).strip()
        raise SampleError("no_media", f"it has neither bytes, a path nor a URL in {' or '.join(self.media)}")

    def _file(self, reference: str) -> Path | bytes:
        """The file of a path, or the content of a URL."""
        parts = urlsplit(reference if "://" in reference else "")
        if parts.scheme in ("", "file"):
            path = Path(url2pathname(parts.path) if parts.scheme else reference).expanduser()
            return self.reading.inside(self.folder / path, self.folder)
        if parts.scheme not in ("http", "https"):
            raise SampleError("bad_url", f"it must be a path or a file, http or https URL; got {parts.scheme}")
        with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
            path = Path(folder, "media")
            _fetch.download(reference, path, self.limits, private=self.reading.allow_outside)
            return path.read_bytes()


def _holds_pictures(values: Sequence[Any]) -> bool:
    """Whether a column holds pictures themselves: PIL images, arrays, bytes, or the hub's struct of bytes and path."""
    kinds = (bytes, bytearray, Mapping, Image.Image, np.ndarray)
    return isinstance(values, StoredPictures) or any(isinstance(value, kinds) for value in values)


def _pick(rows: Rows, label: str, flag: str, given: str | None, usual: Sequence[str]) -> list[str]:
    """The column that was asked for, or those with a usual name; ValueError says which there are."""
    wanted = usual if given is None else (given,)
    found = [name for name in wanted if name in rows]
    if not found:
        raise ValueError(f"{label} has no column {', '.join(map(repr, wanted))}; choose {flag} from {', '.join(rows)}")
    return found


def _open(spec: str, limits: _fetch.Limits) -> Rows:
    """The rows of a table by path or URL."""
    if not spec.startswith(("http://", "https://")):
        return read_rows(_fetch.hub_path(spec) if spec.startswith("hf://") else Path(spec).expanduser())
    with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
        path = Path(folder, "table").with_suffix(Path(urlsplit(spec).path).suffix)
        _fetch.download(spec, path, limits)
        return read_rows(path)


def build(
    spec: str | pd.DataFrame | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    limits: _fetch.Limits = _fetch.DEFAULT_LIMITS,
    **options: Any,
) -> Table:
    """The source of `table:FILE`.

    Parameters
    ----------
    spec : path, `hf://datasets/OWNER/NAME/PATH` or http(s) URL of a .csv, .tsv, .jsonl or .parquet file; or a
        DataFrame, whose relative paths start at the working directory.
    image_column, caption_column : default: all media columns and the first caption column with a usual name.
    limits : of each download.
    **options : see `MediaOptions`; without `allow_outside` a table that is fetched may not name paths outside the
        working directory nor addresses of this machine's network, others always may.

    Raises
    ------
    ValueError, FileNotFoundError : the table cannot be read or lacks the columns.
    """
    if spec is None:
        raise ValueError(f"name the table: --source table:FILE ({', '.join(SUFFIXES)})")
    reading, folder, label = MediaOptions(**options), Path(), "dataframe"
    fetched = isinstance(spec, str) and spec.startswith(FETCHED)
    if isinstance(spec, str):
        rows, label = _open(spec, limits), Path(urlsplit(spec).path if fetched else spec).name
        folder = Path() if fetched else Path(spec).expanduser().parent
    else:
        rows = frame_rows(spec)
    media = _pick(rows, label, "--image-column", image_column, MEDIA_COLUMNS)
    usual = [name for name in (*CAPTION_COLUMNS, *TAG_COLUMNS) if name not in media]
    caption = _pick(rows, label, "--caption-column", caption_column, usual)[0]
    reading = reading if fetched else replace(reading, allow_outside=True)
    tags = next((name for name in TAG_COLUMNS if name in rows), None)
    return Table("table", rows, label, folder, media, caption, reading, limits, tags)
