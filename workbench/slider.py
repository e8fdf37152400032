"""A slider that reports every value it passes, with a name for screen readers; ipywidgets' sliders have none."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets


class Slider(anywidget.AnyWidget):
    """The browser's own range input, with its label and value. A `value` outside of the range is kept."""

    label = traitlets.Unicode().tag(sync=True)
    description = traitlets.Unicode().tag(sync=True)  # the page reads it before it shows a tooltip
    value = traitlets.CFloat().tag(sync=True)
    min = traitlets.CFloat().tag(sync=True)
    max = traitlets.CFloat().tag(sync=True)
    step = traitlets.CFloat().tag(sync=True)
    _esm = Path(__file__).with_name("slider.js")
    _css = Path(__file__).with_name("slider.css")
