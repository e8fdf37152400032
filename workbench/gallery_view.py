"""The live gallery: its HTML, and one button that plays all clips together from their first frame."""

from __future__ import annotations

import anywidget
import traitlets


class GalleryView(anywidget.AnyWidget):
    """`content` is shown as it is: it must be made by us, with every text escaped."""

    content = traitlets.Unicode().tag(sync=True)
    _esm = """
    function render({ model, el }) {
      const button = document.createElement("button");
      button.className = "jupyter-button widget-button lm-Widget";
      button.style.width = "auto";
      const shown = document.createElement("div");
      const clips = () => [...shown.querySelectorAll("video")];
      let playing = true;  // they begin by themselves
      function label() {
        button.textContent = playing ? "Pause all" : "Play all together";
        button.setAttribute("aria-pressed", String(playing));
        button.hidden = clips().length === 0;
      }
      button.addEventListener("click", () => {
        playing = !playing;
        for (const v of clips()) {
          v.muted = true;
          if (playing) { v.currentTime = 0; v.play(); } else { v.pause(); }
        }
        label();
      });
      function fill() { shown.innerHTML = model.get("content"); playing = true; label(); }
      model.on("change:content", fill);
      el.append(button, shown);
      fill();
    }
    export default { render };
    """
