"""The executed notebooks: HTML pages for the docs, and copies in docs/notebooks that GitHub and VS Code show.

    python scripts/executed_notebooks.py [--output build/docs/notebooks]

They run headless with their defaults, in order, in one folder, like a reader would run them: about 12 minutes on two
cores. The times are printed and listed in index.html. In the copies a picture or clip is a PNG, because GitHub shows no
picture of an HTML output; nothing has a path of this machine.
"""

import argparse
import base64
import html
import io
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import numpy as np
from PIL import Image

from dfm_nb.base.video import read_image, read_video
from dfm_nb.display import contact_sheet

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path.stem for path in ROOT.glob("notebooks/*.ipynb"))
PROJECT = "~/butterflies"
LARGEST_CELL = 256
"""px of the pictures that are put on a sheet; a wider one, alone, stays as it is."""


class Media(HTMLParser):
    """The pictures and clips in an output's HTML, uint8 [T, H, W, 3], each with the text before it."""

    def __init__(self, markup: str):
        super().__init__()
        self.entries: list[tuple[list[np.ndarray], str]] = []
        self.text = ""
        self.feed(markup)

    def handle_data(self, data: str) -> None:
        self.text = data.strip() or self.text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        kind, _, content = (said.get("src") or "").partition(";base64,")
        if kind not in ("data:image/png", "data:video/mp4"):
            return
        with tempfile.NamedTemporaryFile(suffix=f".{kind[-3:]}") as file:
            file.write(base64.b64decode(content))
            file.flush()
            frames = read_image(file.name) if kind.endswith("png") else read_video(file.name)[0]
        self.entries.append(([frames], said.get("alt") or said.get("aria-label") or self.text))
        self.text = ""


def picture(markup: str) -> Image.Image | None:
    """What an output's HTML shows, as one picture; None without pictures."""
    row, _, pictures = markup.rpartition("</span></td>")  # mediapy's label at the left of a row
    entries = Media(pictures).entries
    if not entries:
        return None
    videos, _ = entries[0]
    if len(entries) == 1 and max(videos[0].shape) > LARGEST_CELL:
        return Image.fromarray(videos[0][0])
    # of pictures 256 colours are enough; a plot would lose some of its own
    return Image.fromarray(contact_sheet({row.rpartition(">")[2]: entries}, columns=9)).quantize(256, kmeans=2)


def in_copies(source: str) -> str:
    """The source of a cell, with the links as they must be in docs/notebooks."""
    return source.replace("](../", "](../../").replace("](images/", "](../../notebooks/images/")


def for_readers(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with outputs that are shown without a kernel: PNG, tables and text."""
    for cell in notebook.cells:
        cell.source = in_copies(cell.source)
        kept = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            markup = data.get("text/html", "")
            text = data.get("text/plain", "")
            image = picture(markup)
            if "image/png" in data:
                image = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
            if image is not None:
                file = io.BytesIO()
                image.save(file, "png", optimize=True)
                output.data = {"image/png": base64.b64encode(file.getvalue()).decode()}
            elif "<table" in markup:
                output.data = {"text/html": markup, "text/plain": text}
            elif text.startswith("Launcher(") or any("widget" in kind for kind in data):
                continue  # a launcher shows the state at the end of the notebook
            elif data:
                output.data = {"text/plain": text}
            if text.strip() or image is not None or output.get("text", "").strip():
                kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    return notebook


def without_places(page: str, folder: Path) -> str:
    """The page with the project's folder as `~/butterflies`.

    Raises
    ------
    ValueError : the page contains another path of this machine.
    """
    for place in (folder.resolve(), folder):
        page = page.replace(str(place), PROJECT)
    left = [place for place in {str(ROOT), sys.prefix, str(Path.home())} - {"/"} if f"{place}/" in page]
    if left:
        at = page.index(f"{left[0]}/")
        raise ValueError(f"a path of this machine is on the page: {page[at - 60 : at + 60]!r}")
    return page


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, default=ROOT / "build/docs/notebooks")
    args = p.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "butterflies"
        folder.mkdir()
        for name in NOTEBOOKS:
            began = time.monotonic()
            words = ["notebook", "run", str(ROOT / "notebooks" / f"{name}.ipynb"), "--output", f"{place}/{name}.ipynb"]
            subprocess.run([sys.executable, "-m", "dfm_nb", *words, "--quiet"], cwd=folder, check=True)
            took = time.monotonic() - began
            page = without_places(Path(place, f"{name}.html").read_text(encoding="utf-8"), folder)
            (args.output / f"{name}.html").write_text(page, encoding="utf-8")
            copy = nbformat.writes(for_readers(nbformat.read(f"{place}/{name}.ipynb", as_version=4)))
            (ROOT / "docs/notebooks" / f"{name}.ipynb").write_text(without_places(copy, folder), encoding="utf-8")
            rows.append(f'<li><a href="{name}.html">{html.escape(name)}</a>, {took:.0f} s</li>')
            print(f"{name}: {took:.0f} s, {len(page) / 1e6:.1f} MB", flush=True)
    head = '<!doctype html><meta charset="utf-8"><title>Notebooks</title><h1>The notebooks after a run</h1>'
    (args.output / "index.html").write_text(f"{head}<ul>{''.join(rows)}</ul>", encoding="utf-8")


if __name__ == "__main__":
    main()
