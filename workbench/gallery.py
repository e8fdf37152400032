"""Clips that play in the notebook, each with its prompt, seed and settings; side by side to compare.

The HTML contains the clips, so a saved or untrusted notebook still plays them. That adds 4/3 of the files' size.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb import display
from dfm_nb.base import video
from dfm_nb.base.files import is_plain
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.records import SampleError
from dfm_nb.base.run import Run
from dfm_nb.experiments.runs import clip_settings

DESCRIBED = dict(
    seed="seed {}", guidance="guidance {}", num_steps="{} steps", sampler="{}", iteration="iteration {}", fps="{} fps"
)
"""The settings printed under a clip's prompt, where they are known."""
DATA = "your data"
CAPTIONS_OF = {"train": " (a training caption)", "val": " (an unseen caption)"}
DOWNLOAD = "this.href=this.closest('figure').querySelector(':is(video,img):last-of-type').src"
HEAD = '<th scope="col" style="vertical-align:top;text-align:left;padding:4px 8px 4px 0">{}</th>'
CELL = '<td style="vertical-align:top;text-align:left;padding:4px 8px 4px 0">{}</td>'
PROMPT = '<tr><td colspan="{}" style="text-align:left;padding:4px 0 0;font-size:12px">{}</td></tr>'
TABLE = '<table style="border-collapse:collapse"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>'
FIGURE = (
    '<figure style="margin:0;width:{}px;max-width:100%">{}'
    '<figcaption style="font-size:12px;line-height:1.35;margin-top:3px">{}</figcaption></figure>'
)
DETAIL = '<div style="opacity:.75">{}</div>{}'
TOGETHER = (
    "const f=this.closest('table').querySelector('video');"
    "if(Math.abs(f.currentTime-this.currentTime)>0.1)this.currentTime=f.currentTime"
)
"""Synchronises the columns with the first clip, because each clip starts when it scrolls into view."""


@dataclass(frozen=True)
class Item:
    """One clip: media type and bytes, and settings (`prompt`, `seed`, ...; {} when unknown)."""

    media_type: str
    data: bytes
    settings: Mapping[str, Any]

    @functools.cached_property
    def begins(self) -> tuple[np.ndarray, float] | None:
        """Its first frames, uint8 [T, H, W, 3], and their rate; None if they are damaged."""
        with contextlib.suppress(SampleError):
            if not self.media_type.startswith("video/"):
                return video.read_image(self.data), 1.0
            with video.open_video(self.data) as (frames, fps):
                return np.stack(list(itertools.islice(frames, display.POSTER_FRAMES))), fps
        return None

    @property
    def prompt(self) -> str:
        return self.settings.get("prompt") or self.settings.get("name", "clip")

    def describe(self) -> str:
        """`seed 1, guidance 2, 18 steps, heun`."""
        words = []
        for key, template in DESCRIBED.items():
            value = self.settings.get(key)
            if value is None or (key == "fps" and not self.media_type.startswith("video/")):
                continue
            words.append(template.format(f"{value:g}" if isinstance(value, float) else value))
        return ", ".join(words)


def load(thing: Any) -> Item:
    """A path, a `generate.Generated`, or a NumPy array uint8 [T, H, W, 3], as an `Item`.

    Raises
    ------
    FileNotFoundError, ValueError : no such file, or not a clip or picture.
    """
    if isinstance(thing, Item):
        return thing
    if isinstance(thing, (str, Path)):
        path = Path(thing).expanduser()
        kind = display.MEDIA.get(path.suffix.lower())
        if not path.is_file():
            raise FileNotFoundError(f"there is no clip {path}; dfm generate --video-save-path {path} writes one")
        if kind is None:
            raise ValueError(f"{path} must be one of {', '.join(display.MEDIA)}; convert it first")
        # of a foreign clip only the name is known
        return Item(kind, path.read_bytes(), {"name": path.stem, **clip_settings(path)})
    if hasattr(thing, "request"):
        media_type, data = thing.encoded()
        return Item(media_type, data, thing.request.model_dump())
    frames = np.asarray(thing)
    if frames.ndim == 3:
        frames = frames[None]
    if frames.ndim != 4 or frames.dtype != np.uint8 or frames.shape[-1] != 3:
        raise ValueError(f"a gallery shows paths, generated clips or uint8 [T, H, W, 3]; got {type(thing).__name__}")
    return Item(*video.compressed(frames, 12.0), {})


