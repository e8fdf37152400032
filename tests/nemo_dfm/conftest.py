"""What the pages stand on: the hub's files in small, and a folder prepared with them as the pages say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data import encoder_files
from tests.processes import commands

NAMES = (
    ("Aholibah Underwing", "Catocala aholibah"),
    ("Grass Jewel", "Freyeria trochylus"),
    ("Lilac-bordered Copper", "Lycaena nivalis"),
    ("Blue Morpho", "Morpho menelaus"),
    ("Monarch", "Danaus plexippus"),
    ("Painted Lady", "Vanessa cardui"),
    ("Red Admiral", "Vanessa atalanta"),
    ("Zebra Longwing", "Heliconius charithonia"),
    ("Common Buckeye", "Junonia coenia"),
)


def _make_hub(folder: Path) -> None:
    cosmos, t5, butterflies = (folder / name for name in ("cosmos", "t5", "butterflies"))
    for place in (cosmos, t5, butterflies):
        place.mkdir(parents=True)
    encoder_files.save_cosmos(cosmos)
    encoder_files.save_t5(t5)
    rng = np.random.default_rng(0)
    rows: dict[str, list[str]] = {"image_url": [], "name": [], "scientific_name": []}
    for number, (name, scientific) in enumerate(NAMES):
        height, width = [(530, 640), (700, 520), (512, 512)][number % 3]
        small = Image.fromarray(rng.integers(0, 255, (9, 9, 3), dtype=np.uint8))
        small.resize((width, height), Image.Resampling.BICUBIC).save(butterflies / f"{number}.jpg")
        rows["image_url"].append((butterflies / f"{number}.jpg").as_uri())
        rows["name"].append(name)
        rows["scientific_name"].append(scientific)
    pq.write_table(pa.table(rows), butterflies / "train-00000-of-00001.parquet")


@pytest.fixture(scope="session")
def hub(make_once) -> Path:
    """cosmos/, t5/ and butterflies/ in the formats that the hub has them in."""
    return make_once("nemo-dfm-hub", _make_hub)


def prepare(hub: Path, output: Path, ranks: int, *more: object) -> str:
    """The pages' preparation under torchrun, with both caches as the DiT page gives them."""
    done = commands().run(
        *("torchrun", "--nproc-per-node", ranks, "-m", "dfm_nb.prepare", "--output-dir", output),
        *("--source", f"smithsonian_butterflies:{hub / 'butterflies'}", "--tokenizer", "cosmos_cv"),
        *("--text-encoder", "t5", "--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos", *more),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def small_webdataset(make_once, hub) -> Path:
    """Short side 64 px, so that training steps take seconds; all data for training, as the DiT page splits it."""
    flags = ("--short-side", 64, "--val-fraction", 0, "--test-fraction", 0)
    return make_once("nemo-dfm-data", lambda folder: prepare(hub, folder, 2, *flags))
