"""A live view of one or several runs: loss, validation, speed, settings that differ, samples over time.

A daemon thread reads the run folders, so no cell blocks. It follows a run, also through a resume, until `close` or
until another monitor of the run is shown. At the end a picture stays in the saved notebook. A headless monitor shows
only that picture and a line of text. A panel appears once a run has data for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from dfm_nb.base.files import read_json
from dfm_nb.base.log import duration
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.metrics import RISEN_ROUNDS, compared_loss, series
from dfm_nb.base.plots import PALETTE
from dfm_nb.base.run import Run
from dfm_nb.display import data_url
from dfm_nb.experiments.runs import differing, ended, runs_below, settings_of
from workbench.controls import Slider, table_html
from workbench.gallery import Gallery
from workbench.job import Job
from workbench.live import Live, fault_html
from workbench.metrics_reader import MetricsReader
from workbench.plot import LinePlot, Series, draw_png, without_spikes

REPAINT_S = 0.25
"""Four updates per second look live."""
REST = 19
"""After painting, it sleeps this many times as long, to use at most a twentieth of a core."""
KEEP_S = 30.0
"""A copy for the saved notebook has a picture, which takes half a second; also after each validation."""
LOOK_FOR_RUNS_S = 5.0
"""Listing a folder of runs may be slow on a network; a new run appears after at most this long."""
SMOOTHING = 1 / 40
"""Share of the shown curve: wide enough for the noise of single steps, narrow enough to see warm-up."""
AXES = {"iteration": "iteration", "samples": "samples", "time": "elapsed_s"}
SETTINGS_SHOWN = 12
"""Columns of the table of runs that differ."""
FIGURES = dict(loss="loss {:.4f}", val_loss="validation {:.4f}", lr="lr {:.2e}", tokens_per_s="tokens/s {:,.0f}")
BAR_STYLES = {"finished": "success", "failed": "danger", "stopped": "warning"}
PACELESS = ("starting", "opening the data", "building the model", "first step", "ending")
"""Phases in which the pace that is known is not that of what is done: a resumed run has the former one's."""
_LIVE: weakref.WeakSet[Monitor] = weakref.WeakSet()


def finish(run_dir: str | Path) -> None:
    """Bring every monitor of a run to its end state now: the run is over."""
    for monitor in list(_LIVE):
        if any(watched.run.path == Path(run_dir) for watched in monitor.runs):
            monitor.refresh()
            monitor.keep()


