"""A cell's view of a widget, and a static copy of it for when there is no kernel.

A saved notebook, a page and a reloaded tab have no live widgets: JupyterLab shows "model not found" there, or controls
that do nothing. So each widget is followed by a static copy of its content. A style hides the copy while the widget
above it is connected: by class names of our own, so in any front end. In JupyterLab another style hides the copy's
area, too, and the widget's while it is not connected. With the copy comes a script that keeps keys in the widget.
"""

import base64
import time
from pathlib import Path
from typing import Any

from dfm_nb.base.log import is_headless
from dfm_nb.base.markup import Html, fill

STYLE = (
    "<style>"
    ".jp-OutputArea-child:has(.dfm-live:not(.jupyter-widgets-disconnected)) + .jp-OutputArea-child:has(.dfm-kept),"
    ".jp-OutputArea-child:not(:has(.dfm-live:not(.jupyter-widgets-disconnected)))"
    ":has(+ .jp-OutputArea-child .dfm-kept){display:none}"
    # ipywidgets' arrow is black, and so are the pages of dark themes
    ".dfm-live{--jp-widgets-dropdown-arrow:url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' "
    "viewBox='0 0 18 18'%3E%3Cpath d='M5 7l4 4 4-4z' fill='%23888'/%3E%3C/svg%3E\")}"
    # its orange is too light for white text
    ".dfm-launcher .jupyter-button.mod-warning{background:#A84300;color:white}"
    "</style>"
)
KEYS = fill("<script>{}</script>", Html(Path(__file__).with_name("keys.js").read_text()))
FAULT = (
    '<div role="alert" style="border-left:4px solid #D55E00;padding:1px 8px;font-size:12px;line-height:1.4;{}">'
    "<b>{}:</b> {}</div>"
)
PICTURE = '<img src="data:image/png;base64,{}" alt="{}" style="max-width:100%">{}'
KEPT = (
    "{0}<style>body:has(.dfm-live-{1}:not(.jupyter-widgets-disconnected)) .dfm-kept-{1}{{display:none}}</style>"
    '<div class="dfm-kept dfm-kept-{1}">{2}'
    '<p style="opacity:.75">A copy of {3}: run this cell again for the controls.</p></div>'
)


class Live:
    """A base class for objects with a `widget` (an ipywidgets DOMWidget) and a static copy of its content.

    >>> class Hello(Live):
    ...     def kept_html(self):
    ...         return "hello"
    >>> Hello().kept_html()
    'hello'
    """

    widget: Any
    _kept: Any = None
    _kept_content: Any = None

    def kept_html(self) -> str:
        """The widget's content as `Html` that needs no kernel, or as text; "" if the text of `repr` is enough."""
        return ""

    def kept_png(self) -> bytes:
        """A PNG of what the HTML lacks, above it, and for where no HTML is shown; b"" without."""
        return b""

    def keep(self) -> None:
        """Update the copy."""
        if self._kept is None:
            return
        content = self._content()
        if content != self._kept_content:
            self._kept_content = content
            self._kept.update(self._bundle(*content), raw=True)

    def _content(self) -> tuple[Html, str]:
        return fill("{}", self.kept_html()), repr(self)

    def _bundle(self, page: Html, text: str) -> dict[str, str]:
        picture = base64.b64encode(self.kept_png()).decode()
        if picture:
            page = fill(PICTURE, picture, text, page)
        if not is_headless():
            page = page or fill("<pre>{}</pre>", text)
            page = fill(KEPT, Html(STYLE + KEYS), self.widget.model_id, page, time.strftime("%Y-%m-%d %H:%M"))
        bundle = {"text/plain": text}
        if page:
            bundle["text/html"] = page
        if picture:
            bundle["image/png"] = picture
        return bundle

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if not is_headless():
            self.widget.add_class("dfm-live").add_class(f"dfm-live-{self.widget.model_id}")
            display({**self.widget._repr_mimebundle_(), "text/plain": ""}, raw=True)
        self._kept_content = self._content()
        self._kept = display(self._bundle(*self._kept_content), raw=True, display_id=True)


def fault_html(text: str, style: str = "", what: str = "Must be corrected") -> Html:
    """A fault as text next to a coloured line; "" for none."""
    return fill(FAULT, style, what, text) if text else Html()
