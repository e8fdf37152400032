"""JupyterLab in headless Chromium: a notebook from first cell to last, the parts as only a browser shows them.

What the buttons do is tested on the widgets (`tests/workbench`). Screenshots go to `runs/browser` (or
$DFM_SCREENSHOTS), to be kept as output of CI.
"""

import os
import re
import time
from pathlib import Path

import nbformat
import papermill.iorw
import pytest
from papermill.parameterize import parameterize_notebook

from tests.browser.lab_page import FLAGS, LabServer, NotebookPage, find_browser
from tests.notebook_files import write_notebook
from tests.notebooks.test_notebooks import FOLDER, FULL, IN_BROWSER, SMALL
from workbench.job import Job

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_browser() is None, reason="there is no Chromium"),
]
SHOTS = Path(os.environ.get("DFM_SCREENSHOTS", Path(__file__).parents[2] / "runs" / "browser"))
MONITOR = """
import json
from pathlib import Path
from workbench import Monitor, project_folder
project_folder()
for name, lr in (("a", 0.1), ("b", 0.2)):
    run = Path("runs/two", name)  # other notebooks of the project have runs, too
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps({"train": {"train_iters": 2000, "lr": lr}}))
    lines = [{"iteration": i, "loss": 1 / i**lr, "lr": lr, "tokens_per_s": 100 + i % 7} for i in range(1, 2001)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
Monitor("runs/two").show()
"""
STUDIO = """
from workbench import Studio
Studio("butterflies", height=32, width=32, num_video_frames=1, num_steps=4)
"""
KEPT = """
from workbench import ConfigForm
ConfigForm(["train.train_iters"], {"train.train_iters": 77}, recipe="demo")
"""
CONTROLS = """
from IPython.display import display
from workbench import ConfigForm, Runs
display(ConfigForm(["train.train_iters"], recipe="demo"), Runs("runs/two"))
"""
PICTURE = ".jp-OutputArea video, .jp-OutputArea img, .jp-OutputArea svg[role=img], .jp-OutputArea table"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """`opened(name)`: a notebook of one project in a page of its own."""
    project = tmp_path_factory.mktemp("project")
    (project / "notebooks").mkdir()
    for name in IN_BROWSER:
        notebook = papermill.iorw.load_notebook_node(str(FOLDER / f"{name}.ipynb"))
        nbformat.write(parameterize_notebook(notebook, SMALL[name]), project / "notebooks" / f"{name}.ipynb")
    write_notebook(project / "notebooks" / "parts.ipynb", MONITOR, STUDIO, CONTROLS)
    write_notebook(project / "notebooks" / "kept.ipynb", KEPT)
    with LabServer(project, tmp_path_factory.mktemp("jupyter")) as server, sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_browser(), headless=True, args=FLAGS)

        def opened(name: str) -> NotebookPage:
            page = chromium.new_page(viewport={"width": 1280, "height": 1000})
            page.set_default_timeout(120_000)
            sync_api.expect.set_options(timeout=60_000)  # 5 s are too few on a machine that does other work
            notebook = NotebookPage(page, server, f"notebooks/{name}.ipynb")
            notebook.hide_sides()
            return notebook

        yield opened
        chromium.close()
    for record in project.rglob("launch.json"):  # a run outlives its kernel and the server
        Job(record.parent).stop(grace_s=2)


