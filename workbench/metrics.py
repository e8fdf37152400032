"""`metrics.jsonl` read while it is being written, also across a resume that rewrites it.

A half-written last line is read later, when it is whole. A damaged line is reported, not raised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dfm_nb.base.metrics import tail_metrics


class MetricsReader:
    """Follow one file: call `read()` as often as you like.

    Parameters
    ----------
    run_dir : a run folder, or a metrics file; neither has to exist yet.

    Attributes
    ----------
    records : list of dicts, one a line. fault : what is wrong with the file, "" when nothing is.
    """

    def __init__(self, run_dir: str | Path):
        path = Path(run_dir).expanduser()
        self.path = path if path.suffix == ".jsonl" else path / "metrics.jsonl"
        self.records: list[dict[str, Any]] = []
        self.fault = ""
        self._offset, self._inode = 0, 0

    def read(self) -> int:
        """Take in what was added; returns how many records are new (all of them when the file was rewritten)."""
        try:
            stat = self.path.stat()
        except OSError:
            return self._restart(0)
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._restart(stat.st_ino)
        try:
            new, self._offset = tail_metrics(self.path, self._offset)
        except ValueError as error:
            self.fault = str(error)
            return 0
        self.fault = ""
        self.records += new
        return len(new)

    def _restart(self, inode: int) -> int:
        self.records, self._offset, self._inode = [], 0, inode
        return 0

    def last(self, key: str) -> Any:
        """The newest value of a key that is not null; None when there is none."""
        return next((r[key] for r in reversed(self.records) if r.get(key) is not None), None)
