"""Pictures and clips as HTML of notebooks, and as sheets: what `clips.show()` finds as a plug-in.

Generated clips know how they are shown only by its name, so that a machine that trains needs none of it.
"""

import base64
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from dfm_nb.base.files import is_plain, leads_out
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.records import Clip
from dfm_nb.base.run import Run, iteration_folders
from dfm_nb.base.video import compressed
from dfm_nb.display.plots import load_matplotlib

# 4.5 : 1 on white and on black, for a sheet has no ground of its own: the page that shows it may be light or dark
INK = (118, 118, 118)
GAP_PX = 12
LINE_PX = 16
CAPTION_LINES = 8
FILM_FRAMES = 4
FILM_GAP_PX = 2
MEDIA = {".mp4": "video/mp4", ".png": "image/png", ".gif": "image/gif", ".webp": "image/webp"}
"""Suffixes of samples, and their media types."""
MOST_SAMPLE = 1 << 26
"""Bytes of a sample that is shown."""


def contact_sheet(sections: Mapping[str, Sequence[tuple[Sequence[np.ndarray], str]]], columns: int = 8) -> np.ndarray:
    """Pictures and clips with captions below, under headings, on a transparent ground.

    Parameters
    ----------
    sections : entries by heading ("" for none). An entry has videos that belong together, such as a picture and its
        sample, uint8 [T, H, W, 3] of any sizes, and their caption, which is cut with an ellipsis after eight lines.
        Stills stand side by side; clips are film strips of four frames, one above the other.
    columns : squares in a row; a strip takes up to four.

    Returns
    -------
    uint8 [H, W, 4].
    """
    cell = 128  # px, the longest side of a picture
    for videos, _ in chain(*sections.values()):
        for video in videos:
            cell = max(cell, *video.shape[1:3])
    cell = min(256, cell)
    placed: list[tuple[Image.Image, int, int]] = []
    top = 0
    for heading, entries in sections.items():
        if entries and heading:
            title = _text(heading, 8 * cell, 15)
            placed.append((title, GAP_PX, top))
            top += title.height
        x = 0
        bottom = top
        for videos, caption in entries:
            entry = _entry(videos, caption, cell)
            if x + entry.width > columns * (cell + GAP_PX):
                x = 0
                top = bottom
            placed.append((entry, x, top))
            x += entry.width + GAP_PX
            bottom = max(bottom, top + entry.height + GAP_PX)
        top = bottom
    width = max((x + entry.width for entry, x, _ in placed), default=1)
    sheet = Image.new("RGBA", (width, top or 1))
    for entry, x, y in placed:
        sheet.paste(entry, (x, y))
    return np.asarray(sheet.crop(sheet.getbbox()))


def _entry(videos: Sequence[np.ndarray], caption: str, cell: int) -> Image.Image:
    """Stills in squares side by side, on their lower edges; clips as strips below one another; their caption below."""
    strips = []
    for video in videos:
        frames = video
        if len(video) > 1:
            frames = video[np.linspace(0, len(video) - 1, FILM_FRAMES).round().astype(int)]
        strips.append([ImageOps.contain(Image.fromarray(frame).convert("RGBA"), (cell, cell)) for frame in frames])
    if max(map(len, strips)) == 1:
        strips = [[ImageOps.pad(p, (cell, cell), centering=(0.5, 1.0)) for (p,) in strips]]
    largest = np.max([picture.size for picture in chain(*strips)], 0)
    w, h = (largest + FILM_GAP_PX).tolist()
    height = len(strips) * h
    text = _text(caption, max(map(len, strips)) * w - FILM_GAP_PX, 12)
    page = Image.new("RGBA", (text.width, height + text.height))
    page.paste(text, (0, height))
    for row, strip in enumerate(strips):
        for column, picture in enumerate(strip):
            page.paste(picture, (column * w, row * h))
    return page


