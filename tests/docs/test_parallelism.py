"""docs/parallelism.md and workbench.md: every bash and python block runs, in order, on two CPU processes.

Of notebook 05 the parameters alone: tests/notebooks runs it.
"""

import re
import shutil

import nbformat
import pytest

from dfm_nb.base.metrics import read_metrics
from tests.docs.docs_pages import ROOT, Page, desk


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_block_of_the_pages_runs(tmp_path):
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    notebook = nbformat.read(tmp_path / "notebooks/05_parallelism.ipynb", 4)
    notebook.cells = [
        c for c in notebook.cells if c.cell_type == "markdown" or "parameters" in c.metadata.get("tags", [])
    ]
    nbformat.write(notebook, tmp_path / "notebooks/05_parallelism.ipynb")
    here = desk(tmp_path)
    layouts = here.run_page(Page("docs/parallelism.md"))
    assert read_metrics(tmp_path / "runs" / "tp2")[-1]["iteration"] == 3
    same = re.findall(r"^(\d) (\d\.\d+) (\d\.\d+)$", layouts, re.M)
    assert [row[0] for row in same] == ["1", "2", "3"]
    here.run_page(Page("docs/workbench.md"))
    assert (tmp_path / "runs" / "parallelism.html").stat().st_size > 10_000
