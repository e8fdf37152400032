"""`metrics.jsonl`: one JSON record per line, readable while it is written and after a crash."""

from __future__ import annotations

import errno
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

import orjson

from dfm_nb.base.files import plain, write_atomically

if TYPE_CHECKING:
    import pandas as pd

MOST_METRICS = 1 << 29
"""Bytes of the file: a million iterations have 400 MB."""
RISEN_ROUNDS = 3
"""Number of validations without improvement before it is reported."""


class Metrics:
    """Append-only writer of `metrics.jsonl`; open it in one process only.

    Parameters
    ----------
    path : the file; created if missing. An incomplete last line, left by a kill, is removed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = self.path.open("ab", buffering=0)
        self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1)

    def write(self, record: Mapping[str, Any]) -> None:
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

    def truncate(self, iteration: int) -> int:
        """Keep the records up to and including `iteration`; returns how many later ones were dropped."""
        records = read_metrics(self.path)
        kept = [r for r in records if r["iteration"] <= iteration]
        if len(kept) < len(records):
            self.close()
            write_atomically(self.path, b"".join(orjson.dumps(r, option=orjson.OPT_APPEND_NEWLINE) for r in kept))
            self._file = self.path.open("ab", buffering=0)
        return len(records) - len(kept)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The complete records of `metrics.jsonl` or of a run folder, also while it is written; [] if it does not exist."""
    return tail_metrics(path)[0]


def read_table(path: str | os.PathLike) -> pd.DataFrame:
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


def tail_metrics(path: str | os.PathLike, offset: int = 0, limit: int = -1) -> tuple[list[dict[str, Any]], int]:
    """Records after `offset` bytes, and the offset for the next call.

    limit : maximum number of bytes to read; -1 reads all.

    Raises
    ------
    ValueError : a line that is not JSON, with its number.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.exists():
        return [], 0
    with plain(path, path.parent, MOST_METRICS).open("rb") as file:
        file.seek(offset)
        data = file.read(limit)
    data = data[: data.rfind(b"\n") + 1]
    return list(_records(data, path)), offset + len(data)


def _records(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = orjson.loads(line)
            iteration = record["iteration"]
        except (orjson.JSONDecodeError, LookupError, TypeError):
            iteration = None
        if type(iteration) is not int:
            said = "must be a JSON object with a whole iteration"
            raise ValueError(f"{path}, line {number} {said}; got {line[:60]!r}; remove the line")
        yield record


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Iterations and values of the records that have a number under `key` (null, NaN and Inf are skipped)."""
    numbers = [(r["iteration"], v) for r in records if isinstance(v := r.get(key), (int, float)) and math.isfinite(v)]
    return [i for i, _ in numbers], [v for _, v in numbers]


def generated_with(lengths: Iterable[float]) -> float | None:
    """The average that generates and is judged, of the stored relative lengths: the shortest; None without."""
    return min(lengths, default=None)


def compared_loss(keys: Iterable[str]) -> str:
    """The key for comparing validation rounds: the loss of the average that generates.

    >>> compared_loss(["val_loss", "val_loss_ema_0.05", "val_loss_ema_0.1", "val_loss_ema_0.1_by_sigma"])
    'val_loss_ema_0.05'
    """
    averages = {float(m[1]): k for k in keys if (m := re.fullmatch(r"val_loss_ema_(\d+\.?\d*(?:e-?\d+)?)", k))}
    length = generated_with(averages)
    return "val_loss" if length is None else averages[length]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean over `window` values, narrower at both ends."""
    import numpy as np

    half, at = window // 2, np.arange(len(values))
    sums = np.concatenate(([0.0], np.cumsum(values)))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return ((sums[high] - sums[low]) / (high - low)).tolist()
