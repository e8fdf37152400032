"""A grid of runs of one notebook, several at a time, and a table of the results.

Every combination is checked before the first run starts. A failed run becomes a row with its error, and the others
continue. `results.csv` is rewritten after each run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dfm_nb.base import process
from dfm_nb.base.files import write_atomically
from dfm_nb.experiments.sweep import TABLE, run_all
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
    """Run the grid; prints a line when a run starts and ends, and writes `results.csv`.

    Returns
    -------
    One row per run: its name, the grid's values, state, time, error, and published results.
    """
    import pandas as pd

    source = runs.existing(notebook)
    folder = Path(output_dir).expanduser()
    given = points(source, grid, fixed or {}, folder)
    commands = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in given.items():
        words = [w for parameter, text in values.items() for w in ("-p", parameter, text)]
        command = [*process.python_module("dfm_nb"), "notebook", "run", source, *words]
        commands[name] = [
            *command,
            "--output",
            folder / f"{name}.ipynb",
            "--overwrite",
            *["--no-report"] * (not report),
        ]
    labels = {name: ", ".join(f"{key}={values[key]}" for key in grid) for name, values in given.items()}
    waiting = {"state": "waiting", "duration_s": 0.0, "error": ""}
    rows = {name: {"run": name, **{key: values[key] for key in grid}, **waiting} for name, values in given.items()}
    for name, error, seconds in run_all(commands, folder, jobs, labels):
        ended = {"state": "failed" if error else "done", "duration_s": seconds, "error": error}
        # these columns first, whatever the notebook publishes by their names
        rows[name] = rows[name] | runs.published(folder / f"{name}.ipynb") | rows[name] | ended
        table = pd.DataFrame(rows.values(), dtype=object).fillna("")
        write_atomically(folder / TABLE, table.to_csv(index=False).encode())
    return table
