"""What a headless notebook prints while it runs, and the HTML page it leaves."""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

_CELL = re.compile(r"Executing Cell (\d+)-+")
_HEADING = re.compile(r"^#{1,3} (.+)$", re.M)
_QUIET = ("Ending Cell", "Executing notebook", "Input Notebook", "Output Notebook", "<")


class Narrator(logging.Handler):
    """Prints what cells print, as it comes, and which cell runs; a context manager."""

    def __init__(self, notebook: str | Path, enabled: bool = True):
        super().__init__(logging.INFO)
        self.enabled, self._titles, self._begun = enabled, titles(notebook), time.monotonic()
        self._log = logging.getLogger("papermill")

    def __enter__(self) -> Narrator:
        self._before = (self._log.level, self._log.propagate, list(self._log.handlers))
        self._log.handlers, self._log.propagate = [self], False
        self._log.setLevel(logging.INFO if self.enabled else logging.ERROR)
        return self

    def __exit__(self, *_exc: object) -> None:
        level, self._log.propagate, self._log.handlers = self._before
        self._log.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().rstrip()
        cell = _CELL.match(text)
        if cell:
            self._announce(int(cell[1]))
        elif text and not text.startswith(_QUIET):
            print(text, file=sys.stderr if record.levelno >= logging.WARNING else sys.stdout, flush=True)

    def _announce(self, number: int) -> None:
        """A section's title, with the number of cells and the time so far, when its first cell runs."""
        while self._titles and number > self._titles[0][0]:
            _, title, count = self._titles.pop(0)
            print(f"== {title} (cell {number} of {count}, {time.monotonic() - self._begun:.0f} s)", flush=True)


def titles(notebook: str | Path) -> list[tuple[int, str, int]]:
    """(position, first heading, number of cells) of each markdown cell that has a heading."""
    import nbformat

    cells = nbformat.read(notebook, as_version=4).cells
    found = [(i, _HEADING.search(c.source)) for i, c in enumerate(cells) if c.cell_type == "markdown"]
    return [(i, m[1].strip(), len(cells)) for i, m in found if m]


def write_report(notebook: str | Path) -> Path | None:
    """`NAME.html` beside `NAME.ipynb`; None when it could not be made (the reason is printed)."""
    import nbformat
    from nbconvert import HTMLExporter

    path = Path(notebook)
    page = path.with_suffix(".html")
    try:
        body, _ = HTMLExporter(embed_images=True).from_notebook_node(
            offline(nbformat.read(path, as_version=4)), {"metadata": {"name": path.stem}}
        )
    except Exception as error:
        print(f"no report: {page} could not be made: {error}", file=sys.stderr)
        return None
    page.write_text(body, encoding="utf-8")
    return page


def offline(notebook: Any) -> Any:
    """The notebook without live widgets, which a page without a kernel could only fetch a script for."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if len(data) > 1:
                data.pop("application/vnd.jupyter.widget-view+json", None)
    return notebook
