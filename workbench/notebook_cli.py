"""`dfm notebook run`, `sweep` and `parameters`: notebooks as batch jobs.

Exit code 0: every cell of every run succeeded. 1: a cell failed, and its error is the last line. 2: an error in the
command, found before any kernel starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfm_nb.base.argv import run_command
from dfm_nb.base.options import option
from dfm_nb.base.verb import FileVerb, Report, Verb

if TYPE_CHECKING:
    import pandas as pd


class NotebookOptions(Verb):
    """The parameters of a notebook."""

    prog = "dfm notebook parameters"
    notebook: str = option(help="the .ipynb; it is not changed", positional=True)

    def run(self) -> Any:
        from workbench import notebook_run as runs

        return runs.parameters(self.notebook)

    def report(self, result: Any) -> Report:
        lines = [f"{p.name}: {p.type} = {p.default}  # {p.help}" for p in result.values()]
        return Report({p.name: vars(p) for p in result.values()}, "\n".join(lines))


class BatchOptions(NotebookOptions):
    parameter: list[tuple[str, str]] = option(
        [], "a parameter's value; may be repeated", flags=("-p",), action="append", metavar=("NAME", "VALUE")
    )
    no_report: bool = option(False, "leave out the HTML page")

    @property
    def values(self) -> dict[str, str]:
        """The parameters that `-p` sets."""
        values: dict[str, str] = {}
        for name, value in self.parameter:
            if name in values:
                raise ValueError(f"-p {name} is given twice; keep one of the two")
            values[name] = value
        return values


class RunOptions(BatchOptions, FileVerb):
    """One notebook with parameters, from the first cell to the last."""

    prog = "dfm notebook run"
    output: str = option(help="the executed notebook, OUT.ipynb; also written: OUT.html", output=True)
    quiet: bool = option(False, "do not print what the cells print")

    def run(self) -> Any:
        from workbench import notebook_run as runs

        values = runs.convert(self.values, runs.parameters(self.notebook), self.notebook)
        return runs.execute(
            self.notebook,
            self.output,
            values,
            progress=not self.quiet,
            report=not self.no_report,
            overwrite=self.overwrite,
        )

    def report(self, result: Any) -> Report:
        print(f"== {self.output}" + (f" and {result.report}" if result.report else ""), flush=True)
        if result.error:  # the last line of the log, which a sweep shows
            print(f"error: {result.error}", file=sys.stderr, flush=True)
        return Report({"output": self.output}, exit_code=int(bool(result.error)))


class SweepOptions(BatchOptions):
    """A grid of parameters, several runs at a time, a result table."""

    prog = "dfm notebook sweep"
    grid: list[str] = option(help="values to combine", metavar="NAME=A,B,C")
    jobs: int = option(1, "runs at a time", ge=1)
    output_dir: str = option(help="NNN.ipynb, NNN.html, NNN.log and results.csv", output=True)

    def run(self) -> pd.DataFrame:
        from dfm_nb.experiments.sweep import parse_grid
        from workbench import notebook_run as runs
        from workbench import notebook_sweep as grids

        known = runs.parameters(self.notebook)
        grid = parse_grid(self.grid, lambda name: name in known and known[name].kind is str)
        report = not self.no_report
        return grids.sweep(self.notebook, grid, self.output_dir, fixed=self.values, jobs=self.jobs, report=report)

    def report(self, result: pd.DataFrame) -> Report:
        from dfm_nb.experiments.sweep import swept

        return swept(result, Path(self.output_dir), output_dir=self.output_dir)


COMMANDS = {
    "run": (RunOptions.main, "one notebook with parameters, from the first cell to the last"),
    "sweep": (SweepOptions.main, "a grid of parameters, several runs at a time, a result table"),
    "parameters": (NotebookOptions.main, "the parameters of a notebook"),
}


def main(argv: list[str] | None = None) -> int:
    return run_command("dfm notebook", COMMANDS, argv)
