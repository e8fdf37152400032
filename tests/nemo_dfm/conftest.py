"""What the pages stand on: the hub's files in small, and a folder prepared with them as the pages say."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data import encoder_files
from tests.processes import commands

NAMES = ("Aholibah Underwing", "Grass Jewel", "Lilac-bordered Copper", "Blue Morpho", "Monarch", "Painted Lady")
SMALL = "model.num_layers=1 model.hidden_size=48 model.num_attention_heads=4 train.eval_interval=0".split()
SMALL += "dataset.task_encoder_seq_length=128 dataset.use_train_split_for_val=true scheduler.lr_warmup_iters=0".split()
"""A network and steps that two CPU cores manage."""


def run(module: str, ranks: int, *words: object, **settings) -> str:
    """A command of the pages under torchrun; what it prints."""
    done = commands().run("torchrun", "--nproc-per-node", ranks, "-m", f"dfm_nb.{module}", *words, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def make_small_hub(folder: Path) -> None:
    """cosmos/, t5/ and butterflies/ in the formats that the hub has them in."""
    cosmos, t5, butterflies = (folder / name for name in ("cosmos", "t5", "butterflies"))
    for place in (cosmos, t5, butterflies):
        place.mkdir(parents=True)
    encoder_files.save_cosmos(cosmos)
    encoder_files.save_t5(t5)
    pixels = np.random.default_rng(0).integers(0, 255, (len(NAMES), 9, 9, 3), dtype=np.uint8)
    files = [butterflies / f"{i}.jpg" for i in range(len(NAMES))]
    for i, file in enumerate(files):
        Image.fromarray(pixels[i]).resize([(640, 530), (520, 700), (512, 512)][i % 3]).save(file)
    table = pa.table({"image_url": [f.as_uri() for f in files], "name": NAMES, "scientific_name": NAMES})
    pq.write_table(table, butterflies / "train-00000-of-00001.parquet")


@pytest.fixture(scope="session")
def hub(make_once) -> Path:
    return make_once("nemo-dfm-hub", make_small_hub)


@pytest.fixture(scope="session")
def small_webdataset(make_once, hub) -> Path:
    """The pages' preparation on four ranks, with both caches as the DiT page gives them, and all data for training.

    The short side is 64 px, so that training steps take seconds.
    """
    source = ("--source", f"smithsonian_butterflies:{hub / 'butterflies'}", "--short-side", 64)
    encoders = ("--tokenizer", "cosmos_cv", "--text-encoder", "t5", "--val-fraction", 0, "--test-fraction", 0)
    caches = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos")
    words = (*source, *encoders, *caches, "--output-dir")
    return make_once("nemo-dfm-data", lambda folder: run("prepare", 4, *words, folder))
