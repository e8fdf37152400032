"""Compare runs: `compare(runs)` returns a table; `run_page(run)` is one run as self-contained HTML."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dfm_nb import config as cfg
from dfm_nb import display
from dfm_nb.base.files import MARK, UNLIMITED, plain, read_json
from dfm_nb.base.log import legible
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.metrics import damage_of
from dfm_nb.base.run import Run, ended
from dfm_nb.config import notation
from dfm_nb.display import plots

if TYPE_CHECKING:
    import pandas as pd

PLACES = ("checkpoint.checkpoint_dir", "checkpoint.load", "checkpoint.load_checkpoint")
"""Settings that differ in every run and explain nothing."""
StrPath = str | os.PathLike
Ended = Literal["not started", "finished", "stopped"]
TAIL_BYTES = 1 << 16
"""Enough of `metrics.jsonl` for its last record, which may list losses by noise level."""
_ITERATION = re.compile(rb'"iteration": ?(\d+)')
LEVELS = 4
FIGURES = ("state", "iterations", "best_val_loss", "best_at", "val_loss", "loss", "seconds")
ROUNDS_SHOWN = 4
SAMPLES_SHOWN = 8
SAMPLE_PX = 128
STYLE = (
    "body{font-family:sans-serif;margin:24px;max-width:1200px}table.runs{border-collapse:collapse;font-size:14px}"
    ".runs td,.runs th{padding:3px 10px;border-bottom:1px solid #ccc;text-align:left}img{max-width:100%}"
    ".samples{display:flex;flex-wrap:wrap;gap:10px;font-size:12px}figure{margin:0;width:128px}"
)


def runs_below(folder: StrPath) -> list[Path]:
    """The run folders in a folder, four levels down; the folder itself when it is a run, or when there are none.

    A link to a folder is not one of its runs, because a view writes notes and pages into them: open its target.
    """
    top = Path(folder).expanduser()
    if (top / "metrics.jsonl").exists() or (top / "config.yaml").exists():
        return [top]
    runs = []
    for path, folders, files in os.walk(top):  # which follows no link
        depth = len(Path(path).relative_to(top).parts)
        if depth and "metrics.jsonl" in files + folders:
            runs.append(Path(path))
        folders[:] = [name for name in folders if depth < LEVELS and not name.startswith(".")]
    return sorted(runs) or [top]


def settings_of(run: Path) -> dict:
    """What `config.yaml` says by dotted key; {} when it is not there, or is no configuration."""
    try:
        loaded = notation.read(plain(run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tree = loaded if isinstance(loaded, dict) else {}
    return {key: value for key, value in cfg.flatten(tree) if not key.startswith(cfg.OF_SAMPLES)}


def ended_in_terminal(folder: Path) -> Ended:
    """The same for a folder without a launcher's record, from the end of its metrics."""
    run = Run(folder)
    try:
        with plain(run.metrics_file, None, UNLIMITED).open("rb") as file:
            file.seek(max(0, run.metrics_file.stat().st_size - TAIL_BYTES))
            iterations = [0, *_ITERATION.findall(file.read())]
        return ended(int(iterations[-1]), _length(folder, run.config_file.stat().st_mtime_ns))
    except (OSError, ValueError):
        return "not started"


@functools.lru_cache(16)
def _length(folder: Path, _mtime_ns: int) -> Any:
    return settings_of(folder).get("train.train_iters")


def differing(settings: Sequence[Mapping]) -> list[str]:
    """The keys whose values are not the same in all runs that have settings."""
    known = list(filter(None, settings))
    differ = []
    for key in dict.fromkeys(chain(*known)):
        if key in PLACES or key.startswith("provenance."):
            continue
        if any(one.get(key) != known[0].get(key) for one in known):
            differ.append(key)
    return differ


