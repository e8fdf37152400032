"""The list of runs: what it shows, and that it deletes only what a run of this machine has written."""

import os
import shutil
import threading

import pytest

from dfm_nb.base.run import Run
from dfm_nb.base.video import write_png
from tests.frames import black
from tests.json_files import write_metrics
from tests.processes import wait_until
from tests.refusals import refused
from workbench import Monitor, Runs
from workbench.run_list import BELOW, FILES


@pytest.fixture
def folder(tmp_path):
    for name, lr in (("a", 0.1), ("deep/b", 0.2)):
        run = Run.create(tmp_path / name)
        run.config_file.write_text(f"train:\n  train_iters: 9\noptimizer:\n  lr: {lr}\n")
        write_metrics(run.path, {"iteration": 1, "loss": 0.5, "elapsed_s": 1.0}, {"iteration": 1, "val_loss": 0.25})
        run.claim()
        run.release()
        write_png(run.sample_folder(1) / "a.png", black(16, 16))
    return tmp_path


def test_runs_show_their_samples_and_what_differs_and_open_in_a_monitor(folder):
    runs = Runs(folder)
    page = runs.kept_html()
    assert list(runs.paths) == ["a", "deep/b"] and page.count("data:image/png") == 2
    first = runs._rows()[0]["cells"]
    assert first[:4] == ["a", "stopped", 1, 0.25] and first[-1] == 0.1 and runs._heads()[-1] == "lr"
    assert isinstance(runs.open("a", "deep/b"), Monitor)
    assert "optimizer.lr" in runs.report("a").read_text()
    refused("'c'", runs.open, "c")
    assert "0 in" in Runs(folder / "none").kept_html()


def test_a_run_with_a_damaged_line_is_one_row_that_says_so(folder):
    with (folder / "a/metrics.jsonl").open("a") as file:
        file.write("torn\n")
    runs = Runs(folder)
    assert runs.table["state"].tolist() == ["damaged: line 3", "stopped"] and runs.table["loss"].tolist() == [0.5, 0.5]
    assert "damaged: line 3" in runs.kept_html() and runs.report("a").is_file()


def test_the_table_follows_a_run_and_keeps_what_is_ticked(folder, monkeypatch):
    monkeypatch.setattr("workbench.run_list.LOOK_S", 0.05)
    runs = Runs(folder)
    runs.widget  # noqa: B018
    runs._table.chosen = ["a"]
    write_metrics(folder / "a", {"iteration": 9, "loss": 0.125, "elapsed_s": 2.0})
    wait_until(lambda: runs._table.rows[0]["cells"][1:3] == ["finished", 9], "the new figures")
    assert 0.125 in runs._table.rows[0]["cells"] and runs._table.chosen == ["a"]
    Runs(folder).widget  # noqa: B018
    wait_until(lambda: sum(t.name == "dfm-runs" for t in threading.enumerate()) == 1, "a second table ends the first")


def test_tags_and_notes_are_kept_in_a_file_of_the_run(folder):
    runs = Runs(folder)
    runs.widget.children[1]._handle_custom_msg({"name": "deep/b", "tags": "best", "note": "wide & slow"}, [])
    assert [(row["tags"], row["note"]) for row in Runs(folder)._rows()] == [("", ""), ("best", "wide & slow")]
    assert "wide &amp; slow" in Runs(folder).kept_html()
    assert runs.delete("deep/b", confirm=True).startswith("deleted")


def test_only_a_run_of_ours_is_deleted_after_a_confirmation(folder):
    shutil.copytree(folder / "a", folder / "copied")
    shutil.copytree(folder / "a", folder / "bare")
    (folder / "bare/.run.json").unlink()
    theirs = folder / "deep/b/samples/thesis.txt", folder / "deep/b/checkpoints/iter_0000001/model.pt"
    runs = Runs(folder)
    for name, said in (("a", "confirm"), ("copied", "not created on this machine"), ("bare", "record")):
        refused(said, runs.delete, name, confirm=name == "bare")
    for file in theirs:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
        refused(file.name, runs.delete, "deep/b", confirm=True)
        file.unlink()
    assert len(runs.paths) == 4 and all(path.is_dir() for path in runs.paths.values())
    for file in ("events.wandb", "logs/debug.log"):  # of a service that writes into the run's folder
        (folder / "a/wandb/run-1/logs").mkdir(parents=True, exist_ok=True)
        (folder / "a/wandb/run-1" / file).write_text("")
    (folder / "a/wandb/latest-run").symlink_to("run-1")
    delete = next(b for b in runs.widget.children[0].children if b.description == "Delete")
    runs._table.chosen = ["a"]
    delete.click()
    assert (folder / "a").exists() and "confirm" in runs._below.children[0].value
    delete.click()
    assert not (folder / "a").exists() and list(runs.paths) == ["bare", "copied", "deep/b"]


def test_one_bad_run_is_one_row_and_a_link_shows_nothing(folder):
    """Pipes, devices and links in place of its files: tests/attacks/test_views.py."""
    metrics = folder / "deep/b/metrics.jsonl"
    samples = folder / "a/samples"
    (folder / "elsewhere").mkdir()
    shutil.copy(samples / "iter_0000001/a.png", folder / "elsewhere")
    (samples / "iter_0000002").symlink_to(folder / "elsewhere")
    metrics.unlink()
    metrics.mkdir()
    runs = Runs(folder)
    assert runs.table["state"]["deep/b"].startswith("cannot be read") and "metrics.jsonl" in runs.kept_html()
    assert runs.kept_html().count("data:image/png") == 2
    metrics.rmdir()
    metrics.write_text('{"iteration": 1, "val_loss_ema_x": 1.0}\n')
    (folder / "deep/b/config.yaml").unlink()
    os.mkfifo(folder / "deep/b/config.yaml")
    runs = Runs(folder)
    assert runs.table["iterations"]["deep/b"] == 1 and runs.open("a", "deep/b").status()
    assert runs.report("a").read_text().count("<figure>") == 1


def test_every_file_of_a_run_is_known_as_a_runs(tiny_checkpoint):
    files = {str(file.relative_to(tiny_checkpoint)) for file in tiny_checkpoint.rglob("*") if file.is_file()}
    assert any(name.endswith("training_samples.json") for name in files)
    assert not [name for name in files - FILES if not BELOW.fullmatch(name)]
