"""Pieces of the Studio's page as HTML; every text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from dfm_nb.base import video
from dfm_nb.generation.request import Request

STRIP = 8
SIDE_PX, THUMB_PX, STRIP_PX = 320, 72, 56
_SMALL = "font-size:12px;line-height:1.4"
EMPTY = f'<div style="border:1px solid #8888;width:{SIDE_PX}px;max-width:100%;aspect-ratio:1"></div>'


def strip_steps(num_steps: int) -> Sequence[int]:
    """The steps kept for the strip: evenly spaced, with the first and the last."""
    count = min(STRIP, num_steps)
    return [1 + round(i * (num_steps - 1) / max(1, count - 1)) for i in range(count)]


def strip_html(estimates: Sequence[tuple[int, float, np.ndarray]], request: Request) -> str:
    """Estimates of the finished clip in a row, each with its step and the remaining sigma."""
    cells = []
    for step, sigma, frame in estimates:
        image = f'<img src="{data_url(frame)}" alt="after step {step}" style="width:{STRIP_PX}px;display:block">'
        cells.append(f'<figure style="margin:0">{image}<figcaption>{step}: {sigma:.2g}</figcaption></figure>')
    head = f"<div>The model's guess at the finished clip (step: noise left). {html.escape(caption(request))}</div>"
    return f'<div style="{_SMALL}">{head}{video.row_html(cells)}</div>' if cells else ""


def caption(request: Request) -> str:
    return f"{request.prompt} (seed {request.seed}, guidance {request.guidance:g}, {request.num_steps} steps)"


def data_url(frame: np.ndarray) -> str:
    return video.data_url(*video.compressed(frame[None], 1))


def thumb_style(name: str, url: str) -> str:
    """A style that gives the button of class `name` a picture, with its text small at the bottom."""
    text = "font-size:10px;color:white;text-shadow:0 0 3px black,0 0 3px black;display:flex;align-items:flex-end"
    return f"<style>.{name}{{background:center/cover url({url})!important;line-height:1.6;{text}}}</style>"


def framed(media: str, frame: np.ndarray) -> str:
    """A box of the picture's final size, so that the page does not jump when a picture is replaced."""
    return f'<div style="max-width:{SIDE_PX}px;aspect-ratio:{frame.shape[1]}/{frame.shape[0]}">{media}</div>'
