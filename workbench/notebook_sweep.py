"""A grid of runs of one notebook, several at a time, and a table of the results.

Every combination is checked before the first run starts. A failed run becomes a row with its error, and the others
continue. `results.csv` and the page `index.html` are rewritten after each run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfm_nb.base import process
from dfm_nb.base.files import write_atomically
from dfm_nb.runs import page
from dfm_nb.sweep_ import run_all
from workbench import notebook_run as runs

if TYPE_CHECKING:
    import pandas as pd

OWN = "work_dir"
"""A parameter with this name gets a separate folder for each run, unless a value is given."""


@dataclass
class Point:
    """One combination: its values as text, and the outcome of its run with what it published."""

    name: str
    values: dict[str, str]
    outcome: dict[str, Any] = field(default_factory=lambda: {"state": "waiting", "duration_s": 0.0, "error": ""})

    def said(self, names: Iterable[str]) -> str:
        return ", ".join(f"{name}={self.values[name]}" for name in names)


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
    """`runs/{lr}` with the value of `lr`; other braces, as in a dict, are not changed."""
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
    """Run the grid; prints a line when a run starts and ends, and writes `results.csv` and `index.html`."""
    source, folder = runs.existing(notebook), Path(output_dir).expanduser()
    rows = points(source, grid, fixed or {}, folder)
    folder.mkdir(parents=True, exist_ok=True)
    commands = {}
    for point in rows:
        words = [w for name, text in point.values.items() for w in ("-p", name, text)]
        command = [*process.python_module("dfm_nb"), "notebook", "run", source, *words]
        commands[point.name] = [*command, "--output", folder / f"{point.name}.ipynb", *["--no-report"] * (not report)]
    by_name = {point.name: point for point in rows}
    for name, error, seconds in run_all(commands, folder, jobs, {p.name: p.said(grid) for p in rows}):
        ended = {"state": "failed" if error else "done", "duration_s": seconds, "error": error}
        by_name[name].outcome |= runs.published(folder / f"{name}.ipynb") | ended
        write_tables(folder, source.stem, rows, grid)
    return rows


# ---- the table ----------------------------------------------------------------------------------------------------


def table(rows: Sequence[Point], names: Iterable[str]) -> pd.DataFrame:
    """One row per run: its name, the grid's values, state, time, error, and published results."""
    import pandas as pd

    records = []
    for row in rows:
        own = {"run": row.name, **{name: row.values[name] for name in names}}
        records.append(own | row.outcome | own)  # these columns first, whatever the notebook publishes by their names
    return pd.DataFrame(records, dtype=object).fillna("")


def run_of(values: Mapping[str, str]) -> Path | None:
    """The run folder in the parameters of a notebook's run, or a run folder below one of them."""
    folders = [Path(text).expanduser() for name, text in values.items() if name.endswith("_dir")]
    return next((f for top in folders for f in (top, top / "train") if (f / "metrics.jsonl").is_file()), None)


def text(table: pd.DataFrame) -> str:
    """The table for a terminal, without empty columns."""
    return table.loc[:, (table != "").any()].to_string(index=False, float_format="{:.5g}".format)


def write_tables(folder: Path, title: str, rows: Sequence[Point], names: Iterable[str]) -> None:
    """`results.csv` for a spreadsheet, and `index.html` with curves and samples; each is whole or absent."""
    found, results = {row.said(names): run_of(row.values) for row in rows}, table(rows, names)
    runs_found = {label: run for label, run in found.items() if run}
    written = page(f"Sweep of {title}", [results], runs_found, links="{}.html")
    write_atomically(folder / "results.csv", results.to_csv(index=False).encode())
    write_atomically(folder / "index.html", written.encode())
