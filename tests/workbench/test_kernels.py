"""The workbench inside real kernels: headless or not, a kernel restart."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

import workbench
from tests.processes import alive, wait_until
from tests.workbench.test_launcher import FAKE

pytestmark = pytest.mark.slow  # every test starts a Jupyter kernel


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with the small program; kernels keep their files in it."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("DFM_HEADLESS", raising=False)
    (tmp_path / "fake_trainer.py").write_text(FAKE)
    return tmp_path


def run_notebook(place: Path, *cells: str) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(place)}}).execute()
    return notebook


def launcher_cell(place: Path, steps: int, ending: str) -> str:
    return (
        f"import workbench\nrun = workbench.Launcher('run', ['run', {steps}, {ending!r}], program='fake_trainer.py')\n"
        "monitor = workbench.Monitor('run')\nrun.start()\nmonitor.show()"
    )


class Kernel:
    """A kernel that is asked as JupyterLab asks it: input is allowed."""

    def __init__(self, place: Path):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(place))
        self.connect()

    def connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(60)

    def run(self, code: str) -> str:
        """Execute and return what it printed; an error is raised with its text."""
        printed = []

        def note(message) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
            if message["msg_type"] == "error":
                raise AssertionError("\n".join(message["content"]["traceback"]))

        self.client.execute_interactive(
            code, allow_stdin=True, stdin_hook=lambda _m: None, output_hook=note, timeout=60
        )
        return "".join(printed)

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self.connect()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(place):
    made = Kernel(place)
    yield made
    made.close()
    workbench.Launcher(place / "run").job.stop(grace_s=1)


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
    notebook = run_notebook(
        place,
        "import workbench\nworkbench.ConfigForm(['train'], {'train.train_iters': 0})",
        "workbench.PrepareForm('out', {'limit': 3})",
        "workbench.Launcher('run', ['--mock'])",
    )
    shown = [c["outputs"][-1]["data"] for c in notebook.cells]
    assert all(list(d) == ["text/plain"] for d in shown)
    assert "train.train_iters" in shown[0]["text/plain"] and "--limit=3" in shown[1]["text/plain"]


def test_log_lines_and_progress_are_not_shown_as_errors(place):
    said = "from dfm_nb.base import log, progress\nlog.start_logging().info('a line')\n"
    (cell,) = run_notebook(place, said + "for _ in progress.tqdm(range(3)): pass").cells
    assert {output["name"] for output in cell.outputs} == {"stdout"} and "a line" in cell.outputs[0]["text"]


def test_kernel_restart_loses_nothing_and_stop_leaves_nothing(place, kernel):
    assert kernel.run("import workbench; print(workbench.is_headless())") == "False\n"
    pid = int(kernel.run(launcher_cell(place, 100_000, "child") + "\nprint(run.pid)"))
    job = workbench.Launcher(place / "run").job
    wait_until(lambda: (place / "run" / "metrics.jsonl").exists(), "a step")
    kernel.manager.interrupt_kernel()
    tree = job.processes()
    kernel.restart()
    assert job.state == "running" and job.pid == pid and len(alive(tree)) == len(tree)
    kernel.run("import workbench; run = workbench.Launcher.attach('run'); run.widget; assert run.state == 'running'")
    kernel.run("run.stop()")
    assert alive(tree) == []
    assert "stopped" in kernel.run("print(run._panel.status.value)")
