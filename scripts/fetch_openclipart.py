"""Download about 2,700 real captioned drawings: Debian's Open Clip Art Library 0.18 (public domain).

Writes DIR/CATEGORY/*.png, transparent and 256 px square, and DIR/captions.csv. It counts what it skipped by reason. A
caption is the title and up to five keywords: "croissant, food, carbohydrate, menu".

    python scripts/fetch_openclipart.py data/openclipart

It needs apt-get, downloads 156 MB and installs nothing. Only drawings whose metadata declares the public domain are
used. Icon themes, buttons, flags, playing cards and series drawn by a program (stars, gradients, ...) are skipped.

Then: dfm prepare --source folder:data/openclipart --output-dir data/openclipart-latents
"""

import csv
import hashlib
import html
import re
import tempfile
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fetch_text import debian_files, parser_of
from PIL import Image, ImageOps

SIZE_PX = 256
LEFT_OUT = (
    "buttons",
    "computer/buttons",
    "computer/icons",
    "recreation/games/cards",
    "shapes",
    "signs_and_symbols/flags",
    "signs_and_symbols/led",
    "special",
)
ICON_THEME = re.compile(r"icon|theme", re.IGNORECASE)  # in titles of the computer shelf
COLLECTION = 4  # with this many drawings of one title, it is the name of a collection
MAX_KEYWORDS = 5
NO_KEYWORDS = ("", "unsorted", "signs and symbols", "mapsym", "weathersym", "networksym")  # the library's categories
CC = "{http://web.resource.org/cc/}"
DC = "{http://purl.org/dc/elements/1.1/}"
RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
PUBLIC_DOMAIN = ("http://web.resource.org/cc/PublicDomain", "http://creativecommons.org/licenses/publicdomain/")


@dataclass(frozen=True)
class Drawing:
    """Metadata of a drawing's SVG; `file` is its path in the library, without a suffix."""

    file: PurePosixPath
    title: str
    keywords: tuple[str, ...]
    author: str
    licence: str


def words(text: str) -> list[str]:
    """The words in lower case, without digits and marks."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", html.unescape(text).lower())


def read_drawing(path: Path, root: Path) -> Drawing:
    """The drawing of an SVG file below `root`."""
    svg = ET.parse(path).getroot()
    work = svg.find(f".//{CC}Work")
    work = svg if work is None else work
    licence = work.find(f"{CC}license")
    # The library's tools left Perl's "HASH(0x8a0a39c)" among keywords and authors.
    keywords = [" ".join(words(item.text or "")) for item in work.iter(f"{RDF}li")]
    keywords = [k for k in keywords if k not in NO_KEYWORDS and not k.startswith("hash")]
    author = (work.findtext(f"{DC}creator/{CC}Agent/{DC}title") or "").strip()
    return Drawing(
        file=PurePosixPath(path.relative_to(root).with_suffix("").as_posix()),
        title=(work.findtext(f"{DC}title") or "").strip(),
        keywords=tuple(dict.fromkeys(keywords)),
        author="" if author.startswith("HASH(") else author,
        licence="" if licence is None else licence.get(f"{RDF}resource", ""),
    )


def name_of(drawing: Drawing, shared_titles: set[str]) -> str:
    """The drawing's subject: its title, or its file name if the title is a collection's or empty.

    File names end with the author, truncated after 24 characters: `bee_gerald_g._01`, `half_egg_jean-victor_bal_01`.
    """
    author, title = words(drawing.author), words(drawing.title)
    while title and title[-1] in author:
        title.pop()
    if "clipart" in title or max(map(len, title), default=0) < 3:  # "Clipart by ...", "C. Rollandin"
        title = []
    if title and drawing.title not in shared_titles:
        return " ".join(title)
    name = words(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", drawing.file.name))
    while name and (len(name[-1]) == 1 or any(part.startswith(name[-1]) for part in author)):
        name.pop()
    if title and max(map(len, name), default=0) < 3:  # `sm_009` of the collection "stick man"
        return " ".join(title)
    return " ".join(name)


def caption_of(drawing: Drawing, shared_titles: set[str]) -> str:
    """The drawing's name and the keywords that it does not contain, with commas; "" if there is neither."""
    name = name_of(drawing, shared_titles)
    more = [k for k in drawing.keywords if f" {k}" not in f" {name}" and not set(words(k)) & set(words(drawing.author))]
    return ", ".join(([name] if name else []) + more[:MAX_KEYWORDS])


def reason_to_leave(drawing: Drawing) -> str | None:
    """Why a drawing is skipped because of its metadata; None if it is not."""
    for folder in LEFT_OUT:
        if drawing.file.is_relative_to(folder):
            return folder
    if drawing.file.is_relative_to("computer") and ICON_THEME.search(drawing.title):
        return "icon theme"
    return None if drawing.licence in PUBLIC_DOMAIN else "not declared public domain"


def picture(path: Path) -> Image.Image | str:
    """The drawing without its empty margin, RGBA, centred in a transparent square; or the reason to skip it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path).convert("RGBA")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # 14 have 168 to 623 million pixels
        return "too large"
    box = image.getchannel("A").getbbox()
    if box is None:
        return "blank"
    square = ImageOps.pad(image.crop(box), (SIZE_PX, SIZE_PX), Image.Resampling.LANCZOS, color=(0, 0, 0, 0))
    on_white = Image.alpha_composite(Image.new("RGBA", square.size, "white"), square).convert("L")
    low, high = on_white.getextrema()
    return square if high - low > 8 else "blank"


def write(svg: Path, png: Path, folder: Path) -> tuple[int, Counter[str]]:
    """Write pictures and the table of an unpacked library.

    Parameters
    ----------
    svg, png : the library's two trees, with the same files except for the suffix.
    folder : where to write.

    Returns
    -------
    The number of pictures, and of skipped drawings by reason.
    """
    # A linked file is in two categories; the first drawing with the same pixels is used.
    drawings = []
    left: Counter[str] = Counter()
    for path in sorted(svg.rglob("*.svg")):
        if path.is_symlink():
            continue
        drawing = read_drawing(path, svg)
        reason = reason_to_leave(drawing)
        if reason:
            left[reason] += 1
        else:
            drawings.append(drawing)
    titles = Counter(d.title for d in drawings)
    shared = {title for title, n in titles.items() if n >= COLLECTION}
    rows, seen = [], set()
    for drawing in drawings:
        name = drawing.file.as_posix()
        caption = caption_of(drawing, shared)
        image = picture(png / f"{name}.png") if caption else "no caption"
        if isinstance(image, str):
            left[image] += 1
            continue
        pixels = hashlib.sha256(image.tobytes()).digest()
        if pixels in seen:
            left["same pixels"] += 1
            continue
        seen.add(pixels)
        target = folder / f"{name}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        image.save(target)
        category = drawing.file.parent.as_posix()
        rows.append((f"{name}.png", caption, category, "; ".join(drawing.keywords), drawing.title, drawing.author))
    with (folder / "captions.csv").open("w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([("file", "caption", "category", "keywords", "title", "author"), *rows])
    return len(rows), left


def main() -> None:
    args = parser_of(__doc__).parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        svg, png = (
            debian_files(f"openclipart-{kind}", Path(temporary, kind)) / "usr/share/openclipart" / kind
            for kind in ("svg", "png")
        )
        count, left = write(svg, png, args.folder)
    print(f"{count:,} pictures in {args.folder}, all public domain")
    print("left out: " + ", ".join(f"{n:,} {reason}" for reason, n in left.most_common()))


if __name__ == "__main__":
    main()
