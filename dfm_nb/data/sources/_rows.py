"""Columns of a CSV, TSV, JSONL or parquet file or a DataFrame; an empty cell, a null and a NaN are None.

Text files are held in memory, of parquet only two row groups of the columns in use at a time.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
GROUPS_HELD = 2


def _none_if_empty(value: Any) -> Any:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return None if isinstance(value, float) and math.isnan(value) else value


class TextRows:
    """A table that is held in memory: {column: list of values}."""

    def __init__(self, data: dict[str, list]):
        self._data = data
        self.columns = tuple(data)

    def __len__(self) -> int:
        return len(next(iter(self._data.values()), ()))

    def column(self, name: str) -> list:
        return [_none_if_empty(v) for v in self._data[name]]

    def value(self, name: str, index: int) -> Any:
        return _none_if_empty(self._data[name][index])

    def is_heavy(self, name: str) -> bool:
        """Whether the column holds pictures themselves."""
        return any(holds_picture(v) for v in self._data[name])


def holds_picture(value: Any) -> bool:
    """Whether it is a PIL image, an array, or bytes, also in the hub's struct of bytes and path."""
    if isinstance(value, dict):
        value = value.get("bytes")
    return isinstance(value, (bytes, bytearray)) or hasattr(value, "__array_interface__")


class ParquetRows:
    """A parquet file whose columns are read when asked for. Safe to share between threads."""

    def __init__(self, path: Path):
        self._file = pq.ParquetFile(path)
        self.columns = tuple(self._file.schema_arrow.names)
        sizes = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, str], pa.ChunkedArray] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def column(self, name: str) -> Iterator[Any]:
        """The column's values, read a row group at a time."""
        for group in range(self._file.num_row_groups):
            with self._lock:
                values = self._file.read_row_group(group, columns=[name]).column(0)
            yield from map(_none_if_empty, values.to_pylist())

    def value(self, name: str, index: int) -> Any:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:
            held = self._held.pop((group, name), None)
            if held is None:
                held = self._file.read_row_group(group, columns=[name]).column(0)
            self._held[group, name] = held
            while len({g for g, _ in self._held}) > GROUPS_HELD:
                self._held.popitem(last=False)
        return _none_if_empty(held[index - int(self._starts[group])].as_py())

    def is_heavy(self, name: str) -> bool:
        """Whether the column holds bytes."""
        kind = self._file.schema_arrow.field(name).type
        return pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def open_rows(path: Path) -> TextRows | ParquetRows:
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
    try:
        rows = ParquetRows(path) if suffix == ".parquet" else TextRows(_read_text(path, suffix))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8; byte {error.start} is not; save it as UTF-8") from None
    except (ValueError, pa.ArrowException) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {said}") from None
    if not len(rows):
        raise ValueError(f"{path} has no rows: there is nothing to read")
    return rows


def frame_rows(frame: pd.DataFrame) -> TextRows:
    """The rows of a DataFrame."""
    if not len(frame):
        raise ValueError("the DataFrame has no rows: there is nothing to read")
    return TextRows({str(c): frame[c].astype(object).where(frame[c].notna(), None).tolist() for c in frame.columns})


def _read_text(path: Path, suffix: str) -> dict[str, list]:
    if suffix in (".csv", ".tsv"):
        import pandas as pd  # half a second, which other sources need not wait for

        separator = "," if suffix == ".csv" else "\t"
        frame = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig")
        if not isinstance(frame.index, pd.RangeIndex):  # pandas' way with rows longer than the header
            raise ValueError("rows have more cells than the header has columns; quote cells that hold the separator")
        return {str(c): frame[c].tolist() for c in frame.columns}
    with path.open(encoding="utf-8-sig") as file:
        return _columns(_records(file))


def _records(lines: Iterable[str]) -> list[dict]:
    records = []
    for number, line in enumerate(lines, 1):
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
    return records


def _columns(records: list[dict]) -> dict[str, list]:
    names = list(dict.fromkeys(name for record in records for name in record))
    return {name: [record.get(name) for record in records] for name in names}
