"""A grid of runs of one notebook, several at a time, and a table of the results.

Every combination is checked before the first run starts. A failed run is a row with its error, and the others go on.
`results.csv` and the page `index.html` are written again after each run.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfm_nb.base import process
from dfm_nb.base.files import write_atomically
from workbench import notebook_run as runs
from workbench.job import MARGIN_S

if TYPE_CHECKING:
    import pandas as pd
    import psutil

OWN = "work_dir"
"""A parameter with this name gets a folder of its own for each run, unless a value is given."""
POLL_S = 0.2


@dataclass
class Point:
    """One combination: its values as texts, and how its run went."""

    name: str
    values: dict[str, str]
    state: str = "waiting"
    duration_s: float = 0.0
    results: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def said(self, names: Iterable[str]) -> str:
        return ", ".join(f"{name}={self.values[name]}" for name in names)


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """`["steps=10,20", "lr=0.1"]` as {"steps": ["10", "20"], "lr": ["0.1"]}; a value with a comma is in quotes.

    Raises
    ------
    ValueError : no `=`, a name or value given twice.
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        words = shlex.shlex(listed, posix=True)  # as a shell reads quotes, with commas for spaces
        words.whitespace, words.whitespace_split, words.commenters = ",", True, ""
        try:
            values = [word.strip() for word in words]
        except ValueError:  # a quote that nothing closes
            values = []
        if not values or not name or not all(map(str.strip, listed.split(","))):
            raise ValueError(f"--grid needs name=a,b,c; got {text!r}")
        if name in grid or len(set(values)) < len(values):
            raise ValueError(f"--grid has a name or a value of {text!r} twice; write each once")
        grid[name] = values
    return grid


def points(
    notebook: Path, grid: Mapping[str, Sequence[str]], fixed: Mapping[str, str], output_dir: Path
) -> list[Point]:
    """Every combination, checked against the notebook's parameters; `{lr}` in a value is the one given for `lr`."""
    known = runs.parameters(notebook)
    if both := sorted(set(grid) & set(fixed)):
        raise ValueError(f"{both[0]!r} is given by --grid and by -p; keep one of the two")
    out = []
    for i, chosen in enumerate(itertools.product(*grid.values())):
        values = {**fixed, **dict(zip(grid, chosen))}
        if OWN in known:
            values.setdefault(OWN, str(output_dir / f"{i:03d}"))
        values = {name: _filled(value, values) for name, value in values.items()}
        runs.convert(values, known, notebook)
        out.append(Point(f"{i:03d}", values))
    return out


def _filled(text: str, values: Mapping[str, str]) -> str:
    """`runs/{lr}` with the value of `lr`; what else is in braces, as in a dict, stays."""
    return re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), text)


def sweep(
    notebook: str | Path,
    grid: Mapping[str, Sequence[str]],
    output_dir: str | Path,
    *,
    fixed: Mapping[str, str] | None = None,
    jobs: int = 1,
    report: bool = True,
) -> list[Point]:
    """Run the grid; prints a line when a run starts and ends, and leaves `results.csv` and `index.html`."""
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1; got {jobs}")
    source, folder = runs.existing(notebook), Path(output_dir).expanduser()
    rows = points(source, grid, fixed or {}, folder)
    folder.mkdir(parents=True, exist_ok=True)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    waiting = list(rows)
    running: list[tuple[Point, psutil.Popen, float]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                point = waiting.pop(0)
                words = [w for name, text in point.values.items() for w in ("-p", name, text)]
                command = [sys.executable, "-m", "dfm_nb", "notebook", "run", source, *words]
                command += ["--output", folder / f"{point.name}.ipynb", *["--no-report"] * (not report)]
                log = folder / f"{point.name}.log"
                log.unlink(missing_ok=True)  # of a sweep before
                started = process.start(command, log, own_session=False, OMP_NUM_THREADS=threads)
                running.append((point, started, time.monotonic()))
                point.state = "running"
                print(f"-- {point.name} started: {point.said(grid)}", flush=True)
            for run in [run for run in running if run[1].poll() is not None]:
                running.remove(run)
                point, started, begun_s = run
                point.duration_s = round(time.monotonic() - begun_s, 1)
                _collect(point, started.wait(), folder)
                print(f"-- {point.name} {point.state} in {point.duration_s:.0f} s {point.error}".rstrip(), flush=True)
                write_tables(folder, source.stem, rows, grid)
            time.sleep(POLL_S)
    finally:
        for _, started, _ in running:
            process.end(started, process.GRACE_S + MARGIN_S)
    return rows


def _collect(point: Point, code: int, folder: Path) -> None:
    point.state = "failed" if code else "done"
    point.results = runs.published(folder / f"{point.name}.ipynb")
    if code:
        said = (folder / f"{point.name}.log").read_text(errors="replace").strip()
        point.error = (said.splitlines() or [f"exit code {code}"])[-1].removeprefix("error: ")


# ---- the table ----------------------------------------------------------------------------------------------------


def table(rows: Sequence[Point], names: Iterable[str]) -> pd.DataFrame:
    """A row a run: its name, the grid's values, state, time, error, and what it published."""
    import pandas as pd

    records = []
    for row in rows:
        own: dict[str, Any] = {"run": row.name, **{name: row.values[name] for name in names}}
        own |= {"state": row.state, "duration_s": row.duration_s, "error": row.error}
        records.append(own | {name: value for name, value in row.results.items() if name not in own})
    return pd.DataFrame(records, dtype=object).fillna("")


def text(table: pd.DataFrame) -> str:
    """The table for a terminal, without empty columns."""
    return table.loc[:, (table != "").any()].to_string(index=False, float_format="{:.5g}".format)


def write_tables(folder: Path, title: str, rows: Sequence[Point], names: Iterable[str]) -> None:
    """`results.csv` for a spreadsheet, and `index.html` with curves and samples, whole or not at all."""
    from workbench import sweep_page

    found, results = {row.said(names): sweep_page.run_of(row.values) for row in rows}, table(rows, names)
    page = sweep_page.page(f"Sweep of {title}", results, {label: run for label, run in found.items() if run})
    write_atomically(folder / "results.csv", results.to_csv(index=False).encode())
    write_atomically(folder / "index.html", page.encode())
