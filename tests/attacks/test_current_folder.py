"""Files of the folder that one stands in are data: none of our processes imports one, and a kernel imports it last."""

import os
import subprocess
import sys

import pytest

from dfm_nb.base.torchrun import torchrun_argv
from tests.installed import install
from tests.notebook_files import write_notebook
from workbench.notebook_run import execute

pytestmark = pytest.mark.slow

EVIL = "psutil tqdm pickle multiprocessing ipykernel_launcher moths".split()
PROGRAM = "import helper, os, pathlib, multiprocessing; pathlib.Path(os.environ['TO']).write_text(str(helper.X))"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "foreign"
    install(place, "moths", "[dfm_nb.sources]\nmoths = moths\n[dfm_nb.verbs]\nmoths = moths:VERBS\n")
    for name in EVIL:
        (place / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w'); raise SystemExit(7)")
    monkeypatch.chdir(place)
    yield place
    assert not (tmp_path / "ran").exists()


def test_no_process_of_ours_imports_from_it(folder):
    more = ["--source=drawings", "--short-side=32", "--limit=4", "--output-dir=../out"]
    subprocess.run([sys.executable, "-m", "dfm_nb", "prepare", "--nproc-per-node=1", *more], check=True)


def test_a_program_keeps_its_own_folder(folder, tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("X = 5")
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("TO", str(tmp_path / "said"))
    subprocess.run(torchrun_argv(str(tmp_path / "program.py"), [], 1), check=True)
    assert (tmp_path / "said").read_text() == "5"


def test_a_notebook_imports_the_file_next_to_it_and_shadows_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "")
    (folder / "helper.py").write_text("X = 5")
    code = "import os, helper, psutil, workbench; from dfm_nb.base.plugins import names\n"
    code += "workbench.publish(x=helper.X, safe=os.environ.get('PYTHONSAFEPATH'), moths='moths' in names('sources'))"
    write_notebook("a.ipynb", code)
    done = execute("a.ipynb", tmp_path / "b.ipynb", {}, report=False, cwd=os.getcwd())
    assert done.error == "" and done.results == {"x": 5, "safe": None, "moths": False}
