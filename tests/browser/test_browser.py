"""JupyterLab in headless Chromium: the tour with its buttons, plots and clips; a kernel restart in the middle of a run.

Screenshots go to `runs/browser` (or $DFM_SCREENSHOTS), to be kept as output of CI.
"""

import json
import os
import re
from pathlib import Path

import nbformat
import papermill.iorw
import psutil
import pytest
from papermill.parameterize import parameterize_notebook

from dfm_nb.base import video
from dfm_nb.base.metrics import read_metrics
from dfm_nb.data.sources import synthetic
from tests.browser.lab_page import FLAGS, LabServer, NotebookPage, find_browser, write_notebook
from tests.processes import alive, wait_until
from workbench import Gallery
from workbench.gallery import Item
from workbench.job import Job

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHOTS = Path(os.environ.get("DFM_SCREENSHOTS", Path(__file__).parents[2] / "runs" / "browser"))
PATIENCE_S = 300
FULL = "DFM_FULL" in os.environ  # make browser
SMALL = {
    "num_images": 48 if FULL else 24,
    "num_clips": 12 if FULL else 6,
    "model_size": "tiny",
    "train_iters": 24 if FULL else 12,
    "num_processes": 2 if FULL else 1,
    "num_steps": 6 if FULL else 3,
}
LONG = """
from workbench import Launcher, Monitor, project_folder
project_folder()
run = Launcher("runs/long", ["--mock", "--recipe", "demo", "model.size=tiny", "train.train_iters=100000",
               "dataset.num_workers=0", "train.eval_interval=0", "checkpoint.save_interval=100000",
               "logger.log_interval=1"], nproc=2)
Monitor("runs/long").show()
run
"""
FORMS = """
from workbench import ConfigForm, PrepareForm
form = ConfigForm(["model.size", "train.train_iters", "optimizer.lr", "scheduler"], {"optimizer.lr": 3e-4},
                  recipe="demo", nproc=2, run_dir="runs/a")
form
"""
KEPT = """
from workbench import ConfigForm
ConfigForm(["train.train_iters"], {"train.train_iters": 77}, recipe="demo")
"""
ATTACH = """
from workbench import Launcher, Monitor, project_folder
project_folder()
run = Launcher.attach("runs/long")
Monitor("runs/long").show()
run
"""


PLAYING = "vs => vs.map(v => !v.paused)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A Chromium with a profile of its own."""
    path = find_browser()
    if path is None:
        pytest.skip(
            "there is no Chromium on this machine; .ci/run installs it with apt-get (Debian's package chromium)"
        )
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")),
            executable_path=path,
            headless=True,
            args=FLAGS,
            viewport={"width": 1280, "height": 1000},
        )
        context.set_default_timeout(60_000)
        yield context
        context.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`dfm lab` in a project folder with the tour, its parameters made small."""
    project = tmp_path_factory.mktemp("project")
    (project / "notebooks").mkdir()
    tour = papermill.iorw.load_notebook_node(str(NOTEBOOKS / "00_tour.ipynb"))
    nbformat.write(parameterize_notebook(tour, SMALL), project / "notebooks" / "00_tour.ipynb")
    write_notebook(project / "notebooks" / "long.ipynb", LONG, ATTACH)
    write_notebook(project / "notebooks" / "kept.ipynb", KEPT)
    write_notebook(project / "notebooks" / "forms.ipynb", FORMS, "PrepareForm('data', {'num_images': 20})")
    with LabServer(project, tmp_path_factory.mktemp("jupyter")) as running:
        yield running
    for record in project.rglob(
        "launch.json"
    ):  # a run outlives its kernel and the server: none is left after a failure
        Job(record.parent).stop(grace_s=2)


@pytest.fixture
def page(browser, request):
    page = browser.new_page()
    yield page
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{request.node.name}_end.png")
    page.close()


def shot(page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def wait_for(what, about: str, page, timeout_s: float = PATIENCE_S) -> None:
    """Poll `what()` while the browser's events are served."""
    wait_until(lambda: what() or page.wait_for_timeout(200), about, timeout_s)


def drawn(place) -> str:
    """What the loss plot of a page or a cell draws now."""
    return place.locator(".dfm-monitor .dfm-plot").first.locator("svg").inner_html()