class Watched:
    """One run that a monitor looks at: its folder, job, metrics and settings, and a box to leave it out.

    picked : called when the box is clicked.
    """

    def __init__(self, folder: str | Path, picked: Callable[[], None]):
        self.run = Run(Path(folder).expanduser().resolve())
        self.job, self.reader = Job(self.run.path), MetricsReader(self.run.path)
        self.settings: dict[str, Any] = {}
        self._config_mtime = 0.0
        self.box = widgets.Checkbox(True, description=self.run.name, indent=False, layout=widgets.Layout(width="auto"))
        self.box.observe(lambda _change: picked(), names="value")

    @property
    def label(self) -> str:
        return self.box.description

    def read(self) -> int:
        """Read what the run wrote since the last call; returns the number of new records."""
        with contextlib.suppress(OSError):  # not there yet: progress without an end
            mtime = self.run.config_file.stat().st_mtime
            if mtime != self._config_mtime:
                self.settings, self._config_mtime = settings_of(self.run.path), mtime
        return self.reader.read()

    @property
    def train_iters(self) -> int:
        """Length of the run in iterations; 0 if unknown."""
        value = self.settings.get("train.train_iters")
        return value if isinstance(value, int) else 0

    @property
    def progress(self) -> float:
        """0 to 1; 0 while the length of the run is unknown."""
        return min(1.0, self.reader.iteration / self.train_iters) if self.train_iters else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace of the last fifty iterations; None if the pace is unknown."""
        timed = [*zip(*series(self.reader.recent, "elapsed_s"))][-50:]
        if not self.train_iters or len(timed) < 2:
            return None
        (first, begin_s), (last, end_s) = timed[0], timed[-1]
        if last == first or end_s <= begin_s:
            return None
        return (end_s - begin_s) / (last - first) * (self.train_iters - self.reader.iteration)

    def best(self, over: str = "iteration") -> tuple[float, float, int] | None:
        """Iteration and loss of the best validation, and the number of later rounds; None before the second round."""
        x, y = self.reader.points(compared_loss(self.reader.keys()), over)
        at = int(y.argmin()) if len(y) > 1 else None
        return None if at is None else (float(x[at]), float(y[at]), len(y) - 1 - at)

    @property
    def verdict(self) -> str:
        """Which checkpoint to take, as `dfm evaluate --all-checkpoints` wrote it; "" without."""
        told = read_json(self.run.path / "verdict.json").get("verdict")
        return str(told.get("sentence", "")) if isinstance(told, dict) else ""

    @property
    def state(self) -> str:
        """The job's state; for a run that was not started from a notebook, derived from its metrics."""
        state = self.job.state
        return ended(self.reader.iteration, self.train_iters or None) if state == "not started" else state

    @property
    def doing(self) -> str:
        """What a running run is doing, and for how long: `validating, 4 s`; else the state."""
        if self.state != "running":
            return self.state
        told = read_json(self.run.pid_file)
        since, name = told.get("since_s"), told.get("phase")
        if not (isinstance(since, int | float) and abs(since) < 1e12 and isinstance(name, str)):
            # torchrun and the imports, or their end
            since, name = self.job.record.get("started_s"), "starting"
            if since and self.reader.written_s > since:
                since, name = self.reader.written_s, "ending"
        return f"{name}, {duration(max(0, int(time.time() - since)))}" if since else name

    def status(self) -> str:
        """One line: state, phase, iteration, losses, best validation, learning rate, tokens/s, verdict, time left."""
        doing, of = self.doing, f"/{self.train_iters}" if self.train_iters else ""
        running = self.state == "running"
        parts = ["running"] * running + [doing, f"iteration {self.reader.iteration}{of}"]
        parts += [said.format(self.reader.last[key]) for key, said in FIGURES.items() if key in self.reader.last]
        if best := self.best():
            turned = f"; it has risen for {best[2]} rounds" if best[2] >= RISEN_ROUNDS else ""
            parts.append(f"best validation at {best[0]:.0f}{turned}")
        parts += [f"verdict: {said}"] if (said := self.verdict) else []
        if running and not doing.startswith(PACELESS) and (eta := self.eta_s):
            parts.append(f"about {duration(eta)} to go")
        return " · ".join(parts)


