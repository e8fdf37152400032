"""`metrics.jsonl` read while it is being written, also across a resume that rewrites it.

Numbers are kept in columns, 12 bytes a point, so that a million records need megabytes. A half-written last line is
read later, when it is complete. A damaged line is reported, not raised, after those before it.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb.base.files import UNLIMITED, is_plain
from dfm_nb.base.metrics import LARGEST, DamagedMetrics, series, tail_metrics

CHUNK_BYTES = 16 << 20
"""How much of the file is in memory at a time."""


def rounds_by_sigma(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that have validation by noise level: as many losses, which may be null, as levels."""
    rounds = []
    for record in records:
        sigmas: Any = record.get("val_sigmas")
        losses: Any = record.get("val_loss_by_sigma")
        if not isinstance(sigmas, list) or not isinstance(losses, list) or len(sigmas) != len(losses):
            continue
        known = [loss for loss in losses if loss is not None]
        if known and all(isinstance(v, (int, float)) and abs(v) < LARGEST for v in sigmas + known):
            rounds.append(record)
    return rounds


class MetricsReader:
    """Follow one file: call `read()` as often as you like.

    Parameters
    ----------
    run_dir : a run folder, which does not have to exist yet.

    Attributes
    ----------
    count : records so far. iteration : of the newest one; 0 without any. last : newest number of each key.
    rounds : first and newest record that has validation by noise level.
    fault : what is wrong with the file, or "". written_s : when it was last written (Unix time).
    """

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir).expanduser() / "metrics.jsonl"
        self._restart(0)

    def _restart(self, inode: int) -> None:
        self._inode = inode
        self._offset = 0
        self.count = 0
        self.fault = ""
        self.written_s = 0.0
        self.iteration = 0
        self.last: dict[str, float] = {}
        self.rounds: list[dict[str, Any]] = []
        self._columns: defaultdict[str, tuple[array, array]] = defaultdict(lambda: (array("i"), array("d")))

    def read(self) -> int:
        """Read what was added; returns how many records are new (all of them if the file was rewritten)."""
        if not is_plain(self.path, None, UNLIMITED):
            self._restart(0)
            return 0
        stat = self.path.stat()
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._restart(stat.st_ino)
        self.written_s = stat.st_mtime
        self.fault = ""
        before = self.count
        try:
            while self._offset < stat.st_size:
                new, offset = tail_metrics(self.path, self._offset, CHUNK_BYTES)
                if offset == self._offset:
                    break  # the last line is not complete yet
                self._offset = offset
                self._take(new)
        except DamagedMetrics as error:
            self._take(error.records)
            self._offset = error.offset
            self.fault = str(error)
        return self.count - before

    def _take(self, records: Sequence[dict[str, Any]]) -> None:
        for key in set().union(*records) - {"iteration"}:
            x, y = series(records, key)
            if y:
                self._columns[key][0].extend(x)
                self._columns[key][1].extend(y)
                self.last[key] = y[-1]
        rounds = self.rounds + rounds_by_sigma(records)
        self.rounds = rounds[:1] + rounds[1:][-1:]
        for record in records[-1:]:
            self.iteration = record["iteration"]
        self.count += len(records)

    def points(self, key: str, over: str = "iteration") -> tuple[np.ndarray, np.ndarray]:
        """x and y, float64 [N] each. over : "iteration", "samples" or "elapsed_s"; in between it is interpolated."""
        columns = self._columns.get(key, ((), ()))
        x = np.array(columns[0], float)
        y = np.array(columns[1], float)
        if over != "iteration" and len(x):
            at, amount = self._columns.get(over, ((), ()))
            x = np.interp(x, at, amount) if len(at) else np.full_like(x, np.nan)
        return x, y
