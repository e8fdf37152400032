# ruff: noqa
"""Pack the pictures that `general` was trained on: as it ran, see benchmarks/results/tokenizer.md for packages, licences.

    python scripts/pack_pictures.py PACKAGES PICTURES

PACKAGES holds what npm, apt-get and pip fetched, unpacked: icons/*.json (Iconify), openclipart-svg, fluent-3d, fluent-anim,
hdri (*.exr) and photos. Reading .exr needs the package OpenEXR. Of each kind something is left for measuring: the sets
`vscode-icons` and `flat-color-icons`, the drawings of `drawings_held_out.txt` and of their authors, 30 animations.
"""

import argparse
import json
import lzma
import random
import re
from pathlib import Path

import numpy as np
from PIL import Image

from dfm_nb.butterflies import synthetic

HELD_ICONS = {"vscode-icons", "flat-color-icons"}
MOST = {
    "noto": 2200,
    "fluent-emoji-flat": 1600,
    "logos": 900,
    "token-branded": 900,
    "devicon": 450,
    "fluent-color": 500,
}
HELD_DRAWINGS = Path(__file__).parents[1] / "dfm_nb/butterflies/pretrained/drawings_held_out.txt"


def write(path, texts):
    path.write_bytes(lzma.compress(json.dumps(texts).encode(), preset=2))


def icons(folder):
    """(set, SVG) of every set but those held out, without variants of skin tone and long files."""
    found = []
    for file in sorted(folder.glob("*.json")):
        if file.stem in HELD_ICONS:
            continue
        data, own = json.loads(file.read_text()), []
        for name, icon in data["icons"].items():
            if file.stem in ("noto", "fluent-emoji-flat") and re.search(r"(^|-)(dark|light|medium)(-|$)|skin", name):
                continue
            if len(icon["body"]) > 14000:
                continue
            w, h, x, y = (
                icon.get(k, data.get(k, default))
                for k, default in (("width", 16), ("height", 16), ("left", 0), ("top", 0))
            )
            head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{x} {y} {w} {h}" width="{w}" height="{h}" color="#334">'
            own.append((file.stem, f"{head}{icon['body']}</svg>"))
        random.shuffle(own)
        found += own[: MOST.get(file.stem, 400)]
    return found


def author(svg):
    """The longest word of the creator's name."""
    creator = re.search(r"<dc:creator.*?<dc:title>(.*?)</dc:title>", svg, re.S)
    return max(
        re.findall(r"[^\W\d_]+", re.sub(r"\(.*?\)", "", creator[1] if creator else "").lower()), key=len, default=""
    )


def drawings(folder):
    """SVG of 2,300 drawings in the public domain, of authors of whom none is held out."""
    held = {line.strip()[:-4] for line in HELD_DRAWINGS.open() if line.strip()}
    authors = {
        author((folder / f"{name}.svg").read_text(errors="ignore"))
        for name in held
        if (folder / f"{name}.svg").exists()
    }
    authors = {name for name in authors if len(name) >= 3}
    files = [
        f
        for f in folder.rglob("*.svg")
        if 600 < f.stat().st_size < 32000 and str(f.relative_to(folder))[:-4] not in held
    ]
    random.shuffle(files)
    found = []
    for file in files:
        svg = file.read_text(errors="ignore")
        if re.search("flags|playing_cards|/cards|signs_and_symbols/led|special", str(file)) or not re.search(
            "PublicDomain|licenses/publicdomain", svg
        ):
            continue
        name = author(svg)
        if not name or name in authors or any(len(a) > 4 and a[:6] in file.stem for a in authors):
            continue
        for part in (r"<metadata.*?</metadata>", r"<sodipodi:namedview.*?(/>|</sodipodi:namedview>)", r"<!--.*?-->"):
            svg = re.sub(part, "", svg, flags=re.S)
        found.append(re.sub(r"(\d+\.\d{2})\d+", r"\1", re.sub(r"\s+", " ", svg)))
    return found[:2300]


def panoramas(folder, out):
    """Two exposures of each."""
    import OpenEXR

    for file in sorted(folder.glob("*.exr")):
        with OpenEXR.File(str(file)) as opened:
            pixels = next(c.pixels for name, c in opened.channels().items() if name in ("RGB", "RGBA"))[..., :3].astype(
                np.float32
            )
        for i, share in enumerate((0.75, 0.93)):
            x = np.clip(pixels / max(np.quantile(pixels.mean(-1), share), 1e-4) * 0.8, 0, 1)
            x = np.where(x <= 0.0031308, 12.92 * x, 1.055 * np.maximum(x, 1e-9) ** (1 / 2.4) - 0.055)
            Image.fromarray((x * 255 + 0.5).astype(np.uint8)).save(out / f"{file.stem}_{i}.webp", quality=88)


def photos(folder, out):
    for file in sorted(folder.iterdir()):
        picture = Image.open(file).convert("RGB")
        picture.thumbnail((700, 700), Image.LANCZOS)
        picture.save(out / f"{file.stem}.webp", quality=88)


def strips(animations, out):
    """Frames of a clip below one another: butterflies, and all animations but the first 30 of a shuffled list."""
    number = 0
    for spec, images, clips in (("varied", 260, 70), ("", 120, 60)):
        source = synthetic.build(spec, num_images=images, num_clips=clips, size_px=64, seed=4242)
        for i in range(len(source)):
            frames = np.asarray(next(source.read(i)).video)[:9]
            Image.fromarray(np.concatenate(list(frames), 0)).save(
                out / f"b{len(frames):02d}_{number:04d}.webp", quality=93
            )
            number += 1
    files = sorted(f for f in animations.glob("*.webp") if "-" not in f.stem)
    random.Random(2).shuffle(files)
    for file in files[30:]:
        picture = Image.open(file)
        if getattr(picture, "n_frames", 1) < 40:
            continue
        frames = []
        for i in range(0, 34, 2):
            picture.seek(i)
            frames.append(np.asarray(picture.convert("RGBA").resize((88, 88), Image.BOX)))
        Image.fromarray(np.concatenate(frames, 0)).save(out / f"a17_{file.stem}.webp", quality=82)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("packages", type=Path)
    p.add_argument("pictures", type=Path)
    a = p.parse_args()
    for name in ("f3", "pano", "photo", "strips"):
        (a.pictures / name).mkdir(parents=True, exist_ok=True)
    random.seed(0)
    write(a.pictures / "icons.json.xz", icons(a.packages / "icons"))
    random.seed(1)
    write(a.pictures / "clipart.json.xz", drawings(a.packages / "openclipart-svg"))
    for file in (a.packages / "fluent-3d").glob("*.webp"):
        if "-" not in file.stem:
            (a.pictures / "f3" / file.name).write_bytes(file.read_bytes())
    panoramas(a.packages / "hdri", a.pictures / "pano")
    photos(a.packages / "photos", a.pictures / "photo")
    strips(a.packages / "fluent-anim", a.pictures / "strips")


if __name__ == "__main__":
    main()
