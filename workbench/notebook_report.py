"""What a headless notebook prints while it runs, and the HTML page it leaves."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_CELL = re.compile(r"Executing Cell (\d+)-+")
_HEADING = re.compile(r"^#{1,3} (.+)$", re.M)
_NO_SCRIPT = "data:text/javascript,"
"""In place of require.js and MathJax, which nbconvert's page fetches; ours has no formulas and no live widgets."""
_QUIET = ("Ending Cell", "Executing notebook", "Input Notebook", "Output Notebook", "<")


class Narrator(logging.Handler):
    """Prints what cells print, as it comes, and the title of each section that begins; a context manager.

    titles : above each cell, as papermill counts them (`sections`); papermill's log says which cell it executes.
    """

    def __init__(self, titles: Sequence[str]):
        super().__init__()
        self._titles, self._said, self._begun = titles, "", time.monotonic()
        self._log = logging.getLogger("papermill")

    def __enter__(self) -> None:
        self._log.addHandler(self)
        self._log.setLevel(logging.INFO)

    def __exit__(self, *_exc: object) -> None:
        self._log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().rstrip()
        if cell := _CELL.match(text):
            title = self._titles[int(cell[1]) - 1]
            if title != self._said:
                self._said = title
                print(f"== {title} (after {time.monotonic() - self._begun:.0f} s)", flush=True)
        elif text and not text.startswith(_QUIET):
            print(text, file=sys.stderr if record.levelno >= logging.WARNING else sys.stdout, flush=True)


def sections(notebook: Path, injected: bool) -> list[str]:
    """The heading above each cell. injected : papermill adds a cell below that of the parameters, or at the top."""
    from papermill.iorw import load_notebook_node
    from papermill.utils import find_first_tagged_cell_index

    source, titles = load_notebook_node(str(notebook)), [""]
    for cell in source.cells:
        heading = _HEADING.search(cell.source) if cell.cell_type == "markdown" else None
        titles.append(heading[1].strip() if heading else titles[-1])
    if injected:
        at = find_first_tagged_cell_index(source, "parameters") + 1  # -1 without such a cell
        titles.insert(at, titles[at])
    return titles[1:]


def write_report(notebook: str | Path) -> Path:
    """`NAME.html` beside `NAME.ipynb`, without live widgets, which a page could only fetch a script for."""
    import nbformat
    from nbconvert import HTMLExporter

    path = Path(notebook)
    executed = nbformat.read(path, as_version=4)
    executed.metadata.pop("widgets", None)
    for shown in (output for cell in executed.cells for output in cell.get("outputs", [])):
        if len(data := shown.get("data", {})) > 1:
            data.pop("application/vnd.jupyter.widget-view+json", None)
    exporter = HTMLExporter(embed_images=True, require_js_url=_NO_SCRIPT, mathjax_url=_NO_SCRIPT)
    body, _ = exporter.from_notebook_node(executed, {"metadata": {"name": path.stem}})
    page = path.with_suffix(".html")
    page.write_text(body, encoding="utf-8")
    return page
