"""`dfm sweep`: train every combination of settings, some at a time, each in its own run folder.

Every combination is checked before the first one starts. A failed one is a row of the table, and the others continue.
The same call again skips what is finished, resumes what is not, and takes up values that were added.
`results.csv` is written again whenever a run ends.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from dfm_nb import config as cfg
from dfm_nb.base import process
from dfm_nb.base.files import write_atomically
from dfm_nb.base.options import option, plain
from dfm_nb.base.run import Run, iteration_folders
from dfm_nb.base.verb import Report
from dfm_nb.config import notation
from dfm_nb.experiments.runs import compare
from dfm_nb.train import TrainOptions

if TYPE_CHECKING:
    import pandas as pd
    import psutil

POLL_S = 0.2
TABLE = "results.csv"
ENDS = (".log", ".ipynb", ".html")
"""What sweeps of settings and of notebooks write into their folder; each name of a run has these ends."""
Ended = dict[str, tuple[str, float]]
"""Of the commands that have ended, by name: the last line of a failed one's log, else "", and seconds."""


def parse_grid(texts: Sequence[str], is_text: Callable[[str], Any] = lambda name: False) -> dict[str, list[str]]:
    """`["steps=10,20", "lr=1e-3"]` as {"steps": ["10", "20"], "lr": ["0.001"]}: entries of a YAML list.

    is_text : whether a name's values are text; then they stay as they are written.

    Raises
    ------
    ValueError : no `=`, a name or value given twice.
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        try:
            values = []
            for entry in notation.read(f"[{listed}]", words=bool(is_text(name))):
                values.append(entry if isinstance(entry, str) else notation.write_value(entry))
        except ValueError:
            values = []
        if not name or not values:
            raise ValueError(f"--grid needs name=a,b,c; got {text!r}")
        if name in grid or len(set(values)) < len(values):
            raise ValueError(f"--grid has a name or a value of {text!r} twice; write each once")
        grid[name] = values
    return grid


def _grid_words(grid: Any) -> list[str]:
    """A mapping of names to values, or words, as words."""
    if isinstance(grid, Mapping):
        return [f"{key}={notation.write_value(plain(list(values)))[1:-1]}" for key, values in grid.items()]
    return [grid] if isinstance(grid, str) else list(grid)


class SweepOptions(TrainOptions):
    """Train every combination of settings; the flags of dfm pretrain hold for all. A second call resumes."""

    prog = "dfm sweep"
    module = None
    epilog = "For example: --grid optimizer.lr=1e-3,3e-3 optimizer.weight_decay=0,0.1"
    aliases = {"num_processes": "nproc_per_node"}
    grid: Annotated[list[str], BeforeValidator(_grid_words)] = option(
        help="settings to combine; a single value applies to all", metavar="group.key=A,B,C"
    )
    run_dir: str = option("runs/sweep", "a run folder for each, NAME.log, and results.csv", output=True)
    jobs: int = option(1, "runs at a time", ge=1)
    nproc_per_node: int = option(1, "processes of each run", ge=1)

    def points(self) -> dict[str, TrainOptions]:
        """The training of each combination by its name, `optimizer.lr=0.001`; keys of one value are in no name."""
        grid = parse_grid(self.grid, cfg.text_type)
        points: dict[str, TrainOptions] = {}
        common = {name: value for name, value in self.chosen.items() if name in TrainOptions.model_fields}
        for values in itertools.product(*grid.values()):
            words = [f"{key}={value}" for key, value in zip(grid, values)]
            name = ",".join(word for key, word in zip(grid, words) if len(grid[key]) > 1)
            name = re.sub(r"[^\w.=,+-]", "_", name)[:120] or "run"
            if name in points:
                name = f"{name}-{len(points)}"
            own = {"run_dir": f"{Path(self.run_dir) / name}", "overrides": [*self.overrides, *words], "as_json": False}
            points[name] = TrainOptions(**(common | own))
        return points

    def run(self) -> Any:
        points = self.points()
        if self.print_config:
            return next(iter(points.values())).preflight(self.nproc_per_node)
        folder = Path(self.run_dir)
        pretrain = [*process.python_module("dfm_nb"), "pretrain"]
        if self.nproc_per_node > 1:
            pretrain.append(f"--nproc-per-node={self.nproc_per_node}")
        todo = {}
        for name, point in points.items():
            if not _is_finished(point, self.nproc_per_node):
                todo[name] = [*pretrain, *point.words()]
        folder.mkdir(parents=True, exist_ok=True)
        for name in points:
            if name not in todo:
                print(f"-- {name} is finished", flush=True)
        return run_all(todo, folder, self.jobs, partial(_table, folder, points))

    def report(self, result: Any) -> Report:
        if self.print_config:
            return super().report(result)
        return swept(result, Path(self.run_dir), run_dir=self.run_dir)


main = SweepOptions.main


def sweep(grid: Mapping | Iterable[str], *, run_dir: str | os.PathLike | None = None, **flags: Any) -> pd.DataFrame:
    """Train every combination of settings, or resume the unfinished ones.

    Parameters
    ----------
    grid : {"optimizer.lr": [1e-3, 3e-3], ...} or ["optimizer.lr=1e-3,3e-3", ...].
    run_dir : gets a run folder for each combination, and `results.csv`.
    **flags : `jobs` (runs at a time), `num_processes` (of each run), and what `train_model` takes for all of them.

    Returns
    -------
    The table of `compare`, with the column `error`.

    Raises
    ------
    ConfigError, ValueError : some combination is wrong; nothing has started.

    >>> sweep({"optimizer.lr": [1e-3, 3e-3]}, dataset_path="data", run_dir="runs/lr", recipe="demo")  # doctest: +SKIP
    """
    return SweepOptions(**flags | {"grid": grid, "run_dir": run_dir}).run()


def run_all(
    commands: Mapping[str, Sequence[object]],
    folder: Path,
    jobs: int,
    table_of: Callable[[Ended], pd.DataFrame],
    labels: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Run commands, some at a time; each logs to `NAME.log`, and a line is printed when it starts and ends.

    Parameters
    ----------
    table_of : the sweep's table, indexed by name. It is written to `results.csv` now and whenever a command ends.

    Returns
    -------
    The table when all have ended.

    Raises
    ------
    FileExistsError : the folder holds files of these names, and no sweep of ours made it.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    written = map("".join, itertools.product(commands, ENDS))
    own = Run.create(folder, {TABLE, *written})
    own.claim()
    waiting = list(commands)
    running: dict[str, tuple[psutil.Popen, float]] = {}
    ended: Ended = {}
    try:
        while True:
            table = table_of(ended)
            write_atomically(folder / TABLE, table.to_csv().encode())
            for name in waiting[: jobs - len(running)]:
                waiting.remove(name)
                log = folder / f"{name}.log"
                log.unlink(missing_ok=True)  # of a sweep before
                started = process.start(commands[name], log, own_session=False, OMP_NUM_THREADS=threads)
                running[name] = started, time.monotonic()
                print(f"-- {name} started" + (f": {labels[name]}" if labels else ""), flush=True)
            if not running:
                return table
            while all(started.poll() is None for started, _ in running.values()):
                time.sleep(POLL_S)
            for name, (started, begun) in list(running.items()):
                code = started.poll()
                if code is not None:
                    del running[name]
                    seconds = round(time.monotonic() - begun, 1)
                    error = ""
                    state = "done"
                    if code:
                        error = _last_line(folder / f"{name}.log") or f"exit code {code}"
                        state = "failed"
                    print(f"-- {name} {state} in {seconds:.0f} s {error}".rstrip(), flush=True)
                    ended[name] = error, seconds
    finally:
        for started, _ in running.values():
            process.end(started, process.GRACE_S + process.MARGIN_S)
        own.release()


def swept(table: pd.DataFrame, folder: Path, **where: str) -> Report:
    """What a sweep prints of its table, whose rows have a `state`. where : entries of the object of `--json`."""
    table = table.reset_index()
    failed = int((table["state"] == "failed").sum())
    shown = table.loc[:, (table.notna() & (table != "")).any()].to_string(index=False, float_format="{:.5g}".format)
    text = f"{shown}\n== {len(table) - failed} of {len(table)} done; {folder / TABLE}"
    return Report({**where, "runs": json.loads(table.to_json(orient="records"))}, text, int(failed > 0))


def _last_line(log: Path) -> str:
    """The last message of a failed command, without `error: `."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""


