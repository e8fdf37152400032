"""`dfm notebook run | sweep | parameters` and `dfm lab`, on a notebook of three cells."""

import csv
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from dfm_nb import cli
from dfm_nb.base.argv import guard
from workbench import lab, notebook_run, notebook_sweep

CELLS = """
steps: int = 3  # how many
lr: float = 0.1  # how fast
name: str = "a"  # what
fast: bool = False  # hurry
sizes: list[int] = [1, 2]  # which
work_dir: str = "runs/x"  # where
"""
BODY = """
import workbench
print(f"{steps=} {lr=} {name=} {fast=} {sizes=}")
workbench.publish(product=steps * lr, where=work_dir)
if steps > 5:
    raise RuntimeError("one\\ntoo many steps")
"""


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nb = nbformat.v4.new_notebook()
    nb.metadata.update(kernelspec={"name": "python3", "display_name": "Python 3", "language": "python"})
    cell = nbformat.v4.new_code_cell(CELLS.strip(), metadata={"tags": ["parameters"]})
    nb.cells = [nbformat.v4.new_markdown_cell("# Three cells"), cell, nbformat.v4.new_code_cell(BODY.strip())]
    nbformat.write(nb, tmp_path / "three.ipynb")
    return Path("three.ipynb")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-p", "stepz", "3"], "three.ipynb has no parameter 'stepz'; did you mean 'steps'?"),
        (["-p", "steps", "many"], "parameter 'steps' must be a whole number; got 'many'; its default is 3"),
        (["-p", "steps", "1.5"], "parameter 'steps' must be a whole number; got '1.5'"),
        (["-p", "steps", "True"], "parameter 'steps' must be a whole number; got 'True'"),
        (["-p", "lr", "slow"], "parameter 'lr' must be a number; got 'slow'"),
        (["-p", "fast", "maybe"], "parameter 'fast' must be true or false; got 'maybe'"),
        (["-p", "sizes", "3"], "parameter 'sizes' must be a list; got '3'"),
        (["-p", "steps", "1", "-p", "steps", "2"], "-p steps is given twice"),
    ],
)
def test_wrong_parameters_are_one_sentence_and_start_no_kernel(notebook, capsys, argv, said):
    assert guard(cli.main, ["notebook", "run", str(notebook), *argv, "--output", "out.ipynb"]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
    assert not Path("out.ipynb").exists()


def test_values_take_the_type_of_the_parameter(notebook):
    known = notebook_run.parameters(notebook)
    given = {"steps": "1e1", "lr": "2", "name": "007", "fast": "yes", "sizes": "(3, 4)"}
    values = notebook_run.convert(given, known)
    assert values == {"steps": 10, "lr": 2.0, "name": "007", "fast": True, "sizes": [3, 4]}
    assert [type(v) for v in values.values()] == [int, float, str, bool, list]
    assert known["steps"] == notebook_run.Parameter("steps", "int", "3", "how many")


@pytest.mark.slow
def test_run_keeps_the_notebook_and_a_page(notebook, capfd):
    before = notebook.read_bytes()
    argv = ["notebook", "run", str(notebook), "-p", "steps", "4", "-p", "name", "b c", "--output", "out/done.ipynb"]
    assert guard(cli.main, argv) == 0
    assert "steps=4 lr=0.1 name='b c' fast=False sizes=[1, 2]" in capfd.readouterr().out
    assert "steps=4" in json.dumps(json.loads(Path("out/done.ipynb").read_text()))
    page = Path("out/done.html").read_text()
    assert "Three cells" in page and "steps=4" in page
    assert notebook_run.published("out/done.ipynb") == {"product": 0.4, "where": "runs/x"}
    assert notebook.read_bytes() == before


@pytest.mark.slow
def test_failed_cell_is_exit_code_1_with_its_error_and_the_outputs_so_far(notebook, capfd):
    assert guard(cli.main, ["notebook", "run", str(notebook), "-p", "steps", "9", "--output", "bad.ipynb"]) == 1
    captured = capfd.readouterr()
    assert captured.err.strip().splitlines()[-1] == "error: RuntimeError: too many steps (cell 3)"
    assert "steps=9" in Path("bad.ipynb").read_text() and "too many steps" in Path("bad.html").read_text()


def test_output_must_be_another_notebook(notebook):
    with pytest.raises(ValueError, match="must not be the notebook itself"):
        notebook_run.execute(notebook, notebook, {})
    with pytest.raises(ValueError, match=r"must end in \.ipynb"):
        notebook_run.execute(notebook, "out.html", {})
    with pytest.raises(FileNotFoundError, match=r"no notebook tree.ipynb; did you mean three.ipynb\?"):
        notebook_run.existing("tree.ipynb")


def test_grid_texts_are_parted_at_commas_outside_brackets():
    parsed = notebook_sweep.parse_grid(["steps=1,2", "sizes=[1, 2],[3]", "name='a,b',c"])
    assert parsed == {"steps": ["1", "2"], "sizes": ["[1, 2]", "[3]"], "name": ["'a,b'", "c"]}
    for wrong, said in (["steps", "needs name=a,b"], ["steps=1,,2", "needs name=a,b"], ["steps=1,1", "a value twice"]):
        with pytest.raises(ValueError, match=said):
            notebook_sweep.parse_grid([wrong])
    with pytest.raises(ValueError, match="has 'a' twice"):
        notebook_sweep.parse_grid(["a=1", "a=2"])


def test_sweep_checks_every_point_before_the_first_run(notebook, capsys):
    argv = ["notebook", "sweep", str(notebook), "--grid", "steps=1,many", "--output-dir", "grid"]
    assert guard(cli.main, argv) == 2
    assert "got 'many'" in capsys.readouterr().err
    assert not Path("grid").exists()


@pytest.mark.slow
def test_sweep_runs_the_grid_with_a_table_and_a_csv(notebook, capsys):
    argv = ["notebook", "sweep", str(notebook), "--grid", "steps=2,9", "lr=0.5", "--jobs", "2", "--output-dir", "grid"]
    assert guard(cli.main, argv) == 1
    out = capsys.readouterr().out
    assert out.index("-- 001 started") < out.index("-- 000 done"), "two at a time"
    table = out[out.index("run  steps") :].splitlines()
    assert table[2].split()[:4] == ["000", "2", "0.5", "done"] and "1 of 2 done" in table[-1]
    rows = list(csv.DictReader(Path("grid/results.csv").open()))
    assert [r["state"] for r in rows] == ["done", "failed"] and float(rows[0]["product"]) == 1.0
    assert rows[1]["error"] == "RuntimeError: too many steps (cell 3)"
    assert [r["where"] for r in rows] == [os.path.join("grid", n) for n in ("000", "001")], "a folder for each run"
    assert Path("grid/000.html").exists() and Path("grid/001.ipynb").exists()


# ---- dfm lab ------------------------------------------------------------------------------------------------------


def test_lab_says_that_a_port_is_taken(tmp_path, capsys):
    with socket.socket() as s:
        s.bind((lab.HOST, 0))
        s.listen()
        port = s.getsockname()[1]
        assert guard(cli.main, ["lab", "--port", str(port), "--dir", str(tmp_path)]) == 2
    assert f"port {port} is taken" in capsys.readouterr().err
    assert not (tmp_path / "notebooks").exists()


def test_lab_copies_the_notebooks_once(tmp_path):
    assert lab.provide(tmp_path / "notebooks") == 6
    mine = tmp_path / "notebooks" / "00_tour.ipynb"
    mine.write_text("mine")
    assert lab.provide(tmp_path / "notebooks") == 0 and mine.read_text() == "mine"


def test_installed_package_brings_the_notebooks(tmp_path, monkeypatch):
    root = Path(lab.__file__).parents[1]
    files = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert files[lab.SHARE] == ["notebooks/*.ipynb"] and len(list(root.glob("notebooks/*.ipynb"))) == 6
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "site-packages/workbench/lab.py"))
    monkeypatch.setattr(lab.sysconfig, "get_path", lambda _name: str(tmp_path))
    assert lab.shipped() is None
    (tmp_path / lab.SHARE).mkdir(parents=True)
    (tmp_path / lab.SHARE / "00_tour.ipynb").write_text("{}")
    assert lab.shipped() == tmp_path / lab.SHARE and lab.provide(tmp_path / "mine") == 1


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_lab_serves_the_tour_on_loopback_for_the_token_only(tmp_path):
    port = lab.free_port(None)
    env = {**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path / "c"), "JUPYTER_DATA_DIR": str(tmp_path / "d")}
    env.pop("JUPYTER_TOKEN", None)
    command = [sys.executable, "-m", "dfm_nb", "lab", "--port", str(port), "--no-browser", "--dir", str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            lines = [server.stdout.readline() for _ in range(2)]
            url = lines[1].split()[1]
            assert url.startswith(f"http://127.0.0.1:{port}/lab/tree/notebooks/00_tour.ipynb?token=")
            token, contents = url.partition("token=")[2], f"http://127.0.0.1:{port}/api/contents/notebooks"
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert _status(f"{contents}?token={token}") == 200
                    break
                except urllib.error.URLError:
                    assert server.poll() is None and time.monotonic() < deadline
                    time.sleep(0.3)
            assert _status(contents) == 403 and _status(f"{contents}?token=wrong") == 403
            assert len(token) >= 32 and token not in " ".join(open(f"/proc/{server.pid}/cmdline").read().split("\0"))
        finally:
            server.terminate()
