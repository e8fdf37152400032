"""A live view of one run or several: loss, validation, speed, settings that differ, samples over time.

A daemon thread reads the run folders, so no cell waits for it. It follows a run, also through a resume, until `close`
or until another monitor of it is shown. At the end a picture stays in the saved notebook. Headless it shows only that
picture and a line of text. A panel is there when a run has something for it.
"""

from __future__ import annotations

import html
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dfm_nb import config as cfg
from dfm_nb.base.files import read_json
from dfm_nb.base.log import duration
from dfm_nb.base.plots import PALETTE
from dfm_nb.base.run import Run, iteration_folders, media_in
from workbench.job import Job
from workbench.live import Live
from workbench.metrics import MetricsReader
from workbench.plot import LinePlot, Series, draw_png

REPAINT_S = 0.25
REST = 19
"""Painting takes time: it rests so many times as long, to take a twentieth of a core at most."""
LOOK_FOR_RUNS_S = 5.0
SMOOTHING = 1 / 40
AXES = {"iteration": "iteration", "samples": "samples", "time": "elapsed_s"}
PLACES = ("checkpoint.checkpoint_dir", "checkpoint.load", "checkpoint.load_checkpoint")
"""Settings that are different in every run and explain nothing."""
SETTINGS_SHOWN = 12
PACELESS = ("starting", "opening the data", "building the model", "first step", "ending")
"""Phases in which the pace that is known is not that of what is done: a resumed run has the former one's."""
_LIVE: weakref.WeakSet[Monitor] = weakref.WeakSet()


def finish(run_dir: str | Path) -> None:
    """Bring every monitor of a run to its end state now: the run is over."""
    for monitor in list(_LIVE):
        if any(watched.run.path == Path(run_dir) for watched in monitor.runs):
            monitor.finish()


class Watched:
    """One run that a monitor looks at: its folder, job, metrics and settings."""

    def __init__(self, folder: str | Path):
        self.run = Run(Path(folder).expanduser().resolve())
        self.job, self.reader = Job(self.run.path), MetricsReader(self.run.path)
        self.settings: dict[str, Any] = {}
        self.label, self.picked, self._config_mtime = self.run.name, True, 0.0

    def read(self) -> int:
        """Take in what the run wrote since the last call; returns the number of new records."""
        try:
            mtime = self.run.config_file.stat().st_mtime
            if mtime != self._config_mtime:
                loaded = yaml.safe_load(self.run.config_file.read_text())
                self.settings = dict(cfg.flatten(loaded)) if isinstance(loaded, dict) else {}
                self._config_mtime = mtime
        except (OSError, ValueError, yaml.YAMLError):
            pass  # not there yet: progress without an end
        return self.reader.read()

    @property
    def train_iters(self) -> int:
        """How long the run is to be; 0 when it is not known."""
        value = self.settings.get("train.train_iters")
        return value if isinstance(value, int) else 0

    @property
    def progress(self) -> float:
        """0 to 1; 0 while the length of the run is unknown."""
        return min(1.0, self.reader.iteration / self.train_iters) if self.train_iters else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace of the last fifty iterations; None before there is a pace."""
        timed = [r for r in self.reader.recent if "elapsed_s" in r][-50:]
        if len(timed) < 2 or not self.train_iters:
            return None
        steps = timed[-1]["iteration"] - timed[0]["iteration"]
        pace_s = (timed[-1]["elapsed_s"] - timed[0]["elapsed_s"]) / steps if steps > 0 else math.nan
        return pace_s * (self.train_iters - self.reader.iteration) if pace_s > 0 else None

    @property
    def state(self) -> str:
        """The job's; of a run that was not started from a notebook, what its metrics tell."""
        state = self.job.state
        if state == "not started" and self.reader.iteration:
            return "finished" if self.reader.iteration == self.train_iters else "not running here"
        return state

    def phase(self) -> str:
        """What a running run is doing, and for how long: `validating, 4 s`."""
        told = read_json(self.run.pid_file) or {}
        since, name = told.get("since_s"), told.get("phase")
        if not (isinstance(since, int | float) and isinstance(name, str)):  # torchrun and the imports, or their end
            since, name = self.job.record.get("started_s"), "starting"
            if since and self.reader.written_s > since:
                since, name = self.reader.written_s, "ending"
        return f"{name}, {duration(max(0, int(time.time() - since)))}" if since else name

    def status(self) -> str:
        """One line: state, phase, iteration, loss, validation loss, learning rate, tokens/s, time left."""
        state, of = self.state, f"/{self.train_iters}" if self.train_iters else ""
        phase = [self.phase()] if state == "running" else []
        parts = [state, *phase, f"iteration {self.reader.iteration}{of}"]
        for name, key, form in (
            ("loss", "loss", "{:.4f}"),
            ("validation", "val_loss", "{:.4f}"),
            ("lr", "lr", "{:.2e}"),
            ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ):
            if key in self.reader.last:
                parts.append(f"{name} {form.format(self.reader.last[key])}")
        if phase and not phase[0].startswith(PACELESS) and (eta := self.eta_s):
            parts.append(f"about {duration(eta)} to go")
        return " · ".join(parts)


