"""One labelled control for one setting: slider, menu, check box or text, with help below and room for a fault.

Every control is a native form element, so that the keyboard reaches it and screen readers name it. A fault is text
beside the control, not colour alone. Numbers are text boxes: a number box rounds 12.7 to 12 without a word.
"""

from __future__ import annotations

import html
import typing
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as w

from dfm_nb.config import notation
from workbench.slider import Slider

WIDE = w.Layout(width="min(44em, 100%)")
LABEL = {"description_width": "15em"}
_CODE = "white-space:pre-wrap;word-break:normal;overflow-wrap:break-word;user-select:all;margin:0"
SLIDER_SPAN = 4096
"""A bounded integer gets a slider when it has at most this many values."""


class Control:
    """A widget for one key.

    key : its name. value : what the user chose, None for null. fault : the sentence shown below, "" for none.
    reset : a button that is there while the value differs from the one below it, which it names and brings back.
    """

    def __init__(
        self, key: str, label: str, widget: Any, help: str, parse: Callable[[Any], Any], show: Callable[[Any], Any]
    ):
        self.key, self.widget, self._parse, self._show = key, widget, parse, show
        widget.description, widget.style, widget.layout = label, LABEL, WIDE
        widget.tooltip = help
        self.help = w.HTML(
            f'<div style="margin-left:17em;font-size:12px;line-height:1.35;opacity:.75">{html.escape(help)}</div>'
        )
        self._fault = w.HTML()
        self._below: Any = None
        self.reset = w.Button(icon="undo", layout=w.Layout(width="auto", display="none"))
        self.reset.on_click(lambda _button: setattr(self, "value", self._below))
        row = w.HBox([widget, self.reset], layout=w.Layout(flex_flow="row wrap"))
        self.box = w.VBox([row, self.help, self._fault], layout=w.Layout(margin="0 0 4px 0", width="100%"))
        self.fault = ""

    @property
    def value(self) -> Any:
        return self._parse(self.widget.value)

    @value.setter
    def value(self, value: Any) -> None:
        self.widget.value = self._show(value)

    def observe(self, changed: Callable[[], None]) -> None:
        self.widget.observe(lambda _change: changed(), names="value")

    def mark(self, below: Any, changed: bool) -> None:
        """Say what the layer below has, and offer to go back to it, where the value differs."""
        self._below = below
        text = "none" if below is None else notation.write_value(below)
        self.reset.description, self.reset.tooltip = text, f"back to {text}"
        self.reset.layout.display = "" if changed else "none"

    def set_fault(self, text: str) -> None:
        if text == self.fault:
            return
        self.fault = text
        self._fault.value = fault_html(text, "margin-left:17em") if text else ""


def fault_html(text: str, style: str = "") -> str:
    style = f"border-left:4px solid #D55E00;padding:1px 8px;font-size:12px;line-height:1.4;{style}"
    return f'<div role="alert" style="{style}"><b>Must be corrected:</b> {html.escape(text)}</div>'


def copied(label: str, text: str) -> str:
    """Code with a button that copies it; where a page may not reach the clipboard, a click selects all of it."""
    copy = "navigator.clipboard.writeText(this.parentElement.nextElementSibling.textContent);this.textContent='Copied'"
    button = f'<button type="button" class="jupyter-button" style="width:auto" onclick="{copy}">Copy {label}</button>'
    pre = f'<pre tabindex="0" aria-label="{label}" style="{_CODE}">'
    return f"<div>{button}</div>{pre}{html.escape(text)}</pre>"


def _same(value: Any) -> Any:
    return value


def menu(key: str, label: str, choices: Sequence[str], default: Any, help: str, optional: bool = False) -> Control:
    """A drop-down; `null` comes first when the setting may be null."""
    options: list[tuple[str, Any]] = [("(none)", None)] if optional else []
    options += [(c, c) for c in choices]
    return Control(key, label, w.Dropdown(options=options, value=default), help, _same, _same)


def text(key: str, label: str, default: Any, help: str, kind: type = str, placeholder: str = "null") -> Control:
    """A text box in YAML notation; empty means null. A `str` is taken as it is."""

    def parse(raw: str) -> Any:
        raw = raw.strip()
        if not raw:
            return None
        if kind is str:
            return raw
        try:
            return notation.read(raw)
        except ValueError:
            return raw  # the validation says what is wrong

    def show(value: Any) -> str:
        if value is None:
            return ""
        return value if isinstance(value, str) else notation.write_value(value)

    box = w.Text(value=show(default), placeholder=placeholder, continuous_update=False)
    return Control(key, label, box, help, parse, show)


def number(key: str, label: str, kind: type, default: Any, help: str, limits: typing.Mapping[str, Any]) -> Control:
    """A slider when both bounds are known, else a text box that takes anything, so that a fault can be explained."""
    low, high = limits.get("ge"), limits.get("le")
    if low is not None and high is not None and (kind is float or high - low <= SLIDER_SPAN):
        step = limits.get("multiple_of", 1) if kind is int else (high - low) / 100
        slider = Slider(label=label, value=default, min=low, max=high, step=step)
        return Control(key, label, slider, help, kind, _same)
    return text(key, label, default, help, kind, "a whole number" if kind is int else "a number")


def check(key: str, label: str, default: bool, help: str) -> Control:
    return Control(key, label, w.Checkbox(value=default, indent=True), help, bool, bool)