def test_tour_by_hand_from_start_to_clips(page, server):
    lab = NotebookPage(page, server, "notebooks/00_tour.ipynb")
    lab.hide_sides()
    lab.run_all()
    train = page.locator(".dfm-launcher").nth(1)
    start = train.get_by_role("button", name=re.compile("Start$"))
    start.wait_for(timeout=PATIENCE_S * 1000)
    assert train.get_by_role("status").inner_text().endswith("not started")
    assert train.get_by_role("button", name="Stop").is_disabled()
    start.scroll_into_view_if_needed()
    start.click()

    monitor = page.locator(".dfm-monitor")
    monitor.locator(".dfm-plot path").first.wait_for(state="attached", timeout=PATIENCE_S * 1000)
    early = drawn(page)
    status = monitor.get_by_role("status")
    sync_api.expect(status).to_contain_text(
        "finished · iteration {0}/{0}".format(SMALL["train_iters"]), timeout=PATIENCE_S * 1000
    )
    assert drawn(page) != early, "the loss plot changes while it trains"
    sync_api.expect(monitor.locator(".progress-bar").first).to_have_attribute("style", re.compile(r"width: 100%"))
    records = read_metrics(server.project / "runs/nb/tour/train")
    assert [r["iteration"] for r in records if "loss" in r] == list(range(1, SMALL["train_iters"] + 1))
    monitor.scroll_into_view_if_needed()
    shot(page, "tour_trained")

    clips = page.locator("video[aria-label*='eyespotted' i][style*='width:192px']")
    clips.last.wait_for(timeout=PATIENCE_S * 1000)
    lab.wait_idle(PATIENCE_S)
    assert lab.errors() == []
    video = clips.last
    video.scroll_into_view_if_needed()
    size = video.evaluate(
        "v => new Promise(done => v.readyState ? done([v.videoWidth, v.videoHeight]) : "
        "v.addEventListener('loadedmetadata', () => done([v.videoWidth, v.videoHeight])))"
    )
    assert size == [64, 64]
    seen = set()

    def look() -> bool:
        video.scroll_into_view_if_needed()  # cells above may still grow
        seen.add(video.evaluate("v => v.currentTime"))
        return len(seen) >= 3

    wait_for(look, "the clip plays by itself", page, 60)
    assert video.evaluate("v => v.getVideoPlaybackQuality().totalVideoFrames") > 1
    shot(page, "tour_clips")


def test_forms_by_hand(page, server):
    """A fault beside its control and on its closed section, the recipe's value, the command on the clipboard."""
    lab = NotebookPage(page, server, "notebooks/forms.ipynb")
    lab.hide_sides()
    assert page.locator(".Toastify__toast").count() == 0, "no question about news over the first screen"
    lab.run_cell(0)
    form = lab.cell(0).locator(".dfm-form")
    sections = form.locator(".jupyter-widget-Collapse-header")
    sections.filter(has_text="optimizer · 1 changed").click(timeout=120_000)
    lr = form.get_by_label("lr", exact=True)
    assert lr.input_value() in ("0.0003", "3e-4", "3.0e-04")
    sections.filter(has_text="train").first.click()
    iterations = form.get_by_label("train_iters")
    iterations.fill("12.7")
    iterations.press("Tab")
    form.get_by_role("alert").filter(has_text="valid integer; got 12.7").wait_for()
    sections.filter(has_text="train · ✖ 1 to correct").first.click()
    sync_api.expect(iterations).to_be_hidden()
    shot(page, "form_fault_in_closed_section")
    sections.filter(has_text="train · ✖ 1 to correct").first.click()
    iterations.fill("40")
    iterations.press("Tab")
    form.get_by_role("button", name="0.001").click()
    command = "dfm pretrain --recipe demo --nproc-per-node 2 --run-dir runs/a train.train_iters=40"
    sync_api.expect(form.locator("code").filter(has_text="dfm pretrain")).to_have_text(command)
    sync_api.expect(form).to_contain_text("on this machine", timeout=60_000)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    form.get_by_role("button", name="Copy").first.click()
    assert page.evaluate("() => navigator.clipboard.readText()") == command
    shot(page, "form")

    lab.run_cell(1)
    prepare = lab.cell(1).locator(".dfm-form")
    prepare.get_by_label("num images").wait_for(timeout=120_000)
    prepare.get_by_label("source", exact=True).select_option("folder")
    prepare.get_by_role("alert").filter(has_text="name the folder").wait_for()
    sync_api.expect(prepare.get_by_label("num images")).to_be_hidden()
    shot(page, "form_prepare")
    assert lab.errors() == []


def test_a_widget_without_a_kernel_gives_way_to_its_copy(page, server):
    """After a restart of the kernel, and in a reloaded tab: what was shown last, and how to have the controls again."""
    lab = NotebookPage(page, server, "notebooks/kept.ipynb")
    form, kept = lab.cell(0).locator(".dfm-form"), lab.cell(0).locator(".dfm-kept")
    lab.run_cell(0)
    form.wait_for(timeout=PATIENCE_S * 1000)
    sync_api.expect(kept).to_be_hidden()
    lab.restart_kernel()
    sync_api.expect(form).to_be_hidden()
    sync_api.expect(kept).to_contain_text("train.train_iters=77")
    lab.run_cell(0)
    sync_api.expect(form).to_be_visible(timeout=PATIENCE_S * 1000)
    sync_api.expect(kept).to_have_count(1)  # it comes a moment after the widget
    sync_api.expect(kept).to_be_hidden()
    lab.save()
    lab.restart_kernel()
    page.reload()
    lab.wait_idle()
    sync_api.expect(kept).to_contain_text("run this cell again")
    assert page.get_by_text("model not found").locator("visible=true").count() == 0


