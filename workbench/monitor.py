"""A live view of one or several runs: loss, validation, speed, settings that differ, samples over time.

A daemon thread reads the run folders, so no cell blocks. It follows a run, also through a resume, until `close` or
until another monitor of the run is shown. At the end a picture stays in the saved notebook. A headless monitor shows
only that picture and a line of text. A panel appears once a run has data for it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from dfm_nb.base.files import read_json
from dfm_nb.base.log import duration
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.metrics import RISEN_ROUNDS, compared_loss
from dfm_nb.base.run import Run
from dfm_nb.config.schema import INT_LIMIT
from dfm_nb.display import media_html, newest_samples, row_html
from dfm_nb.display.plots import PALETTE
from dfm_nb.experiments.runs import differing, ended, runs_below, settings_of
from workbench.controls import FLOW, Section, Slider, on_change, table_html
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
"""A copy for the saved notebook has a picture, which takes half a second."""
LOOK_FOR_RUNS_S = 5.0
"""Listing a folder of runs may be slow on a network; a new run appears after at most this long."""
SMOOTHING = 1 / 40
"""Share of the shown curve: wide enough for the noise of single steps, narrow enough to see warm-up."""
NAMED = "<div><b>{}</b>{}</div>"
TINTED = (
    '<span style="white-space:nowrap">'
    '<span style="display:inline-block;width:10px;height:10px;margin-right:6px;background:{}"></span>{}</span>'
)
GRID = {"grid_template_columns": "repeat(auto-fill, minmax(300px, 1fr))", "width": "100%"}
AXES = {"iteration": "iteration", "samples": "samples", "seconds": "elapsed_s"}
SETTINGS_SHOWN = 12
"""Of those in which runs differ."""
PROMPTS = 12
ROUNDS = 8
"""Of the picture with the samples of a run; a page has room for no more."""
FIGURES = dict(loss="loss {:.4g}", lr="lr {:.2e}", tokens_per_s="tokens/s {:,.0f}")
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
        self.job = Job(self.run.path)
        self.reader = MetricsReader(self.run.path)
        self.settings: dict[str, Any] = {}
        self._config_mtime = 0.0
        self.box = widgets.Checkbox(True, description=self.run.name, indent=False, layout={"width": "auto"})
        on_change(picked, self.box)
        self.differs = ""  # settings in which it differs from the other runs

    @property
    def label(self) -> str:
        return self.box.description

    def read(self) -> None:
        """Read what the run wrote since the last call."""
        with contextlib.suppress(OSError):  # not there yet: progress without an end
            mtime = self.run.config_file.stat().st_mtime
            if mtime != self._config_mtime:
                self.settings = settings_of(self.run.path)
                self._config_mtime = mtime
        self.reader.read()

    @property
    def train_iters(self) -> int:
        """Length of the run in iterations; 0 if unknown."""
        value = self.settings.get("train.train_iters")
        return value if isinstance(value, int) and value < INT_LIMIT else 0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace of the last fifty iterations; None if the pace is unknown."""
        iterations, elapsed_s = self.reader.points("elapsed_s")
        if not self.train_iters or len(iterations) < 2:
            return None
        steps = iterations[-1] - iterations[-50:][0]
        seconds = elapsed_s[-1] - elapsed_s[-50:][0]
        if steps == 0 or seconds <= 0:
            return None
        return seconds / steps * (self.train_iters - self.reader.iteration)

    def best(self, over: str = "iteration") -> tuple[float, float, int] | None:
        """Iteration and loss of the best validation, and the number of later rounds; None before the first."""
        x, y = self.reader.points(compared_loss(self.reader.last), over)
        if not len(y):
            return None
        at = int(y.argmin())
        return float(x[at]), float(y[at]), len(y) - 1 - at

    @property
    def verdict(self) -> str:
        """Which checkpoint to take, as `dfm evaluate --all-checkpoints` wrote it; "" without."""
        verdict = read_json(self.run.path / "verdict.json").get("verdict")
        return str(verdict.get("sentence", "")) if isinstance(verdict, dict) else ""

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
        record = read_json(self.run.pid_file)
        since = record.get("since_s")
        phase = record.get("phase")
        if not (isinstance(since, int | float) and abs(since) < 1e12 and isinstance(phase, str)):
            # torchrun and the imports, or their end
            since = self.job.record.get("started_s")
            phase = "starting"
            if since and self.reader.written_s > since:
                since = self.reader.written_s
                phase = "ending"
        return f"{phase}, {duration(max(0, int(time.time() - since)))}" if since else phase

    def status(self) -> str:
        """One line: state, phase, iteration, losses, best validation, learning rate, tokens/s, verdict, time left."""
        doing = self.doing
        running = self.state == "running"
        of = f"/{self.train_iters}" if self.train_iters else ""
        parts = [doing, f"iteration {self.reader.iteration}{of}"]
        if running:
            parts.insert(0, "running")
        for key, template in FIGURES.items():
            if key in self.reader.last:
                parts.append(template.format(self.reader.last[key]))
        best = self.best()
        if best:
            iteration, loss, rounds_since = best
            turned = f"; it has risen for {rounds_since} rounds" if rounds_since >= RISEN_ROUNDS else ""
            parts.append(f"best validation {loss:.4g} at {iteration:.0f}{turned}")
        if self.verdict:
            parts.append(f"verdict: {self.verdict}")
        eta_s = self.eta_s
        if running and eta_s and not doing.startswith(PACELESS):
            parts.append(f"about {duration(eta_s)} to go")
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
        self._top = run_dir if isinstance(run_dir, str | Path) else None
        folders = runs_below(run_dir) if isinstance(run_dir, str | Path) else list(run_dir)
        if not folders:
            raise ValueError("a monitor needs a run folder, a list of them, or a folder of runs")
        self.runs = [Watched(folder, self.paint) for folder in folders]
        self.loss = LinePlot("Training loss", "loss", height=250)
        self.validation = LinePlot("Validation loss", "loss", height=250)
        self.by_sigma = LinePlot("Validation by noise level", "loss", "sigma", log_x=True)
        self.rates = {
            "lr": LinePlot("Learning rate", "lr"),
            "grad_norm": LinePlot("Gradient norm", "L2 norm"),
            "tokens_per_s": LinePlot("Speed", "tokens/s"),
            "tflops_per_s": LinePlot("Arithmetic of the model", "TFLOP/s"),
            "data_share": LinePlot("Waiting for data", "share of a step"),
            "cpu_cores": LinePlot("CPU", "cores of a process"),
            "memory_gib": LinePlot("Memory", "GiB of a process"),
            "gpu_memory_gib": LinePlot("GPU memory", "GiB, the most so far"),
        }
        self.plots = [self.loss, self.validation, self.by_sigma, *self.rates.values()]
        looks = {"layout": {"width": "auto"}, "style": {"description_width": "auto"}}
        self.axis = widgets.Dropdown(options=AXES, description="x axis", **looks)
        wide = {"flex": "0 1 24em", "overflow": "visible"}
        self.smoothing = Slider(label="smoothing", max=0.2, step=0.005, value=SMOOTHING, layout=wide)
        on_change(self.paint, self.axis, self.smoothing)
        self._text = widgets.HTML()
        self._media = widgets.HTML()
        self._picker = widgets.HBox(layout=FLOW)
        # from the speed on: of the machine, not of the model
        self._below = widgets.GridBox(self.plots[5:], layout=GRID)
        self._machine = Section(self._below, "Speed and memory")
        self._sampled: Any = None  # what `_films` shows
        self._films = Html()
        self._looked = time.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        _LIVE.add(self)

    # ---- what is known --------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read what the runs wrote since the last call."""
        with self._lock:
            if self._top is not None and time.monotonic() - self._looked > LOOK_FOR_RUNS_S:
                self._looked = time.monotonic()
                known = {watched.run.path: watched for watched in self.runs}
                folders = [folder.resolve() for folder in runs_below(self._top)]
                self.runs = [watched for path, watched in known.items() if path in folders]
                self.runs += [Watched(folder, self.paint) for folder in folders if folder not in known]
            for watched in self.runs:
                watched.read()
            self._label()

    def _label(self) -> None:
        """Name the runs by what differs, where that is short and tells them apart, else by their folders."""
        keys = differing([watched.settings for watched in self.runs])
        top = os.path.commonpath([watched.run.path.parent for watched in self.runs])
        for watched in self.runs:
            words = [f"{key.rpartition('.')[2]} {watched.settings.get(key)}" for key in keys[:SETTINGS_SHOWN]]
            if len(keys) > SETTINGS_SHOWN:
                words.append(f"and {len(keys) - SETTINGS_SHOWN} more")
            watched.differs = ", ".join(words)
        differ = {watched.differs for watched in self.runs}
        short = bool(keys) and len(differ) == len(self.runs) and max(map(len, differ)) <= 40
        for watched in self.runs:
            watched.box.description = watched.differs if short else watched.run.path.relative_to(top).as_posix()

    def status(self) -> str:
        """A line for one run; for several, the number in each state."""
        self.read()  # in a script nobody else does
        if len(self.runs) == 1:
            return self.runs[0].status()
        states = Counter(watched.state for watched in self.runs)
        return f"{len(self.runs)} runs: " + ", ".join(f"{n} {state}" for state, n in states.items())

    # ---- painting -------------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """Redraw everything from what was read."""
        with self._lock:
            smoothing = self.smoothing.value
            if len(self.runs) == 1:
                self.loss.update(self._losses(self.runs[0]))
                self.validation.update([])
            else:
                self.loss.update(self._curves("loss", smoothing))
                self.validation.update(self._curves("val_loss"))
            self.by_sigma.update(self._by_sigma())
            for key, plot in self.rates.items():
                plot.update(self._curves(key, 0.0 if key == "lr" else smoothing))
            for plot in self.plots:
                if plot is not self.by_sigma and plot.x_label != self.axis.label:
                    plot.x_label = self.axis.label
                    plot.zoom = []  # another axis has other ends
                plot.layout.display = "" if plot.data or plot is self.loss else "none"
                plot.legend = plot is self.loss or len(self.runs) == 1  # one for all: the lines are of the same runs
            self._text.value = self.text_html()
            self._picker.children = [watched.box for watched in self.runs] if len(self.runs) > 1 else []
            self._machine.layout.display = "" if any(plot.data for plot in self.plots[5:]) else "none"
            self._media.value = self.samples_html()

    def _curves(self, key: str, smoothing: float = 0.0) -> list[Series]:
        """A curve a run, of the ticked runs that have that key."""
        curves = []
        for i, watched in enumerate(self.runs):
            if watched.box.value and key in watched.reader.last:
                x, y = watched.reader.points(key, self.axis.value)
                curves.append(Series(watched.label, x, y, colour=i, smoothing=smoothing))
        return curves

    def _losses(self, watched: Watched) -> list[Series]:
        """Every loss faintly, a running mean, and validation points, also of averaged weights."""
        reader = watched.reader
        over = self.axis.value
        x, y = reader.points("loss", over)
        curves = []
        smoothing = self.smoothing.value
        if len(y) * smoothing >= 2:
            curves.append(Series("each step", x, y, "faint"))
            x, y = without_spikes(x, y)  # "each step" has them
        else:
            smoothing = 0.0
        if len(y):
            curves.append(Series("training", x, y, smoothing=smoothing))
        rounds = sorted(key for key in reader.last if key.startswith("val_loss"))
        for colour, key in enumerate(rounds, 1):
            name = key.replace("val_loss_ema_", "averaged weights ").replace("val_loss", "validation")
            curves.append(Series(name, *reader.points(key, over), "points", colour))
        best = watched.best(over)
        if best:
            curves.append(Series("best validation", [best[0]], [best[1]], "points", len(rounds) + 1))
        return curves

    def _by_sigma(self) -> list[Series]:
        """Validation loss against sigma: of one run the first round and the newest, of several their newest."""
        shown = []
        if len(self.runs) == 1:
            for colour, record in enumerate(self.runs[0].reader.rounds):
                shown.append((f"iteration {record['iteration']}", record, colour))
        else:
            for colour, watched in enumerate(self.runs):
                if watched.box.value and watched.reader.rounds:
                    shown.append((watched.label, watched.reader.rounds[-1], colour))
        return [Series(name, r["val_sigmas"], r["val_loss_by_sigma"], colour=colour) for name, r, colour in shown]

    def text_html(self) -> Html:
        """The status, why runs failed, what of their metrics cannot be read, and the table of several runs."""
        faults = []
        for watched in self.runs:
            faults.append(fault_html(watched.job.cause(), what=f"{watched.label}: {watched.state}"))
            faults.append(fault_html(watched.reader.fault, what="Fault"))
        return fill('<p role="status">{}</p>{}{}', self.status(), faults, self.table_html())

    def table_html(self) -> Html:
        """One row per run if there are several: its colour, in what it differs, and its status."""
        if len(self.runs) == 1:
            return Html()
        rows = []
        for watched, colour in zip(self.runs, itertools.cycle(PALETTE)):
            rows.append((fill(TINTED, colour, watched.label), watched.differs, watched.status()))
        return table_html(rows, ("run", "settings that differ", "status"))

    def samples_html(self) -> Html:
        """Of each run one prompt over its training; of a single run also every prompt, as one picture."""
        state = [(watched.label, watched.box.value, newest_samples(watched.run)) for watched in self.runs]
        if state == self._sampled:
            return self._films
        self._sampled = state
        parts = []
        for watched, (label, ticked, newest) in zip(self.runs, state):
            if ticked and newest:
                name = label if len(state) > 1 else ""
                parts.append(fill(NAMED, name, Gallery.of_training(watched.run.path).html()))
        if parts and len(state) == 1:
            every = Gallery.of_training(self.runs[0].run.path, prompts=PROMPTS, rounds=ROUNDS)
            rounds = len(every.columns)
            width = 120 * rounds if 1 < rounds < 4 else 480  # a single round is a sheet of its prompts
            parts.append(media_html("image/png", every.png(), "Every prompt over the training", width))
        self._films = row_html(parts)
        return self._films

    @functools.cached_property
    def widget(self) -> Any:
        """The live view; reading starts when it is first asked for."""
        for plot in self.plots:  # two wide ones, and below the samples as many as have room
            plot.layout = {"flex": "1 1 420px", "min_width": "260px", "overflow": "visible"}
        controls = widgets.HBox([self.axis, self.smoothing], layout=FLOW)
        wide = widgets.HBox(self.plots[:2], layout=FLOW)
        small = widgets.GridBox(self.plots[2:5], layout=GRID)
        self.refresh()
        self.watch()
        above = [self._text, self._picker, wide, self._media]
        box = widgets.VBox([*above, controls, small, self._machine, self._below])
        return box.add_class("dfm-monitor")

    def show(self) -> None:
        """Display the live view; when the run ends, a picture of it stays in the saved notebook."""
        for other in list(_LIVE):  # a cell that is run again would leave its former thread behind
            if other is not self and [w.run.path for w in other.runs] == [w.run.path for w in self.runs]:
                other.close()
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
        shown = None
        ran = False
        kept_s = time.monotonic()
        while not self._closed.is_set():
            begun = time.thread_time()
            # before the files, so that the tail is never lost; a second of a phase is a change, too
            doing = [(watched.doing, watched.verdict) for watched in self.runs]
            running = any(watched.state == "running" for watched in self.runs)
            self.read()
            now = doing, [watched.reader.count for watched in self.runs]
            if now != shown:
                self.paint()
            rest = REST * (time.thread_time() - begun)
            if ran and (not running or time.monotonic() - kept_s > KEEP_S):
                self.keep()
                kept_s = time.monotonic()
            shown = now
            ran = running
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

    def kept_png(self) -> bytes:
        return self.png() if any(watched.reader.count for watched in self.runs) else b""

    def kept_html(self) -> str:
        """The text and the samples, below the picture."""
        return fill("{}{}", self.text_html(), self.samples_html())

    def __repr__(self) -> str:
        return f"Monitor: {self.status()}"
