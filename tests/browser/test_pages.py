"""Without JupyterLab in Chromium: the plot's script, the HTML page of a notebook, and clips in a gallery."""

import re
from pathlib import Path

import nbformat
import pytest

from dfm_nb import display
from dfm_nb.butterflies import synthetic
from tests.browser.lab_page import FLAGS, find_browser
from tests.processes import wait_until
from workbench import ConfigForm, Gallery
from workbench.notebook_run import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_browser() is None, reason="there is no Chromium")]

SCRIPTS = Path(__file__).parents[2] / "workbench"
START = """
async ([source, values]) => {
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const on = {};
  window.model = {
    get: (name) => values[name],
    on: (event, call) => { on[event.replace("change:", "")] = call; },
    off: () => {},
    set: (name, value) => { values[name] = value; on[name]?.(); },
    save_changes: () => {},
    send: (asked) => { window.asked = asked; },
    receive: (message, buffers) => on["msg:custom"](message, buffers),
  };
  const el = document.getElementById("plot");
  module.default.render({ model: window.model, el });
}
"""
LINES = [
    {"name": "training", "x": [1, 2, 3, 4], "y": [4.0, 3.0, 2.0, 1.5], "style": "line", "color": "#00f"},
    {"name": "validation", "x": [4], "y": [1.25], "style": "points", "color": "#f00"},
]
LINES = [line | {"dash": "", "cut": []} for line in LINES]
VALUES = {"data": LINES, "title": "Loss", "x_label": "iteration", "y_label": "EDM loss", "log_x": False}
VALUES |= {"log_y": False, "height": 220, "summary": "loss", "zoom": [], "legend": True}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)


@pytest.fixture(scope="module")
def plot(browser):
    page = browser.new_page(viewport={"width": 1000, "height": 400})
    page.set_content('<div id="outer" style="width:900px"><div id="plot"></div></div>')
    page.evaluate(START, [(SCRIPTS / "plot.js").read_text(), VALUES])
    page.wait_for_selector("svg[viewBox]")
    return page


def test_a_plot_that_was_hidden_has_its_width_again(plot):
    """A theme switch in JupyterLab hides a notebook for a moment; plots stayed at a third of their width."""
    outer = plot.locator("#outer")
    assert plot.locator("svg").get_attribute("viewBox") == "0 0 900 220"
    outer.evaluate("e => { e.style.display = 'none'; }")
    plot.evaluate("l => window.model.set('data', l)", LINES[:1])
    plot.wait_for_timeout(200)
    outer.evaluate("e => { e.style.display = ''; }")
    plot.wait_for_timeout(200)
    assert plot.locator("svg").get_attribute("viewBox") == "0 0 900 220" and plot.locator("circle").count() == 0
    plot.evaluate("l => window.model.set('data', l)", LINES)
    plot.wait_for_function("document.querySelectorAll('circle').length > 0")


def test_a_long_legend_wraps_and_the_plot_grows(plot):
    names = [f"lr 0.00{i}, hidden_size 19{i}" for i in range(9)]
    plot.evaluate("l => window.model.set('data', l)", [LINES[0] | {"name": name} for name in names])
    plot.wait_for_function("document.querySelectorAll('path').length === 9")
    labels = plot.locator("text", has_text="hidden_size")
    ends = labels.evaluate_all("t => t.map(e => e.getBBox().x + e.getBBox().width)")
    assert len(ends) == 9 and max(ends) < 900 and plot.locator("svg").get_attribute("viewBox") == "0 0 900 250"
    plot.evaluate("window.model.set('legend', false)")
    sync_api.expect(labels).to_have_count(0)
    plot.evaluate("window.model.set('legend', true)")
    sync_api.expect(labels).to_have_count(9)
    plot.evaluate("l => window.model.set('data', l)", LINES[:1])
    sync_api.expect(plot.locator("text", has_text="training")).to_have_count(0)
    plot.evaluate("l => window.model.set('data', l)", LINES)
    plot.wait_for_function("document.querySelectorAll('path').length === 1")


def test_ticks_of_a_run_that_diverged_are_powers_of_ten(plot):
    plot.evaluate("l => window.model.set('data', l)", [LINES[0] | {"y": [1.0, 2.0, 3e9, 2.5e20]}])
    ticks = plot.locator("text[text-anchor=end]", has_text=re.compile("[0-9]e"))
    sync_api.expect(ticks).to_have_text(["5e19", "1.0e20", "1.5e20", "2.0e20", "2.5e20"])
    plot.evaluate("l => window.model.set('data', l)", LINES)
    plot.wait_for_function("document.querySelectorAll('circle').length > 0")


