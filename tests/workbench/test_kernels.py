"""The workbench inside real kernels without a front end."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import workbench

pytestmark = pytest.mark.slow  # every test starts a Jupyter kernel


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Kernels keep their files in it."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("DFM_HEADLESS", raising=False)
    return tmp_path


def run_notebook(place: Path, *cells: str) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(place)}}).execute()
    return notebook


def test_plain_python_is_headless_unless_the_environment_decides(monkeypatch):
    monkeypatch.delenv("DFM_HEADLESS", raising=False)
    assert workbench.is_headless()
    monkeypatch.setenv("SERVER_SOFTWARE", "voila/0.5.13")
    assert not workbench.is_headless()
    monkeypatch.setenv("DFM_HEADLESS", "0")
    assert not workbench.is_headless()
    monkeypatch.setenv("DFM_HEADLESS", "1")
    assert workbench.is_headless()
    monkeypatch.setenv("DFM_HEADLESS", "yes")
    with pytest.raises(ValueError, match="'yes'"):
        workbench.is_headless()


def test_displayed_widgets_are_text_without_a_front_end(place):
    cells = "workbench.ConfigForm(['train'], {'train.train_iters': 0})", "workbench.PrepareForm('out', {'limit': 3})"
    notebook = run_notebook(
        place, *(f"import workbench\n{c}" for c in (*cells, "workbench.Launcher('run', ['--mock'])"))
    )
    shown = [c["outputs"][-1]["data"] for c in notebook.cells]
    assert all(list(d) == ["text/plain"] for d in shown)
    assert "train.train_iters" in shown[0]["text/plain"] and "--limit=3" in shown[1]["text/plain"]


def test_log_lines_and_progress_are_not_shown_as_errors(place):
    said = "from dfm_nb.base import log, progress\nlog.start_logging().info('a line')\n"
    (cell,) = run_notebook(place, said + "for _ in progress.tqdm(range(3)): pass").cells
    assert {output["name"] for output in cell.outputs} == {"stdout"} and "a line" in cell.outputs[0]["text"]
