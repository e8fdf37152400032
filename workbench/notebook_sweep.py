"""A grid of runs of one notebook, and the table of their results; `dfm_nb.sweep_` runs them.

Every combination is checked before the first run starts.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dfm_nb.base import process
from dfm_nb.experiments.sweep import Ended, run_all
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
    """Run the grid (`run_all`).

    Returns
    -------
    One row per run, indexed by its name: the grid's values, state, time, error, and published results.
    """
    source = runs.existing(notebook)
    folder = Path(output_dir).expanduser()
    given = points(source, grid, fixed or {}, folder)
    folder.mkdir(parents=True, exist_ok=True)
    command = [*process.python_module("dfm_nb"), "notebook", "run", source, "--overwrite"]
    if not report:
        command.append("--no-report")
    commands, labels = {}, {}
    for name, values in given.items():
        words = [w for parameter, text in values.items() for w in ("-p", parameter, text)]
        commands[name] = [*command, *words, "--output", folder / f"{name}.ipynb"]
        labels[name] = ", ".join(f"{key}={values[key]}" for key in grid)
    published = functools.cache(runs.published)  # each notebook is read once

    def table_of(ended: Ended) -> pd.DataFrame:
        import pandas as pd

        rows = []
        for name, values in given.items():
            error, seconds = ended.get(name, ("", 0.0))
            state = "failed" if error else "done" if name in ended else "waiting"
            row = {key: values[key] for key in grid} | {"state": state, "duration_s": seconds, "error": error}
            # these columns first, whatever the notebook publishes by their names
            rows.append(row | published(folder / f"{name}.ipynb") | row if name in ended else row)
        return pd.DataFrame(rows, pd.Index(given, name="run"), dtype=object).fillna("")

    return run_all(commands, folder, jobs, table_of, labels)
