"""`dfm notebook run`, `sweep` and `parameters`: notebooks as batch jobs.

Exit code 0: every cell of every run succeeded. 1: a cell failed, and its error is the last line. 2: an error in the
command, found before any kernel starts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dfm_nb.base.argv import run_command
from dfm_nb.base.options import Options, option


class NotebookOptions(Options):
    """The parameters of a notebook."""

    prog = "dfm notebook parameters"
    notebook: str = option(help="the .ipynb; it is not changed", positional=True)


class BatchOptions(NotebookOptions):
    parameter: list[tuple[str, str]] = option(
        [],
        "a value for the parameters cell; repeat for several",
        flags=("-p",),
        action="append",
        metavar=("NAME", "VALUE"),
    )
    no_report: bool = option(False, "leave out the HTML page")

    @property
    def values(self) -> dict[str, str]:
        """The parameters that `-p` sets."""
        names = [name for name, _ in self.parameter]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"-p {twice[0]} is given twice; keep one of the two")
        return dict(self.parameter)


class RunOptions(BatchOptions):
    """One notebook with parameters, from the first cell to the last."""

    prog = "dfm notebook run"
    output: str = option(help="the executed notebook, OUT.ipynb; also written: OUT.html", output=True)
    quiet: bool = option(False, "do not print what the cells print")


class SweepOptions(BatchOptions):
    """A grid of parameters, several runs at a time, a result table."""

    prog = "dfm notebook sweep"
    grid: list[str] = option(help="values to combine", metavar="NAME=A,B,C")
    jobs: int = option(1, "runs at a time", ge=1)
    output_dir: str = option(help="NNN.ipynb, NNN.html, NNN.log, results.csv and index.html", output=True)


def result(argv: list[str]) -> dict[str, Any]:
    """What `dfm notebook run` and `sweep` print with `--json`."""
    if argv[:1] == ["run"]:
        return {"output": RunOptions.parse(argv[1:]).output}
    if argv[:1] != ["sweep"]:
        return {}
    import pandas as pd

    folder = Path(SweepOptions.parse(argv[1:]).output_dir)
    rows = pd.read_csv(folder / "results.csv").to_json(orient="records")
    return {"output_dir": str(folder), "runs": json.loads(rows)}


def run(argv: list[str]) -> int:
    asked = RunOptions.parse(argv)
    from workbench import notebook_run as runs

    values = runs.convert(asked.values, runs.parameters(asked.notebook), asked.notebook)
    done = runs.execute(asked.notebook, asked.output, values, progress=not asked.quiet, report=not asked.no_report)
    print(f"== {asked.output}" + (f" and {done.report}" if done.report else ""), flush=True)
    if done.error:
        print(f"error: {done.error}", file=sys.stderr, flush=True)
    return int(bool(done.error))


def sweep(argv: list[str]) -> int:
    asked = SweepOptions.parse(argv)
    from dfm_nb.sweep_ import parse_grid
    from workbench import notebook_run as runs
    from workbench import notebook_sweep as grids

    known, output = runs.parameters(asked.notebook), asked.output_dir
    grid = parse_grid(asked.grid, lambda name: name in known and known[name].kind is str)
    table = grids.sweep(asked.notebook, grid, output, fixed=asked.values, jobs=asked.jobs, report=not asked.no_report)
    print(table.loc[:, (table != "").any()].to_string(index=False, float_format="{:.5g}".format))
    failed = int((table["state"] != "done").sum())
    print(f"== {len(table) - failed} of {len(table)} done; {Path(output) / 'index.html'} and results.csv")
    return int(failed > 0)


def parameters(argv: list[str]) -> int:
    asked = NotebookOptions.parse(argv)
    from workbench import notebook_run as runs

    for p in runs.parameters(asked.notebook).values():
        print(f"{p.name}: {p.type} = {p.default}  # {p.help}")
    return 0


COMMANDS = {
    "run": (run, "one notebook with parameters, from the first cell to the last"),
    "sweep": (sweep, "a grid of parameters, several runs at a time, a result table"),
    "parameters": (parameters, "the parameters of a notebook"),
}


def main(argv: list[str] | None = None) -> int:
    return run_command("dfm notebook", COMMANDS, argv)