def compare(runs: StrPath | Iterable[StrPath]) -> pd.DataFrame:
    """One row per run: its progress, its losses, and the settings in which the runs differ.

    Parameters
    ----------
    runs : run folders, or one folder that holds runs.

    Returns
    -------
    DataFrame with the run's folder as index and the columns `state` (running, finished, stopped, not started; or
    `damaged: line 7` of its metrics, of which those before are read), `iterations`, `best_val_loss` and `best_at` (an
    iteration; of the average that generates), `val_loss` and `loss` (the last ones), `seconds`, and one
    for each setting that differs.

    >>> compare("runs").sort_values("best_val_loss")  # doctest: +SKIP
    """
    import pandas as pd

    if isinstance(runs, (str, os.PathLike)):
        folders = runs_below(runs)
    else:
        folders = [Path(run).expanduser() for run in runs]
    for folder in folders:
        run = Run(folder)
        if not run.config_file.exists() and not run.metrics_file.exists():
            raise FileNotFoundError(f"{folder} is neither a run folder nor a folder of runs; pass a --run-dir")
    settings = list(map(settings_of, folders))
    keys = differing(settings)
    top = os.path.commonpath([folder.absolute().parent for folder in folders])
    rows = []
    names = []
    for folder, values in zip(folders, settings):
        rows.append(_row(folder, values) | {key: values.get(key) for key in keys})
        names.append(legible(folder.absolute().relative_to(top).as_posix()))
    return pd.DataFrame(rows, index=pd.Index(names, name="run"), dtype=object)


def _row(folder: Path, settings: Mapping) -> dict:
    """The figures of a run; one that cannot be read, of many, is a row that says why."""
    try:
        return Run(folder).figures(settings.get("train.train_iters"))
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError) as error:
        return {**dict.fromkeys(FIGURES), "state": f"cannot be read: {error}"}


# ---- one page -----------------------------------------------------------------------------------------------------


def run_page(run: StrPath) -> Html:
    """Self-contained HTML of one run: its figures, the settings that are not the default, curves, samples over time."""
    import pandas as pd

    folder = Path(run).expanduser().resolve()
    resolved = cfg.from_yaml(folder / "config.yaml")
    settings = []
    for key, field in cfg.FIELDS.items():
        value = resolved.get(key)
        if value != field.default:
            settings.append((key, str(value), resolved.provenance[key]))
    tables = [compare([folder]).reset_index(), pd.DataFrame(settings, columns=["setting", "value", "from"])]
    rounds = display.sample_rounds(Run(folder))
    title = f"Run {folder.name}"
    parts = [fill("<h1>{}</h1>", title), *map(_table, tables)]
    records, _ = damage_of(folder)
    curves = plots.loss_png(records, folder.name)
    if curves:
        picture = display.data_url("image/png", curves)
        parts.append(fill('<p><img src="{}" alt="Training and validation loss"></p>', picture))
    for iteration, samples in rounds[:: -max(1, len(rounds) // ROUNDS_SHOWN)]:  # the newest first
        figures = list(map(_figure, display.media_in(samples)[:SAMPLES_SHOWN]))
        heading = f"Samples at iteration {iteration}"
        parts.append(fill('<h3>{}</h3><div class="samples">{}</div>', heading, figures))
    page = '<!doctype html><meta charset="utf-8"><title>{}</title><style>{}</style>{}{}'
    return fill(page, title, Html(STYLE), parts, Html(MARK))


def _table(table: pd.DataFrame) -> Html:
    lines = [fill("<tr>{}</tr>", [fill("<th>{}</th>", name) for name in table])]
    for row in table.astype(object).fillna("").itertuples(index=False):
        cells = []
        for value in row:
            cells.append(fill("<td>{}</td>", f"{value:.5g}" if isinstance(value, float) else value))
        lines.append(fill("<tr>{}</tr>", cells))
    return fill('<table class="runs">{}</table>', lines)


SHOWN = {
    **dict.fromkeys(("prompt", "sampler", "caption_of"), str),
    **dict.fromkeys(("seed", "num_steps", "iteration", "guidance", "fps"), int | float),
}
"""What a view shows of the sidecar of a clip, with types."""


def clip_settings(path: Path) -> dict:
    """The settings of a clip in its sidecar that have their types."""
    sidecar = read_json(Path(f"{path}.json"))
    return {key: sidecar[key] for key, kind in SHOWN.items() if isinstance(sidecar.get(key), kind)}


def _figure(path: Path) -> Html:
    """A picture or clip over its prompt or its name."""
    text = clip_settings(path).get("prompt") or path.stem
    media = display.media_html(display.MEDIA[path.suffix], path.read_bytes(), text, SAMPLE_PX)
    return fill("<figure>{}{}</figure>", media, text)