def shot(page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


SCROLL = """() => document.querySelectorAll('.jp-WindowedPanel-outer').forEach(panel => {
    const below = panel.scrollTop + panel.clientHeight < panel.scrollHeight
    panel.scrollTop = below ? panel.scrollTop + 300 : 0
})"""


def run_to_the_end(notebook: NotebookPage, name: str) -> None:
    """Run All, then Start wherever a cell waits for it; without an error and with a picture."""
    page, began, pictured = notebook.page, time.monotonic(), False
    notebook.run_all()
    page.wait_for_timeout(1000)
    while not notebook.is_done() and not notebook.errors():
        assert time.monotonic() - began < 600, f"still busy; {page.locator('.jp-mod-active').last.inner_text()[:500]}"
        pictured = pictured or page.locator(PICTURE).count() > 0  # cells out of sight are not on the page
        for start in page.locator(".dfm-launcher button:has-text('Start'):enabled").all():
            if start.inner_text().strip() == "Start":
                start.click()
        page.evaluate(SCROLL)  # cells out of sight are not on the page, and one of them may wait for Start
        page.wait_for_timeout(500)
    shot(page, f"notebook_{name}")
    assert notebook.errors() == [] and (pictured or page.locator(PICTURE).count())


@pytest.mark.parametrize("name", IN_BROWSER)
def test_notebook_runs_in_lab_from_first_cell_to_last(lab, name):
    """All of them by `make browser`, in their order, then in a new kernel with what the first run has made."""
    notebook, thrown = lab(name), []
    notebook.page.on("pageerror", lambda error: thrown.append(str(error)))
    run_to_the_end(notebook, name)
    if FULL:
        notebook.restart_kernel()
        run_to_the_end(notebook, f"{name}_again")
    assert thrown == []
    notebook.page.close()


def test_a_widget_without_a_kernel_gives_way_to_its_copy(lab):
    """After a restart of the kernel, and in a reloaded tab: what was shown last, and how to have the controls again."""
    notebook = lab("kept")
    page, cell = notebook.page, notebook.cell(0)
    form, kept = cell.locator(".dfm-form"), cell.locator(".dfm-kept")
    notebook.run_cell(0)
    form.wait_for()
    sync_api.expect(kept).to_be_hidden()
    heading = form.get_by_role("button", name="train")
    heading.focus()
    page.keyboard.press("Space")
    sync_api.expect(heading).to_have_attribute("aria-expanded", "false")
    sync_api.expect(form.get_by_role("textbox")).to_be_hidden()
    notebook.save()
    notebook.restart_kernel()
    sync_api.expect(form).to_be_hidden()
    sync_api.expect(kept).to_contain_text("train.train_iters=77")
    page.reload()
    notebook.wait_idle()
    sync_api.expect(kept).to_contain_text("run this cell again")
    assert page.get_by_text("model not found").locator("visible=true").count() == 0
    page.close()


# ---- Monitor and Studio at their default settings ------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(lab):
    notebook = lab("parts")
    for cell in (0, 1, 2):
        notebook.run_cell(cell)
    notebook.page.locator(".dfm-monitor .dfm-plot path").first.wait_for(state="attached")
    sync_api.expect(notebook.page.locator(".dfm-studio [role=status]")).to_contain_text("done in", timeout=120_000)
    yield notebook
    shot(notebook.page, "parts_end")
    notebook.page.close()


def test_the_keyboard_reaches_plots_sliders_and_prompt(parts):
    page = parts.page
    plot = page.locator(".dfm-monitor .dfm-plot").first
    for _ in range(5):  # on a busy machine a part that is still being drawn may take the focus
        plot.locator("svg").focus()
        page.keyboard.press("End")
        if plot.locator(".readout").text_content():
            break
        page.wait_for_timeout(2000)
    sync_api.expect(plot.locator(".readout")).to_have_text(re.compile("iteration 2000: lr 0.1 .*, lr 0.2 "))
    studio = page.locator(".dfm-studio")
    guidance = studio.get_by_label("guidance")
    before = float(guidance.input_value())
    guidance.focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(studio.get_by_role("status")).to_contain_text(f"guidance {before + 0.05:g}", timeout=60_000)
    prompt = studio.get_by_label("prompt", exact=True)
    prompt.fill("A plain red morpho over sand.")
    prompt.press("Enter")
    sync_api.expect(studio).to_contain_text("A plain red morpho over sand. (seed", timeout=60_000)
    assert parts.errors() == []


@pytest.mark.parametrize(
    "control",
    [
        ".dfm-monitor .dfm-plot svg",
        ".dfm-monitor .widget-checkbox input",
        ".dfm-monitor input[type=range]",
        ".dfm-monitor select",
        ".dfm-studio button",
        ".dfm-form button[aria-expanded]",
        ".dfm-runs th button",
        ".dfm-runs input[type=checkbox]",
    ],
)
def test_a_letter_on_a_control_changes_no_cell(parts, control):
    """In command mode JupyterLab takes letters as commands: "b" inserted a cell, "x" cut the widget's own."""
    page, cells = parts.page, parts.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:enter-command-mode')")
    found = page.locator(control).first
    found.focus()
    sync_api.expect(found).to_be_focused()
    page.keyboard.press("b")
    page.keyboard.press("x")
    page.keyboard.press("Control+s")  # a shortcut with a modifier is still JupyterLab's
    page.wait_for_timeout(300)
    assert cells.count() == 3
    page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
