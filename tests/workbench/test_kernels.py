"""The workbench inside real kernels without a front end."""

import nbformat
import pytest
from nbclient import NotebookClient

from dfm_nb.base import log
from tests.refusals import refused

pytestmark = pytest.mark.slow  # every test starts a Jupyter kernel


def test_plain_python_is_headless_unless_the_environment_decides(monkeypatch):
    monkeypatch.delenv("DFM_HEADLESS", raising=False)
    assert log.is_headless()
    monkeypatch.setenv("SERVER_SOFTWARE", "voila/0.5.13")
    assert not log.is_headless()
    monkeypatch.setenv("DFM_HEADLESS", "0")
    assert not log.is_headless()
    monkeypatch.setenv("DFM_HEADLESS", "1")
    assert log.is_headless()
    monkeypatch.setenv("DFM_HEADLESS", "yes")
    refused("'yes'", log.is_headless)


def test_without_a_front_end_widgets_are_text_and_log_lines_are_no_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("DFM_HEADLESS", raising=False)
    cells = ["import workbench\nworkbench.ConfigForm(['train'], {'train.train_iters': 0})"]
    cells += ["workbench.PrepareForm('out', {'limit': 3})", "workbench.Launcher('run', ['--mock'])"]
    log = "from dfm_nb.base import log\nlog.start_logging().info('a line')\n"
    cells += [log + "for _ in log.tqdm(range(3)): pass"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    run_in = {"metadata": {"path": str(tmp_path)}}
    *shown, logged = NotebookClient(notebook, timeout=120, kernel_name="python3", resources=run_in).execute().cells
    assert {output["name"] for output in logged.outputs} == {"stdout"} and "a line" in logged.outputs[0]["text"]
    shown = [c["outputs"][-1]["data"] for c in shown]
    assert all(list(d) == ["text/plain"] for d in shown)
    assert "train.train_iters" in shown[0]["text/plain"] and "--limit=3" in shown[1]["text/plain"]
