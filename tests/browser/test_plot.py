"""The plot's script alone in Chromium: its width when it was hidden, its labels, what the pointer reads."""

from pathlib import Path

import pytest

from tests.browser.lab_page import FLAGS, find_browser

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_browser() is None, reason="there is no Chromium")]

SCRIPT = (Path(__file__).parents[2] / "workbench" / "plot.js").read_text()
START = """
async ([source, values]) => {
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const on = {};
  window.model = {
    get: (name) => values[name],
    on: (event, call) => { on[event.replace("change:", "")] = call; },
    set: (name, value) => { values[name] = value; on[name]?.(); },
  };
  const el = document.getElementById("plot");
  module.default.render({ model: window.model, el });
}
"""
LINES = [
    {"name": "training", "x": [1, 2, 3, 4], "y": [4.0, 3.0, 2.0, 1.5], "style": "line", "color": "#00f", "dash": ""},
    {"name": "validation", "x": [4], "y": [1.25], "style": "points", "color": "#f00", "dash": ""},
]
VALUES = {"data": LINES, "title": "Loss", "x_label": "iteration", "y_label": "EDM loss", "log_x": False}
VALUES |= {"log_y": False, "height": 220, "summary": "loss"}


@pytest.fixture(scope="module")
def plot():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1000, "height": 400})
        page.set_content('<div id="outer" style="width:900px"><div id="plot"></div></div>')
        page.evaluate(START, [SCRIPT, VALUES])
        page.wait_for_selector("svg[viewBox]")
        yield page
        browser.close()


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


def test_both_axes_are_named(plot):
    texts = plot.locator("svg text").all_text_contents()
    assert {"Loss", "EDM loss", "iteration", "training", "validation"} <= set(texts)


def test_the_pointer_reads_the_value_of_its_own_point(plot):
    box = plot.locator("svg").bounding_box()
    at = {}
    for place, x in (("left", 60), ("right", 885)):
        plot.mouse.move(box["x"] + x, box["y"] + 100)
        at[place] = plot.locator(".readout").text_content()
    assert at["left"] == "iteration 1: training 4, validation 1.25 (at 4)"
    assert at["right"] == "iteration 4: training 1.5, validation 1.25"
