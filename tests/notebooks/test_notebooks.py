"""Every notebook from its first cell to its last, headless, with small parameters; stripped in git.

The notebooks run in their order in one folder, as a person would go through them.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill.iorw
import psutil
import pytest
from papermill.parameterize import parameterize_notebook

from scripts.executed_notebooks import in_copies
from tests.browser.lab_page import find_browser
from tests.processes import commands
from workbench import notebook_run

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "notebooks"
STRIP = "metadata.papermill cell.metadata.papermill cell.metadata.execution metadata.widgets"
FULL = "DFM_FULL" in os.environ
"""`make notebooks`: one of them also under nbmake, and workers of torchrun that are no forks."""
DATA = {"num_images": 24, "num_clips": 8}
SMALL = {
    "00_tour": {**DATA, "model_size": "tiny", "train_iters": 8, "num_processes": 1, "num_steps": 4},
    "01_prepare": DATA,
    "02_train": {"model_size": "tiny", "train_iters": 16, "stop_at": 6, "num_processes": 1},
    "03_generate": {"num_steps": 2, "reference_steps": 4},
    "04_text_corpus": {"num_captions": 300, "seq_length": 32},
    "05_parallelism": {"layouts": ["tensor_model_parallel_size"], "train_iters": 3},
    "06_your_own_pictures": {"minutes": 0.02, "short_side": 32, "num_measured": 8},
    "07_wan": {},
    "08_network": {"num_steps": 4},
    "09_lora": {"num_pictures": 4, "num_kept": 4, "rank": 2, "train_iters": 3, "num_measured": 8},
}
EXERCISE = "num_kept = 0; rank = 4"
"""Of `09_lora`: what a reader changes before running its cells once more."""
NOTEBOOKS = sorted(p.stem for p in FOLDER.glob("*.ipynb"))
IN_BROWSER = NOTEBOOKS if FULL else ["00_tour"]
"""`tests/browser` runs these; outside `make notebooks` a notebook is run once."""
HEADLESS = [n for n in NOTEBOOKS if FULL or n not in IN_BROWSER or find_browser() is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where they all run; no process is left when they are done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        if not FULL:
            patch.setenv("PYTHON_EXEC", str(commands().path / "python"))  # what torchrun starts its workers with
        yield tmp_path_factory.mktemp("notebooks")
    running = [" ".join(_argv(p)) for p in psutil.Process().children(recursive=True)]
    assert not [a for a in running if "dfm_nb" in a and "forkserver" not in a]  # that one serves other tests


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def with_exercise(source: Path, target: Path) -> Path:
    """The notebook, and its cells again with other values, in the same kernel; the exam is the same and stays out."""
    notebook = nbformat.read(source, 4)
    cells = [c for c in notebook.cells if c.cell_type == "code" and "parameters" not in c.metadata.get("tags", [])]
    again = [cell.source for cell in cells if "evaluate_model(name" not in cell.source]
    assert len(again) == len(cells) - 1
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in (EXERCISE, *again)]
    nbformat.write(notebook, target)
    return target


@pytest.mark.parametrize("name", HEADLESS)
def test_notebook_runs_headless_from_first_cell_to_last(folder, name):
    source, output = FOLDER / f"{name}.ipynb", folder / "out" / f"{name}.ipynb"
    if name == "09_lora":
        source = with_exercise(source, folder / f"{name}.ipynb")
    done = notebook_run.execute(source, output, SMALL[name], progress=False, cwd=folder)
    assert done.error == "" and done.results and done.report.stat().st_size > 50_000
    shown = output.read_text()
    if name == "02_train":
        assert "Resumed from" in shown and done.results["iterations"] == 16
        assert "data:image/png;base64," in shown, "the monitor's picture"
    if name == "03_generate":
        assert '<video src=\\"data:video/mp4;base64,' in shown
    if name == "05_parallelism":
        assert 0 <= done.results["worst_relative_difference"] < 1e-5
    if name == "08_network":
        assert 0 < done.results["largest_difference"] < 1e-4
    cells = nbformat.read(output, 4).cells
    streams = [o for cell in cells for o in cell.get("outputs", []) if o.get("name") == "stderr"]
    assert not [o.text for o in streams if "prompt" in o.text], "a red box about the notebook's own prompts"


def _code(path: Path) -> list[str]:
    """The lines of code cells that are neither blank nor comments."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    lines = [line for cell in cells for line in cell.source.splitlines()]
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def test_code_of_notebooks_is_short():
    assert sum(len(_code(path)) for path in FOLDER.glob("*.ipynb")) <= 560


def test_the_network_has_sixty_lines():
    """All functions of the notebook but `denoise` and `D`, which call it."""
    count = 0
    counted = False
    for line in _code(FOLDER / "08_network.ipynb"):
        if not line.startswith(" "):
            counted = line.startswith("def ") and not line.startswith(("def denoise(", "def D("))
        count += counted
    assert count == 60


def test_notebooks_are_stripped_of_outputs():
    command = [sys.executable, "-m", "nbstripout", "--verify", "--extra-keys", STRIP]
    checked = subprocess.run([*command, *map(str, FOLDER.glob("*.ipynb"))], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_copies_in_the_docs_have_the_sources_of_the_notebooks():
    """`make docs` writes them anew."""
    copies = sorted((FOLDER.parent / "docs/notebooks").glob("*.ipynb"))
    assert copies and sum(path.stat().st_size for path in copies) < 3e6
    for copy in copies:
        shown = [cell.source for cell in nbformat.read(copy, 4).cells]
        assert shown == [in_copies(cell.source) for cell in nbformat.read(FOLDER / copy.name, 4).cells], copy.name


@pytest.mark.skipif(not FULL, reason="the same cells as above: make notebooks")
def test_notebooks_run_under_nbmake(tmp_path):
    """The same cells started by nbmake: parameters are put in first, and the text notebook stands for all."""
    name = "04_text_corpus"
    nb = parameterize_notebook(papermill.iorw.load_notebook_node(str(FOLDER / f"{name}.ipynb")), SMALL[name])
    nbformat.write(nb, tmp_path / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", f"{name}.ipynb"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "runs/nb/text/blend.yaml").exists()
