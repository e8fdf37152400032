"""Tables: {column: its values} of a CSV, TSV, JSONL or parquet file or a DataFrame.

An empty cell, a null and a NaN are None. No type is guessed in a text file: the caption 007 stays "007", and NA is one.
Text files are held in memory, of a parquet file only two row groups of each column in use.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
GROUPS_HELD = 2

Rows = Mapping[str, Sequence[Any]]


def _none_if_empty(value: Any) -> Any:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return None if isinstance(value, float) and math.isnan(value) else value


class ParquetColumn(Sequence):
    """A column that is read when asked for, by row groups. Safe to share between threads.

    starts : the first row of each group, and the number of rows. With groups of 3, 3 and 2 rows it is 0, 3, 6, 8, and
        row 4 is row 1 of group 1.
    lock : of the file, which its columns share.
    """

    def __init__(self, file: pq.ParquetFile, name: str, starts: np.ndarray, lock: threading.RLock):
        self._file, self._name, self._starts, self._lock = file, name, starts, lock
        self._held = lru_cache(GROUPS_HELD)(self._group)
        self.type = file.schema_arrow.field(name).type

    def _group(self, group: int) -> pa.ChunkedArray:
        with self._lock:
            return self._file.read_row_group(group, columns=[self._name]).column(0)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __iter__(self) -> Iterator[Any]:
        for group in range(self._file.num_row_groups):
            yield from map(_none_if_empty, self._group(group).to_pylist())

    def __getitem__(self, index: Any) -> Any:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:  # or threads that miss the same group would all read it
            held = self._held(group)
        return _none_if_empty(held[index - int(self._starts[group])].as_py())


def holds_pictures(values: Sequence[Any]) -> bool:
    """Whether a column holds pictures themselves: PIL images, arrays, bytes, or the hub's struct of bytes and path."""
    if isinstance(values, ParquetColumn):
        kind = values.type
        return pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    inner = (value.get("bytes") if isinstance(value, dict) else value for value in values)
    return any(isinstance(value, (bytes, bytearray)) or hasattr(value, "__array_interface__") for value in inner)


def open_rows(path: Path) -> Rows:
    """Open a table by its suffix.

    Raises
    ------
    FileNotFoundError, IsADirectoryError : the path. ValueError : its kind or content, with the line where known.
    """
    kinds, suffix = ", ".join(SUFFIXES), path.suffix.lower()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a table ({kinds}) or use --source folder:{path}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; name a table ({kinds})")
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} must be a table that ends in {kinds}; convert or rename it")
    read = {".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet}.get(suffix, _read_jsonl)
    try:
        rows = read(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8; byte {error.start} is not; save it as UTF-8") from None
    except (ValueError, pa.ArrowException) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {said}") from None
    return _some(rows, path)


def frame_rows(frame: pd.DataFrame) -> Rows:
    """The rows of a DataFrame."""
    return _some(_columns(frame), "the DataFrame")


def _some(rows: Rows, name: object) -> Rows:
    if not any(map(len, rows.values())):
        raise ValueError(f"{name} has no rows: there is nothing to read")
    return rows


def _columns(frame: pd.DataFrame) -> Rows:
    objects = frame.astype(object).where(frame.notna(), None)
    return {str(name): list(map(_none_if_empty, objects[name].tolist())) for name in frame.columns}


def _read_csv(path: Path) -> Rows:
    import pandas as pd  # half a second, which other sources need not wait for

    separator = "," if path.suffix.lower() == ".csv" else "\t"
    frame = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    if not isinstance(frame.index, pd.RangeIndex):  # pandas' way with rows longer than the header
        raise ValueError("rows have more cells than the header has columns; quote cells that hold the separator")
    return _columns(frame)


def _read_jsonl(path: Path) -> Rows:
    records = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # also an integer of thousands of digits
                raise ValueError(f"line {number} is not JSON ({getattr(error, 'msg', error)})") from None
            except RecursionError:
                raise ValueError(f"line {number} is nested too deep") from None
            if not isinstance(record, dict):
                raise ValueError(f"line {number} must be a JSON object; it is {type(record).__name__}")
            records.append(record)
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [_none_if_empty(record.get(name)) for record in records] for name in names}


def _read_parquet(path: Path) -> Rows:
    file, lock = pq.ParquetFile(path), threading.RLock()
    starts = np.cumsum([0, *(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))])
    return {name: ParquetColumn(file, name, starts, lock) for name in file.schema_arrow.names}
