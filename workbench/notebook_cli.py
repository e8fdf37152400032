"""`dfm notebook run`, `sweep` and `parameters`: notebooks as batch jobs.

Exit code 0: every cell of every run succeeded. 1: a cell failed, and its error is the last line. 2: an error in the
command, found before any kernel starts.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfm_nb.base.argv import run_command
from dfm_nb.base.options import option
from dfm_nb.base.process import python_module
from dfm_nb.base.verb import FileVerb, Report, Verb

if TYPE_CHECKING:
    import pandas as pd

    from workbench.notebook_run import Parameter

OWN = "work_dir"
"""A parameter with this name gets a separate folder for each run of a grid, unless a value is given."""


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

    def points(self, known: Mapping[str, Parameter], grid: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
        """The values of every combination, checked against the notebook's parameters; `{lr}` in one is that of `lr`."""
        from workbench import notebook_run as runs

        fixed = self.values
        both = set(grid) & set(fixed)
        if both:
            raise ValueError(f"{min(both)!r} is given by --grid and by -p; keep one of the two")
        combinations = {}
        for i, chosen in enumerate(itertools.product(*grid.values())):
            name = f"{i:03d}"
            values = fixed | dict(zip(grid, chosen))
            if OWN in known:
                values.setdefault(OWN, f"{Path(self.output_dir) / name}")
            combinations[name] = {key: _filled(value, values) for key, value in values.items()}
            runs.convert(combinations[name], known, self.notebook)
        return combinations

    def run(self) -> pd.DataFrame:
        import pandas as pd

        from dfm_nb.experiments.sweep import Ended, parse_grid, run_all
        from workbench import notebook_run as runs

        folder = Path(self.output_dir)
        known = runs.parameters(self.notebook)
        grid = parse_grid(self.grid, lambda name: name in known and known[name].kind is str)
        given = self.points(known, grid)
        command = [*python_module("dfm_nb"), "notebook", "run", self.notebook, "--overwrite"]
        if self.no_report:
            command.append("--no-report")
        commands = {}
        labels = {}
        for name, values in given.items():
            commands[name] = [*command, "--output", f"{folder / name}.ipynb"]
            for pair in values.items():
                commands[name] += ["-p", *pair]
            labels[name] = ", ".join(f"{key}={values[key]}" for key in grid)
        published = functools.cache(runs.published)  # each notebook is read once

        def table_of(ended: Ended) -> pd.DataFrame:
            rows = []
            for name, values in given.items():
                error, seconds = ended.get(name, ("", 0.0))
                state = "failed" if error else "done" if name in ended else "waiting"
                row = {key: values[key] for key in grid} | {"state": state, "duration_s": seconds, "error": error}
                # these columns first, whatever the notebook publishes by their names
                rows.append(row | published(folder / f"{name}.ipynb") | row if name in ended else row)
            return pd.DataFrame(rows, pd.Index(given, name="run"), dtype=object).fillna("")

        folder.mkdir(parents=True, exist_ok=True)
        return run_all(commands, folder, self.jobs, table_of, labels)

    def report(self, result: pd.DataFrame) -> Report:
        from dfm_nb.experiments.sweep import swept

        return swept(result, Path(self.output_dir), output_dir=self.output_dir)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """`runs/{lr}` with the value of `lr`; other braces, as in a dict, are not changed."""
    return re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), text)


COMMANDS = {
    "run": (RunOptions.main, "one notebook with parameters, from the first cell to the last"),
    "sweep": (SweepOptions.main, "a grid of parameters, several runs at a time, a result table"),
    "parameters": (NotebookOptions.main, "the parameters of a notebook"),
}


def main(argv: list[str] | None = None) -> int:
    return run_command("dfm notebook", COMMANDS, argv)
