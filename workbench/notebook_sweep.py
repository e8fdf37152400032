"""A grid of runs of one notebook, several at a time, and a table of the results.

Every combination is checked before the first run starts. A failed run becomes a row with its error, and the others
continue. `results.csv` is rewritten after each run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfm_nb.base import process
from dfm_nb.base.files import write_atomically
from dfm_nb.sweep_ import TABLE, run_all
from workbench import notebook_run as runs

if TYPE_CHECKING:
    import pandas as pd

OWN = "work_dir"
"""A parameter with this name gets a separate folder for each run, unless a value is given."""


def points(
    notebook: Path, grid: Mapping[str, Sequence[str]], fixed: Mapping[str, str], output_dir: Path
) -> dict[str, dict[str, str]]:
    """The values of every combination, checked against the notebook's parameters; `{lr}` in one is that of `lr`."""
    known = runs.parameters(notebook)
    both = set(grid) & set(fixed)
    if both:
        raise ValueError(f"{min(both)!r} is given by --grid and by -p; keep one of the two")
    combinations = {}
    for i, chosen in enumerate(itertools.product(*grid.values())):
        name = f"{i:03d}"
        values = {**fixed, **dict(zip(grid, chosen))}
        if OWN in known:
            values.setdefault(OWN, str(output_dir / name))
        combinations[name] = {key: _filled(value, values) for key, value in values.items()}
        runs.convert(combinations[name], known, notebook)
    return combinations


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
    """Run the grid; prints a line when a run starts and ends, and writes `results.csv`.

    Returns
    -------
    One row per run: its name, the grid's values, state, time, error, and published results.
    """
    import pandas as pd

    source = runs.existing(notebook)
    folder = Path(output_dir).expanduser()
    commands = {}
    labels = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, values in points(source, grid, fixed or {}, folder).items():
        command = [*process.python_module("dfm_nb"), "notebook", "run", source, "--overwrite"]
        command += ["--output", folder / f"{name}.ipynb"]
        if not report:
            command.append("--no-report")
        for parameter, text in values.items():
            command += ["-p", parameter, text]
        commands[name] = command
        of_grid = {key: values[key] for key in grid}
        labels[name] = ", ".join(f"{key}={text}" for key, text in of_grid.items())
        rows[name] = {"run": name, **of_grid, "state": "waiting", "duration_s": 0.0, "error": ""}
    folder.mkdir(parents=True, exist_ok=True)
    for name, error, seconds in run_all(commands, folder, jobs, labels):
        ended = {"state": "failed" if error else "done", "duration_s": seconds, "error": error}
        # these columns first, whatever the notebook publishes by their names
        rows[name] = rows[name] | runs.published(folder / f"{name}.ipynb") | rows[name] | ended
        table = pd.DataFrame(rows.values(), dtype=object).fillna("")
        write_atomically(folder / TABLE, table.to_csv(index=False).encode())
    return table
