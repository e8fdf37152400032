"""A JupyterLab of our own and a headless Chromium in front of it, for `test_lab.py`.

The server is `dfm lab` with its own configuration folders; the browser is Debian's, driven by Playwright.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.json_files import write_json
from tests.processes import wait_until
from workbench import lab

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()
FLAGS += ["--disable-component-update", "--disable-sync"]
LAB = {"LabApp": {"expose_app_in_browser": True}}


def find_browser() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class LabServer:
    """`dfm lab` on a free port for one project folder; a context manager."""

    def __init__(self, project: Path, private: Path):
        self.project, self.private = project, private
        self.port, self.token = lab.free_port(None), "browser-test-token"

    def __enter__(self) -> LabServer:
        config, settings = self.private / "config", self.private / "settings"
        for folder in (config, settings):
            folder.mkdir(parents=True)
        write_json(config / "jupyter_server_config.json", LAB)
        write_json(config / "jupyter_lab_config.json", LAB)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "DFM_HEADLESS"))}
        env |= {
            "JUPYTER_CONFIG_DIR": str(config),
            "JUPYTER_DATA_DIR": str(self.private / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.private / "runtime"),
            "JUPYTER_TOKEN": self.token,
            "JUPYTERLAB_SETTINGS_DIR": str(settings),
            "JUPYTERLAB_WORKSPACES_DIR": str(self.private / "workspaces"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, *"-m dfm_nb lab --no-browser --port".split(), str(self.port)]
        command += ["--dir", str(self.project)]
        self.log = (self.private / "lab.log").open("wb")
        self.process = subprocess.Popen(command, env=env, stdout=self.log, stderr=subprocess.STDOUT)
        wait_until(self.answers, "the server", timeout_s=90, pause_s=0.25)
        return self

    def answers(self) -> bool:
        assert self.process.poll() is None, self.said()
        try:
            return bool(urllib.request.urlopen(self.url("api/status"), timeout=2))
        except OSError:
            return False

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}?token={self.token}"

    def said(self) -> str:
        return (self.private / "lab.log").read_text(errors="replace")

    def __exit__(self, *_exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


class NotebookPage:
    """One notebook open in Lab.

    page : Playwright's page. `run_all` and `run_cell` act as the menu does.
    """

    READY = """(notebook) => {
        const app = window.jupyterapp, panel = app && app.shell.currentWidget;
        if (!panel || !panel.context || panel.context.path !== notebook) return false;
        const session = panel.sessionContext && panel.sessionContext.session, kernel = session && session.kernel;
        return Boolean(kernel && kernel.status === "idle" && panel.content && panel.content.widgets.length);
    }"""

    def __init__(self, page, server: LabServer, notebook: str):
        self.page, self.notebook = page, notebook
        page.goto(server.url(f"lab/tree/{notebook}") + "&reset")  # without the notebooks that were open before
        self.wait_idle()

    def wait_idle(self, timeout_s: float = 120) -> None:
        self.page.wait_for_function(self.READY, arg=self.notebook, timeout=timeout_s * 1000)

    def is_done(self) -> bool:
        """Whether every code cell has run, and the kernel rests."""
        return self.page.evaluate(self.READY, self.notebook) and self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets.every(
                (cell) => cell.model.type !== "code" || cell.model.executionCount !== null)"""
        )

    def run_all(self) -> None:
        """Run > Run All Cells; returns at once."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    def run_cell(self, index: int) -> None:
        """Select a cell and run it; returns at once."""
        self.page.evaluate(
            """(index) => {
                window.jupyterapp.shell.currentWidget.content.activeCellIndex = index;
                window.jupyterapp.commands.execute("notebook:run-cell");
            }""",
            index,
        )

    def cell(self, index: int):
        """A cell of the notebook that is in front (others may be open in hidden tabs)."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").nth(index)

    def restart_kernel(self) -> None:
        """The menu's Restart Kernel, confirmed."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:restart-kernel'); }")
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()
        self.page.locator(".jp-Dialog").wait_for(state="detached")
        self.wait_idle()

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def hide_sides(self) -> None:
        """Give the notebook the whole window, for screenshots."""
        self.page.evaluate("() => { window.jupyterapp.shell.collapseLeft(); window.jupyterapp.shell.collapseRight(); }")

    def errors(self) -> list[str]:
        """Tracebacks in the outputs, as text."""
        kind = "application/vnd.jupyter.error"
        return self.page.locator(f'.jp-OutputArea-output[data-mime-type="{kind}"]').all_inner_texts()
