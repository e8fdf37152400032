"""Static plots, by matplotlib: on white, so that they are readable on any page."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from dfm_nb.base.files import Json, write_atomically
from dfm_nb.base.log import legible
from dfm_nb.base.metrics import read_metrics, series
from dfm_nb.base.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#BC6698", "#B07A00", "#2F8DC9")
"""Okabe and Ito's colours, which colour-blind people can distinguish; the last three darker, for 3:1 on white."""


@functools.cache
def load_matplotlib() -> ModuleType:
    """The package, imported without a file of the current folder."""
    exists = os.path.exists
    # matplotlib 3.11 first looks for a `matplotlibrc` of the current folder, by this function. Files there are data:
    # bytes would end it, a pipe hang it.
    os.path.exists = lambda path: path != "matplotlibrc" and exists(path)
    try:
        import matplotlib
    finally:
        os.path.exists = exists
    return matplotlib


def blank(width_in: float, height_in: float, dpi: int = 120) -> Figure:
    """An empty figure to draw on; every plot begins with one."""
    load_matplotlib()
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    return Figure(figsize=(width_in, height_in), dpi=dpi, layout="constrained", facecolor="white")


def literal(drawn: Figure) -> Figure:
    """The figure, whose text is no mathtext: two dollar signs in a name are no formula. It is UTF-8, too."""
    from matplotlib.text import Text

    for text in drawn.findobj(Text):
        shown = text.get_text()
        if "mathdefault" not in shown and "$" in shown:  # a tick's power of ten is a formula
            text.set_parse_math(False)
        if not shown.isprintable():
            text.set_text(legible(shown))
    return drawn


def png(drawn: Figure) -> bytes:
    """The figure as a PNG."""
    out = io.BytesIO()
    literal(drawn).savefig(out, format="png")
    return out.getvalue()


def save(drawn: Figure, path: str | Path) -> None:
    """Write the figure as a PNG file, which is whole or absent."""
    write_atomically(path, png(drawn))


def plain(axes: Axes) -> None:
    """Style axes without a frame, with a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def smooth(values: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """Centred running mean over `window` values, narrower at both ends."""
    half = window // 2
    at = np.arange(len(values))
    sums = np.concatenate(([0.0], np.cumsum(values)))
    low = np.maximum(at - half, 0)
    high = np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def plot_loss(run: Run) -> None:
    """Draw a run's `loss.png`, unless it has no finite `loss`."""
    picture = loss_png(read_metrics(run.metrics_file), run.name)
    if picture:
        write_atomically(run.path / "loss.png", picture)


def loss_png(records: Sequence[Json], title: str) -> bytes:
    """Every loss faintly by iteration, a running mean, and validation points; b"" without a finite `loss`."""
    x, y = series(records, "loss")
    if not y:
        return b""
    drawn = blank(7.2, 4.2)
    axes = drawn.add_subplot()
    axes.plot(x, y, color=PALETTE[0], alpha=0.22, linewidth=0.8)
    axes.plot(x, smooth(y, max(1, len(y) // 40)), color=PALETTE[0], linewidth=1.8, label="training loss")
    x_val, y_val = series(records, "val_loss")
    if x_val:
        axes.plot(x_val, y_val, "o", color=PALETTE[1], markersize=4.5, label="validation loss", zorder=3)
    axes.set(xlabel="iteration", ylabel="EDM loss", title=title)
    top = float(np.quantile(y, 0.995))  # a few early spikes are cut off, so that the curve fills the plot
    axes.set_ylim(0 if min(y) < top / 2 else None, 1.05 * top)
    plain(axes)
    axes.legend(frameon=False)
    return png(drawn)