class Monitor(Live):
    """Watch run folders.

    Parameters
    ----------
    run_dir : a run folder, which may not exist yet; a list of them; or a folder of runs, including future ones.

    >>> Monitor("runs/first").show()                       # doctest: +SKIP
    >>> Monitor(["runs/first", "runs/second"]).show()      # doctest: +SKIP
    """

    def __init__(self, run_dir: str | Path | Sequence[str | Path]):
        alone = isinstance(run_dir, str | Path)
        folders = [run_dir] if isinstance(run_dir, str | Path) else list(run_dir)
        if not folders:
            raise ValueError("a monitor needs a run folder, a list of them, or a folder of runs")
        self._top = folders[0] if alone else None
        found = runs_below(folders[0]) if alone else folders
        self.runs = [Watched(folder, self.paint) for folder in found]
        self.loss = LinePlot("Training loss", "iteration", "loss", height=250)
        self.validation = LinePlot("Validation loss", "iteration", "loss", height=250)
        self.by_sigma = LinePlot("Validation by noise level", "sigma", "loss", log_x=True)
        self.rates = {
            "lr": LinePlot("Learning rate", "iteration", "lr"),
            "grad_norm": LinePlot("Gradient norm", "iteration", "L2 norm"),
            "tokens_per_s": LinePlot("Speed", "iteration", "tokens/s"),
            "tflops_per_s": LinePlot("Arithmetic of the model", "iteration", "TFLOP/s"),
            "data_share": LinePlot("Waiting for data", "iteration", "share of a step"),
            "cpu_cores": LinePlot("CPU", "iteration", "cores of a process"),
            "memory_gib": LinePlot("Memory", "iteration", "GiB of a process"),
            "gpu_memory_gib": LinePlot("GPU memory", "iteration", "GiB, the most so far"),
        }
        self.plots = [self.loss, self.validation, self.by_sigma, *self.rates.values()]
        self.axis = widgets.Dropdown(options=AXES, description="x axis", layout=widgets.Layout(width="14em"))
        self.smoothing = Slider(label="smoothing", max=0.2, step=0.005, value=SMOOTHING)
        self.when = Slider(label="samples", min=1, max=1, step=1, value=1)
        for control in (self.axis, self.smoothing, self.when):
            control.observe(lambda _change: self.paint(), names="value")
        self._samples: Any = None
        self._looked = time.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        _LIVE.add(self)

    # ---- what is known --------------------------------------------------------------------------------------------

    def read(self) -> int:
        """Read what the runs wrote since the last call; returns the number of new records."""
        with self._lock:
            if self._top is not None and time.monotonic() - self._looked > LOOK_FOR_RUNS_S:
                self._looked = time.monotonic()
                here = {watched.run.path for watched in self.runs}
                found = [folder.resolve() for folder in runs_below(self._top)]
                self.runs = [watched for watched in self.runs if watched.run.path in found]
                self.runs += [Watched(folder, self.paint) for folder in found if folder not in here]
            new = sum([watched.read() for watched in self.runs])
            self._label()
            return new

    def _label(self) -> None:
        """Name the runs by what differs, where that is short and tells them apart, else by their folders."""
        keys = differing([w.settings for w in self.runs])
        if len(self.runs) > 1 and 0 < len(keys) <= 2:
            labels = [", ".join(f"{k.rpartition('.')[2]} {w.settings.get(k)}" for k in keys) for w in self.runs]
            if len(set(labels)) == len(labels) and max(map(len, labels)) <= 40:
                for watched, label in zip(self.runs, labels):
                    watched.box.description = label
                return
        top = os.path.commonpath([w.run.path.parent for w in self.runs])
        for watched in self.runs:
            watched.box.description = watched.run.path.relative_to(top).as_posix()

    def status(self) -> str:
        """A line for one run; for several, the number in each state."""
        self.read()  # in a script nobody else does
        if len(self.runs) == 1:
            return self.runs[0].status()
        states = [watched.state for watched in self.runs]
        return f"{len(states)} runs: " + ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))

    # ---- painting -------------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """Redraw everything from what was read."""
        with self._lock:
            picked = [(i, w) for i, w in enumerate(self.runs) if w.box.value]
            one = len(self.runs) == 1
            self.loss.update(self._losses(self.runs[0]) if one else self._curves(picked, "loss", self.smoothing.value))
            self.validation.update([] if one else self._curves(picked, "val_loss"))
            self.by_sigma.update(self._by_sigma(picked))
            for key, plot in self.rates.items():
                plot.update(self._curves(picked, key, 0.0 if key == "lr" else self.smoothing.value))
            for plot in self.plots:
                label = "s" if self.axis.value == "elapsed_s" else self.axis.value
                if plot is not self.by_sigma and plot.x_label != label:
                    plot.x_label, plot.zoom = label, []  # another axis has other ends
                plot.layout.display = "" if plot.data or plot is self.loss else "none"
            if "widget" in vars(self):
                self._paint_box()

    def _curves(self, picked: Sequence[tuple[int, Watched]], key: str, smoothing: float = 0.0) -> list[Series]:
        """A curve a run, of the runs that have that key."""
        return [
            Series(w.label, *w.reader.points(key, self.axis.value), colour=i, smoothing=smoothing)
            for i, w in picked
            if key in w.reader.last
        ]

    def _losses(self, watched: Watched) -> list[Series]:
        """Every loss faintly, a running mean, and validation points, also of averaged weights."""
        points, last = watched.reader.points, watched.reader.last
        x, y = points("loss", self.axis.value)
        smoothing = self.smoothing.value if len(y) * self.smoothing.value >= 2 else 0.0
        out = [Series("each step", x, y, "faint")] if smoothing else []
        if smoothing:
            x, y = without_spikes(x, y)  # "each step" has them
        out += [Series("training", x, y, smoothing=smoothing)] if len(y) else []
        names = {k: f"averaged weights ({k[13:]})" for k in watched.reader.keys() if k.startswith("val_loss_ema_")}
        for colour, (key, name) in enumerate({"val_loss": "validation", **names}.items(), 1):
            out += [Series(name, *points(key, self.axis.value), "points", colour)] if key in last else []
        if best := watched.best(self.axis.value):
            out.append(Series("best validation", [best[0]], [best[1]], "points", len(names) + 2))
        return out

    def _by_sigma(self, picked: Sequence[tuple[int, Watched]]) -> list[Series]:
        """Validation loss against sigma: of one run the first round and the newest, of several their newest."""
        if len(self.runs) > 1:
            rounds = [(w.label, w.reader.rounds[-1], i) for i, w in picked if w.reader.rounds]
        else:
            found = self.runs[0].reader.rounds
            rounds = [(f"iteration {r['iteration']}", r, 1 if r is found[-1] else 5) for r in found]
        return [Series(name, r["val_sigmas"], r["val_loss_by_sigma"], colour=c) for name, r, c in rounds]

    def _paint_box(self) -> None:
        self._bar.value = sum(watched.progress for watched in self.runs) / len(self.runs)
        self._bar.bar_style = BAR_STYLES.get(self.runs[0].state, "") if len(self.runs) == 1 else ""
        faults = [fault_html(watched.reader.fault, what="Fault") for watched in self.runs]
        self._text.value = fill('<span role="status">{}</span>{}{}', self.status(), faults, self.table_html())
        self._picker.children = [w.box for w in self.runs] if len(self.runs) > 1 else []
        self._paint_samples()

    def table_html(self) -> Html:
        """One row per run if there are several: state, progress, losses, and the settings that differ."""
        if len(self.runs) == 1:
            return Html()
        keys = differing([w.settings for w in self.runs])
        more = f"{len(keys) - SETTINGS_SHOWN} more settings differ" if len(keys) > SETTINGS_SHOWN else ""
        keys, rows = keys[:SETTINGS_SHOWN], []
        for w in self.runs:
            of = f"{w.reader.iteration}/{w.train_iters}" if w.train_iters else str(w.reader.iteration)
            losses = [f"{w.reader.last[k]:.4f}" if k in w.reader.last else "" for k in ("loss", "val_loss")]
            rows.append([w.label, w.doing, of, *losses, *(str(w.settings.get(k, "")) for k in keys)])
        tints = [PALETTE[i % len(PALETTE)] for i in range(len(rows))]
        table = table_html(rows, ["run", "state", "iteration", "loss", "validation", *keys], tints=tints)
        return fill('{}<div style="font-size:12px">{}</div>', table, more)

    def _paint_samples(self) -> None:
        """The samples of the iteration that the slider shows; while it is at its end, the newest."""
        picked = [watched for watched in self.runs if watched.box.value]
        whole = max((newest[0] for w in picked if (newest := w.run.newest_samples())), default=0)  # others are written
        iterations = sorted({i for w in picked for i, _ in w.run.rounds() if i <= whole})
        if not iterations:
            return
        last, at_end = len(iterations), self.when.value >= self.when.max
        self.when.max = last
        self.when.value = last if at_end else self.when.value
        self.when.layout.display = "" if last > 1 else "none"
        asked = iterations[min(int(self.when.value), last) - 1]
        found = {w.label: w.run.newest_samples(asked) for w in picked}
        shown = {f"{label}, iteration {of[0]}": of[1][:12] for label, of in found.items() if of}
        key = asked, [(label, path, path.stat().st_mtime) for label, files in shown.items() for path in files]
        if not shown or key == self._samples:
            return
        self._samples = key
        head = f"Samples at iteration {asked} ({iterations.index(asked) + 1} of {last} rounds)"
        clips: Any = shown if len(self.runs) > 1 else next(iter(shown.values()))
        self._media.value = Gallery(clips, width_px=144, details=False, title=head).html()

    @functools.cached_property
    def widget(self) -> Any:
        """The live view; reading starts when it is first asked for."""
        flow = widgets.Layout(flex_flow="row wrap", overflow="visible", width="100%")
        self._bar = widgets.FloatProgress(min=0, max=1, layout=widgets.Layout(width="auto", margin="0"))
        self._text, self._media, self._picker = widgets.HTML(), widgets.HTML(), widgets.HBox(layout=flow)
        self.smoothing.layout = widgets.Layout(flex="0 1 24em", overflow="visible")
        self.when.layout = widgets.Layout(display="none", width="min(40em, 100%)")
        for plot in self.plots:  # two wide ones, and below them as many as have room
            plot.layout = widgets.Layout(flex="1 1 420px", min_width="260px", overflow="visible")
        small = widgets.Layout(grid_template_columns="repeat(auto-fill, minmax(300px, 1fr))", width="100%")
        rows = [widgets.HBox(row, layout=flow) for row in ([self.axis, self.smoothing], self.plots[:2])]
        rows.append(widgets.GridBox(self.plots[2:], layout=small))
        self.refresh()
        self._paint_box()
        self.watch()
        box = widgets.VBox([self._bar, self._text, self._picker, *rows, self.when, self._media])
        return box.add_class("dfm-monitor")

    def show(self) -> None:
        """Display the live view; when the run ends, a picture of it stays in the saved notebook."""
        for other in list(_LIVE):  # a cell that is run again would leave its former thread behind
            if other is not self and [w.run.path for w in other.runs] == [w.run.path for w in self.runs]:
                other.close()
        self.refresh()
        super()._ipython_display_()
        self.watch()

    _ipython_display_ = show

    # ---- following ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Follow the runs in a daemon thread until `close`."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._closed.clear()
                self._thread = threading.Thread(target=self._follow, name="dfm-monitor", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        before, painted, ran, rounds, kept = None, None, False, None, time.monotonic()
        while not self._closed.is_set():
            begun = time.thread_time()
            # before the files, so that the tail is never lost; a second of a phase is a change, too
            doing = [(w.doing, w.verdict) for w in self.runs]
            running = any(w.state == "running" for w in self.runs)
            self.read()
            counts = [w.reader.count for w in self.runs]
            if counts != painted:
                self.paint()
            elif doing != before and "widget" in vars(self):  # the curves are unchanged
                with self._lock:
                    self._paint_box()
            rest = REST * (time.thread_time() - begun)
            newest = [w.reader.rounds[-1:] for w in self.runs]
            if ran and (not running or newest != rounds or time.monotonic() - kept > KEEP_S):
                self.keep()
                rounds, kept = newest, time.monotonic()
            before, painted, ran = doing, counts, running
            self._closed.wait(max(REPAINT_S, rest))

    def refresh(self) -> None:
        """Read to the end, and paint."""
        with self._lock:
            self.read()
            self.paint()

    def close(self) -> None:
        """Stop following."""
        self._closed.set()

    def png(self) -> bytes:
        """Loss, validation and learning rate as one PNG."""
        self.refresh()
        return draw_png(self.plots[:4])

    def kept_html(self) -> str:
        """The picture, the status, and the table of several runs."""
        status = self.status()
        if not any(watched.reader.count for watched in self.runs):
            return status
        page = '<img src="{}" alt="{}" style="max-width:100%"><p>{}</p>{}'
        said = f"{status}. {self.loss.summary}"
        return fill(page, data_url("image/png", self.png()), said, status, self.table_html())

    def __repr__(self) -> str:
        return f"Monitor: {self.status()}"
