"""The runs of a folder as a table: one prompt over each run, progress, losses, settings that differ, tags and note."""

import contextlib
import functools
import re
import shutil
import threading
import time
from pathlib import Path
from textwrap import shorten
from typing import Any

import anywidget
import ipywidgets as w
import pandas as pd
import traitlets

from dfm_nb.base.files import CHECKSUMS, MARK, check_free, read_json, write_atomically, write_json
from dfm_nb.base.log import legible
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.run import IDENTITY, LOCK, WRITTEN, Run
from dfm_nb.checkpoints.folders import ASSETS, NEEDED, TRACKER
from dfm_nb.display import media_html
from dfm_nb.experiments.runs import compare, run_page, runs_below
from workbench.controls import button, table_html
from workbench.gallery import DATA, Gallery
from workbench.job import Job
from workbench.launcher import Launcher
from workbench.live import Live
from workbench.monitor import REST, Monitor

THUMBNAIL_PX = 48
LOOK_S = 2.0
"""Interval between looks at the runs."""
NOTES = "notes.json"
FILES = {*WRITTEN, IDENTITY, LOCK, NOTES, "report.html", "launch.json", "launch.log", ".launch.lock"}
_PARTS = "|".join(map(re.escape, (*NEEDED, *ASSETS, CHECKSUMS)))
BELOW = re.compile(
    r"samples/(data|iter_\d+)/[^/]+\.(png|mp4)(\.json)?|tensorboard/events\.out\.tfevents\.[^/]+|"
    r"wandb/(latest-run|debug[^/]*|(offline-)?run-[^/]+/.+)|"
    rf"checkpoints/(owner\.json|{re.escape(TRACKER)}|iter_\d+(\.removed)?(\.tmp)?/(rank-\d+\.(json|safetensors)|{_PARTS}))"
)
"""What a run and this workbench write into a run folder, and below it."""
_NEWEST: dict[Path, "Runs"] = {}


class RunsTable(anywidget.AnyWidget):
    """Sorts, filters, and sends what is written into a row; `chosen` are the names of the ticked rows."""

    heads: Any = traitlets.List().tag(sync=True)
    rows: Any = traitlets.List().tag(sync=True)
    chosen: Any = traitlets.List().tag(sync=True)
    _esm = Path(__file__).with_name("runs.js")
    _css = Path(__file__).with_name("runs.css")