class Gallery:
    """Clips in a row, or in columns to compare.

    Parameters
    ----------
    clips : paths, a folder, generated clips or arrays; {label: such a list} shows one column per label.
    width_px : width of one clip on the page. details : show seed, settings and a link to download below the prompt.

    >>> Gallery(["runs/demo/samples/a.mp4"])                                  # doctest: +SKIP
    >>> Gallery({f"guidance {g}": pipe("a blue morpho", guidance=g) for g in (1, 2, 4)})      # doctest: +SKIP
    """

    def __init__(self, clips: Any, width_px: int = 192, details: bool = True):
        columns = clips if isinstance(clips, Mapping) else {"": clips}
        self.columns = {str(label): list(map(load, _listed(things))) for label, things in columns.items()}
        if not any(self.columns.values()):
            raise ValueError("there is nothing to show: give paths, a folder with clips, or generated clips")
        self.width_px = width_px
        self.details = details

    @classmethod
    def of_training(cls, run_dir: str | Path, prompts: int = 1, rounds: int = 4) -> Gallery:
        """One prompt over a training: samples of the first validation, a third, two thirds and the end, and the data's.

        Parameters
        ----------
        prompts : number of prompts, a row each. rounds : number of validations, evenly spaced.

        Raises
        ------
        ValueError : the run has no samples yet.

        >>> Gallery.of_training("runs/demo/train")                            # doctest: +SKIP
        """
        run = Run(Path(run_dir).expanduser())
        sampled = {}
        for iteration, folder in display.sample_rounds(run):
            files = display.media_in(folder)[:prompts]
            if files:
                sampled[iteration] = files
        if not sampled:
            raise ValueError(f"{run_dir} has no samples yet; they come with each validation (train.eval_interval)")
        chosen = set()
        for wanted in np.linspace(0, max(sampled), rounds):
            chosen.add(min(sampled, key=lambda iteration: abs(iteration - wanted)))
        columns = {f"iteration {iteration}": list(map(load, sampled[iteration])) for iteration in sorted(chosen)}
        newest = sampled[max(sampled)]
        real = [run.samples / "data" / file.name for file in newest]
        if all(is_plain(file, run.samples) for file in real):
            columns[DATA] = [replace(load(file), settings=clip_settings(made)) for file, made in zip(real, newest)]
        return cls(columns, 144, details=False)

    def __repr__(self) -> str:
        counts = [f"{len(clips)} clips {label}".strip() for label, clips in self.columns.items()]
        return f"Gallery({'; '.join(counts)})"

    def html(self) -> Html:
        """Self-contained HTML, built from `display.media_html`."""
        if set(self.columns) == {""}:
            figures = [self._figure(item) for item in self.columns[""]]
            return fill('<div style="display:flex;flex-wrap:wrap;gap:12px">{}</div>', figures)
        labels = [fill(HEAD, label) for label in self.columns]
        body = []
        for row in self._rows():
            items = list(filter(None, row))
            prompts = {item.prompt for item in items}
            if len(prompts) == 1:  # said once
                kind = CAPTIONS_OF.get(items[0].settings.get("caption_of", ""), "")
                body.append(fill(PROMPT, len(row), items[0].prompt + kind))
            cells = []
            for label, item in zip(self.columns, row):
                cells.append(fill(CELL, self._figure(item, label, len(prompts) > 1) if item else ""))
            body.append(fill("<tr>{}</tr>", cells))
        return fill(TABLE, labels, body)

    def _rows(self) -> list[tuple[Item | None, ...]]:
        return list(itertools.zip_longest(*self.columns.values()))

    def _figure(self, item: Item, column: str = "", named: bool = True) -> Html:
        detail = item.describe() if self.details else ""
        text = ", ".join(filter(None, (item.prompt, column, detail)))
        together = TOGETHER if column else ""
        media = display.media_html(item.media_type, item.data, text, self.width_px, item.begins, together)
        caption = [item.prompt] if named else []
        if self.details:
            caption.append(fill(DETAIL, detail, download(item)))
        return fill(FIGURE, self.width_px, media, caption)

    _repr_html_ = html

    def png(self) -> bytes:
        """The first frames of all clips as one picture; what stands in a row stands side by side."""
        wide = len(self.columns) > 1
        entries = []
        for row in self._rows():
            items = [item for item in row if item]
            begins = [item.begins for item in items]
            shown = [frames for frames, _ in filter(None, begins)]
            if wide:  # side by side there is room for one
                shown = [frames[:1] for frames in shown]
            if shown:
                entries.append((shown, items[0].prompt))
        sheet = display.contact_sheet({" | ".join(self.columns): entries}, columns=1 if wide else 8)
        return display.small_png(sheet)

    _repr_png_ = png


def file_stem(prompt: str) -> str:
    """The start of a clip's file name: the words of its prompt, in any script."""
    return "-".join(re.findall(r"[^\W_]+", prompt.lower()))[:40].strip("-") or "clip"


def download(item: Item) -> Html:
    """A link that saves the clip shown in the same figure, without a second copy of its bytes in the page."""
    name = file_stem(item.prompt)
    if "seed" in item.settings:
        name += f"-seed{item.settings['seed']}"
    suffix = next(suffix for suffix, kind in display.MEDIA.items() if kind == item.media_type)
    link = '<a href="#" download="{}" style="color:inherit;text-decoration:underline" onclick="{}">download</a>'
    return fill(link, name + suffix, DOWNLOAD)


def _listed(things: Any) -> list[Any]:
    if isinstance(things, (str, Path)):
        path = Path(things).expanduser()
        if path.is_dir():
            media = [
                file for file in path.rglob("[!.]*") if file.suffix.lower() in display.MEDIA and is_plain(file, path)
            ]
            return sorted(media)
        return [path]
    return list(things) if isinstance(things, Iterable) else [things]
