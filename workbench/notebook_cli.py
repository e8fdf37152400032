"""`dfm notebook run`, `sweep` and `parameters`: notebooks as batch jobs.

Exit code 0: every cell of every run ran. 1: a cell failed, and its error is the last line. 2: a mistake in the command,
found before any kernel starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from dfm_nb.base.argv import ArgumentParser, guard, output


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="dfm notebook", description="Notebooks as batch jobs.")
    commands = p.add_subparsers(metavar="COMMAND", required=True)
    for verb, about in (
        (run, "one notebook with parameters, from the first cell to the last"),
        (sweep, "a grid of parameters, several runs at a time, a result table"),
        (parameters, "what can be set in a notebook"),
    ):
        c = commands.add_parser(verb.__name__, help=about, description=about)
        c.set_defaults(verb=verb)
        c.add_argument("notebook", help="the .ipynb; it is not changed")
        if verb is not parameters:
            pairs: dict[str, Any] = {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE")}
            c.add_argument("-p", "--parameter", **pairs, help="a value for the parameters cell; repeat for several")
            c.add_argument("--no-report", action="store_true", help="leave out the HTML page")
        if verb is run:
            files = "the executed notebook, OUT.ipynb; also written: OUT.html"
            c.add_argument("--output", type=output, required=True, help=files)
            c.add_argument("--quiet", action="store_true", help="do not print what the cells print")
        if verb is sweep:
            files = "NNN.ipynb, NNN.html, NNN.log, results.csv and index.html"
            c.add_argument("--grid", nargs="+", required=True, metavar="NAME=A,B,C", help="values to combine")
            c.add_argument("--jobs", type=int, default=1, help="runs at a time")
            c.add_argument("--output-dir", type=output, required=True, help=files)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    if importlib.util.find_spec("papermill") is None:
        raise ValueError("papermill is not installed; pip install 'dfm_nb[notebook]'")
    return args.verb(args)


def _given(args: argparse.Namespace) -> dict[str, str]:
    """What `-p` sets."""
    names = [name for name, _ in args.parameter]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"-p {twice[0]} is given twice; keep one of the two")
    return dict(args.parameter)


def run(args: argparse.Namespace) -> int:
    from workbench import notebook_run as runs

    values = runs.convert(_given(args), runs.parameters(args.notebook), args.notebook)
    done = runs.execute(args.notebook, args.output, values, progress=not args.quiet, report=not args.no_report)
    print(f"== {args.output}" + (f" and {done.report}" if done.report else ""), flush=True)
    if done.error:
        print(f"error: {done.error}", file=sys.stderr, flush=True)
    return int(bool(done.error))


def sweep(args: argparse.Namespace) -> int:
    from workbench import notebook_sweep as grids

    grid, fixed = grids.parse_grid(args.grid), _given(args)
    rows = grids.sweep(args.notebook, grid, args.output_dir, fixed=fixed, jobs=args.jobs, report=not args.no_report)
    print(grids.text(grids.table(rows, grid)))
    failed = sum(row.state != "done" for row in rows)
    print(f"== {len(rows) - failed} of {len(rows)} done; {Path(args.output_dir) / 'index.html'} and results.csv")
    return int(failed > 0)


def parameters(args: argparse.Namespace) -> int:
    from workbench import notebook_run as runs

    for p in runs.parameters(args.notebook).values():
        print(f"{p.name}: {p.type} = {p.default}  # {p.help}")
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
