"""A light line plot: SVG drawn in the browser, and the same plot as a PNG for saved notebooks.

At most 500 points per series are sent, with the extremes; zooming in sends as many of the visible part. Lines differ in
dash and marker as well as colour; the arrow keys move a cursor that reads out values.
Why we wrote our own: docs/decisions/0010.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from dfm_nb.display.plots import PALETTE, blank, plain, png, smooth

MAX_POINTS = 500
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 4")


def plain_ticks(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


@dataclass
class Series:
    """One line of a plot.

    x, y : sequences or arrays of numbers; x ascends. style : "line", "faint" or "points". colour : in the palette.
    smoothing : a running mean over this share of the visible points; 0 for none.
    """

    name: str
    x: Any
    y: Any
    style: str = "line"
    colour: int = 0
    dash: str = ""
    smoothing: float = 0.0

    def shown(self, zoom: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        """At most `MAX_POINTS` points, of the visible range of x and one point beyond each end."""
        x = self.x
        y = self.y
        if len(zoom):
            first = max(0, np.searchsorted(x, zoom[0]) - 1)
            end = np.searchsorted(x, zoom[1], "right") + 1
            x = x[first:end]
            y = y[first:end]
        if self.smoothing:
            y = smooth(y, max(1, int(self.smoothing * len(y))))
        return downsample(x, y)

    def sent(self, x: list[float], y: list[float], low: float, high: float) -> dict[str, Any]:
        """The message to the browser with these points; those outside of low and high are clipped, and in `cut`."""
        return {
            "name": self.name,
            "x": x,
            "y": [float(f"{min(max(v, low), high):.6g}") for v in y],
            "cut": [i for i, v in enumerate(y) if not low <= v <= high],
            "style": self.style,
            "color": PALETTE[self.colour % len(PALETTE)],
            "dash": self.dash,
        }


def downsample(x: np.ndarray, y: np.ndarray) -> tuple[list[float], list[float]]:
    """At most `MAX_POINTS` points: the first, the last, and the lowest and highest of each interval."""
    if len(x) > MAX_POINTS:
        shown = {0, len(x) - 1}
        for part in np.array_split(np.arange(len(x)), MAX_POINTS // 2 - 1):
            shown |= {part[y[part].argmin()], part[y[part].argmax()]}
        at = sorted(shown)
        x = x[at]
        y = y[at]
    return x.tolist(), y.tolist()


def without_spikes(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points without those above three times the mean of the 50 around: one lifts a running mean for long."""
    kept = y <= 3 * smooth(y, 50)
    return x[kept], y[kept]


def ends(drawn: Sequence[tuple[Series, list[float], list[float]]]) -> tuple[float, float]:
    """Lowest and highest y to show: lines in full, faint lines up to half their bulk's spread above and below it.

    This way a few spikes do not flatten a long run.
    """
    extremes: list[float] = []
    for s, _, y in drawn:
        low, high = np.percentile(y, [5, 95])  # of the extremes of each interval
        room = (high - low) / 2 if s.style == "faint" else math.inf
        extremes += [max(min(y), low - room), min(max(y), high + room)]
    return min(extremes, default=0.0), max(extremes, default=0.0)


class LinePlot(anywidget.AnyWidget):
    """Lines in an SVG; `update` replaces them.

    A drag zooms in, a double click zooms out; buttons switch the y axis to log scale and download a PNG.

    >>> plot = LinePlot("loss", "EDM loss")
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
    legend = traitlets.Bool(True).tag(sync=True)  # of several lines; a single one has none
    zoom: Any = traitlets.List(traitlets.Float()).tag(sync=True)  # from x, to x; [] shows all

    def __init__(self, title: str = "", y_label: str = "", x_label: str = "iteration", **settings: Any):
        super().__init__(title=title, x_label=x_label, y_label=y_label, **settings)
        self.series: list[Series] = []
        self.observe(lambda _change: self._send_shown(), names="zoom")
        self.on_msg(self._on_message)

    def update(self, series: Sequence[Series]) -> None:
        """Replace the series; points that cannot be plotted are left out."""
        self.series = []
        i = 0  # of the lines
        for s in series:
            x = np.asarray(s.x, float)  # None becomes NaN
            y = np.asarray(s.y, float)
            good = np.isfinite(x) & np.isfinite(y)
            if self.log_x:
                good &= x > 0
            dash = ""
            if s.style == "line":
                dash = DASHES[(i + i // len(DASHES)) % len(DASHES)]  # the seventh has the first's colour, not its dash
                i += 1
            self.series.append(replace(s, x=x[good], y=y[good], dash=dash))
        self._send_shown()

    def drawn(self, zoom: Sequence[float] = ()) -> list[tuple[Series, list[float], list[float]]]:
        """Each series that has points, and x and y of those that are drawn."""
        return [(s, *s.shown(zoom)) for s in self.series if len(s.x)]

    def _send_shown(self) -> None:
        drawn = self.drawn(self.zoom)
        low, high = ends(drawn)
        sent = [s.sent(x, y, low, high) for s, x, y in drawn]
        if sent != self.data:
            parts = []
            for s, x, y in self.drawn():
                if s.style != "faint":
                    parts.append(f"{s.name} {y[-1]:.4g} at {x[-1]:.4g} (lowest {min(y):.4g})")
            with self.hold_sync():
                self.data = sent
                self.summary = f"{self.title}: {'; '.join(parts) or 'no points yet'}"

    def _on_message(self, _widget: Any, message: Any, _buffers: Any) -> None:
        if message == "png":
            self.send({"name": f"{self.title}.png", "kind": "image/png"}, [draw_png([self])])


LOOKS: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.8},
    "faint": {"linewidth": 0.8, "alpha": 0.3},
    "points": {"linestyle": "none", "marker": "o"},
}


def draw_png(plots: Sequence[LinePlot]) -> bytes:
    """The plots in a row as one PNG."""
    shown = [plot for plot in plots if plot.data] or plots[:1]
    figure = blank(4.6 * len(shown) + 0.4, 3.1, dpi=110)
    for axes, plot in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        drawn = plot.drawn()
        low, high = ends(drawn)
        for s, x, y in drawn:
            colour = PALETTE[s.colour % len(PALETTE)]
            (line,) = axes.plot(x, np.clip(y, low, high), color=colour, label=s.name, **LOOKS[s.style])
            if s.dash:
                line.set_dashes([float(length) for length in s.dash.split()])
        scales = {"xscale": "log" if plot.log_x else "linear", "yscale": "log" if plot.log_y else "linear"}
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label, title=plot.title, **scales)
        if plot.log_x:
            plain_ticks(axes.xaxis)
        else:
            axes.locator_params("x", integer=True)
        plain(axes)
        if plot.legend and len(drawn) > 1:
            axes.legend(frameon=False, fontsize=8)
    return png(figure)
