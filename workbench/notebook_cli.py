"""`dfm notebook run`, `sweep` and `parameters`: notebooks as batch jobs.

Exit code 0: every cell of every run ran. 1: a cell failed, and its error is the last line. 2: a mistake in the command,
found before any kernel starts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dfm_nb.base.argv import ArgumentParser, guard

USAGE = """usage: dfm notebook COMMAND ...   (dfm notebook COMMAND --help for its flags)

  run         one notebook with parameters, from the first cell to the last
  sweep       a grid of parameters, several runs at a time, a result table
  parameters  what can be set in a notebook"""


def parser(command: str) -> ArgumentParser:
    if command == "run":
        p = ArgumentParser(prog="dfm notebook run", description="Run a notebook from its first cell to its last.")
    elif command == "sweep":
        p = ArgumentParser(prog="dfm notebook sweep", description="Run a notebook for every combination of a grid.")
    else:
        p = ArgumentParser(prog="dfm notebook parameters", description="What can be set in a notebook.")
    p.add_argument("notebook", help="the .ipynb; it is not changed")
    if command == "parameters":
        return p
    p.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=argparse.SUPPRESS,
        metavar=("NAME", "VALUE"),
        help="a value for the parameters cell; repeat for several",
    )
    p.add_argument("--no-report", action="store_true", help="leave out the HTML page")
    if command == "run":
        p.add_argument("--output", required=True, help="the executed notebook, OUT.ipynb; also written: OUT.html")
        p.add_argument("--quiet", action="store_true", help="do not print what the cells print")
    else:
        p.add_argument("--grid", nargs="+", required=True, metavar="NAME=A,B,C", help="values to combine")
        p.add_argument("--jobs", type=int, default=1, help="runs at a time")
        p.add_argument("--output-dir", required=True, help="NNN.ipynb, NNN.html, NNN.log, results.csv and index.html")
    return p


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    verbs = {"run": run, "sweep": sweep, "parameters": show_parameters}
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] not in verbs:
        raise ValueError(f"dfm notebook has no command {argv[0]!r}; it has {', '.join(verbs)}")
    args = parser(argv[0]).parse_args(argv[1:])
    require_papermill()
    return verbs[argv[0]](args)


def require_papermill() -> None:
    """ValueError with the fix when the notebook extra is not installed."""
    try:
        import papermill  # noqa: F401
    except ImportError:
        raise ValueError("papermill is not installed; pip install 'dfm_nb[notebook]'") from None


def _given(args: argparse.Namespace) -> dict[str, str]:
    out: dict[str, str] = {}
    for name, value in getattr(args, "parameter", []):
        if name in out:
            raise ValueError(f"-p {name} is given twice; keep one of the two")
        out[name] = value
    return out


def run(args: argparse.Namespace) -> int:
    from workbench import notebook_run as runs

    values = runs.convert(_given(args), runs.parameters(args.notebook), args.notebook)
    done = runs.execute(args.notebook, args.output, values, progress=not args.quiet, report=not args.no_report)
    report = f" and {done.report}" if done.report else ""
    print(f"== {done.output}{report} in {done.duration_s:.0f} s", flush=True)
    if done.error:
        print(f"error: {done.error}", file=sys.stderr, flush=True)
        return 1
    return 0


def sweep(args: argparse.Namespace) -> int:
    from workbench import notebook_sweep as grids

    grid, report = grids.parse_grid(args.grid), not args.no_report
    rows = grids.sweep(args.notebook, grid, args.output_dir, fixed=_given(args), jobs=args.jobs, report=report)
    print(grids.table(rows, list(grid)))
    failed = [r for r in rows if r.state != "done"]
    print(f"== {len(rows) - len(failed)} of {len(rows)} done; {Path(args.output_dir) / 'index.html'} and results.csv")
    return 1 if failed else 0


def show_parameters(args: argparse.Namespace) -> int:
    from workbench import notebook_run as runs

    found = list(runs.parameters(args.notebook).values())
    print(runs.summary(found) if found else f"{args.notebook} has no cell tagged parameters")
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
