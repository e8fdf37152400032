"""`dfm notebook run | sweep | parameters` and `dfm lab`, on a notebook of three cells."""

import csv
import logging
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from dfm_nb import cli
from dfm_nb.base.argv import guard
from dfm_nb.experiments.sweep import parse_grid
from tests.notebook_files import write_notebook
from tests.processes import commands, wait_until
from tests.refusals import refused
from workbench import check_parameters, lab, notebook_run
from workbench.notebook_cli import SweepOptions

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
    [(["-p", "stepz", "3"], "'stepz'"), (["-p", "steps", "1.5"], "got 1.5"), (["-p", "sizes", "3"], "'sizes'")],
)
def test_wrong_parameters_are_one_sentence_and_start_no_kernel(notebook, wrong_use, argv, said):
    error = wrong_use(guard, cli.main, ["notebook", "run", str(notebook), *argv, "--output", "out.ipynb"])
    assert said in error and len(error.strip().splitlines()) == 1
    assert not Path("out.ipynb").exists()


@pytest.mark.slow
def test_run_keeps_the_notebook_and_a_page(notebook, capfd):
    before = notebook.read_bytes()
    words = "-p steps 4 -p lr 2 -p name 007 -p fast yes -p sizes [3,4] --output out/done.ipynb"
    assert guard(cli.main, ["notebook", "run", str(notebook), *words.split()]) == 0
    assert "steps=4 lr=2.0 name='007' fast=True sizes=[3, 4]" in capfd.readouterr().out
    page = Path("out/done.html").read_text()
    assert "Three cells" in page and "steps=4" in page
    assert notebook_run.published("out/done.ipynb") == {"product": 8.0, "where": "runs/x"}
    assert notebook.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("two", lambda: write_notebook("two.ipynb", "a: int = 1", "a: int = 2", tagged=2)),
        ("nope", lambda: write_notebook("nope.ipynb", "a: int = 1", tagged=1, kernel="nope")),
        (
            "odd",
            lambda: Path("odd.ipynb").write_text('{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "foo"}]}'),
        ),
        ("deep", lambda: Path("deep.ipynb").write_text("[" * 100_000)),
        ("three", lambda: Path("three.ipynb").write_text('{"nbformat": 3, "metadata": {}, "worksheets": []}')),
    ],
)
def test_a_notebook_that_cannot_be_run_is_one_sentence(tmp_path, monkeypatch, wrong_use, name, write):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "raiseExceptions", False)  # a handler of another test may hold its closed stream
    write()
    error = wrong_use(guard, cli.main, ["notebook", "run", f"{name}.ipynb", "--quiet", "--output", "out.ipynb"])
    assert f"{name}.ipynb" in error and len(error.strip().splitlines()) == 1


def test_optional_parameters_take_values_and_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = 'n: int | None = None  # count\nlr: "float | None" = 1.0\nname: Optional[str] = None'
    write_notebook("{n}.ipynb", source, tagged=1)
    known = notebook_run.parameters("{n}.ipynb")
    assert notebook_run.convert({"n": "3", "lr": "1e-3", "name": "3"}, known) == {"n": 3, "lr": 1e-3, "name": "3"}
    assert notebook_run.convert({"n": "None", "name": "null"}, known) == {"n": None, "name": None}
    deep = "1" + "+1" * 5000
    assert notebook_run.convert({"any": deep}, {"any": notebook_run.Parameter("any", "None", "", "")}) == {"any": deep}
    refused("'n'", notebook_run.convert, {"n": "x"}, known)


@pytest.mark.slow
def test_a_kernel_that_dies_leaves_the_page_of_what_ran(tmp_path, monkeypatch):
    """And braces in a name are no parameters; a link in the place of the copy is replaced, and so is a copy of ours."""
    monkeypatch.chdir(tmp_path)
    Path("theirs").write_text("precious")
    Path("{n}-out.ipynb").symlink_to("theirs")
    cells = "n: int = 1", "print('before')", "import os; os.kill(os.getpid(), 9)", "print('after')"
    write_notebook("{n}.ipynb", *cells, tagged=1)
    done = notebook_run.execute("{n}.ipynb", "{n}-out.ipynb", {"n": 2}, progress=False, overwrite=True)
    assert "cell 4 of 5" in done.error and not Path("{n}-out.ipynb").is_symlink()
    assert Path("theirs").read_text() == "precious"
    assert done.report is not None and "before" in done.report.read_text()
    monkeypatch.setattr("papermill.execute_notebook", lambda *_, **__: None)
    notebook_run.execute("{n}.ipynb", "{n}-out.ipynb", {}, progress=False)


