"""A light line plot: SVG drawn in the browser; and the same picture as a PNG for saved notebooks.

At most 500 points a series are sent, extremes kept. Lines differ in dash and marker as well as colour; the arrow keys
move a cursor that reads out values.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import anywidget
import traitlets

from dfm_nb.base.plots import PALETTE

MAX_POINTS = 500
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 4")


@dataclass
class Series:
    """One line of a plot: name, x and y; `style` is "line", "faint" or "points"; `colour` indexes the palette."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "line"
    colour: int = 0
    dash: str = ""

    def sent(self) -> dict[str, Any]:
        x, y = downsample(self.x, self.y)
        return {
            "name": self.name,
            "x": x,
            "y": [float(f"{v:.6g}") for v in y],
            "style": self.style,
            "color": PALETTE[self.colour % len(PALETTE)],
            "dash": self.dash,
        }


def downsample(x: Sequence[float], y: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most `limit` points: the first, the last, and the lowest and highest of each stretch."""
    n = len(x)
    if n <= limit:
        return list(x), list(y)
    buckets = (limit - 2) // 2
    keep = {0, n - 1}
    for b in range(buckets):
        stretch = range(1 + b * (n - 2) // buckets, 1 + (b + 1) * (n - 2) // buckets)
        keep |= {min(stretch, key=lambda i: y[i]), max(stretch, key=lambda i: y[i])}
    return [x[i] for i in sorted(keep)], [y[i] for i in sorted(keep)]


def finite(x: Sequence[float], y: Sequence[float | None], log_x: bool = False) -> tuple[list[float], list[float]]:
    """The points that can be plotted: finite, and positive on a log axis."""
    good = [
        (a, b) for a, b in zip(x, y) if b is not None and math.isfinite(b) and math.isfinite(a) and (a > 0 or not log_x)
    ]
    return [a for a, _ in good], [b for _, b in good]


class LinePlot(anywidget.AnyWidget):
    """Lines in an SVG; `update` replaces them.

    >>> plot = LinePlot("loss", "iteration", "EDM loss")
    >>> plot.update([Series("training", [1, 2, 3], [0.9, 0.7, 0.6])])
    >>> plot.summary
    'loss: training 0.6 at 3 (lowest 0.6)'
    """

    _esm = Path(__file__).with_name("plot.js")
    _css = Path(__file__).with_name("plot.css")
    data: Any = traitlets.List().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    x_label = traitlets.Unicode().tag(sync=True)
    y_label = traitlets.Unicode().tag(sync=True)
    log_x = traitlets.Bool(False).tag(sync=True)
    log_y = traitlets.Bool(False).tag(sync=True)
    height = traitlets.Int(220).tag(sync=True)
    summary = traitlets.Unicode().tag(sync=True)

    def __init__(self, title: str = "", x_label: str = "", y_label: str = "", **settings: Any):
        super().__init__(title=title, x_label=x_label, y_label=y_label, **settings)
        self.series: list[Series] = []

    def update(self, series: Sequence[Series]) -> None:
        """Replace the series."""
        solid = [s for s in series if s.style == "line"]
        self.series = [
            Series(s.name, *finite(s.x, s.y, self.log_x), s.style, s.colour, _dash(solid, s)) for s in series
        ]
        sent = [s.sent() for s in self.series if s.x]
        if sent != self.data:
            with self.hold_sync():
                self.data = sent
                self.summary = self._summarise()

    def _summarise(self) -> str:
        told = [s for s in self.series if s.x and s.style != "faint"]
        parts = [f"{s.name} {s.y[-1]:.4g} at {s.x[-1]:.4g} (lowest {min(s.y):.4g})" for s in told]
        return f"{self.title}: " + ("; ".join(parts) if parts else "no points yet")


def _dash(lines: list[Series], one: Series) -> str:
    """The first line is solid, the others each have their own dashes."""
    return next((DASHES[i % len(DASHES)] for i, s in enumerate(lines) if s is one), "")


def draw_png(plots: Sequence[LinePlot]) -> bytes:
    """The plots in a row as one PNG; on white, so that it reads on any page."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display
    from matplotlib.ticker import LogFormatter

    plain = LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5))
    shown = [p for p in plots if any(s.x for s in p.series)] or list(plots[:1])
    figure = Figure(figsize=(4.6 * len(shown) + 0.4, 3.1), dpi=110, layout="constrained", facecolor="white")
    for axes, plot in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        for s in plot.series:
            colour = PALETTE[s.colour % len(PALETTE)]
            if s.style == "points":
                axes.plot(s.x, s.y, "o", color=colour, markersize=5, markeredgecolor="white", label=s.name)
            else:
                faint = s.style == "faint"
                line = (0, tuple(map(float, s.dash.split()))) if s.dash else "-"
                axes.plot(
                    s.x,
                    s.y,
                    color=colour,
                    linewidth=0.8 if faint else 1.8,
                    alpha=0.3 if faint else 1,
                    linestyle=line,
                    label=None if faint else s.name,
                )
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label, title=plot.title)
        if plot.log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(plain)
            axes.xaxis.set_minor_formatter(plain)
        if plot.log_y and any(v > 0 for s in plot.series for v in s.y):
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        if any(s.x and s.style != "faint" for s in plot.series):
            axes.legend(frameon=False, fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
