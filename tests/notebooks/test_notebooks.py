"""Every notebook from its first cell to its last, headless, with small parameters; stripped in git; failures with their
cause.

The notebooks run in their order in one folder, as a person would go through them.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

from dfm_nb.base.metrics import read_metrics
from tests.processes import commands
from workbench import notebook_run

FOLDER = Path(__file__).parents[2] / "notebooks"
STRIP = "metadata.papermill cell.metadata.papermill cell.metadata.execution metadata.widgets"
FULL = "DFM_FULL" in os.environ
"""`make notebooks`: the same cells once more under nbmake, and workers of torchrun that are no forks."""
SMALL = {
    "00_tour": {
        "num_images": 48,
        "num_clips": 12,
        "model_size": "tiny",
        "train_iters": 8,
        "num_processes": 1,
        "num_steps": 4,
    },
    "01_prepare": {"num_images": 48, "num_clips": 12},
    "02_train": {"model_size": "tiny", "train_iters": 40, "stop_at": 12, "num_processes": 1},
    "03_generate": {"num_steps": 4, "reference_steps": 8},
    "04_text_corpus": {"num_captions": 300, "seq_length": 32},
    "05_parallelism": {"layouts": ["tensor_model_parallel_size"], "train_iters": 3},
    "06_finetune": {"num_pictures": 4, "num_kept": 4, "rank": 2, "train_iters": 3, "num_measured": 8},
    "07_wan": {"train_iters": 3, "num_steps": 2},
}
NOTEBOOKS = sorted(SMALL)


def test_there_is_a_test_for_every_notebook():
    assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == NOTEBOOKS


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs a notebook and those before it, once each, in a folder of their own."""
    folder, done = tmp_path_factory.mktemp("notebooks"), {}

    def run(name: str) -> notebook_run.Outcome:
        needs = {"02_train": "01_prepare", "03_generate": "02_train"}.get(name)
        if needs:
            assert not run(needs).error, f"{needs} comes before {name}"
        if name not in done:
            output = folder / "out" / f"{name}.ipynb"
            source = FOLDER / f"{name}.ipynb"
            done[name] = notebook_run.execute(source, output, SMALL[name], progress=False, cwd=folder)
        return done[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        if not FULL:
            patch.setenv("PYTHON_EXEC", str(commands().path / "python"))  # what torchrun starts its workers with
        yield run
    running = [" ".join(_argv(p)) for p in psutil.Process().children(recursive=True)]
    assert not [a for a in running if "dfm_nb" in a and "forkserver" not in a], (
        "left running"
    )  # that one serves other tests


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_headless_from_first_cell_to_last(ran, name):
    before = (FOLDER / f"{name}.ipynb").read_bytes()
    done = ran(name)
    assert done.error == ""
    assert done.results, "it publishes what a sweep would tabulate"
    assert done.report.stat().st_size > 50_000
    nb = nbformat.read(done.output, as_version=4)
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code if c.source.strip())
    assert (FOLDER / f"{name}.ipynb").read_bytes() == before


@pytest.mark.slow
def test_tour_leaves_clips_that_play_and_a_picture_of_the_run(ran):
    shown = ran("00_tour").output.read_text()
    assert '<video src=\\"data:video/mp4;base64,' in shown and "data:image/png;base64," in shown
    clips = sorted(ran("00_tour").output.parents[1].glob("runs/nb/tour/clips/*.mp4"))
    assert len(clips) == 3 and all(json.loads(p.with_suffix(".mp4.json").read_text())["seed"] == 1 for p in clips)


@pytest.mark.slow
def test_training_notebook_stops_and_goes_on(ran):
    text = ran("02_train").output.read_text()
    assert "stopped after iteration" in text and "Resumed from" in text
    assert ran("02_train").results["iterations"] == SMALL["02_train"]["train_iters"]


@pytest.mark.slow
def test_sweep_that_the_training_notebook_prints_runs_as_it_stands(ran):
    """The very command, with tiny parameters after it: a run folder for each value, and the runs differ."""
    folder = ran("02_train").output.parents[1]
    text = "\n".join(c.source for c in nbformat.read(FOLDER / "02_train.ipynb", as_version=4).cells)
    (printed,) = re.findall(r"^dfm notebook sweep .*$", text, re.M)
    words = shlex.split(printed.replace("notebooks/02_train.ipynb", str(FOLDER / "02_train.ipynb")))[1:]
    for name, value in {**SMALL["02_train"], "train_iters": 8, "stop_at": 3}.items():
        words += ["-p", name, str(value)]
    done = commands().run("dfm", *words, "--no-report", cwd=folder)
    assert done.returncode == 0 and "2 of 2 done" in done.stdout, done.stdout + done.stderr
    assert "Training loss: lr=0.0005" in (folder / "runs/nb/sweep/index.html").read_text()
    runs = [folder / "runs/nb" / f"lr-{lr}" for lr in ("0.0005", "0.002")]
    assert [[r["iteration"] for r in read_metrics(run) if "loss" in r] for run in runs] == [list(range(1, 9))] * 2
    assert read_metrics(runs[0])[-1] != read_metrics(runs[1])[-1] and not (folder / "runs/nb/lr-{lr}").exists()


