"""A light line plot: SVG drawn in the browser, and the same plot as a PNG for saved notebooks.

At most 500 points per series are sent, with the extremes; zooming in sends as many of the visible part. Lines differ in
dash and marker as well as colour; the arrow keys move a cursor that reads out values.
Why we wrote our own: docs/decisions/0010.
"""

import math
import re
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

    name, x, y : x ascends. style : "line", "faint" or "points". colour : in the palette.
    smoothing : a running mean over this share of the visible points; 0 for none.
    """

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    style: str = "line"
    colour: int = 0
    dash: str = ""
    smoothing: float = 0.0

    def shown(self, zoom: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        """At most `MAX_POINTS` points, of the visible range of x and one point beyond each end."""
        x = np.asarray(self.x, float)
        y = np.asarray(self.y, float)
        if len(zoom):
            first = max(0, np.searchsorted(x, zoom[0]) - 1)
            end = np.searchsorted(x, zoom[1], "right") + 1
            x = x[first:end]
            y = y[first:end]
        return averaged(x, y, self.smoothing) if self.smoothing else downsample(x, y)

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


def downsample(x: Any, y: Any) -> tuple[list[float], list[float]]:
    """At most `MAX_POINTS` points: the first, the last, and the lowest and highest of each interval."""
    x = np.asarray(x, float)
    y = np.asarray(y, float)
    n = len(x)
    stretches = (MAX_POINTS - 2) // 2
    # 3,000 points: 249 intervals of 13 in the middle, the last ones padded; two points of each, and both ends
    if n > MAX_POINTS:
        size = math.ceil((n - 2) / stretches)
        middle = np.pad(y[1:-1], (0, size * stretches - (n - 2)), mode="edge").reshape(stretches, size)
        first = 1 + size * np.arange(stretches)
        at = np.concatenate([[0, n - 1], first + middle.argmin(1), first + middle.argmax(1)])
        at = np.unique(np.minimum(at, n - 1))  # the padding repeats the second-last point
        x = x[at]
        y = y[at]
    return x.tolist(), y.tolist()


def averaged(x: np.ndarray, y: np.ndarray, share: float) -> tuple[list[float], list[float]]:
    """A running mean over `share` of the points; for many points, over the means of `MAX_POINTS` intervals."""
    if len(x) > MAX_POINTS:
        # the end of each interval, so that the line ends with the run
        x = np.array([part[-1] for part in np.array_split(x, MAX_POINTS)])
        y = np.array([part.mean() for part in np.array_split(y, MAX_POINTS)])
    return x.tolist(), smooth(y.tolist(), max(1, int(share * len(y))))


def without_spikes(x: np.ndarray, y: np.ndarray, block: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """The points without those above three times the mean of their block: one of them lifts a running mean for long."""
    begin = np.arange(0, len(y), block)
    sizes = np.diff(np.append(begin, len(y)))
    kept = y <= np.repeat(3 * np.add.reduceat(y, begin) / sizes, sizes)
    return x[kept], y[kept]


def finite(x: Any, y: Any, log_x: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The points that can be plotted: finite, and positive on a log axis."""
    x = np.asarray(x, float)  # None becomes NaN
    y = np.asarray(y, float)
    good = np.isfinite(x) & np.isfinite(y) & ((x > 0) | (not log_x))
    return x[good], y[good]


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
    legend = traitlets.Bool(True).tag(sync=True)  # of several lines; a single one has none
    zoom: Any = traitlets.List(traitlets.Float()).tag(sync=True)  # from x, to x; [] shows all

    def __init__(self, title: str = "", x_label: str = "", y_label: str = "", **settings: Any):
        super().__init__(title=title, x_label=x_label, y_label=y_label, **settings)
        self.series: list[Series] = []
        self.observe(lambda _change: self._send_shown(), names="zoom")
        self.on_msg(self._on_message)

    def update(self, series: Sequence[Series]) -> None:
        """Replace the series."""
        solid = [id(s) for s in series if s.style == "line"]
        self.series = []
        for s in series:
            x, y = finite(s.x, s.y, self.log_x)
            i = solid.index(id(s)) if id(s) in solid else 0
            dash = DASHES[(i + i // len(DASHES)) % len(DASHES)]  # the seventh line has the first's colour, not its dash
            self.series.append(replace(s, x=x, y=y, dash=dash))
        self._send_shown()

    def _send_shown(self) -> None:
        drawn = [(s, *s.shown(self.zoom)) for s in self.series if len(s.x)]
        low, high = ends(drawn)
        sent = [s.sent(x, y, low, high) for s, x, y in drawn]
        if sent != self.data:
            with self.hold_sync():
                self.data = sent
                if self.zoom:  # the summary is of the whole line
                    drawn = [(s, *s.shown()) for s, _, _ in drawn]
                self.summary = self._summarise(drawn)

    def _summarise(self, drawn: Sequence[tuple[Series, list[float], list[float]]]) -> str:
        parts = []
        for s, x, y in drawn:
            if s.style != "faint":
                parts.append(f"{s.name} {y[-1]:.4g} at {x[-1]:.4g} (lowest {min(y):.4g})")
        return f"{self.title}: {'; '.join(parts) or 'no points yet'}"

    def _on_message(self, _widget: Any, message: Any, _buffers: Any) -> None:
        if message == "png":
            name = re.sub(r"[\W_]", "-", self.title.lower()) or "plot"
            self.send({"name": f"{name}.png", "kind": "image/png"}, [draw_png([self])])


def draw_png(plots: Sequence[LinePlot]) -> bytes:
    """The plots in a row as one PNG."""
    shown = [plot for plot in plots if any(len(s.x) for s in plot.series)] or list(plots[:1])
    figure = blank(4.6 * len(shown) + 0.4, 3.1, dpi=110)
    for axes, plot in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        drawn = [(s, *s.shown()) for s in plot.series if len(s.x)]
        low, high = ends(drawn)
        for s, x, y in drawn:
            dash = (0, tuple(map(float, s.dash.split()))) if s.dash else "-"
            looks: dict[str, dict[str, Any]] = {
                "line": {"linestyle": dash, "linewidth": 1.8, "label": s.name},
                "faint": {"linewidth": 0.8, "alpha": 0.3},
                "points": {"linestyle": "none", "marker": "o", "label": s.name},
            }
            axes.plot(x, np.clip(y, low, high), color=PALETTE[s.colour % len(PALETTE)], **looks[s.style])
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label, title=plot.title)
        axes.set(xscale="log" if plot.log_x else "linear", yscale="log" if plot.log_y else "linear")
        if plot.log_x:
            plain_ticks(axes.xaxis)
        else:
            axes.locator_params("x", integer=True)
        plain(axes)
        if plot.legend and sum(s.style != "faint" for s, _, _ in drawn) > 1:
            axes.legend(frameon=False, fontsize=8)
    return png(figure)
