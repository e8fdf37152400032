"""What a cell shows of a widget, and what stays of it where no kernel answers.

A saved notebook, a page and a reloaded tab have no live widgets: JupyterLab says "model not found" there, or shows
controls that do nothing. Below each widget lies a plain copy of what it showed. A style hides the copy while the widget
above it is connected, and hides the widget's place while it is not.
"""

from __future__ import annotations

import html
from typing import Any

from workbench.headless import is_headless

STYLE = (
    "<style>"
    ".jp-OutputArea-child:has(.dfm-live:not(.jupyter-widgets-disconnected)) + .jp-OutputArea-child:has(.dfm-kept),"
    ".jp-OutputArea-child:not(:has(.dfm-live:not(.jupyter-widgets-disconnected)))"
    ":has(+ .jp-OutputArea-child .dfm-kept){display:none}"
    "</style>"
)
AGAIN = '<p style="opacity:.75">A copy of what was shown last: run this cell again for the controls.</p>'


class Live:
    """A base for what has a `widget` (an ipywidgets DOMWidget) and tells without it what it shows.

    >>> class Hello(Live):
    ...     def kept_html(self):
    ...         return "hello"
    >>> Hello().kept_html()
    'hello'
    """

    widget: Any
    _kept: Any = None
    _kept_now = ""

    def kept_html(self) -> str:
        """What the widget shows, as HTML that needs no kernel."""
        return f"<pre>{html.escape(repr(self))}</pre>"

    def keep(self) -> None:
        """Bring the copy below the widget up to date."""
        if self._kept is not None and (now := self.kept_html()) != self._kept_now:
            self._kept_now = now
            self._kept.update({"text/html": _page(now), "text/plain": repr(self)}, raw=True)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if is_headless():
            display({"text/html": self.kept_html(), "text/plain": repr(self)}, raw=True)
            return
        self.widget.add_class("dfm-live")
        view = self.widget._repr_mimebundle_()
        display({**view, "text/plain": ""}, raw=True)
        self._kept_now = self.kept_html()
        kept = {"text/html": _page(self._kept_now), "text/plain": repr(self)}
        self._kept = display(kept, raw=True, display_id=True)


def _page(content: str) -> str:
    return f'{STYLE}<div class="dfm-kept">{content}{AGAIN}</div>'