class Runs(Live):
    """The runs in a folder, up to four levels down: open, compare, continue, delete, and write a page to share.

    Parameters
    ----------
    folder : a folder of run folders.

    Attributes
    ----------
    table : from `dfm_nb.compare`, one row per run, indexed by its path below the folder.

    >>> Runs("runs")                                  # doctest: +SKIP
    >>> Runs("runs").report("first")                  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path = "runs"):
        self.folder = Path(folder).expanduser().resolve()
        self.paths: dict[str, Path] = {}
        self.table = pd.DataFrame()
        self.refresh()

    def refresh(self) -> None:
        """Read the folder again."""
        self._shown = self._seen()  # before it is read, so that what changes meanwhile is seen next
        paths = {}
        for path in runs_below(self.folder):
            if path != self.folder and Run(path).metrics_file.exists():
                paths[legible(path.relative_to(self.folder).as_posix())] = path
        table = pd.DataFrame()
        if paths:
            table = compare(paths.values()).set_axis(pd.Index(paths, name="run")).drop(columns="val_loss")
        for name, path in paths.items():
            state = Job(path).state  # which also knows failed and lost runs
            damaged = table["state"][name].startswith(("damaged", "cannot"))  # the table says why
            if not damaged and state != "not started":
                table.loc[name, "state"] = state
        self.paths = paths
        self.table = table
        if "widget" in vars(self):
            self._paint()

    def _follow(self) -> None:
        """Refresh when a run has changed, until another table of the folder is shown."""
        while _NEWEST[self.folder] is self:
            began = time.thread_time()
            with contextlib.suppress(OSError):  # a run is deleted or moved just now
                if self._seen() != self._shown:
                    self.refresh()
            time.sleep(max(LOOK_S, REST * (time.thread_time() - began)))

    def _seen(self) -> list[tuple[Path, str, int]]:
        """State, and time of the newest metrics, of each run."""
        files = [Run(path).metrics_file for path in runs_below(self.folder)]
        return [(file, Job(file.parent).state, file.stat().st_mtime_ns) for file in files if file.exists()]

    # ---- what can be done with a run ------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        if name not in self.paths:
            raise ValueError(f"{self.folder} has no run {name!r}; it has {', '.join(self.paths) or 'none'}")
        return self.paths[name]

    def open(self, *names: str) -> Monitor:
        """A monitor of one run, or of several in the same plots."""
        return Monitor([self._path(name) for name in names])

    def report(self, name: str) -> Path:
        """Write a run's page, `report.html` in its folder; it is self-contained."""
        path = self._path(name) / "report.html"
        check_free(path, Run(path.parent).id is not None, fix="move it away", mark=MARK)
        write_atomically(path, run_page(path.parent).encode())
        return path

    def delete(self, name: str, confirm: bool = False) -> str:
        """Delete a run folder permanently; returns a message.

        Raises
        ------
        ValueError : not confirmed; it has no record; or it holds files that no run writes.
        FileExistsError : a live process uses it.
        """
        path = self._path(name)
        run = Run(path)
        files = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
        strange = sorted(file for file in files if file not in FILES and not BELOW.fullmatch(file))
        if run.id is None or strange:
            why = f"it also holds {', '.join(strange[:3])}" if strange else "it has no record of a run"
            raise ValueError(f"only a run's own files are deleted; {path} is kept: {why}; delete it yourself")
        if not confirm:
            what = f"{name} with {self.table['iterations'][name]} iterations and its checkpoints in {path}"
            doubt = run.doubt()
            if doubt:
                what += f" ({doubt})"
            raise ValueError(f"this deletes {what} permanently; press Delete again, or delete({name!r}, confirm=True)")
        run.claim()  # no process trains there, and none can start
        try:
            shutil.rmtree(path)
        finally:
            run.release()
        self.refresh()
        return f"deleted {name} "

    # ---- what is seen ---------------------------------------------------------------------------------------------

    def _thumbnail(self, name: str) -> Html:
        """One prompt over the run."""
        shown = []
        with contextlib.suppress(ValueError):  # it has no samples
            columns = Gallery.of_training(self.paths[name]).columns
            columns.pop(DATA, None)
            for (item,) in columns.values():
                shown.append(media_html(item.media_type, item.data, item.prompt, THUMBNAIL_PX))
        return fill('<div style="display:flex;gap:2px">{}</div>', shown)

    def _rows(self) -> list[dict[str, Any]]:
        """Of each run: its name, its thumbnail as HTML, the columns of the table, tags and note."""
        columns = self.table.where(self.table.notna(), None)
        rows = []
        for name, path in self.paths.items():
            notes = read_json(path / NOTES)
            row = {"run": name, "thumbnail": self._thumbnail(name), "cells": [name, *map(_plain, columns.loc[name])]}
            rows.append(row | {key: str(notes.get(key, "")) for key in ("tags", "note")})
        return rows

    def annotate(self, name: str, tags: str = "", note: str = "") -> None:
        """Write a run's tags (words) and note to `notes.json` in its folder."""
        path = self._path(name) / NOTES
        check_free(path, Run(path.parent).id is not None, fix="move it away")
        write_json(path, {"tags": tags, "note": note})
        if "widget" in vars(self):
            self._paint()

    def kept_html(self) -> str:
        table = []
        for row in self._rows():
            table.append([*map(_short, row["cells"]), row["tags"], row["note"], row["thumbnail"]])
        return table_html(table, [*self._heads(), "tags", "note", "samples"]) if table else repr(self)

    def _heads(self) -> list[str]:
        return ["run", *(str(key).rpartition(".")[2].replace("_", " ") for key in self.table)]

    def __repr__(self) -> str:
        return f"Runs: {len(self.paths)} in {self.folder}"

    @functools.cached_property
    def widget(self) -> Any:
        """The table, and buttons for the runs that are ticked."""
        self._table = RunsTable()
        self._below = w.VBox()
        self._last_press: tuple[str, tuple[str, ...]] = ("", ())
        self._table.on_msg(lambda _widget, sent, _buffers: self.annotate(**sent))
        actions = ("Open", "Continue", "Page", "Delete")
        buttons = [button(action, functools.partial(self._press, action)) for action in actions]
        self._paint()
        _NEWEST[self.folder] = self
        threading.Thread(target=self._follow, name="dfm-runs", daemon=True).start()
        return w.VBox([w.HBox(buttons), self._table, self._below])

    def _paint(self) -> None:
        self._table.heads = self._heads()
        self._table.rows = self._rows()
        self._table.chosen = [name for name in self._table.chosen if name in self.paths]
        self.keep()

    def _press(self, action: str) -> None:
        """Act on the selected runs; the result or the error is shown below; a second press confirms."""
        names = tuple(self._table.chosen)
        press = (action, names)
        confirmed = press == self._last_press
        self._last_press = press
        for old in self._below.children:
            old.close()
        try:
            if not names:
                shown = w.HTML("tick runs first")
            elif action == "Open":
                shown = self.open(*names).widget
            elif action == "Continue":
                shown = Launcher.attach(self._path(names[0])).resume(confirmed).widget
            elif action == "Page":
                shown = w.HTML(fill("{}", [fill("{}<br>", self.report(name)) for name in names]))
            else:
                shown = w.HTML(fill("{}", [self.delete(name, confirmed) for name in names]))
        except Exception as error:
            shown = w.HTML(fill('<div role="alert">{}</div>', error))
        self._below.children = [shown]


def _plain(value: Any) -> str | int | float | None:
    """A cell as JSON has it: numbers sort as numbers."""
    if value is None or (isinstance(value, int | float) and value is not True):
        return value
    return shorten(str(value), 40, placeholder="...") if isinstance(value, list) else str(value)


def _short(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