def _is_finished(point: TrainOptions, nproc: int) -> bool:
    """Whether the run has its last checkpoint, with these settings; ConfigError where they are wrong."""
    resolved = point.resolve(nproc)
    run = Run(Path(point.run_dir))
    if not run.config_file.is_file():
        return False
    stored = cfg.from_yaml(run.config_file)
    for key in cfg.FIELDS:
        now = resolved.get(key)
        if now != stored.get(key):
            derived = stored.provenance[key].startswith(cfg.DERIVED)
            if now not in (None, "auto") or not derived:
                return False
    saved = iteration_folders(run.checkpoints)
    return bool(saved) and saved[-1][0] >= stored.config.train.train_iters


def _table(folder: Path, points: Mapping[str, TrainOptions], ended: Ended) -> pd.DataFrame:
    """The runs of a sweep, as `compare` has them, with the errors of those that failed."""
    import pandas as pd

    errors = {name: error for name, (error, _) in ended.items() if error}
    runs = {name: folder / name for name in points if (folder / name / "config.yaml").exists()}
    table = compare(runs.values()) if runs else pd.DataFrame(columns=["state"])
    table = table.set_axis(pd.Index(runs, name="run")).reindex(pd.Index(points, name="run"))
    table["state"] = table["state"].fillna("waiting").mask(table.index.isin(list(errors)), "failed")
    table["error"] = table.index.map(errors)
    return table
