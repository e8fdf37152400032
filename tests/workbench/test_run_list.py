"""The list of runs: what it shows, and that it deletes only what a run of this machine has written."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from dfm_nb.base.metrics import Metrics
from dfm_nb.base.run import Run
from dfm_nb.base.video import write_png
from workbench import Monitor, Runs


@pytest.fixture
def folder(tmp_path):
    for name, lr in (("a", 0.1), ("deep/b", 0.2)):
        run = Run.create(tmp_path / name)
        run.save_config(f"train:\n  train_iters: 9\noptimizer:\n  lr: {lr}\n")
        with Metrics(run.metrics_file) as metrics:
            metrics.write({"iteration": 1, "loss": 0.5, "elapsed_s": 1.0})
            metrics.write({"iteration": 1, "val_loss": 0.25})
        run.claim()
        run.release()
        write_png(run.sample_folder(1) / "a.png", np.zeros((16, 16, 3), np.uint8))
    return tmp_path


def test_runs_show_their_samples_and_what_differs_and_open_in_a_monitor(folder):
    runs = Runs(folder)
    page = runs.kept_html()
    assert list(runs.paths) == ["a", "deep/b"] and page.count("data:image/png") == 2
    assert "lr 0.2" in page and "best validation 0.2500 at 1" in page and "stopped" in page
    assert isinstance(runs.open("a", "deep/b"), Monitor)
    assert "optimizer.lr" in runs.report("a").read_text()
    with pytest.raises(ValueError, match="'c'"):
        runs.open("c")
    assert "0 in" in Runs(folder / "none").kept_html()


def test_only_a_run_of_ours_is_deleted_after_a_confirmation(folder):
    shutil.copytree(folder / "a", folder / "copied")
    (folder / "deep/b/notes.txt").write_text("mine")
    runs = Runs(folder)
    for name, said in (("a", "confirm"), ("copied", "copied"), ("deep/b", "notes.txt")):
        with pytest.raises(ValueError, match=said):
            runs.delete(name, confirm=name != "a")
    assert len(runs.paths) == 3 and all(path.is_dir() for path in runs.paths.values())
    delete = next(b for b in runs.widget.children[2].children if b.description == "Delete")
    runs._chosen.value = ("a",)
    delete.click()
    assert (folder / "a").exists() and "confirm" in runs._below.children[0].value
    delete.click()
    assert not (folder / "a").exists() and list(runs.paths) == ["copied", "deep/b"]
