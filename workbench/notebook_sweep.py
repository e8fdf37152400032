"""A grid of runs of one notebook, several at a time, and a table of the results.

Every combination is checked before the first run starts. A failed run becomes a row with its error, and the others
continue. `results.csv` and the page `index.html` are rewritten after each run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dfm_nb.base import process
from dfm_nb.base.files import write_atomically
from dfm_nb.runs import page
from dfm_nb.sweep_ import run_all
from workbench import notebook_run as runs

if TYPE_CHECKING:
    import pandas as pd

OWN = "work_dir"
"""A parameter with this name gets a separate folder for each run, unless a value is given."""


def points(
    notebook: Path, grid: Mapping[str, Sequence[str]], fixed: Mapping[str, str], output_dir: Path
) -> dict[str, dict[str, str]]:
    """The values of every combination, checked against the notebook's parameters; `{lr}` in one is that of `lr`."""
    known, out = runs.parameters(notebook), dict[str, dict[str, str]]()
    if both := sorted(set(grid) & set(fixed)):
        raise ValueError(f"{both[0]!r} is given by --grid and by -p; keep one of the two")
    for i, chosen in enumerate(itertools.product(*grid.values())):
        name, values = f"{i:03d}", {**fixed, **dict(zip(grid, chosen))}
        if OWN in known:
            values.setdefault(OWN, str(output_dir / name))
        out[name] = {key: _filled(value, values) for key, value in values.items()}
        runs.convert(out[name], known, notebook)
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
) -> pd.DataFrame:
    """Run the grid; prints a line when a run starts and ends, and writes `results.csv` and `index.html`.

    Returns
    -------
    One row per run: its name, the grid's values, state, time, error, and published results.
    """
    source, folder = runs.existing(notebook), Path(output_dir).expanduser()
    given, commands = points(source, grid, fixed or {}, folder), {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in given.items():
        words = [w for parameter, text in values.items() for w in ("-p", parameter, text)]
        command = [*process.python_module("dfm_nb"), "notebook", "run", source, *words]
        commands[name] = [*command, "--output", folder / f"{name}.ipynb", *["--no-report"] * (not report)]
    labels = {name: ", ".join(f"{key}={values[key]}" for key in grid) for name, values in given.items()}
    waiting = {"state": "waiting", "duration_s": 0.0, "error": ""}
    rows = {name: {"run": name, **{key: values[key] for key in grid}, **waiting} for name, values in given.items()}
    for name, error, seconds in run_all(commands, folder, jobs, labels):
        ended = {"state": "failed" if error else "done", "duration_s": seconds, "error": error}
        # these columns first, whatever the notebook publishes by their names
        rows[name] = rows[name] | runs.published(folder / f"{name}.ipynb") | rows[name] | ended
        found = {labels[name]: run for name, values in given.items() if (run := run_of(values))}
        table = write_tables(folder, source.stem, rows.values(), found)
    return table


def run_of(values: Mapping[str, str]) -> Path | None:
    """The run folder in the parameters of a notebook's run, or a run folder below one of them."""
    folders = [Path(text).expanduser() for name, text in values.items() if name.endswith("_dir")]
    return next((f for top in folders for f in (top, top / "train") if (f / "metrics.jsonl").is_file()), None)


def write_tables(folder: Path, title: str, rows: Iterable[Mapping], run_folders: Mapping[str, Path]) -> pd.DataFrame:
    """`results.csv` for a spreadsheet, and `index.html` with curves and samples; each is whole or absent."""
    import pandas as pd

    table = pd.DataFrame(rows, dtype=object).fillna("")
    write_atomically(folder / "results.csv", table.to_csv(index=False).encode())
    written = page(f"Sweep of {title}", [table], run_folders, links="{}.html")
    write_atomically(folder / "index.html", written.encode())
    return table
