"""The page "Train DiT Model": its commands and its YAML with `-m dfm_nb.train` for the script.

SMALL is appended to each: a network and steps that two CPU cores manage. The page's first command, with the defaults
that it has, is in tests/test_train_reference.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from dfm_nb.base.metrics import read_metrics
from dfm_nb.checkpoints import weights as checkpoint
from tests.processes import commands

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=48",
    "model.num_attention_heads=4",
    "train.eval_interval=0",
    "dataset.task_encoder_seq_length=128",
    "dataset.use_train_split_for_val=true",
    "scheduler.lr_warmup_iters=0",
)


def train(ranks: int, data: Path, *words: object, iterations: int = 1) -> str:
    torchrun = ("torchrun", "--nproc-per-node", ranks, "-m", "dfm_nb.train")
    done = commands().run(*torchrun, "--dataset-path", data, *SMALL, f"train.train_iters={iterations}", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(small_webdataset, tmp_path_factory) -> tuple[Path, Path, str]:
    """Step 3: the page's YAML, and what two processes say with it. Returns checkpoint_dir, the YAML, the output."""
    folder = tmp_path_factory.mktemp("training")
    config = {
        "model": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1},
        "train": {"global_batch_size": 64, "micro_batch_size": 2, "train_iters": 10000},
        "optimizer": {"lr": 0.0001, "weight_decay": 0.01},
        "checkpoint": {"save_interval": 500, "checkpoint_dir": str(folder / "checkpoints" / "dit_butterfly")},
    }
    path = folder / "dit_butterfly_config.yaml"
    path.write_text(yaml.safe_dump(config))
    words = ("--config-file", path, "--run-dir", folder / "run", "checkpoint.save_interval=1")
    said = train(2, small_webdataset, *words, iterations=2)
    return folder / "checkpoints" / "dit_butterfly", path, said


@pytest.mark.slow
def test_the_yaml_of_the_page_trains_and_logs_as_shown(run):
    _, _, said = run
    assert "Starting pretraining" in said
    assert re.search(r"Iteration +1/2, Loss: \d\.\d+, LR: ", said) and "Checkpoint saved: " in said


@pytest.mark.slow
def test_checkpoints_have_the_names_of_the_page(run):
    folder, _, _ = run
    assert {"iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"} <= {p.name for p in folder.iterdir()}
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.mark.slow
def test_the_command_line_overrides_the_yaml(run, small_webdataset, tmp_path):
    _, config, _ = run
    overrides = ("model.tensor_model_parallel_size=4", "train.global_batch_size=128")
    place = f"checkpoint.checkpoint_dir={tmp_path / 'ckpt'}"
    train(4, small_webdataset, "--config-file", config, "--run-dir", tmp_path / "run", *overrides, place)
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["model"]["tensor_model_parallel_size"] == 4 and saved["train"]["global_batch_size"] == 128
    assert saved["optimizer"]["lr"] == 0.0001  # the YAML's, over the recipe's


@pytest.mark.slow
def test_training_continues_from_an_unpadded_iteration(run, small_webdataset, tmp_path):
    """`checkpoint.load_checkpoint=.../iter_5000/`: no zeros before the number, a slash after it."""
    folder, config, _ = run
    train(
        *(2, small_webdataset, "--config-file", config, "--run-dir", tmp_path / "run"),
        f"checkpoint.load_checkpoint={folder}/iter_1/",
        f"checkpoint.checkpoint_dir={tmp_path / 'ckpt'}",
        iterations=2,
    )
    went_on = {r["iteration"]: r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r}
    first = read_metrics(folder.parents[1] / "run" / "metrics.jsonl")
    before = {r["iteration"]: r["loss"] for r in first if "loss" in r}
    assert sorted(went_on) == [2] and went_on == {i: before[i] for i in went_on}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(2, ["train.micro_batch_size=1", "train.global_batch_size=32"]), (4, ["model.tensor_model_parallel_size=2"])],
    ids=["Solution 1", "Solution 2"],
)
def test_the_solutions_for_out_of_memory_run(small_webdataset, tmp_path, ranks, overrides):
    said = train(ranks, small_webdataset, "--run-dir", tmp_path / "run", *overrides)
    assert "Starting pretraining" in said
    (kept,) = checkpoint.whole_checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoint.iteration_of(kept) == 1


@pytest.mark.slow
def test_a_sample_can_be_printed_and_workers_set(small_webdataset, tmp_path):
    """ "Loss Not Decreasing" reads a shard with webdataset; "Data Loading Slow" edits num_workers."""
    shard = small_webdataset / "rank0-000000.tar"
    code = f"import webdataset as wds; print(next(iter(wds.WebDataset({str(shard)!r}))))"
    done = commands().run("python", "-c", code)
    assert done.returncode == 0 and "pickle" in done.stdout, done.stderr
    done = commands().run(
        "dfm", "pretrain", "--dataset-path", small_webdataset, "--print-config", "dataset.num_workers=8"
    )
    assert re.search(r"^dataset.num_workers +8 +command line", done.stdout, re.M), done.stdout + done.stderr
    assert json.loads((small_webdataset / "manifest.json").read_text())["counts"]["samples"] > 0
