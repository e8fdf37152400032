"""A sample while it is generated: the model's estimate of the finished clip after each sampler step.

Sampling runs in a thread, one at a time. The result is the one that the pipeline gives without a preview.
"""

from __future__ import annotations

import base64
import html
import threading
import time
from typing import Any, Sequence

import numpy as np

from dfm_nb.base import video
from dfm_nb.diffusion import samplers

SHOW_S = 0.25
STRIP = 8
SIDE_PX = 256


class Stopped(Exception):
    """The user stopped the sampling."""


class SamplerPreview:
    """Generate a clip for one prompt and watch.

    Parameters
    ----------
    pipe : a loaded pipeline. prompt : shown at the start. settings : fields of `generate.Request` for every clip.

    >>> preview = SamplerPreview(pipe)                              # doctest: +SKIP
    >>> clips = preview.draw("a blue morpho", num_steps=18)         # doctest: +SKIP
    """

    def __init__(self, pipe: Any, prompt: str = "", **settings: Any):
        self.pipe, self.prompt, self.settings = pipe, prompt, settings
        self.frames: list[tuple[int, np.ndarray]] = []
        self.num_steps = 0
        self.clips: Any = None
        self.message = ""
        self._stop = threading.Event()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None
        self._box: Any = None

    # ---- sampling -------------------------------------------------------------------------------------------------

    def draw(self, prompt: str | None = None, **settings: Any) -> Any:
        """Generate now and return the clips; the widget, if shown, follows. Raises what the pipeline raises."""
        if not self._busy.acquire(blocking=False):
            raise ValueError("a clip is being generated; wait for it or press Stop")
        try:
            self.prompt = self.prompt if prompt is None else prompt
            self.frames, self.clips, self._last_s = [], None, 0.0
            self._stop.clear()
            self.clips = self.pipe([self.prompt], callback=self._on_step, **{**self.settings, **settings})
            return self.clips
        finally:
            self._busy.release()

    def _on_step(self, step: int, num_steps: int, clips: Any) -> None:
        """Called by the pipeline after each step, 1 to `num_steps`; reading `frames` decodes a clip."""
        if self._stop.is_set():
            raise Stopped
        self.num_steps = num_steps
        now = time.monotonic()
        in_strip = step in strip_steps(num_steps)
        if not in_strip and (self._box is None or now - self._last_s < SHOW_S):
            return
        self._last_s = now
        frames = clips[0].frames
        self.frames.append((step, frames[len(frames) // 2]))
        if self._box is not None:
            self._show(len(self.frames) - 1)

    def stop(self) -> None:
        """Stop after the current step."""
        self._stop.set()

    # ---- pictures -------------------------------------------------------------------------------------------------

    def filmstrip(self) -> np.ndarray:
        """The estimates from noise to clip in a row: uint8 [H, W, 3].

        Raises
        ------
        ValueError : nothing was generated yet.
        """
        if not self.frames:
            raise ValueError("nothing was generated yet; call draw(prompt)")
        wanted = strip_steps(self.num_steps)
        row = [f for s, f in self.frames if s in wanted]
        gap = np.full((row[0].shape[0], 4, 3), 255, np.uint8)
        return np.concatenate([piece for f in row for piece in (f, gap)][:-1], axis=1)

    def _repr_html_(self) -> str:
        if not self.frames:
            return "<i>nothing was generated yet</i>"
        shown = [s for s, _ in self.frames if s in strip_steps(self.num_steps)]
        said = f"{self.prompt.rstrip('.')}: estimates after steps {', '.join(map(str, shown))} of {self.num_steps}"
        image = _img(self.filmstrip(), said, "max-width:100%")
        return f'<figure style="margin:0">{image}<figcaption>{html.escape(said)}</figcaption></figure>'

    # ---- the widget -----------------------------------------------------------------------------------------------

    @property
    def widget(self) -> Any:
        """Prompt, steps, guidance, sampler and seed; Draw and Stop; the picture; a slider back through the steps."""
        if self._box is None:
            self._build()
        return self._box

    def _build(self) -> None:
        import ipywidgets as w

        start = {**self.pipe.recommended, "seed": 1, **self.settings}
        wide, label = w.Layout(width="100%"), {"description_width": "6em"}
        self._prompt = w.Text(value=self.prompt, description="prompt", layout=wide, style=label)
        self._inputs = {
            "num_steps": w.IntSlider(
                value=start["num_steps"], min=2, max=100, description="steps", layout=wide, style=label
            ),
            "guidance": w.FloatSlider(
                value=start["guidance"], min=0, max=10, step=0.25, description="guidance", layout=wide, style=label
            ),
            "sampler": w.Dropdown(
                options=list(samplers.SAMPLERS), value=start["sampler"], description="sampler", layout=wide, style=label
            ),
            "seed": w.IntText(value=start["seed"], description="seed", layout=wide, style=label),
        }
        self._draw = w.Button(
            description="Draw", icon="play", button_style="primary", tooltip="Generate a clip with these settings"
        )
        self._halt = w.Button(
            description="Stop", icon="stop", button_style="warning", tooltip="Stop after this step", disabled=True
        )
        self._draw.on_click(lambda _b: self._begin())
        self._halt.on_click(lambda _b: self.stop())
        self._image, self._note, self._result = w.HTML(), w.HTML(), w.HTML()
        self._image.value = _img(np.full((64, 64, 3), 128, np.uint8), "nothing generated yet")
        self._back = w.IntSlider(
            value=0, min=0, max=0, description="step back", layout=wide, style=label, disabled=True
        )
        self._back.observe(lambda change: self._show(change["new"]), names="value")
        rows = [self._prompt, *self._inputs.values(), w.HBox([self._draw, self._halt]), self._back, self._note]
        controls = w.VBox(rows, layout=w.Layout(flex="1 1 22em", min_width="20em", max_width="36em"))
        pictures = w.HBox([self._image, self._result], layout=w.Layout(flex_flow="row wrap"))
        self._box = w.HBox([controls, pictures], layout=w.Layout(flex_flow="row wrap", width="100%"))
        self._box.add_class("dfm-preview")
        self._say("ready")

    def _begin(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._draw.disabled, self._halt.disabled, self._back.disabled = True, False, True
        self._result.value = ""
        self._say("generating; the first step also loads the text encoder")
        chosen = {k: v.value for k, v in self._inputs.items()}
        self._thread = threading.Thread(target=self._draw_in_thread, args=(self._prompt.value, chosen), daemon=True)
        self._thread.start()

    def _draw_in_thread(self, prompt: str, chosen: dict[str, Any]) -> None:
        from workbench.gallery import Gallery

        started, page = time.monotonic(), ""
        try:
            page = Gallery(self.draw(prompt, **chosen), width_px=SIDE_PX).html()
            outcome = f"done in {time.monotonic() - started:.1f} s"
        except Stopped:
            outcome = "stopped"
        except Exception as error:
            outcome = f"failed: {error}"
        self._result.value = page
        self._back.max, self._back.disabled = max(0, len(self.frames) - 1), not self.frames
        if self.frames:
            self._back.value = self._back.max
        self._say(outcome)
        self._draw.disabled, self._halt.disabled = False, True

    def _say(self, text: str) -> None:
        self.message = text
        self._note.value = f'<span role="status" aria-live="polite">{html.escape(text)}</span>'

    def _show(self, index: int) -> None:
        if not 0 <= index < len(self.frames):
            return
        step, frame = self.frames[index]
        self._image.value = _img(frame, f"estimate of {self.prompt!r} after step {step} of {self.num_steps}")
        self._say(f"step {step} of {self.num_steps}")


def strip_steps(num_steps: int, count: int = STRIP) -> Sequence[int]:
    """Which steps are kept for the filmstrip: evenly spread, the first and the last among them."""
    count = min(count, num_steps)
    return [1 + round(i * (num_steps - 1) / max(1, count - 1)) for i in range(count)]


def _img(frame: np.ndarray, alt: str, style: str = f"width:{SIDE_PX}px") -> str:
    """HTML of uint8 [H, W, 3]; `alt` is escaped here."""
    media_type, data = video.compressed(frame[None], 1)
    source = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return f'<img src="{source}" alt="{html.escape(alt, quote=True)}" style="{style}">'
