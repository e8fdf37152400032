"""The page that a sweep leaves: its table, the loss curves of its runs over one another, their newest samples."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from dfm_nb.base import video
from dfm_nb.base.run import Run
from workbench.gallery import Gallery
from workbench.metrics_reader import MetricsReader
from workbench.monitor import SMOOTHING
from workbench.plot import LinePlot, Series, draw_png

STYLE = (
    "body{font-family:sans-serif;margin:24px;max-width:1200px}table.runs{border-collapse:collapse;font-size:14px}"
    ".runs td,.runs th{padding:3px 10px;border-bottom:1px solid #ccc;text-align:left}img{max-width:100%}"
)


def run_of(values: Mapping[str, str]) -> Path | None:
    """The run folder that the parameters of a notebook's run name, or that is below one that they name."""
    folders = [Path(text).expanduser() for name, text in values.items() if name.endswith("_dir")]
    return next((f for top in folders for f in (top, top / "train") if (f / "metrics.jsonl").is_file()), None)


def page(title: str, table: pd.DataFrame, runs: Mapping[str, Path]) -> str:
    """Self-contained HTML.

    Parameters
    ----------
    table : a row a run; its name in the column `run` links to its page. runs : label of a run -> its folder.
    """
    cells = table.map(lambda value: html.escape(f"{value:.5g}" if isinstance(value, float) else str(value)))
    cells["run"] = [f'<a href="{name}.html">{name}</a>' for name in cells["run"]]
    with pd.option_context("display.max_colwidth", None):  # 50 would cut the links
        rows = cells.rename(columns=html.escape).to_html(index=False, escape=False, border=0, classes="runs")
    parts = [f"<h1>{html.escape(title)}</h1>", rows]
    for key, name in (("loss", "Training loss"), ("val_loss", "Validation loss")):
        plot = LinePlot(name, "iteration", "loss", height=300)
        plot.update([_curve(label, run, key, at) for at, (label, run) in enumerate(runs.items())])
        if plot.data:
            picture = video.data_url("image/png", draw_png([plot]))
            parts.append(f'<p><img src="{picture}" alt="{html.escape(plot.summary)}"></p>')
    newest = {label: Run(run).newest_samples() for label, run in runs.items()}
    samples = {label: found[1] for label, found in newest.items() if found}
    if samples:
        parts.append(Gallery(samples, title="Newest samples").html())
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
        + "\n".join(parts)
    )


def _curve(label: str, run: Path, key: str, colour: int) -> Series:
    reader = MetricsReader(run)
    reader.read()
    return Series(label, *reader.points(key), colour=colour, smoothing=SMOOTHING if key == "loss" else 0.0)
