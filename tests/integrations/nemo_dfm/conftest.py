"""What the pages stand on: the hub's files in small, and a folder prepared with them as the pages say."""

from pathlib import Path

import pytest

from tests.data.encoder_files import make_small_hub
from tests.processes import commands

SMALL = "model.num_layers=1 model.hidden_size=48 model.num_attention_heads=4 train.eval_interval=0".split()
SMALL += "dataset.task_encoder_seq_length=128 dataset.use_train_split_for_val=true scheduler.lr_warmup_iters=0".split()
"""A network and steps that two CPU cores manage."""


def run(module: str, ranks: int, *words: object, **settings) -> str:
    """A command of the pages under torchrun; what it prints."""
    done = commands().run("torchrun", "--nproc-per-node", ranks, "-m", f"dfm_nb.{module}", *words, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def hub(make_once) -> Path:
    return make_once("nemo-dfm-hub", make_small_hub)


@pytest.fixture(scope="session")
def small_webdataset(make_once, hub) -> Path:
    """The pages' preparation on two ranks, with both caches as the DiT page gives them, and all data for training.

    The short side is 64 px, so that training steps take seconds.
    """
    source = ("--source", f"smithsonian_butterflies:{hub / 'butterflies'}", "--short-side", 64)
    encoders = ("--tokenizer", "cosmos_cv", "--text-encoder", "t5", "--val-fraction", 0, "--test-fraction", 0)
    caches = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos")
    words = (*source, *encoders, *caches, "--output-dir")
    return make_once("nemo-dfm-data", lambda folder: run("prepare", 2, *words, folder))
