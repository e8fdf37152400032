"""`metrics.jsonl`: one JSON record per line, readable while it is written and after a crash."""

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

import orjson

from dfm_nb.base.files import UNLIMITED, Json, StrPath, appending, plain, write_atomically

if TYPE_CHECKING:
    import pandas as pd

MOST_METRICS = 1 << 29
"""Bytes of a file that is read whole: a million iterations have 400 MB."""
RISEN_ROUNDS = 3
"""Number of validations without improvement before it is reported."""
LARGEST = 3.4e38
"""Of a number that is drawn: float32's, so that limits and means of axes are finite; others are as Inf."""


class DamagedMetrics(ValueError):
    """A line of `metrics.jsonl` is damaged: `line` is its number, `records` are those read before it, which end at
    `offset` bytes.
    """

    def __init__(self, path: Path, line: int, text: bytes, records: list[Json], offset: int):
        rule = "must be a JSON object, without NaN, with a whole iteration below 2^31"
        super().__init__(f"{path}, line {line} {rule}; got {text[:60]!r}; remove the line")
        self.line = line
        self.records = records
        self.offset = offset


class Metrics:
    """Append-only writer of `metrics.jsonl`; open it in one process only.

    Parameters
    ----------
    path : the file; created if missing. An incomplete last line, left by a kill, is removed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = appending(self.path, buffering=0)
        self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1)

    def write(self, record: Json) -> None:
        """Append one record as one line; floats are written so that they read back bit for bit, NaN and Inf as null.

        Parameters
        ----------
        record : JSON-serialisable, including NumPy scalars; it needs an integer `iteration`.
        """
        assert isinstance(record.get("iteration"), int), f"a metrics record needs an integer iteration: {record}"
        line = orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        written = os.write(self._file.fileno(), line)
        if written != len(line):  # a full disk: leave no half line behind
            self._file.truncate(self.path.stat().st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def truncate(self, iteration: int) -> None:
        """Keep the records up to and including `iteration`."""
        records = read_metrics(self.path)
        kept = [r for r in records if r["iteration"] <= iteration]
        if len(kept) < len(records):
            self.close()
            write_atomically(self.path, b"".join(orjson.dumps(r, option=orjson.OPT_APPEND_NEWLINE) for r in kept))
            self._file = appending(self.path, buffering=0)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: StrPath) -> list[Json]:
    """The complete records of `metrics.jsonl` or of a run folder, also while it is written; [] if it does not exist."""
    return tail_metrics(path)[0]


def read_table(path: StrPath) -> "pd.DataFrame":
    """`dfm_nb.read_metrics`: the records of `metrics.jsonl` or of a run folder as a table, one row per record.

    A validation round is a separate record, so its row has no loss and the others no `val_loss`.

    Raises
    ------
    FileNotFoundError : there is no such file.
    """
    import pandas as pd

    records = read_metrics(path)
    if not records:
        raise FileNotFoundError(f"there is no metrics.jsonl with records at {os.fspath(path)}; name a run folder")
    return pd.DataFrame(records)


def tail_metrics(path: StrPath, offset: int = 0, limit: int = -1) -> tuple[list[Json], int]:
    """Records after `offset` bytes, and the offset for the next call.

    limit : maximum number of bytes to read; -1 reads all.

    Raises
    ------
    DamagedMetrics : also a ValueError.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.exists():
        return [], 0
    records: list[Json] = []
    with plain(path, None, MOST_METRICS if limit < 0 else UNLIMITED).open("rb") as file:
        file.seek(offset)
        data = file.read(limit)
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            try:
                record = orjson.loads(line)
                iteration = record["iteration"]
            except (orjson.JSONDecodeError, LookupError, TypeError):
                iteration = None
            if type(iteration) is not int or not 0 <= iteration < 2**31:
                number = path.read_bytes()[:offset].count(b"\n") + 1
                raise DamagedMetrics(path, number, line, records, offset)
            records.append(record)
            offset += len(line)
    return records, offset


def damage_of(path: StrPath) -> tuple[list[Json], str]:
    """The records before the first damaged line, and `damaged: line 7`; all of them, and "", if none is damaged."""
    try:
        return read_metrics(path), ""
    except DamagedMetrics as error:
        return error.records, f"damaged: line {error.line}"


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Iterations and values of the records that have a number under `key` (null, NaN and Inf are skipped)."""
    iterations = []
    values = []
    for record in records:
        value = record.get(key)
        if isinstance(value, (int, float)) and abs(value) < LARGEST:
            iterations.append(record["iteration"])
            values.append(value)
    return iterations, values


def generated_with(lengths: Iterable[float]) -> float | None:
    """The stored average that generates and is judged: the shortest; None if there is none.

    The shortest follows training most closely: at length 0.05 the first half of a run weighs less than 1 in 100,000, at
    0.28 it weighs 0.8 times the second half."""
    return min(lengths, default=None)


def compared_loss(keys: Iterable[str]) -> str:
    """The key for comparing validation rounds: the loss of the average that generates.

    >>> compared_loss(["val_loss", "val_loss_ema_0.05", "val_loss_ema_0.1", "val_loss_ema_0.1_by_sigma"])
    'val_loss_ema_0.05'
    """
    averages = {}
    for key in keys:
        average = re.fullmatch(r"val_loss_ema_(\d+\.?\d*(?:e-?\d+)?)", key)
        if average:
            averages[float(average[1])] = key
    length = generated_with(averages)
    return "val_loss" if length is None else averages[length]
