"""Monitor and Studio in JupyterLab at its default settings: theme, narrow window, keyboard, zoom, download."""

import re

import pytest

from tests.browser.lab_page import FLAGS, LabServer, NotebookPage, find_browser, write_notebook
from tests.browser.test_browser import SHOTS
from tests.processes import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_browser() is None, reason="there is no Chromium"),
]
MONITOR = """
import json
from pathlib import Path
from workbench import Monitor, project_folder
project_folder()
for name, lr in (("a", 0.1), ("b", 0.2)):
    run = Path("runs", name)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps({"train": {"train_iters": 2000, "lr": lr}}))
    lines = [{"iteration": i, "loss": 1 / i**lr, "lr": lr, "tokens_per_s": 100 + i % 7} for i in range(1, 2001)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
Monitor("runs").show()
"""
STUDIO = """
from workbench import Studio
Studio(height=32, width=32, num_video_frames=1, num_steps=4)
"""
WIDTHS = "es => es.map(e => [e.clientWidth, e.querySelector('svg').viewBox.baseVal.width]).filter(([w]) => w)"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    project = tmp_path_factory.mktemp("project")
    (project / "notebooks").mkdir()
    write_notebook(project / "notebooks" / "00_tour.ipynb", "1")  # which dfm lab opens
    write_notebook(project / "notebooks" / "parts.ipynb", MONITOR, STUDIO)
    with LabServer(project, tmp_path_factory.mktemp("jupyter")) as server, sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_browser(), headless=True, args=FLAGS)
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(120_000)
        opened = NotebookPage(page, server, "notebooks/parts.ipynb")
        opened.hide_sides()
        for cell in (0, 1):
            opened.run_cell(cell)
        page.locator(".dfm-monitor .dfm-plot path").first.wait_for(state="attached")
        sync_api.expect(page.locator(".dfm-studio [role=status]")).to_contain_text("done in", timeout=120_000)
        yield opened
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / "parts_end.png")
        chromium.close()


def fits(widths: list[list[int]]) -> bool:
    return len(widths) >= 3 and all(there == drawn > 260 for there, drawn in widths)


def test_plots_keep_their_width_through_a_change_of_theme(notebook):
    page, plots = notebook.page, notebook.page.locator(".dfm-monitor .dfm-plot")
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.theme(theme)
        page.wait_for_function("t => document.body.dataset.jpThemeName === t", arg=theme)
        page.wait_for_timeout(500)
        wait_until(
            lambda: page.wait_for_timeout(200) or fits(plots.evaluate_all(WIDTHS)), "every plot has its width", 20
        )


def test_nothing_scrolls_sideways_in_a_narrow_window(notebook):
    page = notebook.page
    page.set_viewport_size({"width": 720, "height": 900})
    page.wait_for_timeout(1000)
    for name in (".dfm-monitor", ".dfm-studio"):
        beyond = page.locator(name).evaluate(
            """top => [...top.querySelectorAll("*")].filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1 &&
                ["auto", "scroll"].includes(getComputedStyle(e).overflowX) || e.getBoundingClientRect().right >
                top.getBoundingClientRect().right + 2).map(e => e.tagName + "." + e.getAttribute("class"))"""
        )
        assert beyond == [], name
    page.set_viewport_size({"width": 1280, "height": 1000})


def test_a_zoom_gets_its_points_from_the_kernel(notebook):
    page = notebook.page
    loss = page.locator(".dfm-monitor .dfm-plot").first
    loss.scroll_into_view_if_needed()
    svg = loss.locator("svg")
    whole = svg.locator("path").first.get_attribute("d")
    box = svg.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 100, steps=4)
    page.mouse.up()
    sync_api.expect(loss.get_by_role("button", name="Show all")).to_be_visible()
    ticks = svg.locator("text[text-anchor=middle]")
    sync_api.expect(ticks.first).not_to_have_text("500")
    assert svg.locator("path").first.get_attribute("d") != whole
    with page.expect_download() as download:
        loss.get_by_role("button", name="CSV").click()
    assert len(download.value.path().read_text().splitlines()) == 1 + 2 * 2000
    with page.expect_download() as download:
        loss.get_by_role("button", name="PNG").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    loss.get_by_role("button", name="Show all").click()
    sync_api.expect(svg.locator("path").first).to_have_attribute("d", whole)


def test_a_run_is_left_out_by_its_box(notebook):
    plot = notebook.page.locator(".dfm-monitor .dfm-plot").first
    sync_api.expect(plot.locator("path")).to_have_count(2)
    box = notebook.page.locator(".dfm-monitor").get_by_role("checkbox", name="lr 0.1")
    box.uncheck()
    sync_api.expect(plot.locator("path")).to_have_count(1)
    box.check()
    sync_api.expect(plot.locator("path")).to_have_count(2)


def test_the_keyboard_reaches_plots_sliders_and_prompt(notebook):
    page = notebook.page
    plot = page.locator(".dfm-monitor .dfm-plot").first
    plot.locator("svg").focus()
    page.keyboard.press("End")
    sync_api.expect(plot.locator(".readout")).to_have_text(re.compile("iteration 2000: lr 0.1 .*, lr 0.2 "))
    studio = page.locator(".dfm-studio")
    guidance = studio.get_by_label("guidance")
    before = float(guidance.input_value())
    guidance.focus()
    page.keyboard.press("ArrowRight")
    assert float(guidance.input_value()) == pytest.approx(before + 0.05)
    sync_api.expect(studio.get_by_role("status")).to_contain_text(f"guidance {before + 0.05:g}", timeout=60_000)
    prompt = studio.get_by_label("prompt", exact=True)
    prompt.fill("A plain red morpho over sand.")
    prompt.press("Enter")
    sync_api.expect(studio).to_contain_text("A plain red morpho over sand. (seed", timeout=60_000)
    assert notebook.errors() == []
