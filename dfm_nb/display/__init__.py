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

PAPER = (250, 249, 246)
INK = (52, 50, 48)
GAP_PX = 12
LINE_PX = 16
CAPTION_LINES = 5
FILM_FRAMES = 4
FILM_GAP_PX = 2
MEDIA = {".mp4": "video/mp4", ".png": "image/png", ".gif": "image/gif", ".webp": "image/webp"}
"""Suffixes of samples, and their media types."""
MOST_SAMPLE = 1 << 26
"""Bytes of a sample that is shown."""


def contact_sheet(sections: Mapping[str, Sequence[tuple[Sequence[np.ndarray], str]]], columns: int = 8) -> np.ndarray:
    """A page of pictures and clips with captions below, under headings.

    Parameters
    ----------
    sections : entries by heading ("" for none). An entry has videos that belong together, such as a picture and its
        sample, uint8 [T, H, W, 3] of any sizes, and their caption, which is cut with an ellipsis after five lines.
        Stills stand side by side; clips are film strips of four frames, one above the other.
    columns : squares in a row; a strip takes up to four.

    Returns
    -------
    uint8 [H, W, 3].
    """
    cell = 128  # px, the longest side of a picture
    for videos, _ in chain(*sections.values()):
        for video in videos:
            cell = max(cell, *video.shape[1:3])
    cell = min(256, cell)
    font = ImageFont.load_default(size=15)
    placed: list[tuple[Image.Image, int, int]] = []
    headings: list[tuple[str, int]] = []
    width = GAP_PX
    top = GAP_PX
    for heading, entries in sections.items():
        if entries and heading:
            headings.append((heading, top))
            width = max(width, int(font.getlength(heading)) + GAP_PX)
            top += 2 * LINE_PX
        x = GAP_PX
        bottom = top
        for videos, caption in entries:
            entry = _entry(videos, caption, cell)
            if x + entry.width > columns * (cell + GAP_PX) + GAP_PX:
                x = GAP_PX
                top = bottom
            placed.append((entry, x, top))
            x += entry.width + GAP_PX
            width = max(width, x - GAP_PX)
            bottom = max(bottom, top + entry.height + GAP_PX)
        top = bottom
    sheet = Image.new("RGB", (GAP_PX + width, top), PAPER)
    for heading, y in headings:
        ImageDraw.Draw(sheet).text((GAP_PX, y), heading, INK, font)
    for entry, x, y in placed:
        sheet.paste(entry, (x, y))
    return np.asarray(sheet)


def _entry(videos: Sequence[np.ndarray], caption: str, cell: int) -> Image.Image:
    """Stills in squares side by side, on their lower edges; clips as strips below one another; their caption below."""
    strips = []
    for video in videos:
        frames = video
        if len(video) > 1:
            frames = video[np.linspace(0, len(video) - 1, FILM_FRAMES).round().astype(int)]
        strips.append([ImageOps.contain(Image.fromarray(frame), (cell, cell)) for frame in frames])
    if max(map(len, strips)) == 1:
        strips = [[ImageOps.pad(p, (cell, cell), color=PAPER, centering=(0.5, 1.0)) for (p,) in strips]]
    largest = np.max([picture.size for picture in chain(*strips)], 0)
    w, h = (largest + FILM_GAP_PX).tolist()
    width = max(map(len, strips)) * w - FILM_GAP_PX
    height = len(strips) * h - FILM_GAP_PX
    font = ImageFont.load_default(size=12)
    lines = textwrap.wrap(caption, int(width / font.getlength("n")), max_lines=CAPTION_LINES, placeholder="…")
    page = Image.new("RGB", (width, height + LINE_PX * (1 + len(lines))), PAPER)
    ImageDraw.Draw(page).multiline_text((0, height + 4), "\n".join(lines), INK, font)
    for row, strip in enumerate(strips):
        for column, picture in enumerate(strip):
            page.paste(picture, (column * w, row * h))
    return page


POSTER_PX = 128
POSTER_FRAMES = 17
SHEET_BYTES = 100_000


def small_png(picture: np.ndarray) -> bytes:
    """A picture, uint8 [H, W, 3], as a PNG of at most `SHEET_BYTES`: with 256 colours, and smaller if it must be.

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