def test_clips_of_a_page_play_by_themselves_and_rest_off_the_screen(browser):
    clips = Gallery([synthetic.render({"colour": c}, i, 64, 64, 9) for i, c in enumerate(synthetic.COLOURS * 8)])
    page = browser.new_page()
    page.set_content(clips.html())
    videos = page.locator("video")
    wait_for(lambda: videos.first.evaluate("v => v.currentTime") > 0, "the first clip plays", page, 60)
    wait_for(lambda: not videos.last.evaluate("v => !v.paused"), "the last one, below the screen, rests", page, 60)
    first = videos.evaluate_all(PLAYING)
    assert 0 < sum(first) < 40
    videos.first.hover()
    assert videos.first.evaluate("v => v.controls") and not videos.last.evaluate("v => v.controls")
    videos.last.scroll_into_view_if_needed()
    wait_for(lambda: videos.evaluate_all(PLAYING)[-1], "the last clip plays", page, 60)
    wait_for(lambda: not videos.evaluate_all(PLAYING)[0], "the first one rests", page, 60)
    page.close()


def test_columns_of_a_gallery_play_in_step(browser):
    drawn = [synthetic.render({"colour": c}, 0, 64, 64, 17) for c in synthetic.COLOURS[:3]]
    page = browser.new_page()
    page.set_content(Gallery({f"column {i}": [frames] for i, frames in enumerate(drawn)}).html())
    page.wait_for_function("[...document.querySelectorAll('video')].every(v => v.currentTime > 0)")
    page.locator("video").nth(1).evaluate("v => { v.pause(); v.currentTime = 0; setTimeout(() => v.play(), 500); }")
    page.wait_for_timeout(1500)
    times = page.locator("video").evaluate_all("vs => vs.map(v => v.currentTime)")
    apart = [min(abs(t - times[0]), 17 / 12 - abs(t - times[0])) for t in times]
    assert max(apart) < 0.2
    page.close()


def test_a_clip_is_enlarged_saved_and_its_settings_copied(browser):
    frames = synthetic.render({"colour": "red"}, 0, 64, 64, 9)
    kind, data = video.compressed(frames, 12)
    page = browser.new_page()
    page.set_content(Gallery([Item(kind, data, {"prompt": "a red one", "seed": 3})]).html())
    buttons = page.locator(".dfm-tools")
    assert buttons.evaluate("e => getComputedStyle(e).opacity") == "0"
    page.locator("video").hover()
    assert buttons.evaluate("e => getComputedStyle(e).opacity") == "1"
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    assert download.value.suggested_filename == "a-red-one.mp4"
    assert Path(download.value.path()).read_bytes() == data
    settings = page.get_by_role("button", name="Copy settings").get_attribute("data-settings")
    assert json.loads(settings) == {"prompt": "a red one", "seed": 3}
    page.get_by_role("button", name="Enlarge").click()
    page.wait_for_function("document.fullscreenElement && document.fullscreenElement.tagName === 'VIDEO'")
    page.close()


def test_run_outlives_a_kernel_restart_and_stop_leaves_no_process(page, server):
    lab = NotebookPage(page, server, "notebooks/long.ipynb")
    lab.hide_sides()
    job, folder = Job(server.project / "runs/long"), server.project / "runs/long"
    lab.run_cell(0)
    lab.cell(0).locator(".dfm-launcher").get_by_role("button", name=re.compile("Start$")).click(timeout=120_000)
    wait_for(lambda: len(read_metrics(folder)) >= 3, "three iterations", page)
    processes = job.processes()
    assert len(processes) >= 4, "a supervisor, torchrun and two workers"
    group = os.getpgid(processes[0].pid)
    assert group == processes[0].pid != os.getpgid(server.process.pid), "a process group of its own"
    early = drawn(lab.cell(0))

    lab.restart_kernel()
    before = len(read_metrics(folder))
    wait_for(lambda: len(read_metrics(folder)) > before + 3, "training goes on without a kernel", page)
    assert len(alive(processes)) == len(processes)
    lab.run_cell(1)
    again = lab.cell(1).locator(".dfm-launcher")  # what cell 0 shows belonged to the former kernel
    status = again.get_by_role("status")
    sync_api.expect(status).to_contain_text(f"running · process {processes[0].pid}", timeout=120_000)
    monitor = lab.cell(1).locator(".dfm-monitor")
    monitor.locator(".dfm-plot path").first.wait_for(state="attached")
    attached = drawn(lab.cell(1))
    assert attached != early
    wait_for(lambda: drawn(lab.cell(1)) != attached, "the plot goes on", page, 60)
    monitor.scroll_into_view_if_needed()
    shot(page, "attached_after_restart")

    processes = job.processes()
    again.get_by_role("button", name="Stop").click()
    sync_api.expect(status).to_contain_text("stopped", timeout=90_000)
    assert alive(processes) == [] and job.state == "stopped"
    assert alive([p for p in psutil.process_iter() if _group(p) == group]) == [], "nothing of the process group is left"
    sync_api.expect(again.get_by_role("button", name="Continue")).to_be_enabled()
    assert lab.errors() == []
    shot(page, "stopped")


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None
