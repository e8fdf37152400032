"""What a launcher looks like: Start, Stop, Resume, the state, the last log lines, and on failure the cause.

Faults of a button are shown here; otherwise only JupyterLab's log console would have them.
"""

from __future__ import annotations

import html
import threading
import time
from typing import Any

LOOK_S = 0.25

_COLOURS = {"running": "#0072B2", "finished": "#009E73", "failed": "#D55E00", "lost": "#D55E00", "stopped": "#E69F00"}
_MARKS = {"running": "▶", "finished": "✔", "failed": "✖", "lost": "✖", "stopped": "■", "not started": "○"}


class Panel:
    """The buttons, state and log; the state is a word and a mark as well as a colour."""

    def __init__(self, launcher: Any):
        import ipywidgets as w

        self.launcher, self.message, self.stopping, self.asked = launcher, "", False, False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

        def button(text: str, icon: str, style: str, tip: str, action: Any) -> Any:
            out = w.Button(description=text, icon=icon, button_style=style, tooltip=tip, layout=w.Layout(width="auto"))
            out.on_click(lambda _b: self._guarded(action))
            return out

        self.start = button("Start", "play", "primary", "Start the run in the background", launcher.start)
        self.stop = button("Stop", "stop", "warning", "Save, then end every process of the run", self._stop)
        self.resume = button("Resume", "forward", "", "Continue from the newest checkpoint", self._resume)
        self.status, self.alert, self.log = w.HTML(), w.HTML(), w.HTML()
        self.box = w.VBox([w.HBox([self.start, self.stop, self.resume, self.status]), self.alert, self.log])
        self.box.add_class("dfm-launcher")
        self.refresh()

    def _guarded(self, action: Any) -> None:
        """Run a button's action and show its exception in the widget."""
        self.message = ""
        try:
            action()
        except Exception as error:
            self.message = str(error) or type(error).__name__
        self.refresh()

    def _resume(self) -> None:
        """A command that a foreign folder names is shown first; a second press runs it."""
        asked, self.asked = self.asked, True
        self.launcher.resume(confirm=asked)

    def _stop(self) -> None:
        """The first press asks and leaves time to save; a second one kills."""
        job = self.launcher.job
        action = (lambda: job.stop(0.0)) if self.stopping else job.stop
        self.stopping = True
        threading.Thread(target=self._guarded, args=(action,), daemon=True).start()

    def watch(self) -> None:
        """Follow the run in a daemon thread until it ends."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._follow, name="dfm-launcher", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        while True:
            running = self.launcher.state == "running"
            self.refresh()
            if not running:
                return
            time.sleep(LOOK_S)

    def refresh(self) -> None:
        job, state = self.launcher.job, self.launcher.state
        running = state == "running"
        self.stopping = self.stopping and running
        wanted = "Stop now" if self.stopping else "Stop"
        if self.stop.description != wanted:
            self.stop.description = wanted
        for button, usable in (
            (self.start, not running),
            (self.stop, running),
            (self.resume, self.launcher.can_resume),
        ):
            if button.disabled == usable:
                button.disabled = not usable
        pid = f" · process {job.pid}" if running else ""
        pid += " · saving, then ending" if self.stopping else ""
        colour = _COLOURS.get(state, "var(--jp-ui-font-color2, #777)")
        put(
            self.status,
            f'<span role="status" aria-live="polite" style="padding-left:8px">'
            f'<b style="color:{colour}" aria-hidden="true">{_MARKS[state]}</b> {state}{pid}</span>',
        )
        cause = self.message or job.cause()
        put(self.alert, _alert(cause) if cause else "")
        tail = html.escape(job.tail(14))
        put(self.log, _log_html(tail, bool(job.cause())) if tail else "")


def put(widget: Any, value: str) -> None:
    if widget.value != value:
        widget.value = value


def _alert(text: str) -> str:
    style = (
        "border-left:4px solid #D55E00;padding:4px 10px;margin:4px 0;white-space:pre-wrap;line-height:1.4;"
        "color:var(--jp-ui-font-color1, inherit);background:var(--jp-layout-color2, #f6f6f6)"
    )
    return f'<div role="alert" style="{style}"><b>Failed:</b> {html.escape(text)}</div>'


def _log_html(tail: str, failed: bool) -> str:
    """The reversed column keeps the last line in view however the lines wrap."""
    height = "24em" if failed else "15em"
    frame = (
        f"display:flex;flex-direction:column-reverse;max-height:{height};overflow:auto;margin:4px 0;padding:6px 10px;"
        "border:1px solid var(--jp-border-color2, #bbb);background:var(--jp-layout-color1, transparent)"
    )
    lines = (
        "margin:0;flex-shrink:0;font-size:11px;line-height:1.45;white-space:pre-wrap;word-break:normal;"
        "overflow-wrap:anywhere;color:var(--jp-content-font-color1, inherit)"
    )
    head = f'<div tabindex="0" role="log" aria-label="Last log lines" style="{frame}">'
    return f'{head}<pre style="{lines}">{tail}</pre></div>'
