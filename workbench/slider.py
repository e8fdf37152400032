"""A slider that reports every value it passes, with a name for screen readers; ipywidgets' sliders have none."""

from __future__ import annotations

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
    _esm = """
    function render({ model, el }) {
      const label = document.createElement("label"), name = document.createElement("span");
      const range = document.createElement("input"), shown = document.createElement("output");
      el.classList.add("dfm-slider");
      range.type = "range";
      range.dataset.lmSuppressShortcuts = "true";  // arrow keys are for the slider, not for the notebook's cells
      shown.ariaHidden = "true";  // the range input announces its value itself
      name.textContent = model.get("label");
      function fill() {
        for (const key of ["min", "max", "step", "value"]) range[key] = model.get(key);
        shown.textContent = model.get("value");
      }
      range.addEventListener("input", () => { model.set("value", Number(range.value)); model.save_changes(); });
      for (const key of ["min", "max", "value"]) model.on("change:" + key, fill);
      label.append(name, range, shown);
      el.append(label);
      fill();
    }
    export default { render };
    """
    _css = """
    .dfm-slider { width: 100%; }
    .dfm-slider label { display: flex; align-items: center; gap: 8px; margin: 2px;
      font-size: var(--jp-widgets-font-size, 13px); color: var(--jp-widgets-label-color, inherit); }
    .dfm-slider span { flex: 0 0 6em; text-align: right; } .dfm-form .dfm-slider span { flex-basis: 14.5em; }
    .dfm-slider input { flex: 1 1 6em; min-width: 0; accent-color: var(--jp-brand-color1, #1976d2); }
    .dfm-slider output { flex: 0 0 3em; font-variant-numeric: tabular-nums; }
    """
