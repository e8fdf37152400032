"""`dfm sweep`, `sweep` and `compare`: one folder a combination, and a second call does only what is left."""

import sys

import pytest

from dfm_nb import compare, sweep
from dfm_nb.base.argv import guard
from dfm_nb.base.run import Run
from dfm_nb.cli import main
from dfm_nb.config import ConfigError
from dfm_nb.experiments.runs import run_page
from dfm_nb.experiments.sweep import SweepOptions, run_all
from tests import tiny_run
from tests.json_files import write_metrics
from tests.processes import commands
from tests.refusals import refused

TINY = ["--mock", "--recipe", "demo", *tiny_run.SIZE, "validation.samples=false", "train.eval_interval=2"]


def run_of(folder, lr, losses):
    run = Run.create(folder)
    run.config_file.write_text(f"train:\n  train_iters: 3\noptimizer:\n  lr: {lr}\n")
    for i, (loss, val_loss) in enumerate(losses, 1):
        step = {"iteration": i, "loss": loss, "elapsed_s": 2.0 * i}
        write_metrics(folder, step, {"iteration": i, "val_loss": val_loss})


def test_compare_says_how_far_how_well_and_what_differs(tmp_path):
    run_of(tmp_path / "a", 0.1, [(3, 5), (2, 4), (1, 6)])
    run_of(tmp_path / "b", 0.2, [(4, 7)])
    table = compare(tmp_path)
    assert table.index.tolist() == ["a", "b"] and table["optimizer.lr"].tolist() == [0.1, 0.2]
    assert "train.train_iters" not in table
    figures = table.loc["a", ["state", "iterations", "best_val_loss", "best_at", "val_loss", "loss", "seconds"]]
    assert figures.tolist() == ["finished", 3, 4, 2, 6, 1, 6.0] and table["state"]["b"] == "stopped"
    assert compare([tmp_path / "b"]).shape == (1, 7)
    page = run_page(tmp_path / "a")
    assert "optimizer.lr" in page and "data:image/png" in page and "http" not in page
    refused("none", compare, tmp_path / "none", error=FileNotFoundError)


def test_a_combination_has_one_folder_however_its_values_are_written(tmp_path):
    written = SweepOptions.parse(["--grid", "optimizer.lr=1e-3,3e-3", "model.P_mean=-1.2", "--mock"])
    called = SweepOptions(grid={"optimizer.lr": [0.001, 0.003], "model.P_mean": [-1.2]}, mock=True)
    assert list(written.points()) == list(called.points()) == ["optimizer.lr=0.001", "optimizer.lr=0.003"]
    texts = SweepOptions(grid={"dataset.path": ["a,b", "1.10", None]}).points()
    assert [p.overrides for p in texts.values()] == [[f"dataset.path={v}"] for v in ("a,b", "1.10", "null")]


def test_every_combination_is_checked_before_the_first_run(tmp_path):
    with pytest.raises(ConfigError, match="optimizer.lr"):
        sweep({"optimizer.lr": [0.1, -1]}, mock=True, run_dir=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_second_sweep_does_what_is_left_and_a_failed_run_is_a_row(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(commands().path / "python"))
    folder = tmp_path / "s"
    words = ["sweep", "--run-dir", str(folder), *TINY, "--jobs", "2", "--grid", "optimizer.lr=1e-3,3e-3"]
    assert guard(main, words) == 0
    before = (folder / "optimizer.lr=0.001/metrics.jsonl").read_bytes()
    (folder / "optimizer.lr=0.01").write_text("in the way")
    assert guard(main, [*words[:-1], "optimizer.lr=1e-3,1e-2"]) == 1
    said = capfd.readouterr().out
    assert "-- optimizer.lr=0.001 is finished" in said and "-- optimizer.lr=0.01 failed" in said
    assert (folder / "optimizer.lr=0.001/metrics.jsonl").read_bytes() == before
    (folder / "optimizer.lr=0.01").unlink()
    flags = {"recipe": "demo", "overrides": TINY[3:], "mock": True, "run_dir": folder}
    table = sweep({"optimizer.lr": [1e-3, 3e-3]}, **flags)
    assert table["state"].tolist() == ["finished"] * 2 and "started" not in capfd.readouterr().out
    for more in (["model.shift_tokens=64"], []):  # set, and left out again
        sweep({"optimizer.lr": [1e-3]}, **flags | {"overrides": [*TINY[3:], *more]})
        assert "-- run started" in capfd.readouterr().out


def test_tables_of_somebody_else_are_kept(tmp_path):
    (tmp_path / "a.log").write_text("mine")
    refused(r"a\.log", run_all, {"a": ["false"]}, tmp_path, 1, lambda ended: None, error=FileExistsError)
    assert (tmp_path / "a.log").read_text() == "mine"
