"""The runs of a folder as a list: each run's newest sample, progress, loss, and settings that differ."""

from __future__ import annotations

import functools
import html
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as w
import pandas as pd

from dfm_nb.base.files import write_atomically
from dfm_nb.base.run import IDENTITY, LOCK, WRITTEN, Run
from dfm_nb.base.video import media_html
from dfm_nb.runs import compare, run_page, runs_below
from workbench.gallery import load
from workbench.job import Job
from workbench.launcher import Launcher
from workbench.live import Live
from workbench.monitor import SETTINGS_SHOWN, Monitor

THUMBNAIL_PX = 64
FIGURES = {"best_val_loss": "best validation {0[best_val_loss]:.4f} at {0[best_at]}", "loss": "loss {0[loss]:.4f}"}
FILES = {*WRITTEN, IDENTITY, LOCK, "report.html", "launch.json", "launch.log", ".launch.lock"}
BELOW = re.compile(
    r"samples/(data|iter_\d+)/[^/]+\.(png|mp4)(\.json)?|tensorboard/events\.out\.tfevents\.[^/]+|"
    r"checkpoints/(owner\.json|latest_checkpointed_iteration\.txt|iter_\d+(\.removed)?(\.tmp)?/"
    r"(rank-\d+|index|state|config|checksums|manifest|tokenizer|text_empty|latent_statistics)\.(json|yaml|safetensors))"
)
"""What a run and this workbench write into a run folder, and below it."""


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
        self._box: Any = None
        self.refresh()

    def refresh(self) -> None:
        """Read the folder again."""
        found = [path for path in runs_below(self.folder) if Run(path).metrics_file.exists() and path != self.folder]
        self.paths = {path.relative_to(self.folder).as_posix(): path for path in found}
        self.table = compare(found).set_axis(pd.Index(self.paths, name="run")) if found else pd.DataFrame()
        for name, path in self.paths.items():
            row = self.table.loc[name]
            sick = row["iterations"] is None or str(row["state"]).startswith("damaged")  # its state says why
            if not sick and (state := Job(path).state) != "not started":  # which also knows failed and lost runs
                self.table.loc[name, "state"] = state
        if self._box is not None:
            self._paint()

    # ---- what can be done with a run ------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        if name not in self.paths:
            raise ValueError(f"{self.folder} has no run {name!r}; it has {', '.join(self.paths) or 'none'}")
        return self.paths[name]

    def open(self, *names: str) -> Monitor:
        """A monitor of one run, or of several in the same plots."""
        return Monitor([self._path(name) for name in names])

    def resume(self, name: str, confirm: bool = False) -> Launcher:
        """Resume from the newest checkpoint; `NotOurs` without `confirm` if the folder was created elsewhere."""
        return Launcher.attach(self._path(name)).resume(confirm)

    def report(self, name: str) -> Path:
        """Write a run's page, `report.html` in its folder; it is self-contained."""
        path = self._path(name) / "report.html"
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
        run, found = Run(path), (entry for entry in path.rglob("*") if entry.is_symlink() or not entry.is_dir())
        strange = sorted(n for e in found if (n := str(e.relative_to(path))) not in FILES and not BELOW.fullmatch(n))
        if run.id is None or strange:
            why = f"it also holds {', '.join(strange[:3])}" if strange else "it has no record of a run"
            raise ValueError(f"only a run's own files are deleted; {path} is kept: {why}; delete it yourself")
        if not confirm:
            told = f"{name} with {self.table['iterations'][name]} iterations and its checkpoints in {path}"
            told += f" ({doubt})" if (doubt := run.doubt()) else ""
            raise ValueError(f"this deletes {told} permanently; to confirm: delete({name!r}, confirm=True)")
        run.claim()  # no process trains there, and none can start
        try:
            shutil.rmtree(path)
        finally:
            run.release()
        self.refresh()
        return f"deleted {name} "

    # ---- what is seen ---------------------------------------------------------------------------------------------

    def row_html(self, name: str) -> str:
        """The run's newest sample, and three lines about the run."""
        row, drawn = self.table.loc[name].dropna(), Run(self.paths[name]).newest_samples()
        item = load(drawn[1][0]) if drawn else None
        thumbnail = media_html(item.media_type, item.data, item.prompt, THUMBNAIL_PX) if item else ""
        said = [f"{row['state']}, iteration {row['iterations']}" if "iterations" in row else row["state"]]
        said += [text.format(row) for key, text in FIGURES.items() if key in row]
        differs = self.table.columns[self.table.columns.get_loc("seconds") + 1 :]
        settings = [f"{key.rpartition('.')[2]} {row.get(key)}" for key in differs[:SETTINGS_SHOWN]]
        lines = "<br>".join(html.escape(text) for text in (" · ".join(said), ", ".join(settings)))
        place = f'<div style="width:{THUMBNAIL_PX}px;min-height:20px">{thumbnail}</div>'
        text = f'<div style="line-height:1.35"><b>{html.escape(name)}</b><br>{lines}</div>'
        return f'<div style="display:flex;gap:10px;align-items:center;margin:2px 0">{place}{text}</div>'

    def kept_html(self) -> str:
        return "".join(map(self.row_html, self.paths)) or html.escape(repr(self))

    def __repr__(self) -> str:
        return f"Runs: {len(self.paths)} in {self.folder}"

    @property
    def widget(self) -> Any:
        """The list, a selection of runs, and buttons for the selected ones."""
        if self._box is None:
            actions: dict[str, Callable[[tuple[str, ...], bool], Any]] = {
                "Open": lambda names, _sure: self.open(*names).widget,
                "Continue": lambda names, sure: self.resume(names[0], sure).widget,
                "Page": lambda names, _sure: w.HTML("<br>".join(html.escape(str(self.report(n))) for n in names)),
                "Delete": lambda names, sure: w.HTML(html.escape("".join(self.delete(n, confirm=sure) for n in names))),
            }
            self._list, self._below, self._asked = w.HTML(), w.VBox(), ("", ())
            self._chosen = w.SelectMultiple(rows=8, description="runs", layout=w.Layout(width="min(40em, 100%)"))
            buttons = [w.Button(description=name, layout=w.Layout(width="auto")) for name in (*actions, "Refresh")]
            for button in buttons[:-1]:
                button.on_click(functools.partial(self._press, actions[button.description]))
            buttons[-1].on_click(lambda _button: self.refresh())
            self._box = w.VBox([self._list, self._chosen, w.HBox(buttons), self._below])
            self._paint()
        return self._box

    def _paint(self) -> None:
        self._list.value, self._chosen.options = self.kept_html(), list(self.paths)

    def _press(self, does: Callable[[tuple[str, ...], bool], Any], button: Any) -> None:
        """Act on the selected runs; the result or the error is shown below; a second press confirms."""
        names, before = self._chosen.value, self._asked
        self._asked = asked = button.description, names
        for old in self._below.children:
            old.close()
        try:
            shown = does(names, asked == before) if names else w.HTML("choose runs first")
        except Exception as error:
            shown = w.HTML(f'<div role="alert">{html.escape(str(error))}</div>')
        self._below.children = [shown]
