"""Clips that play in the notebook, each with its prompt, seed and settings; side by side to compare.

The HTML contains the clips, so a saved or untrusted notebook still plays them. That adds 4/3 of the files' size.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb import display
from dfm_nb.base import pretrained, video
from dfm_nb.base.files import is_plain
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.records import SampleError
from dfm_nb.base.run import is_iteration
from dfm_nb.experiments.runs import clip_settings

DESCRIBED = dict(
    seed="seed {}", guidance="guidance {}", num_steps="{} steps", sampler="{}", iteration="iteration {}", fps="{} fps"
)
"""The settings printed under a clip's prompt, where they are known."""
CAPTIONS_OF = {"train": "a training caption", "val": "an unseen caption"}
DOWNLOAD = "this.href=this.closest('figure').querySelector(':is(video,img):last-of-type').src"
HEAD = '<th scope="col" style="vertical-align:top;text-align:left;padding:4px 8px 4px 0">{}</th>'
CELL = '<td style="vertical-align:top;text-align:left;padding:4px 8px 4px 0">{}</td>'
TABLE = '{}<table style="border-collapse:collapse"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>'
FIGURE = (
    '<figure style="margin:0;width:{}px">{}<figcaption style="font-size:12px;line-height:1.35;margin-top:3px">{}'
    '<div style="opacity:.75">{}</div>{}</figcaption></figure>'
)
TOGETHER = (
    "const f=this.closest('table').querySelector('video');"
    "if(Math.abs(f.currentTime-this.currentTime)>0.1)this.currentTime=f.currentTime"
)
"""Synchronises the columns with the first clip, because each clip starts when it scrolls into view."""


@dataclass(frozen=True)
class Item:
    """One clip: media type and bytes, and settings (`prompt`, `seed`, ...; {} when unknown).

    real : the data's own clip of its caption.
    """

    media_type: str
    data: bytes
    settings: Mapping[str, Any]
    real: Item | None = None

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
        return _from_file(Path(thing).expanduser())
    request = getattr(thing, "request", None)
    frames = np.asarray(getattr(thing, "frames", thing))
    if frames.ndim == 3:
        frames = frames[None]
    if frames.ndim != 4 or frames.dtype != np.uint8 or frames.shape[-1] != 3:
        raise ValueError(f"a gallery shows paths, generated clips or uint8 [T, H, W, 3]; got {type(thing).__name__}")
    settings = {"name": getattr(thing, "caption", "clip")} if request is None else request.model_dump()
    if hasattr(thing, "encoded"):
        media_type, data = thing.encoded()
    else:
        media_type, data = video.compressed(frames, float(settings.get("fps", 12.0)))
    return Item(media_type, data, settings)


def _from_file(path: Path) -> Item:
    kind = display.MEDIA.get(path.suffix.lower())
    if not path.is_file():
        raise FileNotFoundError(f"there is no clip {path}; dfm generate --video-save-path {path} writes one")
    if kind is None:
        raise ValueError(f"{path} must be one of {', '.join(display.MEDIA)}; convert it first")
    # of a foreign clip only the name is known
    return Item(kind, path.read_bytes(), {"name": path.stem, **clip_settings(path)}, real=_real_of(path))


def _real_of(path: Path) -> Item | None:
    """The data's clip for the caption of a training's sample: `samples/data/a.png` for `samples/iter_0000100/a.png`."""
    samples = path.parent.parent
    file = samples / "data" / path.name
    return _from_file(file) if is_iteration(path.parent) and is_plain(file, samples) else None