def test_a_drag_zooms_in_and_a_double_click_out(plot):
    box = plot.locator("svg").bounding_box()
    left, right = (box["x"] + 52, box["x"] + 882)  # of iterations 1 and 4
    plot.mouse.move(left + (right - left) / 3, box["y"] + 100)
    plot.mouse.down()
    plot.mouse.move(right, box["y"] + 100)
    plot.mouse.up()
    low, high = plot.evaluate("window.model.get('zoom')")
    assert abs(low - 2) < 0.02 and abs(high - 4) < 0.02
    plot.locator("svg").dblclick(position={"x": 300, "y": 100})
    assert plot.evaluate("window.model.get('zoom')") == []


def test_a_plot_has_a_log_axis_and_is_downloaded(plot):
    plot.locator("svg").hover()
    plot.get_by_role("button", name="log").click()
    assert plot.evaluate("window.model.get('log_y')") is True
    plot.wait_for_timeout(100)
    assert plot.get_by_role("button", name="log").get_attribute("aria-pressed") == "true"
    plot.get_by_role("button", name="log").click()
    plot.get_by_role("button", name="PNG").click()
    assert plot.evaluate("window.asked") == "png"
    with plot.expect_download() as download:
        plot.evaluate(
            "() => window.model.receive({ name: 'loss.png', kind: 'image/png' }, [new TextEncoder().encode('a,b')])"
        )
    assert download.value.suggested_filename == "loss.png"
    assert Path(download.value.path()).read_text() == "a,b"


def test_a_pressed_button_that_is_disabled_gives_the_focus_to_the_next(browser):
    """Start disables itself: the focus went to the top of the page, far from Stop."""
    page = browser.new_page()
    page.set_content('<div class="dfm-launcher"><p id="plot"></p><button>Start</button><button disabled>Stop</button>')
    page.evaluate(START, [(SCRIPTS / "attention.js").read_text(), {"text": ""}])
    page.wait_for_timeout(100)
    page.get_by_text("Start").focus()
    page.evaluate("document.querySelectorAll('button').forEach((button) => { button.disabled = !button.disabled; })")
    sync_api.expect(page.get_by_text("Stop")).to_be_focused()


def test_new_figures_of_runs_leave_ticks_and_half_written_notes(browser):
    def rows(**losses) -> list[dict]:
        told = {"thumbnail": "", "tags": "", "note": ""}
        return [{"run": f"lr/{lr}", "cells": [f"lr/{lr}", loss], **told} for lr, loss in losses.items()]

    page = browser.new_page()
    page.set_content('<div id="plot"></div>')
    values = {"heads": ["run", "loss"], "chosen": [], "rows": rows(**{"0.002": 10, "0.0005": None, "0.001": 9.5})}
    page.evaluate(START, [(SCRIPTS / "runs.js").read_text(), values])
    names = page.locator("tbody td:nth-child(3)")
    sync_api.expect(names).to_have_text(["lr/0.0005", "lr/0.001", "lr/0.002"])
    page.get_by_role("button", name="loss").click()
    sync_api.expect(names).to_have_text(["lr/0.001", "lr/0.002", "lr/0.0005"])
    page.get_by_label("choose lr/0.001").check()
    note = page.get_by_label("note of lr/0.002")
    note.focus()
    page.keyboard.type("half")
    page.evaluate("rows => window.model.set('rows', rows)", rows(**{"0.002": 1, "0.0005": 2, "0.001": 3}))
    sync_api.expect(page.locator("tbody td:nth-child(4)")).to_have_text(["3", "1", "2"])
    sync_api.expect(note).to_be_focused()
    page.keyboard.type("-written")
    page.keyboard.press("Enter")
    assert page.evaluate("window.asked") == {"name": "lr/0.002", "tags": "", "note": "half-written"}
    sync_api.expect(names).to_have_text(["lr/0.002", "lr/0.0005", "lr/0.001"])
    sync_api.expect(page.get_by_label("choose lr/0.001")).to_be_checked()
    sync_api.expect(note).to_have_value("half-written")


CELL = """<div class="jp-CodeCell" style="height:300px"><div class="jp-InputPrompt">[*]:</div>
<div class="jp-Cell-outputArea"></div></div>"""
FAR = '<div class="jp-CodeCell"></div>'
FINISH = """([i, output, prompt]) => {
  const cell = document.querySelectorAll(".jp-CodeCell")[i];
  cell.querySelector(".jp-InputPrompt").textContent = prompt;
  cell.querySelector(".jp-Cell-outputArea").innerHTML = output;
}"""
NEAREST = """() => {
  const middle = (e) => e.getBoundingClientRect().top + e.getBoundingClientRect().height / 2;
  const here = middle(document.querySelector(".jp-Notebook"));
  const away = [...document.querySelectorAll(".jp-Cell-outputArea")].map((e) => Math.abs(middle(e) - here));
  return away.indexOf(Math.min(...away));
}"""
TEXT = '<p class="jp-OutputArea-output">text</p>'
PICTURE = '<canvas class="jp-OutputArea-output" width="90" height="90"></canvas>'
WAITS = '<div class="dfm-launcher"><p class="dfm-attention">A cell waits</p></div>'


