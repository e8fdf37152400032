"""Pieces of the Studio's page as HTML."""

from collections.abc import Sequence

import numpy as np

from dfm_nb import display
from dfm_nb.base import video
from dfm_nb.base.markup import Html, fill
from dfm_nb.generation.request import Request

STRIP = 8
SIDE_PX = 320
THUMB_PX = 72
STRIP_PX = 56
STEP = '<figure style="margin:0">{}<figcaption>{}</figcaption></figure>'
STRIP_OF = (
    '<div style="font-size:12px;line-height:1.4">'
    "<div>The model's guess at the finished clip (step: noise left). {}</div>{}</div>"
)
EMPTY = fill('<div style="border:1px solid #8888;width:{}px;max-width:100%;aspect-ratio:1"></div>', SIDE_PX)


def strip_steps(num_steps: int) -> Sequence[int]:
    """The steps kept for the strip: evenly spaced, with the first and the last."""
    count = min(STRIP, num_steps)
    return [1 + round(i * (num_steps - 1) / max(1, count - 1)) for i in range(count)]


def strip_html(estimates: Sequence[tuple[int, float, np.ndarray]], request: Request) -> Html:
    """Estimates of the finished clip in a row, each with its step and the remaining sigma."""
    cells = []
    for step, sigma, frame in estimates:
        image = fill(display.IMAGE, data_url(frame), f"after step {step}", f"width:{STRIP_PX}px;display:block")
        cells.append(fill(STEP, image, f"{step}: {sigma:.2g}"))
    return fill(STRIP_OF, caption(request), display.row_html(cells)) if cells else Html()


def caption(request: Request) -> str:
    return f"{request.prompt} (seed {request.seed}, guidance {request.guidance:g}, {request.num_steps} steps)"


def data_url(frame: np.ndarray) -> str:
    return display.data_url(*video.compressed(frame[None], 1))


def thumb_style(name: str, url: str) -> Html:
    """A style that gives the button of class `name` a picture, with its text small at the bottom."""
    text = "font-size:10px;color:white;text-shadow:0 0 3px black,0 0 3px black;display:flex;align-items:flex-end"
    return fill("<style>.{}{{background:center/cover url({})!important;line-height:1.6;{}}}</style>", name, url, text)


def framed(media: Html, frame: np.ndarray) -> Html:
    """A box of the picture's final size, so that the page does not jump when a picture is replaced."""
    size = f"max-width:{SIDE_PX}px;aspect-ratio:{frame.shape[1]}/{frame.shape[0]}"
    return fill('<div style="{}">{}</div>', size, media)
