"""The HTML page of a headless notebook run."""

from __future__ import annotations

from pathlib import Path

_NO_SCRIPT = "data:text/javascript,"
"""Replaces require.js and MathJax, which nbconvert's page fetches; ours has no formulas and no live widgets."""


def write_report(notebook: str | Path) -> Path:
    """`NAME.html` next to `NAME.ipynb`, without live widgets, which would need a downloaded script."""
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
