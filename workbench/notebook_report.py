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
_NO_SCRIPT = "data:text/javascript,"
"""In place of require.js and MathJax, which nbconvert's page fetches; ours has no formulas and no live widgets."""
_QUIET = ("Ending Cell", "Executing notebook", "Input Notebook", "Output Notebook", "<")


class Narrator(logging.Handler):
    """Prints what cells print, as it comes, and which cell runs; a context manager.

    injected : papermill adds a cell with parameters below the notebook's own; it is not counted.
    """

    def __init__(self, notebook: str | Path, injected: bool = False, enabled: bool = True):
        import nbformat

        super().__init__(logging.INFO)
        cells = nbformat.read(notebook, as_version=4).cells
        tagged = [i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])]
        # papermill puts it first where no cell is tagged
        self._injected_at = (tagged[0] + 1 if tagged else 0) if injected else len(cells)
        self._titles, self._count = titles(cells), len(cells)
        self.enabled, self._said, self._begun = enabled, "", time.monotonic()
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

    def _announce(self, executed: int) -> None:
        """A section's title, with the number of cells and the time so far, when its first cell runs."""
        title = self._title(executed)
        if title != self._said:
            self._said = title
            print(f"== {title} ({self._cell(executed)}, {time.monotonic() - self._begun:.0f} s)", flush=True)

    def _number(self, executed: int) -> int:
        """A cell's place in the notebook, from 1, for papermill's, which counts the injected cell too."""
        return executed - (executed - 1 >= self._injected_at)

    def _title(self, executed: int) -> str:
        return next((title for at, title in reversed(self._titles) if at < self._number(executed)), "")

    def _cell(self, executed: int) -> str:
        return f"cell {self._number(executed)} of {self._count}"

    def place(self, executed: int) -> str:
        """`cell 16 of 22, below "2. Training"`, for papermill's number of a cell, from 1."""
        title = self._title(executed)
        return self._cell(executed) + (f', below "{title}"' if title else "")


def titles(cells: list[Any]) -> list[tuple[int, str]]:
    """(position, first heading) of each markdown cell that has a heading."""
    found = [(i, _HEADING.search(c.source)) for i, c in enumerate(cells) if c.cell_type == "markdown"]
    return [(i, m[1].strip()) for i, m in found if m]


def write_report(notebook: str | Path) -> Path | None:
    """`NAME.html` beside `NAME.ipynb`; None when it could not be made (the reason is printed)."""
    import nbformat
    from nbconvert import HTMLExporter

    path = Path(notebook)
    page = path.with_suffix(".html")
    try:
        body, _ = HTMLExporter(embed_images=True, require_js_url=_NO_SCRIPT, mathjax_url=_NO_SCRIPT).from_notebook_node(
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
