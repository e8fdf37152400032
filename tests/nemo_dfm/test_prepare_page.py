"""The page "Prepare Butterfly Dataset": its commands with `-m dfm_nb.prepare` for the script, and their results."""

from __future__ import annotations

import json
import pickle
import re

import pytest
import torch
import webdataset as wds
import yaml

from tests.nemo_dfm.conftest import NAMES, prepare
from tests.processes import commands


@pytest.fixture(scope="module")
def four_ranks(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "butterfly_webdataset"
    return folder, prepare(hub, folder, 4)


@pytest.mark.slow
def test_four_ranks_share_the_pictures_and_say_so(four_ranks):
    folder, said = four_ranks
    shares = [(int(a), int(b)) for a, b in re.findall(r"processing \d+ samples, from (\d+) to (\d+)", said)]
    assert sorted(shares) == [(0, 2), (2, 4), (4, 6), (6, 9)] and f"processing {len(NAMES)} samples" in said
    assert {f"rank{rank}-000000.tar" for rank in range(4)} <= {path.name for path in folder.glob("*.tar")}


@pytest.mark.slow
def test_a_sample_has_the_parts_that_the_page_shows(four_ranks):
    folder, _ = four_ranks
    sample = next(iter(wds.WebDataset(str(folder / "rank0-000000.tar"), shardshuffle=False)))
    assert set(sample) >= {"__key__", "pth", "pickle", "json"}  # webdataset gives the names without the page's dot
    decoded = next(iter(wds.WebDataset(str(folder / "rank0-000000.tar"), shardshuffle=False).decode()))
    latent, text, meta = decoded["pth"], pickle.loads(sample["pickle"]), json.loads(sample["json"])
    assert latent.dtype == text.dtype == torch.bfloat16
    height, width = meta["image_height"], meta["image_width"]
    assert min(height, width) == 512 and height % 16 == width % 16 == 0
    assert latent.shape == (1, 16, 1, height // 8, width // 8)
    # T5-11B's states are 1,024 wide (the page says 4,096); true lengths unless --pad-text-tokens 512 is given.
    assert text.ndim == 3 and text.shape[0] == 1 and text.shape[1] == meta["text_tokens"] <= 512


@pytest.mark.slow
def test_no_question_is_left_for_energon_prepare(four_ranks):
    """The DiT page answers its questions by hand: split, and 11 for crude samples."""
    folder, _ = four_ranks
    assert "CrudeWebdataset" in yaml.safe_load((folder / ".nv-meta" / "dataset.yaml").read_text())["__class__"]
    assert (folder / ".nv-meta" / "split.yaml").is_file()


@pytest.mark.slow
def test_text_can_be_padded_as_the_page_has_it(hub, tmp_path):
    prepare(hub, tmp_path / "padded", 1, "--pad-text-tokens", 512, "--limit", 2, "--short-side", 64)
    shard = next((tmp_path / "padded").glob("*.tar"))
    assert next(iter(wds.WebDataset(str(shard), shardshuffle=False).decode()))["pickle"].shape[1] == 512


@pytest.mark.slow
def test_a_table_of_the_users_own_replaces_line_53(hub, tmp_path):
    """`df = pd.read_csv("/path/to/your/dataset.csv")` with the columns image_url and caption."""
    rows = [f"{(hub / 'butterflies' / f'{i}.jpg').as_uri()},a butterfly {i}" for i in range(3)]
    (tmp_path / "dataset.csv").write_text("\n".join(["image_url,caption", *rows]) + "\n")
    encoders = ("--tokenizer", "cosmos_cv", "--text-encoder", "t5")
    caches = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos")
    words = ("--source", f"table:{tmp_path / 'dataset.csv'}", "--output-dir", tmp_path / "own", "--short-side", 64)
    done = commands().run("dfm", "prepare", *words, *encoders, *caches)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "own" / "manifest.json").read_text())["counts"]["samples"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--t5_cache_dir", "{hub}/t5", "--tokenizer_cache_dir", "{hub}/t5"], "encoder.jit"),
        (["--t5_cache_dir", "{hub}/cosmos", "--tokenizer_cache_dir", "{hub}/cosmos"], "hf download"),
    ],
    ids=["Cosmos Tokenizer Error", "T5 Model Download Fails"],
)
def test_missing_weights_end_in_a_sentence_and_claim_nothing(hub, tmp_path, flags, said):
    words = [flag.format(hub=hub) for flag in flags]
    source = ("--source", f"smithsonian_butterflies:{hub / 'butterflies'}", "--output-dir", tmp_path / "data")
    encoders = ("--tokenizer", "cosmos_cv", "--text-encoder", "t5")
    done = commands().run("dfm", "prepare", *source, *encoders, *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    good = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos", "--short-side", 64)
    assert commands().run("dfm", "prepare", *source, *encoders, *good).returncode == 0
