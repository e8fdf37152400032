"""Every notebook in JupyterLab at its default settings: Run All, Start wherever a cell waits for it, to the last cell.

They run in their order in one project, as a person would go through them.
"""

import time

import nbformat
import papermill.iorw
import pytest
from papermill.parameterize import parameterize_notebook

from tests.browser.lab_page import FLAGS, LabServer, NotebookPage, find_browser
from tests.browser.test_browser import SHOTS
from tests.notebooks.test_notebooks import FOLDER, NOTEBOOKS, SMALL
from workbench.job import Job

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_browser() is None, reason="there is no Chromium"),
]
PATIENCE_S = 600
PICTURE = ".jp-OutputArea video, .jp-OutputArea img, .jp-OutputArea svg[role=img], .jp-OutputArea table"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A page for each notebook, and how to open it."""
    project = tmp_path_factory.mktemp("project")
    (project / "notebooks").mkdir()
    for name in NOTEBOOKS:
        notebook = papermill.iorw.load_notebook_node(str(FOLDER / f"{name}.ipynb"))
        nbformat.write(parameterize_notebook(notebook, SMALL[name]), project / "notebooks" / f"{name}.ipynb")
    with LabServer(project, tmp_path_factory.mktemp("jupyter")) as server, sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_browser(), headless=True, args=FLAGS)
        yield server, chromium
        chromium.close()
    for record in project.rglob("launch.json"):
        Job(record.parent).stop(grace_s=2)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_in_lab_from_first_cell_to_last(lab, name):
    server, chromium = lab
    page = chromium.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(120_000)
    notebook = NotebookPage(page, server, f"notebooks/{name}.ipynb")
    began, pictured_s = time.monotonic(), None
    notebook.run_all()
    page.wait_for_timeout(1000)
    while not notebook.is_done():
        assert time.monotonic() - began < PATIENCE_S, f"still busy; {page.locator('.jp-mod-active').inner_text()[:500]}"
        if notebook.errors():
            break
        if pictured_s is None and page.locator(PICTURE).count():
            pictured_s = time.monotonic() - began
        for start in page.locator(".dfm-launcher button:has-text('Start'):enabled").all():
            if start.inner_text().strip() == "Start":
                start.click()
        page.wait_for_timeout(250)
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"notebook_{name}.png")
    assert notebook.errors() == [] and pictured_s is not None
    print(f"{name}: first picture or table after {pictured_s:.1f} s, end after {time.monotonic() - began:.1f} s")
    page.close()
