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
from workbench.live import fault_html

LOOK_S = 0.25
"""Interval between polls of the run: too short to notice, long enough to cost nothing."""

IDLE_S = 5.0
"""The same while nothing runs: a terminal or another notebook may start something."""

_COLOURS = {"running": "#0072B2", "finished": "#009E73", "failed": "#D55E00", "lost": "#D55E00", "stopped": "#E69F00"}
_NEWEST: weakref.WeakValueDictionary[Path, Panel] = weakref.WeakValueDictionary()
_MARKS = {"running": "▶", "finished": "✔", "failed": "✖", "lost": "✖", "stopped": "■", "not started": "○"}
_STATUS = (
    '<span role="status" aria-live="polite" style="padding-left:8px">'
    '<b style="color:{}" aria-hidden="true">{}</b> {}{}{}</span>'
)
_LOG = (
    '<div tabindex="0" role="log" aria-label="Last log lines" style="display:flex;flex-direction:column-reverse;'
    'max-height:{};overflow:auto;margin:4px 0;padding:6px 10px;border:1px solid var(--jp-border-color2, #8888)">'
    '<pre style="margin:0;flex-shrink:0;font-size:11px;line-height:1.45;white-space:pre-wrap;overflow-wrap:anywhere">'
    "{}</pre></div>"
)

ALERT = "padding:4px 10px;margin:4px 0;font-size:inherit;white-space:pre-wrap"


class Attention(anywidget.AnyWidget):
    """A sentence, also in the page's title, that comes into view when it appears."""

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

        self.launcher, self.message, self.note, self.stopping, self.asked = launcher, "", "", False, ""
        self._follower: threading.Thread | None = None
        self.buttons = {}
        for name, (icon, style) in self.LOOKS.items():
            made = w.Button(description=name, icon=icon, button_style=style, layout=w.Layout(width="auto"))
            made.on_click(functools.partial(self._press, name))
            self.buttons[name] = made
        self.status, self.says, self.alert, self.log = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.attention = Attention()
        row = w.HBox([*self.buttons.values(), self.status], layout=w.Layout(flex_flow="row wrap"))
        self.box = w.VBox([self.attention, row, self.says, self.alert, self.log])
        self.box.add_class("dfm-launcher")
        _NEWEST[launcher.run_dir] = self
        self.refresh()

    def _press(self, name: str, button: Any) -> None:
        if button.disabled:
            return
        run = self.launcher
        run.starts_at = math.inf  # the user is here
        if name == "Stop" and run.state != "running":
            return self.refresh()
        asked, self.asked = self.asked, name  # the first press shows a foreign folder's command, a second one runs it
        if name == "Stop":  # the first press leaves time to save; a second one kills
            if asked != name and run.doubt:
                return self._try(run.stop)
            stop = functools.partial(self.launcher.job.stop, *[0.0] * self.stopping)
            self.stopping = True
            threading.Thread(target=self._try, args=(stop,), daemon=True).start()
            return
        for other in self.buttons.values():
            other.disabled = True
        action = {"Start": run.start, "Continue": run.resume, "Start over": run.start_over}[name]
        self._try(functools.partial(action, confirm=asked == name))

    def _try(self, action: Callable[[], object]) -> None:
        """Run a button's action and show its exception; that another starter was first is no fault."""
        self.message = self.note = ""
        try:
            action()
        except Exception as error:
            first = isinstance(error, FileExistsError) and self.launcher.state == "running"
            setattr(self, "note" if first else "message", str(error) or type(error).__name__)
        self.refresh()

    def _follow(self) -> None:
        while (running := self.launcher.state == "running") or _NEWEST.get(self.launcher.run_dir) is self:
            self._show()
            time.sleep(LOOK_S if running else IDLE_S)
        self._show()

    def html(self) -> Html:
        """State, fault and log, without the buttons."""
        return Html("".join(part.value for part in (self.status, self.alert, self.log)))

    def refresh(self) -> None:
        """Show the current state; a daemon thread keeps it up to date, of a folder's newest panel also while idle."""
        self._show()
        if not (self._follower and self._follower.is_alive()):
            self._follower = threading.Thread(target=self._follow, name="dfm-launcher", daemon=True)
            self._follower.start()

    def _show(self) -> None:
        job, state = self.launcher.job, self.launcher.state
        running, offers = state == "running", self.launcher.offers()
        self.attention.text = self.launcher.asks()
        self.stopping = self.stopping and running
        for name, button in self.buttons.items():
            counts = name == "Stop" and self.launcher.starts_at < math.inf
            button.disabled, button.tooltip = not (counts or name in offers), offers.get(name, "")
        self.buttons["Stop"].description = "Stop now" if self.stopping else "Stop"
        pid = f" · process {job.pid}" if running else ""
        pid += " · saving, then exiting" if self.stopping else ""
        already = "already " if running and not self.launcher.followed else ""
        colour = _COLOURS.get(state, "var(--jp-ui-font-color2, #777)")
        self.status.value = fill(_STATUS, colour, _MARKS[state], already, state, pid)
        notes: list[str] = [fill("<b>{}</b> {}.", *offer) for offer in offers.items()]
        told = [text for text in (self.note if running else "", self.launcher.difference()) if text]
        notes += [f"{text[0].upper()}{text[1:]}." for text in told]
        cause, now = job.cause(), self.launcher.followed
        if cause and not now:
            notes.append(f"The last run here {state} on {job.ended()}: {cause}")
        self.says.value = fill("{}", [fill('<div style="font-size:12px;line-height:1.5">{}</div>', n) for n in notes])
        self.alert.value = fault_html(self.message or (cause if now else ""), ALERT, "Failed")
        tail = job.tail(14) if now or not cause else ""
        self.log.value = _log_html(tail, bool(cause)) if tail else ""
        self.launcher.keep()


def _log_html(tail: str, failed: bool) -> Html:
    """Lines of a log; the reversed column keeps the last line in view, however the lines wrap."""
    return fill(_LOG, "24em" if failed else "8em", tail)
