"""Download about 1,350 real transparent pictures of a set of emoji from npm.

| set | px | drawn by | licence |
|---|---|---|---|
| fluent | 256 | Microsoft | MIT |
| flat | 128 | Microsoft | MIT |
| noto | 64 | Google | Apache-2.0 |
| noto-v1 | 128 | Google | Apache-2.0 |

Writes the pictures and DIR/captions.csv. The caption of a picture is the Unicode name of the code point in its file
name, or, for the two sets of Iconify's SVG (flat, noto-v1), the name there, without those of skin tones; its keywords
are those of npm's emojilib (MIT). Those two need `pip install resvg-py`.

    python scripts/fetch_emoji.py data/fluent [--set fluent]

Then: dfm prepare --source folder:data/fluent --output-dir data/fluent-latents
"""

import csv
import json
import re
import tarfile
import tempfile
import unicodedata
from pathlib import Path

from fetch_text import fetched, parser_of

KEYWORDS = "emojilib@4.0.3"
SETS = {
    "fluent": ("@lobehub/fluent-emoji-3d@1.1.0", "package/assets/*.webp"),
    "noto": ("emoji-datasource-google@16.0.0", "package/img/google/64/*.png"),
    "flat": ("@iconify-json/fluent-emoji-flat@1.2.6", "package/icons.json"),
    "noto-v1": ("@iconify-json/noto-v1@1.2.5", "package/icons.json"),
}
"""Of each its package, and its pictures there."""
SVG_PX, XLINK = 128, "http://www.w3.org/1999/xlink"


def caption_of(stem: str) -> str | None:
    """The lower-case Unicode name of a file named by one code point; None for sequences, flags and unnamed ones."""
    stem = stem.removesuffix("-fe0f")  # the variation selector for the coloured picture
    if "-" in stem:
        return None
    try:
        name = unicodedata.name(chr(int(stem, 16)))
    except (ValueError, OverflowError):
        return None
    return None if "REGIONAL INDICATOR" in name or "FLAG" in name else name.lower()


def keywords_of(stem: str, emojilib: dict[str, list[str]]) -> str:
    """The keywords of that file; "" if emojilib does not have the emoji."""
    character = chr(int(stem.removesuffix("-fe0f"), 16))
    return joined(emojilib.get(character) or emojilib.get(character + "\ufe0f") or [])


def joined(words: list[str]) -> str:
    """The words with commas, without smileys such as ":D"."""
    return ", ".join(
        dict.fromkeys(w.replace("_", " ").lower() for w in words if any(map(str.isalpha, w)) and ":" not in w)
    )


def draw_icons(icons: dict, emojilib: dict[str, list[str]], folder: Path) -> list[tuple[str, str, str]]:
    """Draw an Iconify set with resvg (masks are blank in Skia); file, caption and keywords of each picture."""
    import resvg_py

    size, rows = icons["height"], []
    keywords = {words[0].replace("_", "-"): joined(words) for words in emojilib.values() if words}
    for name, icon in icons["icons"].items():
        if icon.get("hidden") or re.search(r"(^|-)(flags?|tone|skin|medium|dark|keycap|letter)(-|$)|-light", name):
            continue
        head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="{XLINK}" viewBox="0 0 {size} {size}">'
        drawn = resvg_py.svg_to_bytes(svg_string=f"{head}{icon['body']}</svg>", width=SVG_PX, height=SVG_PX)
        (folder / f"{name}.png").write_bytes(bytes(drawn))
        rows.append((f"{name}.png", name.replace("-", " "), keywords.get(name, "")))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--set", choices=SETS, default="fluent", help="whose emoji")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    package, pictures = SETS[args.set]
    pack = ["npm", "pack", "--silent"]
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(fetched([*pack, KEYWORDS], Path(temporary, "keywords"))) as tar:
            emojilib = json.load(tar.extractfile("package/dist/emoji-en-US.json"))
        with tarfile.open(fetched([*pack, package], Path(temporary, "pictures"))) as tar:
            for member in tar:
                path = Path(member.name)
                if path.match(pictures) and path.suffix == ".json":
                    rows = draw_icons(json.load(tar.extractfile(member)), emojilib, args.folder)
                    break
                caption = caption_of(path.stem) if path.match(pictures) else None
                if not member.isfile() or caption is None:
                    continue
                (args.folder / path.name).write_bytes(tar.extractfile(member).read())
                rows.append((path.name, caption, keywords_of(path.stem, emojilib)))
    with (args.folder / "captions.csv").open("w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([("file", "caption", "keywords"), *sorted(rows)])
    print(f"{len(rows)} pictures in {args.folder}")


if __name__ == "__main__":
    main()
