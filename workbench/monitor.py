"""A live view of a run: loss, validation by noise level, learning rate, speed, time left, newest samples.

A daemon thread reads the run folder, so no cell waits for it. It follows the run, also through a resume, until `close`
or until another monitor of the run is shown. At the end a picture stays in the saved notebook. Headless it shows only
that picture and a line of text.
"""

from __future__ import annotations

import html
import math
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Mapping, Sequence

import yaml

from dfm_nb.base.log import duration
from dfm_nb.base.metrics import series, smooth
from dfm_nb.base.run import Run
from workbench.headless import is_headless
from workbench.job import Job, State
from workbench.metrics import MetricsReader
from workbench.plot import LinePlot, Series, draw_png

REPAINT_S = 0.25
REST = 19
"""Painting a long run takes long: it rests so many times as long, to take a twentieth of a core at most."""
_LIVE: weakref.WeakSet[Monitor] = weakref.WeakSet()


def finish(run_dir: str | Path) -> None:
    """Bring every monitor of a run to its end state now: the run is over."""
    for monitor in list(_LIVE):
        if monitor.run.path == Path(run_dir):
            monitor.finish()


class Monitor:
    """Watch a run folder.

    Parameters
    ----------
    run_dir : the folder; it may be made later.

    >>> Monitor("runs/first").show()      # doctest: +SKIP
    """

    def __init__(self, run_dir: str | Path):
        self.run = Run(Path(run_dir).expanduser().resolve())
        self.job, self.reader = Job(self.run.path), MetricsReader(self.run.path)
        self.loss = LinePlot("Training loss", "iteration", "EDM loss", height=250)
        self.by_sigma = LinePlot("Validation by noise level", "sigma", "EDM loss", log_x=True, height=200)
        self.lr = LinePlot("Learning rate", "iteration", "lr", height=200)
        self.speed = LinePlot("Speed", "iteration", "tokens/s", height=200)
        self.train_iters = 0
        self._config_mtime = 0.0
        self._samples: tuple[Any, ...] = ()
        self._box: Any = None
        self._display: Any = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        _LIVE.add(self)

    # ---- what is known --------------------------------------------------------------------------------------------

    def read(self) -> int:
        """Take in what the run wrote since the last call; returns the number of new records."""
        with self._lock:
            self._read_config()
            return self.reader.read()

    def _read_config(self) -> None:
        try:
            mtime = self.run.config_file.stat().st_mtime
            if mtime == self._config_mtime:
                return
            self.train_iters = int(yaml.safe_load(self.run.config_file.read_text())["train"]["train_iters"])
            self._config_mtime = mtime
        except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
            return  # not there yet, or of another kind: progress without an end

    @property
    def iteration(self) -> int:
        return int(self.reader.records[-1]["iteration"]) if self.reader.records else 0

    @property
    def progress(self) -> float:
        """0 to 1; 0 while the length of the run is unknown."""
        return min(1.0, self.iteration / self.train_iters) if self.train_iters else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace of the last fifty iterations; None before there is a pace."""
        timed = [r for r in self.reader.records[-60:] if "elapsed_s" in r][-50:]
        if len(timed) < 2 or not self.train_iters:
            return None
        steps = timed[-1]["iteration"] - timed[0]["iteration"]
        pace_s = (timed[-1]["elapsed_s"] - timed[0]["elapsed_s"]) / steps if steps > 0 else math.nan
        return pace_s * (self.train_iters - self.iteration) if pace_s > 0 else None

    @property
    def state(self) -> str:
        """The job's; of a run that was not started from a notebook, what its metrics tell."""
        state = self.job.state
        if state == "not started" and self.iteration:
            return "finished" if self.iteration == self.train_iters else "started elsewhere"
        return state

    def status(self) -> str:
        """One line: state, iteration, loss, validation loss, learning rate, tokens/s, time left."""
        last, state = self.reader.last, self.state
        of = f"/{self.train_iters}" if self.train_iters else ""
        parts = [f"{state}", f"iteration {self.iteration}{of}"]
        for name, key, form in (
            ("loss", "loss", "{:.4f}"),
            ("validation", "val_loss", "{:.4f}"),
            ("lr", "lr", "{:.2e}"),
            ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ):
            value = last(key)
            if isinstance(value, (int, float)):
                parts.append(f"{name} {form.format(value)}")
        eta = self.eta_s
        if state == "running" and eta is not None:
            parts.append(f"about {duration(eta)} to go")
        return " · ".join(parts)

    # ---- painting -------------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """Redraw everything from the records that were read."""
        with self._lock:
            records = self.reader.records
            self.loss.update(loss_series(records))
            self.by_sigma.update(sigma_series(records))
            for plot, key in ((self.lr, "lr"), (self.speed, "tokens_per_s")):
                x, y = series(records, key)
                y = smooth(y, len(y) // 40) if key == "tokens_per_s" else y
                plot.update([Series(plot.y_label, x, y, colour=2)])
            if self._box is not None:
                self._paint_box()

    def _paint_box(self) -> None:
        _set(self._bar, "value", self.progress)
        _set(
            self._bar,
            "bar_style",
            {"finished": "success", "failed": "danger", "stopped": "warning"}.get(self.state, ""),
        )
        text = f'<span role="status">{html.escape(self.status())}</span>'
        if self.reader.fault:
            text += f'<div role="alert"><b>Fault:</b> {html.escape(self.reader.fault)}</div>'
        _set(self._text, "value", text)
        newest = self.run.newest_samples()
        key = (newest[0], *((str(p), p.stat().st_mtime) for p in newest[1])) if newest else ()
        if newest and key != self._samples:
            from workbench.gallery import Gallery

            self._samples = key
            head = f'<div style="font-weight:600">Samples at iteration {newest[0]}</div>'
            self._media.value = head + Gallery(newest[1][:8], width_px=144, details=False).html()

    @property
    def widget(self) -> Any:
        """The live view; reading starts when it is first asked for."""
        if self._box is None:
            import ipywidgets as w

            self._bar = w.FloatProgress(min=0, max=1, layout=w.Layout(width="100%"))
            self._text, self._media = w.HTML(), w.HTML()
            half = w.Layout(width="33%", min_width="260px", flex="1 1 260px")
            for plot in (self.by_sigma, self.lr, self.speed):
                plot.layout = half
            small = w.HBox([self.by_sigma, self.lr, self.speed], layout=w.Layout(flex_flow="row wrap", width="100%"))
            self._box = w.VBox([self._bar, self._text, self.loss, small, self._media], layout=w.Layout(width="100%"))
            self._box.add_class("dfm-monitor")
            self.read()
            self.paint()
            self.watch()
        return self._box

    def show(self) -> None:
        """Display the live view; when the run ends, a picture of it stays in the saved notebook."""
        from IPython.display import HTML, display

        for other in list(_LIVE):  # a cell that is run again would leave its former thread behind
            if other is not self and other.run.path == self.run.path:
                other.close()
        if not is_headless():
            display(self.widget)
        self._display = display(HTML(""), display_id=True)
        if self.job.state != "running":
            self.finish()
        self.watch()

    def _ipython_display_(self) -> None:
        self.show()

    # ---- following ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Follow the run in a daemon thread until `close`."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._closed.clear()
                self._thread = threading.Thread(target=self._follow, name="dfm-monitor", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        before: State | None = None
        while not self._closed.is_set():
            begun = time.thread_time()
            state = self.job.state  # before the file, so that the tail is never lost
            new = self.read()
            if new or state != before:
                self.paint()
            if before == "running" and state != "running":
                self.keep_picture()
            before = state
            self._closed.wait(max(REPAINT_S, REST * (time.thread_time() - begun)))

    def finish(self) -> None:
        """Read to the end, paint, and leave the picture."""
        with self._lock:
            self.read()
            self.paint()
            self.keep_picture()

    def close(self) -> None:
        """Stop following."""
        self._closed.set()

    def png(self) -> bytes:
        """Loss, validation by noise level and learning rate as one PNG."""
        return draw_png([self.loss, self.by_sigma, self.lr])

    def keep_picture(self) -> None:
        """Put the picture into the output that `show` reserved; folded away while the live view is there."""
        if self._display is None or not self.reader.records:
            return
        from IPython.display import HTML

        self._display.update(HTML(self.picture_html(folded=not is_headless())))

    def picture_html(self, folded: bool = False) -> str:
        from dfm_nb.base.video import data_url  # with it come the codecs, which a run without samples never needs

        said = html.escape(f"{self.status()}. {self.loss.summary}", quote=True)
        image = f'<img src="{data_url("image/png", self.png())}" alt="{said}" style="max-width:100%">'
        image += f"<p>{html.escape(self.status())}</p>"
        return (
            f"<details><summary>Picture of the run, kept in the notebook</summary>{image}</details>"
            if folded
            else image
        )

    def _repr_html_(self) -> str:
        self.read()
        self.paint()
        return self.picture_html() if self.reader.records else html.escape(self.status())


# ---- from records to lines ----------------------------------------------------------------------------------------


def loss_series(records: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Every loss faintly, a running mean, validation points."""
    x, y = series(records, "loss")
    window = max(1, len(y) // 40)
    out = [Series("each step", x, y, "faint")] if window > 1 else []
    out.append(Series("training", x, smooth(y, window)))
    x, y = series(records, "val_loss")
    return [*out, Series("validation", x, y, "points", 1)] if x else out


def sigma_series(records: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Validation loss against sigma: the first round, and the newest."""
    rounds = [r for r in records if r.get("val_loss_by_sigma") and r.get("val_sigmas")]
    chosen = [rounds[0], rounds[-1]] if len(rounds) > 1 else rounds
    return [
        Series(
            f"iteration {r['iteration']}", r["val_sigmas"], r["val_loss_by_sigma"], "line", 1 if r is rounds[-1] else 5
        )
        for r in chosen
    ]


def _set(widget: Any, name: str, value: Any) -> None:
    if getattr(widget, name) != value:
        setattr(widget, name, value)
