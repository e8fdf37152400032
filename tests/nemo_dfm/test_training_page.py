"""The page "Train DiT Model": its YAML with `-m dfm_nb.train`, overridden, and its checkpoint resumed."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.nemo_dfm.conftest import SMALL, run
from tests.test_train import losses


@pytest.mark.slow
def test_the_yaml_of_the_page_trains_is_overridden_and_resumed(small_webdataset, tmp_path):
    saved = tmp_path / "checkpoints" / "dit_butterfly"
    config = {
        "model": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1},
        "train": {"global_batch_size": 64, "micro_batch_size": 2, "train_iters": 10000},
        "optimizer": {"lr": 0.0001, "weight_decay": 0.01},
        "checkpoint": {"save_interval": 500, "checkpoint_dir": str(saved)},
    }
    path = tmp_path / "dit_butterfly_config.yaml"
    path.write_text(yaml.safe_dump(config))

    def train(name: str, *words: str) -> str:
        given = ("--dataset-path", small_webdataset, "--config-file", path, "--run-dir", tmp_path / name)
        return run("train", 2, *given, *SMALL, "train.train_iters=2", "checkpoint.save_interval=1", *words)

    said = train("run")
    assert re.search(r"Iteration +1/2, Loss: \d\.\d+, LR: ", said) and "Checkpoint saved: " in said
    assert {"iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"} <= {p.name for p in saved.iterdir()}
    # no zeros before the number, a slash after it
    train("again", f"checkpoint.load_checkpoint={saved}/iter_1/", f"checkpoint.checkpoint_dir={tmp_path / 'other'}")
    assert losses(tmp_path / "again") == {2: losses(tmp_path / "run")[2]}
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["train"]["train_iters"] == 2 and kept["train"]["global_batch_size"] == 64