def test_run_all_is_a_film_until_the_reader_scrolls(browser):
    """Each new picture for three seconds, a launcher that waits, the newest output; at the end the last picture."""
    page = browser.new_page()
    page.clock.install()
    page.set_content(f'<div class="jp-Notebook" style="height:400px;overflow:auto">{CELL * 9}{FAR}</div>')
    notebook = page.locator(".jp-Notebook")
    notebook.evaluate("e => { e.scrollTop = 9999; }")  # as JupyterLab does

    def finish(i: int, output: str, prompt: str = "[1]:") -> None:
        page.evaluate(FINISH, [i, output, prompt])

    def shown(after_ms: int) -> int:
        page.clock.run_for(after_ms)
        return page.evaluate(NEAREST)

    notebook.evaluate(
        "(e, text) => { const s = document.createElement('script'); s.textContent = text; e.append(s); }",
        (SCRIPTS / "film.js").read_text(),
    )
    assert shown(600) == 8
    finish(1, TEXT)
    assert shown(600) == 1
    finish(2, "")
    finish(3, PICTURE)
    finish(5, PICTURE)
    assert shown(600) == 3 and shown(2000) == 3 and shown(1500) == 5
    finish(4, WAITS)
    assert shown(1500) == 5 and shown(2500) == 4
    finish(4, TEXT)
    finish(6, TEXT)
    assert shown(600) == 6
    finish(0, "")
    finish(7, f"<table><td>{PICTURE.replace('canvas', 'img')}</table>")
    finish(8, "")
    assert shown(600) == 5
    finish(8, "", "[*]:")
    assert shown(600) == 7
    before = notebook.evaluate("e => e.scrollTop")
    page.mouse.move(100, 100)
    page.mouse.wheel(0, -300)
    wait_until(lambda: notebook.evaluate("e => e.scrollTop") != before, "the page scrolls")
    finish(8, PICTURE)
    assert shown(600) == shown(5000) != 8


def test_a_copy_gives_way_to_its_widget_by_classes_of_our_own(browser, monkeypatch):
    """As VS Code and Colab show outputs: HTML and widgets in one document, without JupyterLab's classes."""
    monkeypatch.setenv("DFM_HEADLESS", "0")
    form = ConfigForm(["train.train_iters"], recipe="demo")
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle))
    form._ipython_display_()
    classes = " ".join(form.widget._dom_classes)
    page = browser.new_page()
    page.set_content(f'<div id="live" class="{classes}"></div><div>{shown[-1]["text/html"]}</div>')
    copy = page.get_by_text("dfm pretrain")
    sync_api.expect(copy).to_be_hidden()
    page.evaluate("document.getElementById('live').classList.add('jupyter-widgets-disconnected')")
    sync_api.expect(copy).to_be_visible()
    page.evaluate("document.getElementById('live').remove()")
    sync_api.expect(copy).to_be_visible()


def test_where_video_tags_are_removed_an_animation_is_left(browser):
    shown = Gallery([synthetic.render({"colour": "red"}, 0, 64, 64, 9)]).html()
    page = browser.new_page()
    page.set_content(re.sub("</?video[^>]*>", "", shown))
    assert page.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 64


def test_a_report_asks_the_network_for_nothing_and_its_clips_play(browser, tmp_path):
    shown = display.inline_html(synthetic.render({"colour": "red"}, 0, 64, 64, 9), 12, "a red one")
    cell = nbformat.v4.new_code_cell("clip")
    cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": shown})]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A run"), cell])
    nbformat.write(nb, tmp_path / "a.ipynb")
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(write_report(tmp_path / "a.ipynb").as_uri())
    page.wait_for_function("document.querySelector('video').currentTime > 0")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.get_by_role("heading", name="A run").is_visible()


def test_clips_of_a_page_play_by_themselves_and_rest_off_the_screen(browser):
    clips = Gallery([synthetic.render({"colour": c}, i, 64, 64, 9) for i, c in enumerate(synthetic.COLOURS * 8)])
    page = browser.new_page()
    page.set_content(clips.html())
    videos = page.locator("video")

    def wait_for(playing: bool, which: int) -> None:
        plays = lambda: page.wait_for_timeout(200) or videos.nth(which).evaluate("v => !v.paused")  # noqa: E731
        wait_until(lambda: plays() == playing, f"clip {which} plays: {playing}")

    wait_for(True, 0)
    wait_for(False, -1)
    videos.first.hover()
    assert videos.first.evaluate("v => v.controls") and not videos.last.evaluate("v => v.controls")
    videos.last.scroll_into_view_if_needed()
    wait_for(True, -1)
    wait_for(False, 0)
    page.close()
