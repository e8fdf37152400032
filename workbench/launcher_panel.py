"""A launcher's widget: Start, Stop, Continue, Start over with their effects, the state and the last log lines.

Errors of a button are shown here; otherwise only JupyterLab's log console would show them.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Callable

import anywidget
import traitlets

from dfm_nb.base.markup import Html, fill
from workbench.controls import FLOW, Section, button
from workbench.live import fault_html

LOOK_S = 0.25
"""Interval between polls of the run: too short to notice, long enough to cost nothing."""

IDLE_S = 5.0
"""The same while nothing runs: a terminal or another notebook may start something."""

_COLOURS = {"running": "#0072B2", "finished": "#009E73", "failed": "#D55E00", "lost": "#D55E00", "stopped": "#B07A00"}
_NEWEST: weakref.WeakValueDictionary[Path, Panel] = weakref.WeakValueDictionary()
_MARKS = {"running": "▶", "finished": "✔", "failed": "✖", "lost": "✖", "stopped": "■", "not started": "○"}
_STATUS = (
    '<span role="status" aria-live="polite" style="padding-left:8px">'
    '<b style="color:{}" aria-hidden="true">{}</b> {}{}{}</span>'
)
_LOG = (
    '<div tabindex="0" role="log" aria-label="Last log lines" style="display:flex;flex-direction:column-reverse;'
    'max-height:16em;overflow:auto;margin:4px 0;padding:6px 10px;border:1px solid var(--jp-border-color2, #8888)">'
    '<pre style="margin:0;flex-shrink:0;font-size:11px;line-height:1.45;white-space:pre-wrap;overflow-wrap:anywhere">'
    "{}</pre></div>"
)

ALERT = "padding:4px 10px;margin:4px 0;font-size:inherit;white-space:pre-wrap"


class Attention(anywidget.AnyWidget):
    """A sentence, also in the page's title; while there is one, `film.js` keeps it in view."""

    text = traitlets.Unicode().tag(sync=True)
    _esm = Path(__file__).with_name("attention.js")


class Panel:
    """The buttons with their effects, the state and the log; the state is a word and a mark as well as a colour.

    A button without an effect now is disabled, and a click on it (the second of a double click) does nothing.
    """

    LOOKS = {
        "Start": ("play", "primary"),
        "Stop": ("stop", "warning"),
        "Continue": ("forward", "primary"),
        "Start over": ("refresh", ""),
    }

    def __init__(self, launcher: Any):
        import ipywidgets as w

        self.launcher = launcher
        self.message = ""
        self.note = ""
        self.stopping = False
        self.was_running = False
        self.last_press = ""
        self._follower: threading.Thread | None = None
        self.buttons = {}
        for name, (icon, style) in self.LOOKS.items():
            self.buttons[name] = button(name, functools.partial(self._press, name), icon=icon, button_style=style)
        self.status = w.HTML()
        self.says = w.HTML()
        self.alert = w.HTML()
        self.log = w.HTML()
        # while a training is well, its monitor tells the same and more
        self.fold = Section(self.log, "Last log lines", opened=not launcher.trains)
        self.attention = Attention()
        row = w.HBox([*self.buttons.values(), self.status], layout=FLOW)
        self.box = w.VBox([self.attention, row, self.says, self.alert, self.fold, self.log])
        self.box.add_class("dfm-launcher")
        _NEWEST[launcher.run_dir] = self
        self.refresh()

    def _press(self, name: str) -> None:
        if self.buttons[name].disabled:
            return
        run = self.launcher
        run.starts_at = math.inf  # the user is here
        if name == "Stop" and run.state != "running":
            return self.refresh()
        confirmed = self.last_press == name  # the first press shows a foreign folder's command, a second one runs it
        self.last_press = name
        if name == "Stop":  # the first press leaves time to save; a second one kills
            if not confirmed and run.doubt:
                return self._try(run.stop)
            stop = functools.partial(run.job.stop, 0.0) if self.stopping else run.job.stop
            self.stopping = True
            threading.Thread(target=self._try, args=(stop,), daemon=True).start()
            return
        for other in self.buttons.values():
            other.disabled = True
        action = {"Start": run.start, "Continue": run.resume, "Start over": run.start_over}[name]
        self._try(functools.partial(action, confirm=confirmed))

    def _try(self, action: Callable[[], object]) -> None:
        """Run a button's action and show its exception; that another starter was first is no fault."""
        self.message = self.note = ""
        try:
            action()
        except Exception as error:
            text = str(error) or type(error).__name__
            if isinstance(error, FileExistsError) and self.launcher.state == "running":
                self.note = text
            else:
                self.message = text
        self.refresh()

    def _follow(self) -> None:
        while True:
            running = self.launcher.state == "running"
            self._show()
            if not running and _NEWEST.get(self.launcher.run_dir) is not self:
                break
            time.sleep(LOOK_S if running else IDLE_S)

    def html(self) -> Html:
        """State, fault and log, without the buttons."""
        return Html(self.status.value + self.alert.value + self.log.value)

    def refresh(self) -> None:
        """Show the current state; a daemon thread keeps it up to date, of a folder's newest panel also while idle."""
        self._show()
        if not (self._follower and self._follower.is_alive()):
            self._follower = threading.Thread(target=self._follow, name="dfm-launcher", daemon=True)
            self._follower.start()

    def _show(self) -> None:
        run = self.launcher
        job = run.job
        state = run.state
        running = state == "running"
        offers = run.offers()
        self.attention.text = run.asks()
        self.stopping = self.stopping and running
        if running and not self.was_running:
            self.message = ""  # of what was tried before
        self.was_running = running
        for name, one in self.buttons.items():
            ends_countdown = name == "Stop" and run.starts_at < math.inf
            one.disabled = name not in offers and not ends_countdown
        self.buttons["Stop"].description = "Stop now" if self.stopping else "Stop"
        pid = f" · process {job.pid}" if running else ""
        if self.stopping:
            pid += " · saving, then exiting"
        already = "already " if running and not run.followed else ""
        colour = _COLOURS.get(state, "var(--jp-ui-font-color2, #777)")
        self.status.value = fill(_STATUS, colour, _MARKS[state], already, state, pid)
        notes: list[str] = [fill("<b>{}</b> {}.", *offer) for offer in offers.items()]
        for text in (self.note if running else "", run.difference()):
            if text:
                notes.append(f"{text[0].upper()}{text[1:]}.")
        cause = job.cause()
        alert = self.message
        tail = ""
        if cause and not run.followed:
            notes.append(f"The last run here {state} on {job.ended()}: {cause}")
        else:
            alert = alert or cause
            tail = job.tail(14)
        lines = [fill('<div style="font-size:12px;line-height:1.5">{}</div>', note) for note in notes]
        self.says.value = fill("{}", lines)
        if cause and not self.alert.value:
            self.fold.display = ""
        self.alert.value = fault_html(alert, ALERT, "Failed")
        self.fold.layout.display = "" if tail else "none"
        # the reversed column keeps the last line in view, however the lines wrap
        self.log.value = fill(_LOG, tail) if tail else ""
        run.keep()