@pytest.mark.slow
def test_what_the_form_says_is_what_the_training_notebook_uses(ran, tmp_path):
    folder = ran("02_train").output.parents[1]
    nb = nbformat.read(FOLDER / "02_train.ipynb", as_version=4)
    at = next(i for i, c in enumerate(nb.cells) if c.source.startswith("form = ConfigForm("))
    nb.cells.insert(at + 1, nbformat.v4.new_code_cell('form["train.train_iters"] = 10'))
    nbformat.write(nb, tmp_path / "edited.ipynb")
    values = {**SMALL["02_train"], "stop_at": 4, "run_dir": "runs/nb/edited"}
    done = notebook_run.execute(
        tmp_path / "edited.ipynb", tmp_path / "out.ipynb", values, progress=False, report=False, cwd=folder
    )
    assert done.error == "" and done.results["iterations"] == 10


@pytest.mark.slow
def test_generating_notebook_alone_takes_the_packaged_model(tmp_path):
    out, small = tmp_path / "out.ipynb", {**SMALL["03_generate"], "num_video_frames": 1}
    done = notebook_run.execute(FOLDER / "03_generate.ipynb", out, small, progress=False, report=False, cwd=tmp_path)
    assert done.error == "" and "the packaged butterflies stands in for it" in out.read_text()


@pytest.mark.slow
def test_parallel_notebook_finds_equal_losses(ran):
    assert 0 <= ran("05_parallelism").results["worst_relative_difference"] < 1e-5


# ---- what is in git ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_notebooks_are_stripped_of_outputs():
    command = [sys.executable, "-m", "nbstripout", "--verify", "--extra-keys", STRIP]
    checked = subprocess.run([*command, *map(str, FOLDER.glob("*.ipynb"))], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert STRIP in (FOLDER.parent / ".pre-commit-config.yaml").read_text(), "the hook strips the same"


@pytest.mark.slow
def test_strip_check_notices_an_output(tmp_path):
    nb = nbformat.read(FOLDER / "00_tour.ipynb", as_version=4)
    cell = next(c for c in nb.cells if c.cell_type == "code")
    cell.outputs = [nbformat.v4.new_output("stream", text="left behind")]
    nbformat.write(nb, tmp_path / "dirty.ipynb")
    command = [sys.executable, "-m", "nbstripout", "--verify", "--extra-keys", STRIP, str(tmp_path / "dirty.ipynb")]
    assert subprocess.run(command, capture_output=True).returncode == 1


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_written_as_promised(name):
    """Typed and explained parameters; short cells without def and class; what it needs,
    makes, takes; where to go next.
    """
    nb = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    parameters = notebook_run.parameters(FOLDER / f"{name}.ipynb")
    tagged = [c for c in nb.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1 and set(SMALL[name]) <= set(parameters)
    assert all(p.help and p.type != "any" for p in parameters.values())
    head = nb.cells[0].source
    assert all(f"| {word} |" in head for word in ("needs", "makes", "takes", "next"))
    code = [c.source for c in nb.cells if c.cell_type == "code"]
    assert max(len(c.splitlines()) for c in code) <= 20
    assert not [
        line for c in code for line in c.splitlines() if line.lstrip().startswith(("def ", "class ", "async def "))
    ]
    words = sum(len(c.source.split()) for c in nb.cells if c.cell_type == "markdown")
    assert words > 200, "words that teach"


# ---- failures ------------------------------------------------------------------------------------------------------

FAILS = """
from workbench import Launcher
run = Launcher("runs/fails", ["--mock", "--recipe", "demo", "model.size=tiny", "model.num_attention_heads=5"])
run.start()
await run.wait()
"""


@pytest.mark.slow
def test_failed_run_ends_the_traceback_with_its_own_error(tmp_path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FAILS.strip())])
    nb.metadata.update(kernelspec={"name": "python3", "display_name": "Python 3", "language": "python"})
    nbformat.write(nb, tmp_path / "fails.ipynb")
    done = notebook_run.execute(tmp_path / "fails.ipynb", tmp_path / "out.ipynb", {}, progress=False, cwd=tmp_path)
    assert done.error.startswith("RunFailed: ") and "num_attention_heads" in done.error
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    (error,) = [o for c in cells for o in c.get("outputs", []) if o.output_type == "error"]
    last = [line for line in "\n".join(error.traceback).splitlines() if line.strip()][-1]
    assert "num_attention_heads" in last and "hidden_size" in last
    assert "num_attention_heads" in done.report.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="the same cells as above: make notebooks")
def test_notebooks_run_under_nbmake(tmp_path):
    """The same cells started by nbmake: parameters are put in first, and the text notebook stands for all."""
    import papermill.iorw
    from papermill.parameterize import parameterize_notebook

    name = "04_text_corpus"
    nb = parameterize_notebook(papermill.iorw.load_notebook_node(str(FOLDER / f"{name}.ipynb")), SMALL[name])
    nbformat.write(nb, tmp_path / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", f"{name}.ipynb"]
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert (tmp_path / "runs/nb/text/blend.yaml").exists()
