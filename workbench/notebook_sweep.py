"""A grid of runs of one notebook, several at a time, and a table of the results.

Every combination is checked before the first run starts. A failed run is a row with its error, and the others go on.
`results.csv` and the page `index.html` are written again after each run.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench import notebook_run as runs

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


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """`["steps=10,20", "lr=0.1"]` as {"steps": ["10", "20"], "lr": ["0.1"]}; commas within brackets do not part.

    Raises
    ------
    ValueError : no `=`, an empty or doubled value, a name given twice.
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        name, eq, listed = text.partition("=")
        values = _split(listed)
        if not eq or not name or not all(values):
            raise ValueError(f"--grid needs name=a,b,c; got {text!r}")
        if name in grid:
            raise ValueError(f"--grid has {name!r} twice; write all its values in one")
        if len(set(values)) < len(values):
            raise ValueError(f"--grid {text!r} has a value twice")
        grid[name] = values
    return grid


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for c in text:
        quote = "" if c == quote else quote or (c if c in "'\"" else "")
        depth += 0 if quote else (c in "[({") - (c in "])}")
        if c == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


def points(
    notebook: Path, grid: Mapping[str, Sequence[str]], fixed: Mapping[str, str], output_dir: Path
) -> list[Point]:
    """Every combination, checked against the notebook's parameters; `{lr}` in a value is that of the parameter `lr`."""
    known = runs.parameters(notebook)
    both = sorted(set(grid) & set(fixed))
    if both:
        raise ValueError(f"{both[0]!r} is given by --grid and by -p; keep one of the two")
    out = []
    for i, chosen in enumerate(itertools.product(*grid.values())):
        values = {**fixed, **dict(zip(grid, chosen))}
        name = f"{i:03d}"
        if OWN in known and OWN not in values:
            values[OWN] = str(output_dir / name)
        values = {key: _expanded(text, values, known) for key, text in values.items()}
        runs.convert(values, known, notebook)
        out.append(Point(name, values))
    return out


def _expanded(text: str, values: Mapping[str, str], known: Mapping[str, runs.Parameter]) -> str:
    """`runs/{lr}` with what `lr` is given, or its default; other braces stay as they are."""

    def value(match: re.Match) -> str:
        name = match[1]
        return values[name] if name in values else known[name].plain if name in known else match[0]

    return re.sub(r"\{(\w+)\}", value, text)


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
    waiting = list(rows)
    running: dict[str, tuple[Point, subprocess.Popen, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                point = waiting.pop(0)
                running[point.name] = (point, _start(source, point, folder, report, jobs), time.monotonic())
                point.state = "running"
                print(f"-- {point.name} started: {_shown(point, grid)}", flush=True)
            for name, (point, process, started) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                point.duration_s = time.monotonic() - started
                _collect(point, process.returncode, folder)
                print(f"-- {name} {point.state} in {point.duration_s:.0f} s {point.error}".rstrip(), flush=True)
                write_csv(folder / "results.csv", rows, list(grid))
                write_page(folder / "index.html", source.stem, rows, list(grid))
            time.sleep(POLL_S)
    finally:
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()
    return rows


def _start(notebook: Path, point: Point, folder: Path, report: bool, jobs: int) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "dfm_nb",
        "notebook",
        "run",
        str(notebook),
        "--output",
        str(folder / f"{point.name}.ipynb"),
    ]
    for name, text in point.values.items():
        command += ["-p", name, text]
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    with (folder / f"{point.name}.log").open("wb") as log:
        return subprocess.Popen(
            command + ([] if report else ["--no-report"]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
        )


def _collect(point: Point, code: int, folder: Path) -> None:
    point.state = "done" if code == 0 else "failed"
    point.results = runs.published(folder / f"{point.name}.ipynb")
    if code:
        lines = (folder / f"{point.name}.log").read_text(errors="replace").strip().splitlines()
        point.error = (lines[-1] if lines else f"exit code {code}").removeprefix("error: ")


def _shown(point: Point, names: Sequence[str] | Mapping) -> str:
    return ", ".join(f"{n}={point.values[n]}" for n in names)


# ---- the table ----------------------------------------------------------------------------------------------------


def columns(rows: Sequence[Point], names: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """Header and cells: run, the grid's values, state, time, what was published, error."""
    told = list(dict.fromkeys(k for r in rows for k in r.results))
    header = ["run", *names, "state", "duration_s", *told, "error"]
    cells = [
        [
            r.name,
            *(r.values[n] for n in names),
            r.state,
            round(r.duration_s, 1),
            *(r.results.get(k, "") for k in told),
            r.error,
        ]
        for r in rows
    ]
    return header, cells


def write_csv(path: Path, rows: Sequence[Point], names: Sequence[str]) -> None:
    """The table for a spreadsheet, whole or not at all."""
    from dfm_nb.base.files import write_atomically

    out = io.StringIO(newline="")
    header, cells = columns(rows, names)
    csv.writer(out).writerows([header, *cells])
    write_atomically(path, out.getvalue().encode())


def write_page(path: Path, title: str, rows: Sequence[Point], names: Sequence[str]) -> None:
    """The table, curves and samples as HTML, whole or not at all."""
    from dfm_nb.base.files import write_atomically
    from workbench import sweep_page

    found = {_shown(row, names): run for row in rows if (run := sweep_page.run_of(row.values)) is not None}
    write_atomically(path, sweep_page.page(f"Sweep of {title}", *columns(rows, names), found).encode())


def table(rows: Sequence[Point], names: Sequence[str]) -> str:
    """The table for a terminal; numbers to the right, empty columns left out."""
    header, cells = columns(rows, names)
    keep = [i for i in range(len(header)) if any(row[i] not in ("", None) for row in cells)]
    text = [[_cell(row[i]) for i in keep] for row in [header, *cells]]
    widths = [max(map(len, column)) for column in zip(*text)]
    right = [all(_is_number(row[i]) for row in cells if row[i] not in ("", None)) for i in keep]
    lines = ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)).rstrip() for row in text]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    try:
        json.loads(str(value))
    except ValueError:
        return False
    return not isinstance(value, bool)
