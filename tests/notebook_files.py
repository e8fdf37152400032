"""Notebooks written by tests."""

from pathlib import Path

import nbformat


def write_notebook(path: Path | str, *sources: str, tagged: int = 0, kernel: str = "python3") -> None:
    """Of code cells; the first `tagged` ones hold parameters."""
    tags = [{"tags": ["parameters"] * (i < tagged)} for i in range(len(sources))]
    cells = [nbformat.v4.new_code_cell(source.strip(), metadata=of) for source, of in zip(sources, tags)]
    about = {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(metadata=about, cells=cells), path)