def _text(text: str, width: int, size: int) -> Image.Image:
    """Text in as many lines of `width` px as it needs, at most `CAPTION_LINES`."""
    font = ImageFont.truetype(f"{load_matplotlib().get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)
    for letters in range(width // 4, 0, -1):  # as many as fit: their widths differ by a factor of five
        lines = textwrap.wrap(text, letters, max_lines=CAPTION_LINES, placeholder="…")
        if max(map(font.getlength, lines), default=0) <= width:
            break
    page = Image.new("RGBA", (width, LINE_PX * (1 + len(lines))), (*INK, 0))
    ImageDraw.Draw(page).multiline_text((0, 2), "\n".join(lines), INK, font)
    return page


POSTER_PX = 128
POSTER_FRAMES = 17
SHEET_BYTES = 100_000


def small_png(picture: np.ndarray) -> bytes:
    """A picture, uint8 [H, W, 3], or a sheet as a PNG of at most `SHEET_BYTES`, with 256 colours.

    For outputs of a notebook where no HTML is shown: some code hosts, and PDF.
    """
    image = Image.fromarray(picture)
    while True:
        out = io.BytesIO()
        image.quantize(256).save(out, "PNG", optimize=True)
        if out.tell() <= SHEET_BYTES:
            return out.getvalue()
        image = image.resize((max(1, image.width * 4 // 5), max(1, image.height * 4 // 5)))


IMAGE = '<img src="{}" alt="{}" style="{}">'
FIGURE = (
    '<figure style="display:inline-block;margin:8px;vertical-align:top">{}'
    '<figcaption style="max-width:{}px;font-size:13px;margin-top:4px">{}</figcaption></figure>'
)
VIDEO = (
    '<video src="{}" autoplay loop muted playsinline{} onmouseenter="this.controls=true" '
    'onmouseleave="this.controls=false" aria-label="{}" style="{}">{}</video>'
)


def media_html(
    kind: str, data: bytes, said: str, width_px: int, begins: tuple[np.ndarray, float] | None = None, playing: str = ""
) -> Html:
    """A picture, or a clip that loops muted like one: `<img>` or `<video>` with its bytes in `src`.

    A video's controls appear under the pointer, and browsers pause a muted autoplaying video while it is off screen.
    From untrusted notebooks, such as papermill's, JupyterLab removes a `<source>` inside and the two event handlers;
    the rest still plays. Where a code host removes the <video> tag, an animated WebP inside it is left.

    Parameters
    ----------
    kind, data : media type and bytes.
    said : alternative text for screen readers.
    begins : first frames and their rate, for that WebP (`POSTER_FRAMES`) and for a still where the clip cannot play.
    playing : script to run when a clip begins to play; "" for none.
    """
    style = f"width:{width_px}px;max-width:100%;border-radius:6px;display:block"
    if not kind.startswith("video/"):
        return fill(IMAGE, data_url(kind, data), said, style)
    attributes = []
    fallback = Html()
    if playing:
        attributes.append(fill(' onplaying="{}"', playing))
    if begins:
        frames, fps = begins
        attributes.append(fill(' poster="{}"', _webp_url(frames[:1], fps)))
        fallback = fill(IMAGE, _webp_url(frames[:POSTER_FRAMES], fps), said, style)
    return fill(VIDEO, data_url(kind, data), attributes, said, style, fallback)


def _webp_url(frames: np.ndarray, fps: float) -> str:
    """A small WebP of some kB, animated if there are several frames."""
    first, *rest = map(Image.fromarray, frames)
    for picture in (first, *rest):
        picture.thumbnail((POSTER_PX, POSTER_PX))
    out = io.BytesIO()
    duration_ms = round(1000 / fps)
    first.save(out, "WEBP", save_all=True, append_images=rest, duration=duration_ms, loop=0, quality=50)
    return data_url("image/webp", out.getvalue())


def data_url(kind: str, data: bytes) -> str:
    """Bytes of a media type as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def inline_html(frames: np.ndarray, fps: float, caption: str) -> Html:
    """A self-contained <figure>: a looping MP4 for a clip, a PNG for one frame.

    Parameters
    ----------
    frames : uint8 [T, H, W, 3].
    caption : shown below, also as alternative text.
    """
    width = max(frames.shape[2], 192)
    media = media_html(*compressed(frames, fps), caption, width, (frames, fps))
    return fill(FIGURE, media, width, caption)


def row_html(figures: Iterable[Html]) -> Html:
    """Figures side by side."""
    return fill('<div style="display:flex;flex-wrap:wrap;gap:8px">{}</div>', [*figures])


def sheet_png(clips: Iterable[tuple[np.ndarray, str]]) -> bytes:
    """A small PNG of videos, uint8 [T, H, W, 3], with their captions."""
    return small_png(contact_sheet({"": [([video], caption) for video, caption in clips]}))


def show(clips: Iterable[Clip]) -> None:
    """Play clips of a source side by side in the notebook, each with its caption."""
    clips = list(clips)
    page = row_html(inline_html(clip.video, clip.fps, clip.caption) for clip in clips)
    show_output(page, sheet_png((clip.video, clip.caption) for clip in clips))


def show_output(page: str, sheet: bytes) -> None:
    """Display our HTML in the notebook, and a PNG for where no HTML is shown."""
    from IPython.display import display

    display({"text/html": page, "image/png": base64.b64encode(sheet).decode(), "text/plain": ""}, raw=True)


# ---- samples of a run -----------------------------------------------------------------------------------------------


def sample_rounds(run: Run) -> list[tuple[int, Path]]:
    """The folders of a run's samples, by iteration; none that a link leads out to."""
    return [(i, folder) for i, folder in iteration_folders(run.samples) if not leads_out(folder, run.path)]


def newest_samples(run: Run, until: float = float("inf")) -> tuple[int, list[Path]] | None:
    """The last iteration with samples, at most `until`, and its pictures and clips by name; None without any."""
    for iteration, folder in reversed(sample_rounds(run)):
        media = media_in(folder) if iteration <= until else []
        if media:
            return iteration, media
    return None


def media_in(folder: Path) -> list[Path]:
    """The pictures and clips of a folder, by name."""
    media = (p for p in folder.iterdir() if p.suffix in MEDIA and not p.name.startswith("."))
    return sorted(p for p in media if is_plain(p, folder, MOST_SAMPLE))