class Gallery:
    """Clips in a row, or in columns to compare.

    Parameters
    ----------
    clips : paths, a folder, generated clips or arrays; {label: such a list} shows one column per label.
    width_px : width of one clip on the page. details : show seed and settings below the prompt.

    >>> Gallery(["runs/demo/samples/a.mp4"])                                  # doctest: +SKIP
    >>> Gallery({f"guidance {g}": pipe("a blue morpho", guidance=g) for g in (1, 2, 4)})      # doctest: +SKIP
    """

    def __init__(self, clips: Any, width_px: int = 192, details: bool = True, title: str = ""):
        columns = clips if isinstance(clips, Mapping) else {"": clips}
        self.columns = {str(label): list(map(load, _listed(things))) for label, things in columns.items()}
        if not any(self.columns.values()):
            raise ValueError("there is nothing to show: give paths, a folder with clips, or generated clips")
        self.width_px = width_px
        self.details = details
        self.title = title

    def __repr__(self) -> str:
        counts = [f"{len(clips)} clips {label}".strip() for label, clips in self.columns.items()]
        return f"Gallery({'; '.join(counts)})"

    def html(self) -> Html:
        """Self-contained HTML, built from `display.media_html`."""
        head = fill('<div style="font-weight:600;margin:4px 0">{}</div>', self.title) if self.title else ""
        if set(self.columns) == {""}:
            figures = [self._figure(item) for item in self.columns[""]]
            return fill('{}<div style="display:flex;flex-wrap:wrap;gap:12px">{}</div>', head, figures)
        labels = [fill(HEAD, label) for label in self.columns]
        body = []
        for row in itertools.zip_longest(*self.columns.values()):
            cells = [fill(CELL, self._figure(item, label) if item else "") for label, item in zip(self.columns, row)]
            body.append(fill("<tr>{}</tr>", cells))
        return fill(TABLE, head, labels, body)

    def _figure(self, item: Item, column: str = "") -> Html:
        width_px = self.width_px
        detail = item.describe() if self.details else ""
        text = ", ".join(filter(None, (item.prompt, column, detail)))
        together = TOGETHER if column else ""
        media = display.media_html(item.media_type, item.data, text, width_px, item.begins, together)
        if item.real:
            yours = display.media_html(item.real.media_type, item.real.data, f"yours: {item.prompt}", width_px)
            media = fill('<div style="display:flex;gap:2px;align-items:flex-end">{}{}</div>', yours, media)
            caption_of = CAPTIONS_OF.get(item.settings.get("caption_of", ""))
            detail = ", ".join(filter(None, ("left: yours", caption_of, detail)))
            width_px *= 2
        return fill(FIGURE, width_px, media, item.prompt, detail, download(item))

    _repr_html_ = html

    def _repr_png_(self) -> bytes:
        shown = {}
        for label, items in self.columns.items():
            shown[label] = [([item.begins[0]], item.prompt) for item in items if item.begins]
        return display.small_png(display.contact_sheet(shown))


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


def grid(pipe: Any, prompt: str | Sequence[str], **settings: Any) -> Gallery:
    """Clips of one or two settings with lists of values, as a table: the first is its columns, the second its rows.

    Parameters
    ----------
    pipe : a pipeline, an argument of `Pipeline.from_pretrained`, or a list of them. prompt : one or several.
    settings : as for `pipe(...)`, each a value or a list of values. Everything else is equal in all clips.

    >>> grid("runs/demo/train", "a blue morpho", seed=[1, 2, 3], guidance=[1, 2, 4])       # doctest: +SKIP
    >>> grid(["runs/demo/train", "butterflies"], ["a blue morpho", "a red moth"])          # doctest: +SKIP
    """
    from dfm_nb.generation.pipeline import Pipeline

    load_once = functools.cache(Pipeline.from_pretrained)
    values = {"checkpoint": pipe, "prompt": prompt, **settings}
    lists = [name for name, value in values.items() if isinstance(value, list)]
    if not 1 <= len(lists) <= 2:
        raise ValueError(f"a grid needs a list of values for one or two settings; got {', '.join(lists) or 'none'}")
    across = lists[0]
    down = lists[-1]  # the same one if there is one list: then each column is one clip
    labels = [f"{across} {path_of(value) if hasattr(value, 'source') else value}" for value in values[across]]
    clips: dict[str, list[Any]] = {}
    for i, (label, column) in enumerate(zip(labels, values[across]), 1):
        if labels.count(label) > 1:
            label += f" ({i})"
        clips[label] = []
        for row in values[down] if len(lists) == 2 else [column]:
            chosen = values | {across: column, down: row}
            model = chosen.pop("checkpoint")
            if not hasattr(model, "run"):
                model = load_once(model)
            clips[label].append(model(chosen.pop("prompt"), **chosen)[0])
    return Gallery(clips)


def path_of(pipe: Any) -> str:
    """The argument of `Pipeline.from_pretrained` for the same weights."""
    path = (pipe.source.file or pipe.source.folder) if pipe.source else pipe.folder
    return path.stem if pretrained.packaged(path.stem) == path else str(path)


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