def test_output_must_be_another_notebook(notebook):
    for output in (notebook, "out.html"):
        refused(str(output), notebook_run.execute, notebook, output, {})
    refused("tree.ipynb", notebook_run.existing, "tree.ipynb", error=FileNotFoundError)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": "one"}, "'prompts'.*'one'"),
        ({"train_iters": -5}, "train.train_iters"),
        ({"images": -1}, "num.images"),
        ({"steps": 0}, "num.steps"),
    ],
)
def test_notebook_checks_its_own_parameters(given, said):
    cell = "train_iters: int = 3; prompts: list[str] = []; processes: int = 1; images: int = 4; steps: int = 2"
    check = (
        'check_parameters({"train.train_iters": train_iters, "optimizer.lr": 0.1}, num_processes=processes, '
        'prepare={"num_images": images}, generate={"num_steps": steps})'
    )
    space = {"check_parameters": check_parameters}
    exec(cell, space)
    exec(check, space)
    refused(said, exec, check, space | given)


def test_names_of_parameters_in_braces_are_their_values(notebook):
    fixed = [("name", "{lr}-{steps}-{other}"), ("steps", "3")]
    sweep = SweepOptions(notebook=str(notebook), grid=["lr=0.1,2e-3"], parameter=fixed, output_dir="grid")
    rows = sweep.points(notebook_run.parameters(notebook), {"lr": ["0.1", "2e-3"]})
    assert [values["name"] for values in rows.values()] == ["0.1-3-{other}", "2e-3-3-{other}"]


def test_grid_texts_are_parted_at_commas_outside_quotes():
    parsed = parse_grid(["steps=1,2", "sizes=[1, 2],[3]", 'name="a,b",c', "lr=1e-3"])
    assert parsed == {"steps": ["1", "2"], "sizes": ["[1, 2]", "[3]"], "name": ["a,b", "c"], "lr": ["0.001"]}
    assert parse_grid(["name=007,1.10"], lambda name: name == "name") == {"name": ["007", "1.10"]}
    for wrong in (["steps"], ["steps=1,,2"], ["steps='a"], ["steps=1,1"], ["steps=1", "steps=2"]):
        refused("steps", parse_grid, wrong)


def test_sweep_checks_every_point_before_the_first_run(notebook, wrong_use):
    argv = ["notebook", "sweep", str(notebook), "--grid", "steps=1,many", "--output-dir", "grid"]
    assert "got 'many'" in wrong_use(guard, cli.main, argv)
    assert not Path("grid").exists()


@pytest.mark.slow
def test_sweep_runs_the_grid_with_a_table_and_a_csv(notebook, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(commands().path / "python"))
    argv = ["notebook", "sweep", str(notebook), "--grid", "steps=2,9", "lr=0.5", "--jobs", "2", "--output-dir", "grid"]
    assert guard(cli.main, argv) == 1
    out = capsys.readouterr().out
    started, done = out.find("-- 001 started"), out.find("-- 000 done")
    assert 0 <= started < done, f"two at a time:\n{out}"
    assert out[out.index("run steps") :].splitlines()[1].split()[:4] == ["000", "2", "0.5", "done"]
    rows = list(csv.DictReader(Path("grid/results.csv").open()))
    assert [r["state"] for r in rows] == ["done", "failed"] and float(rows[0]["product"]) == 1.0
    assert "too many steps" in rows[1]["error"]
    assert [r["where"] for r in rows] == [os.path.join("grid", n) for n in ("000", "001")], "a folder for each run"
    assert Path("grid/000.html").exists() and Path("grid/001.ipynb").exists()


# ---- dfm lab ------------------------------------------------------------------------------------------------------


def test_lab_says_that_a_port_is_taken(tmp_path, wrong_use):
    with socket.socket() as s:
        s.bind((lab.HOST, 0))
        s.listen()
        port = s.getsockname()[1]
        assert str(port) in wrong_use(guard, cli.main, ["lab", "--port", str(port), "--dir", str(tmp_path)])
    assert not (tmp_path / "notebooks").exists()


def test_checkout_is_worked_on_in_a_copy(tmp_path):
    root = lab.shipped().parent
    assert lab.working_copy(root) == root / "my-notebooks" and lab.working_copy(tmp_path) == tmp_path / "notebooks"
    shipped = {p.name for p in lab.shipped().glob("*.ipynb")}
    assert lab.provide(tmp_path / "my-notebooks") == len(shipped) and lab.provide(tmp_path / "my-notebooks") == 0
    assert (tmp_path / "my-notebooks/images/butterflies.webp").is_file()
    (tmp_path / "my-notebooks/02_train.ipynb").unlink()
    assert lab.provide(tmp_path / "my-notebooks") == 1
    (tmp_path / "other").mkdir()
    assert lab.provide(tmp_path / "other") == 0, "a folder of somebody's own"


def _status(url: str) -> int | None:
    """None without a server."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return None


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
            wait_until(lambda: server.poll() is not None or _status(contents), "an answer", pause_s=0.3)
            queries = f"?token={token}", "?token=wrong", ""
            assert [_status(contents + query) for query in queries] == [200, 403, 403]
            assert len(token) >= 32 and token not in " ".join(open(f"/proc/{server.pid}/cmdline").read().split("\0"))
        finally:
            server.terminate()
