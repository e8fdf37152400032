"""One labelled control for one option: slider, menu, check box or text, with help below and room for a fault.

Every control is a native form element, so that keyboards and screen readers work. A fault is text below the control,
not colour alone. Numbers are text boxes, because a number box silently rounds 12.7 to 12.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as w
import traitlets

from dfm_nb.base.markup import Html, fill
from dfm_nb.base.options import Field
from dfm_nb.config import notation

SLIDER_SPAN = 4096
"""A bounded integer gets a slider when it has at most this many values; a bounded fraction always does."""
FLOW = {"flex_flow": "row wrap", "overflow": "visible"}
"""Layout of a row."""
INDENT = "margin-left:17em;font-size:12px;line-height:1.35"
HEAD = '<th scope="col" style="text-align:left;padding:2px 12px 2px 0">{}</th>'
NAME = '<th scope="row" style="text-align:left;padding:2px 12px 2px 0">{}</th>'
CELL = '<td style="text-align:left;padding:2px 12px 2px 0">{}</td>'
_CODE = "white-space:pre-wrap;word-break:normal;overflow-wrap:break-word;user-select:all;margin:0"


class Control:
    """A widget for one option.

    value : what the user chose, None for null.
    fault : what is wrong, below it.
    reset : a button that is shown while the value differs from the layer below, and restores that layer's value.
    """

    def __init__(self, field: Field, value: Any):
        self.widget, self._parse, self._show = _widget(field, value)
        self.widget.description = field.key.rpartition(".")[2]
        help = _spoken(field.help)
        self.widget.tooltip = help
        self.widget.style = {"description_width": "15em"}
        self.widget.layout = {"width": "min(44em, 100%)"}
        self.fault = w.HTML()
        self._below = value
        self.reset = button("", lambda: setattr(self, "value", self._below), icon="undo")
        row = w.HBox([self.widget, self.reset], layout=FLOW)
        shown = w.HTML(fill('<div style="{};opacity:.75">{}</div>', INDENT, help))
        self.box = w.VBox([row, shown, self.fault], layout={"margin": "0 0 4px 0", "width": "100%"})

    @property
    def value(self) -> Any:
        return self._parse(self.widget.value)

    @value.setter
    def value(self, value: Any) -> None:
        self.widget.value = self._show(value)

    def mark(self, below: Any, changed: bool) -> None:
        """Offer the value of the layer below, where the value differs from it."""
        self._below = below
        text = "none" if below is None else notation.write_value(below)
        self.reset.description = text
        self.reset.tooltip = f"back to {text}"
        self.reset.layout.display = "" if changed else "none"


def button(label: str, pressed: Callable[[], object], **looks: Any) -> w.Button:
    """A button as wide as its text."""
    made = w.Button(description=label, layout={"width": "max-content"}, **looks)
    made.on_click(lambda _button: pressed())
    return made


def on_change(changed: Callable[[], object], *controls: Any) -> None:
    """Call a function whenever one of these controls has a new value."""
    for control in controls:
        control.observe(lambda _change: changed(), names="value")


class Slider(anywidget.AnyWidget):
    """The browser's own range input, which reports every value it passes, with its label and value.

    ipywidgets' sliders have no name for screen readers. A `value` outside of the range is kept.
    """

    label = traitlets.Unicode().tag(sync=True)
    description = traitlets.Unicode().tag(sync=True)  # the page reads it before it shows a tooltip
    value = traitlets.CFloat().tag(sync=True)
    min = traitlets.CFloat().tag(sync=True)
    max = traitlets.CFloat().tag(sync=True)
    step = traitlets.CFloat().tag(sync=True)
    _esm = Path(__file__).with_name("slider.js")
    _css = Path(__file__).with_name("slider.css")


class Section(anywidget.AnyWidget):
    """A heading that opens and closes `below`, the widget below it; ipywidgets' Accordion has no keyboard."""

    title = traitlets.Unicode().tag(sync=True)
    display = traitlets.Unicode().tag(sync=True)  # of the layout of `below`
    _esm = Path(__file__).with_name("section.js")

    def __init__(self, below: Any, title: str = "", opened: bool = False):
        super().__init__(title=title, display="" if opened else "none")
        w.link((self, "display"), (below.layout, "display"))


def _widget(field: Field, value: Any) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    """The widget for an option's type and limits, how its value is read, and how it is set."""
    if "choices" in field.limits:
        choices = list(zip(field.limits["choices"], field.limits["choices"]))
        if field.optional:  # ipywidgets shows nothing for None
            choices.insert(0, ("(none)", ""))
        return w.Dropdown(options=choices, value=value or ""), lambda raw: raw or None, lambda value: value or ""
    if field.type is bool and not field.optional:
        return w.Checkbox(value=bool(value), indent=True), bool, bool
    low = field.limits.get("ge", -math.inf)
    high = field.limits.get("le", math.inf)
    if field.type is int:
        bounded = high - low <= SLIDER_SPAN
        step = field.limits.get("multiple_of", 1)
    else:
        bounded = math.isfinite(high - low)
        step = (high - low) / 100
    if bounded and not field.optional:
        label = field.key.rpartition(".")[2]
        return Slider(label=label, value=value, min=low, max=high, step=step), field.type, float
    box = w.Text(value=_written(value), placeholder="none", continuous_update=False)
    return box, _text if field.type is str else _read, _written


def _text(raw: str) -> str | None:
    return raw.strip() or None


def _read(raw: str) -> Any:
    """YAML; empty is null. Text that is not YAML is returned unchanged, and the checks report it."""
    try:
        return notation.read(raw) if raw.strip() else None
    except ValueError:
        return raw.strip()


def _written(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else notation.write_value(value)


def faults_of(error: Exception, known: Collection[str], elsewhere: str) -> dict[str, str]:
    """An error's messages by control: the option's, else that of the first flag in the message, else `elsewhere`."""
    faults: dict[str, str] = {}
    for name, text in getattr(error, "faults", {"": str(error)}).items():
        flags = re.findall("--([a-z-]+)", text)
        keys = [flag.replace("-", "_") for flag in (name, *flags)]
        faults.setdefault(next((key for key in keys if key in known), elsewhere), _spoken(text))
    return faults


def _spoken(text: str) -> str:
    """A message of the command line for one who sees controls: without its own flag, others by their names."""
    text = re.sub(r"^--[a-z-]+ (?=must )| \(--[a-z-]+\)$|: --source [a-z_]+:[A-Z]+", "", text)
    return re.sub("--([a-z]+(?:-[a-z]+)*)", lambda flag: flag[1].replace("-", " "), text)


def copied(label: str, text: str) -> Html:
    """Code with a button that copies it; on a page without access to the clipboard, a click selects all of it."""
    copy = "navigator.clipboard.writeText(this.parentElement.nextElementSibling.textContent);this.textContent='Copied'"
    button = '<div><button type="button" class="jupyter-button" style="width:auto" onclick="{}">Copy {}</button></div>'
    return fill(button + '<pre tabindex="0" aria-label="{}" style="{}">{}</pre>', copy, label, label, _CODE, text)


def table_html(rows: Iterable[Sequence[str]], heads: Sequence[str] = ()) -> Html:
    """A table of text with row headers in the first column."""
    body = [fill("<tr>{}</tr>", [fill(HEAD, text) for text in heads])]
    for name, *cells in rows:
        body.append(fill("<tr>{}{}</tr>", fill(NAME, name), [fill(CELL, text) for text in cells]))
    return fill('<div style="overflow:auto"><table>{}</table></div>', body)