def runs_below(folder: str | Path) -> list[Path]:
    """The run folders in a folder, two levels down; the folder itself when it is a run, or when there are none."""
    top = Path(folder).expanduser()
    if (top / "metrics.jsonl").exists() or (top / "config.yaml").exists():
        return [top]
    return sorted({f.parent for depth in ("*", "*/*") for f in top.glob(f"{depth}/metrics.jsonl")}) or [top]


def differing(runs: Sequence[Watched]) -> list[str]:
    """The settings that are not the same in all runs."""
    known = [w.settings for w in runs if w.settings]
    keys = dict.fromkeys(key for settings in known for key in settings)
    return [k for k in keys if k not in PLACES and any(s.get(k) != known[0].get(k) for s in known)]


class Monitor(Live):
    """Watch run folders.

    Parameters
    ----------
    run_dir : a run folder, which may be made later; a list of them; or a folder that holds runs, also new ones.

    >>> Monitor("runs/first").show()                       # doctest: +SKIP
    >>> Monitor(["runs/first", "runs/second"]).show()      # doctest: +SKIP
    """

    def __init__(self, run_dir: str | Path | Sequence[str | Path]):
        alone = isinstance(run_dir, str | Path)
        folders = [run_dir] if isinstance(run_dir, str | Path) else list(run_dir)
        if not folders:
            raise ValueError("a monitor needs a run folder, a list of them, or a folder that holds runs")
        self._top = folders[0] if alone else None
        found = runs_below(folders[0]) if alone else folders
        self.runs = [Watched(folder) for folder in found]
        wide: dict[str, Any] = {"height": 250}
        self.loss = LinePlot("Training loss", "iteration", "loss", **wide)
        self.validation = LinePlot("Validation loss", "iteration", "loss", **wide)
        self.by_sigma = LinePlot("Validation by noise level", "sigma", "loss", log_x=True)
        self.lr = LinePlot("Learning rate", "iteration", "lr")
        self.grad_norm = LinePlot("Gradient norm", "iteration", "L2 norm")
        self.speed = LinePlot("Speed", "iteration", "tokens/s")
        self.compute = LinePlot("Arithmetic of the model", "iteration", "TFLOP/s")
        self._over, self._smoothing = "iteration", SMOOTHING
        self._samples: tuple[Any, ...] = ()
        self._looked = time.monotonic()
        self._box: Any = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        _LIVE.add(self)

    # ---- what is known --------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The first run's folder."""
        return self.runs[0].run

    @property
    def reader(self) -> MetricsReader:
        return self.runs[0].reader

    def read(self) -> int:
        """Take in what the runs wrote since the last call; returns the number of new records."""
        with self._lock:
            if self._top is not None and time.monotonic() - self._looked > LOOK_FOR_RUNS_S:
                self._looked = time.monotonic()
                here = {watched.run.path for watched in self.runs}
                found = [f.resolve() for f in runs_below(self._top)]
                if found != [self.run.path]:
                    self.runs = [w for w in self.runs if w.run.path in found]
                    self.runs += [Watched(folder) for folder in found if folder not in here]
            new = sum([watched.read() for watched in self.runs])
            self._label()
            return new

    def _label(self) -> None:
        """Name the runs by what differs, where that is short and tells them apart, else by their folders."""
        keys = differing(self.runs)
        if len(self.runs) > 1 and 0 < len(keys) <= 2:
            labels = [", ".join(f"{k.rpartition('.')[2]} {w.settings.get(k)}" for k in keys) for w in self.runs]
            if len(set(labels)) == len(labels) and max(map(len, labels)) <= 40:
                for watched, label in zip(self.runs, labels):
                    watched.label = label
                return
        top = os.path.commonpath([w.run.path.parent for w in self.runs])
        for watched in self.runs:
            watched.label = watched.run.path.relative_to(top).as_posix()

    @property
    def progress(self) -> float:
        """0 to 1, the mean of the runs; 0 while the length of a run is unknown."""
        return sum(watched.progress for watched in self.runs) / len(self.runs)

    @property
    def state(self) -> str:
        """Of the first run."""
        return self.runs[0].state

    def status(self) -> str:
        """A line for one run; for several, how many there are in which state."""
        self.read()  # in a script nobody else does
        if len(self.runs) == 1:
            return self.runs[0].status()
        states = [watched.state for watched in self.runs]
        return f"{len(states)} runs: " + ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))

    # ---- painting -------------------------------------------------------------------------------------------------

    @property
    def plots(self) -> list[LinePlot]:
        small = [self.by_sigma, self.lr, self.grad_norm, self.speed, self.compute]
        return [self.loss, self.validation, *small]

    def paint(self) -> None:
        """Redraw everything from what was read."""
        with self._lock:
            picked = [(i, w) for i, w in enumerate(self.runs) if w.picked]
            one = len(self.runs) == 1
            self.loss.update(self._losses(self.runs[0]) if one else self._curves(picked, "loss"))
            self.validation.update([] if one else self._curves(picked, "val_loss", smoothing=0.0))
            self.by_sigma.update(self._by_sigma(picked))
            for plot, key in zip(self.plots[3:], ("lr", "grad_norm", "tokens_per_s", "tflops_per_s")):
                curves = self._curves(picked, key, smoothing=0.0 if key == "lr" else self._smoothing)
                if one and curves:
                    curves[0].name, curves[0].colour = plot.y_label, 2
                plot.update(curves)
            for plot in self.plots:
                if plot is not self.by_sigma:
                    plot.x_label = "s" if self._over == "elapsed_s" else self._over
                there = "" if plot.data or plot is self.loss else "none"
                if plot.layout.display != there:
                    plot.layout.display = there
            if self._box is not None:
                self._paint_box()

    def _curves(self, picked: Sequence[tuple[int, Watched]], key: str, smoothing: float | None = None) -> list[Series]:
        """A curve a run, of the runs that have that key."""
        share = self._smoothing if smoothing is None else smoothing
        return [
            Series(w.label, *w.reader.points(key, self._over), colour=i, smoothing=share)
            for i, w in picked
            if key in w.reader.last
        ]

    def _losses(self, watched: Watched) -> list[Series]:
        """Every loss faintly, a running mean, and validation points, also of averaged weights."""
        points, last = watched.reader.points, watched.reader.last
        x, y = points("loss", self._over)
        smoothing = self._smoothing if len(y) * self._smoothing >= 2 else 0.0
        out = [Series("each step", x, y, "faint")] if smoothing else []
        out += [Series("training", x, y, smoothing=smoothing)] if len(y) else []
        names = {k: f"averaged weights ({k[13:]})" for k in watched.reader.keys() if k.startswith("val_loss_ema_")}
        for colour, (key, name) in enumerate({"val_loss": "validation", **names}.items(), 1):
            out += [Series(name, *points(key, self._over), "points", colour)] if key in last else []
        return out

    def _by_sigma(self, picked: Sequence[tuple[int, Watched]]) -> list[Series]:
        """Validation loss against sigma: of one run the first round and the newest, of several their newest."""
        if len(self.runs) > 1:
            rounds = [(w.label, w.reader.rounds[-1], i) for i, w in picked if w.reader.rounds]
        else:
            found = self.reader.rounds
            rounds = [(f"iteration {r['iteration']}", r, 1 if r is found[-1] else 5) for r in found]
        return [Series(name, r["val_sigmas"], r["val_loss_by_sigma"], colour=c) for name, r, c in rounds]

    def _paint_box(self) -> None:
        state = self.state if len(self.runs) == 1 else ""
        _set(self._bar, "value", self.progress)
        _set(self._bar, "bar_style", {"finished": "success", "failed": "danger", "stopped": "warning"}.get(state, ""))
        text = f'<span role="status">{html.escape(self.status())}</span>'
        for watched in self.runs:
            if watched.reader.fault:
                text += f'<div role="alert"><b>Fault:</b> {html.escape(watched.reader.fault)}</div>'
        _set(self._text, "value", text + (self.table_html() if len(self.runs) > 1 else ""))
        self._paint_picker()
        self._paint_samples()

    def table_html(self) -> str:
        """A row a run: state, progress, losses, and the settings that differ."""
        keys = differing(self.runs)
        more = f"{len(keys) - SETTINGS_SHOWN} more settings differ" if len(keys) > SETTINGS_SHOWN else ""
        keys, cell = keys[:SETTINGS_SHOWN], 'style="text-align:left;padding:2px 12px 2px 0;white-space:nowrap"'
        heads = ["run", "state", "iteration", "loss", "validation", *keys]
        rows = ""
        for i, w in enumerate(self.runs):
            box = f"display:inline-block;width:10px;height:10px;margin-right:6px;background:{PALETTE[i % len(PALETTE)]}"
            last = [f"{w.reader.last[k]:.4f}" if k in w.reader.last else "" for k in ("loss", "val_loss")]
            of = f"{w.reader.iteration}/{w.train_iters}" if w.train_iters else str(w.reader.iteration)
            doing = w.phase() if w.state == "running" else w.state
            texts = [doing, of, *last, *(str(w.settings.get(k, "")) for k in keys)]
            name = f'<th scope="row" {cell}><span style="{box}"></span>{html.escape(w.label)}</th>'
            rows += f"<tr>{name}{''.join(f'<td {cell}>{html.escape(t)}</td>' for t in texts)}</tr>"
        head = "".join(f'<th scope="col" {cell}>{html.escape(h)}</th>' for h in heads)
        table = f'<div style="overflow:auto"><table><tr>{head}</tr>{rows}</table></div>'
        return f'{table}<div style="font-size:12px">{more}</div>'

    def _paint_picker(self) -> None:
        """A check box a run, where there are several."""
        import ipywidgets as w

        labels = [watched.label for watched in self.runs] if len(self.runs) > 1 else []
        if labels == [box.description for box in self._picker.children]:
            return
        boxes = []
        for watched in self.runs if labels else ():
            box = w.Checkbox(watched.picked, description=watched.label, indent=False, layout=w.Layout(width="auto"))

            def pick(change: Any, watched: Watched = watched) -> None:
                watched.picked = change["new"]
                self.paint()

            box.observe(pick, names="value")
            boxes.append(box)
        self._picker.children = boxes

    def _paint_samples(self) -> None:
        """The samples of the iteration that the slider shows; while it is at its end, the newest."""
        rounds: dict[str, dict[int, Path]] = {}
        for watched in self.runs:
            if watched.picked and (newest := watched.run.newest_samples()):  # a later one is being written
                folders = iteration_folders(watched.run.samples)
                rounds[watched.label] = {i: folder for i, folder in folders if i <= newest[0]}
        iterations = sorted({i for found in rounds.values() for i in found})
        if not iterations:
            return
        last, at_end = len(iterations), self._when.value >= self._when.max
        if self._when.max != last:
            with self._when.hold_sync():
                self._when.max = last
                if at_end:
                    self._when.value = last
        _set(self._when.layout, "display", "" if last > 1 else "none")
        asked = iterations[min(int(self._when.value), last) - 1]
        shown = {}
        for label, found in rounds.items():
            i = max((i for i in found if i <= asked), default=None)
            if i is not None and (files := media_in(found[i])):
                shown[label] = (i, files)
        key = tuple((label, i, *((str(p), p.stat().st_mtime) for p in files)) for label, (i, files) in shown.items())
        if not key or key == self._samples:
            return
        from workbench.gallery import Gallery

        self._samples = key
        several = len(self.runs) > 1
        columns = {f"{label}, iteration {i}": files[:8] for label, (i, files) in shown.items()}
        place = f" ({iterations.index(asked) + 1} of {len(iterations)} rounds)" if len(iterations) > 1 else ""
        head = f'<div style="font-weight:600">Samples at iteration {asked}{place}</div>'
        items: Any = columns if several else next(iter(columns.values()))
        self._media.value = head + Gallery(items, width_px=144, details=False).html()

    @property
    def widget(self) -> Any:
        """The live view; reading starts when it is first asked for."""
        if self._box is None:
            import ipywidgets as w

            from workbench.slider import Slider

            self._bar = w.FloatProgress(min=0, max=1, layout=w.Layout(width="auto", margin="0"))
            self._text, self._media = w.HTML(), w.HTML()
            row = {"flex_flow": "row wrap", "overflow": "visible"}
            self._picker = w.HBox(layout=w.Layout(**row))
            over = w.Dropdown(options=list(AXES.items()), description="x axis", layout=w.Layout(width="14em"))
            smoothing = Slider(label="smoothing", min=0, max=0.2, step=0.005, value=SMOOTHING)
            smoothing.layout = w.Layout(flex="0 1 24em", overflow="visible")
            self._when = Slider(label="samples", min=1, max=1, step=1, value=1)
            self._when.layout = w.Layout(display="none", width="min(40em, 100%)")
            for name, control in (("_over", over), ("_smoothing", smoothing)):
                control.observe(lambda change, name=name: self._set(name, change["new"]), names="value")
            self._when.observe(lambda _change: self.paint(), names="value")
            for plot in (self.loss, self.validation):
                plot.layout = w.Layout(flex="1 1 420px", min_width="260px", overflow="visible")
            for plot in self.plots[2:]:
                plot.layout = w.Layout(flex="1 1 300px", min_width="260px", overflow="visible")
            self._box = w.VBox(
                [
                    self._bar,
                    self._text,
                    self._picker,
                    w.HBox([over, smoothing], layout=w.Layout(**row)),
                    w.HBox(self.plots[:2], layout=w.Layout(**row, width="100%")),
                    w.HBox(self.plots[2:], layout=w.Layout(**row, width="100%")),
                    self._when,
                    self._media,
                ],
                layout=w.Layout(width="100%", overflow="visible"),
            )
            self._box.add_class("dfm-monitor")
            self.read()
            self.paint()
            self.watch()
        return self._box

    def _set(self, name: str, value: Any) -> None:
        setattr(self, name, value)
        for plot in self.plots:  # another axis has other ends
            plot.zoom = [] if name == "_over" else plot.zoom
        self.paint()

    def show(self) -> None:
        """Display the live view; when the run ends, a picture of it stays in the saved notebook."""
        for other in list(_LIVE):  # a cell that is run again would leave its former thread behind
            if other is not self and [w.run.path for w in other.runs] == [w.run.path for w in self.runs]:
                other.close()
        self.read()
        self.paint()
        super()._ipython_display_()
        self.watch()

    def _ipython_display_(self) -> None:
        self.show()

    # ---- following ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Follow the runs in a daemon thread until `close`."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._closed.clear()
                self._thread = threading.Thread(target=self._follow, name="dfm-monitor", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        before: tuple[Any, ...] = ()
        painted: list[int] = []
        ran = False
        while not self._closed.is_set():
            begun = time.thread_time()
            # before the files, so that the tail is never lost; a second of a phase is a change, too
            now = tuple((w.job.state, w.phase() if w.job.state == "running" else "") for w in self.runs)
            running = any(state == "running" for state, _ in now)
            self.read()
            counts = [w.reader.count for w in self.runs]
            if counts != painted:
                self.paint()
            elif now != before and self._box is not None:
                with self._lock:
                    self._paint_box()
            if ran and not running:
                self.keep()
            before, painted, ran = now, counts, running
            self._closed.wait(max(REPAINT_S, REST * (time.thread_time() - begun)))

    def finish(self) -> None:
        """Read to the end, paint, and leave the picture."""
        with self._lock:
            self.read()
            self.paint()
            self.keep()

    def close(self) -> None:
        """Stop following."""
        self._closed.set()

    def png(self) -> bytes:
        """Loss, validation and learning rate as one PNG."""
        self.read()
        self.paint()
        return draw_png([self.loss, self.validation, self.by_sigma, self.lr])

    def kept_html(self) -> str:
        """The picture, the status, and the table of several runs."""
        status = html.escape(self.status())
        if not any(watched.reader.count for watched in self.runs):
            return status
        from dfm_nb.base.video import data_url  # with it come the codecs, which a run without samples never needs

        said = f'alt="{status}. {html.escape(self.loss.summary)}"'
        image = f'<img src="{data_url("image/png", self.png())}" {said} style="max-width:100%">'
        return image + f"<p>{status}</p>" + (self.table_html() if len(self.runs) > 1 else "")

    def __repr__(self) -> str:
        return f"Monitor: {self.status()}"


def _set(widget: Any, name: str, value: Any) -> None:
    if getattr(widget, name) != value:
        setattr(widget, name, value)
