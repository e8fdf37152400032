"""The executed notebooks: HTML pages for the docs, and copies in docs/notebooks that GitHub and VS Code show.

    python scripts/executed_notebooks.py

They run headless with their defaults, in order, in one folder, like a reader would run them: about half an hour on two
cores. The times are printed and listed in index.html. In the copies an output of HTML is a PNG, taken in Chromium,
because GitHub shows neither pictures nor styles of HTML; nothing has a path of this machine.
"""

import base64
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from PIL import Image, ImageOps
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.lab_page import FLAGS, find_browser  # noqa: E402

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PAGES = ROOT / "build/docs/notebooks"
COPIES = ROOT / "docs/notebooks"
PROJECT = "~/butterflies"
WIDTH = 880  # px, about that of a notebook on GitHub
PAGE = '<body style="margin:0;font:14px sans-serif"><div id="shown" style="padding:4px;min-width:min-content">{}</div>'
REWOUND = """() => Promise.all([...document.querySelectorAll("video")].map((video) => new Promise((done) => {
    video.autoplay = false;
    video.pause();
    video.addEventListener("seeked", done);
    video.currentTime = 0;
})))"""


class Screen:
    """A browser page on which an output's HTML looks as in a notebook; a context manager."""

    def __enter__(self) -> "Screen":
        self.playwright = sync_playwright().start()
        self.browser = self.playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        self.page = self.browser.new_page(viewport={"width": WIDTH, "height": 400})
        return self

    def __exit__(self, *_exc: object) -> None:
        self.browser.close()
        self.playwright.stop()

    def picture(self, markup: str) -> bytes:
        """PNG of 128 colours, which is enough for pictures and text; clips show their first frame."""
        self.page.set_content(PAGE.format(markup), wait_until="load")
        self.page.evaluate(REWOUND)
        image = Image.open(io.BytesIO(self.page.locator("#shown").screenshot())).convert("RGB")
        _, _, right, _ = ImageOps.invert(image).getbbox()  # where the page is not white
        file = io.BytesIO()
        image.crop((0, 0, right, image.height)).quantize(128, kmeans=2).save(file, "png", optimize=True)
        return file.getvalue()


def in_copies(source: str) -> str:
    """The source of a cell, with the links as they must be in docs/notebooks."""
    return source.replace("](../", "](../../").replace("](images/", "](../../notebooks/images/")


def for_readers(notebook: nbformat.NotebookNode, screen: Screen) -> nbformat.NotebookNode:
    """The notebook with outputs that are shown without a kernel: PNG, tables of pandas, and text."""
    for cell in notebook.cells:
        cell.source = in_copies(cell.source)
        kept = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            markup = data.get("text/html", "")
            text = data.get("text/plain", "")
            # without a kernel a widget is nothing, and a launcher would show the state at the notebook's end
            dead = text.startswith("Launcher(") or ("text/html" not in data and any("widget" in kind for kind in data))
            empty = not (markup or "image/png" in data or text.strip() or output.get("text", "").strip())
            if dead or empty:
                continue
            if 'class="dataframe"' in markup:
                output.data = {"text/html": markup, "text/plain": text}
            elif markup:
                output.data = {"image/png": base64.b64encode(screen.picture(markup)).decode()}
            elif "image/png" in data:
                output.data = {"image/png": data["image/png"]}
            elif data:
                output.data = {"text/plain": text}
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
    PAGES.mkdir(parents=True, exist_ok=True)
    rows = []
    with Screen() as screen, tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "butterflies"
        folder.mkdir()
        for name in NOTEBOOKS:
            began = time.monotonic()
            words = ["notebook", "run", str(ROOT / "notebooks" / f"{name}.ipynb"), "--output", f"{place}/{name}.ipynb"]
            subprocess.run([sys.executable, "-m", "dfm_nb", *words, "--quiet"], cwd=folder, check=True)
            took = time.monotonic() - began
            page = without_places(Path(place, f"{name}.html").read_text(encoding="utf-8"), folder)
            (PAGES / f"{name}.html").write_text(page, encoding="utf-8")
            copy = nbformat.writes(for_readers(nbformat.read(f"{place}/{name}.ipynb", as_version=4), screen))
            (COPIES / f"{name}.ipynb").write_text(without_places(copy, folder), encoding="utf-8")
            rows.append(f'<li><a href="{name}.html">{name}</a>, {took:.0f} s</li>')
            print(f"{name}: {took:.0f} s, {len(page) / 1e6:.1f} MB", flush=True)
    head = '<!doctype html><meta charset="utf-8"><title>Notebooks</title><h1>The notebooks after a run</h1>'
    (PAGES / "index.html").write_text(f"{head}<ul>{''.join(rows)}</ul>", encoding="utf-8")


if __name__ == "__main__":
    main()
