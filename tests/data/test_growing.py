"""A finished folder whose source grew: splits and bytes of what was there stay, and only what is new is encoded."""

import re
import shutil
from collections import Counter

import pytest
import torch

from dfm_nb import prepare
from dfm_nb.base import files
from dfm_nb.base.argv import guard
from dfm_nb.base.files import read_json
from dfm_nb.data import shards
from dfm_nb.data.encoding import LatentEncoder
from dfm_nb.data.sample_index import SampleIndex
from dfm_nb.data.shard_plan import ShardPlans
from dfm_nb.inspect import inspect_dataset
from tests.frames import picture

pytestmark = pytest.mark.slow  # whole preparations


def paint(source, numbers, shift=0):
    for n in numbers:
        picture(source / f"p{(n * 37) % 101:03d}.png", (5 * n + shift, 2 * n, 90), (16, 16))


def run(source, folder, *extra):
    argv = ["--source", f"folder:{source}", "--output-dir", str(folder), "--shard-size", "10", "--workers", "2"]
    return guard(prepare.main, [*argv, "--val-fraction", "0.2", *extra])


def splits(folder):
    """Of each sample its split, by the legible part of its key."""
    counts = read_json(folder / "manifest.json")["counts"]
    return {key[:4]: split for split in ("train", "val") if counts[split] for key in SampleIndex(folder, split).keys}


def tars(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def sound(folder):
    return inspect_dataset(folder, verify=True, samples=0)["faults"] == []


@pytest.fixture
def encoded(monkeypatch):
    """Number of pictures that the tokenizer encodes while preparing."""
    found, encode = Counter(), LatentEncoder.__call__
    monkeypatch.setattr(
        LatentEncoder, "__call__", lambda self, frames: (found.update(n=len(frames)), encode(self, frames))[1]
    )
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder of 30 pictures, and what was prepared of them."""
    place = tmp_path_factory.mktemp("first")
    paint(place / "source", range(30))
    assert run(place / "source", place / "data") == 0
    return place


@pytest.fixture
def copy(first, tmp_path):
    return shutil.copytree(first / "source", tmp_path / "source"), shutil.copytree(first / "data", tmp_path / "data")


def test_what_is_new_goes_into_new_shards_again_and_again(copy, encoded):
    source, folder = copy
    for numbers in (range(30, 35), range(35, 38)):
        before = tars(folder)
        held = splits(folder)
        manifest = read_json(folder / "manifest.json")
        paint(source, numbers)
        encoded.clear()
        assert run(source, folder) == 0 and encoded["n"] == len(numbers)
        assert before.items() <= tars(folder).items() and held.items() <= splits(folder).items()
        now = read_json(folder / "manifest.json")
        assert all(now[name] == manifest[name] for name in ("latent_mean", "latent_std", "tokenizer"))
        assert now["counts"]["samples"] == manifest["counts"]["samples"] + len(numbers) and sound(folder)
    assert run(source, folder) == 0 and encoded["n"] == 3


def test_a_changed_picture_replaces_its_sample_and_one_that_is_gone_stays(copy, encoded, capsys):
    source, folder = copy
    before = tars(folder)
    held = splits(folder)
    paint(source, [4], shift=7)
    (source / "p037.png").unlink()
    assert run(source, folder) == 0 and encoded["n"] == 1
    now = tars(folder)
    assert sum(before[name] != now.get(name) for name in before) == 1 and len(now) == len(before) + 1
    assert splits(folder) == held and sound(folder)
    assert re.search("gone.*p037", capsys.readouterr().err)
    assert run(source, folder, "--overwrite") == 0 and splits(folder).keys() == held.keys() - {"p037"}


def test_a_file_that_was_only_touched_or_renamed_is_not_encoded(copy, encoded, capsys):
    source, folder = copy
    held = splits(folder)
    for path in source.iterdir():
        path.touch()
    renamed = next(key for key, split in held.items() if split == "val")
    (source / f"{renamed}.png").rename(source / "z000.png")
    assert run(source, folder) == 0 and encoded["n"] == 0
    assert splits(folder) == held | {"z000": "val"}
    assert "copies" in capsys.readouterr().err


def test_other_captions_are_reported_and_encoded_with_texts_only(copy, capsys):
    source, folder = copy
    paint(source, [30])
    (source / "p000.txt").write_text("a dark square")
    assert run(source, folder) == 0 and "--texts-only" in capsys.readouterr().err

    def captions():
        return {e.key[:4]: e.meta["caption"] for tar in folder.glob("*.tar") for e in shards.samples_of(tar)}

    assert captions()["p000"] == "p000"
    (source / "p037.png").unlink()
    assert run(source, folder) == 0 and run(source, folder, "--texts-only") == 0
    assert captions()["p000"] == "a dark square" and captions()["p037"] == "p037" and sound(folder)


@pytest.mark.parametrize("fatal", range(6))
def test_growing_that_was_killed_goes_on(copy, fatal, monkeypatch):
    """At each file that gets its name: the plan, shards and their records, the manifest."""
    source, folder = copy
    held, left, replace = splits(folder), [fatal], files.os.replace
    paint(source, [4], shift=7)
    paint(source, range(30, 34))

    def dying(*paths):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(*paths)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(files.os, "replace", dying)
        prepare.main(
            ["--source", f"folder:{source}", "--output-dir", str(folder), "--shard-size", "10"]
            + ["--val-fraction", "0.2"]
        )
    assert run(source, folder, *(["--resume"] if fatal else [])) == 0
    assert len(splits(folder)) == 34 and held.items() <= splits(folder).items() and sound(folder)


def test_latents_of_another_folder_are_reused_by_content(first, tmp_path, encoded):
    paint(tmp_path / "other", range(20, 33))
    for path in (tmp_path / "other").iterdir():
        path.rename(path.with_stem(f"n{path.stem[1:]}"))
    assert run(tmp_path / "other", tmp_path / "data", "--reuse", str(first / "data")) == 0
    assert encoded["n"] == 3 and len(splits(tmp_path / "data")) == 13 and sound(tmp_path / "data")
    assert run(tmp_path / "other", tmp_path / "own") == 0
    stored, own = (
        {e.key: e.read() for tar in (tmp_path / name).glob("*.tar") for e in shards.samples_of(tar)}
        for name in ("data", "own")
    )
    for key, sample in stored.items():  # batches of other sizes round otherwise
        assert sample.meta == own[key].meta and torch.equal(sample.text_emb, own[key].text_emb)
        torch.testing.assert_close(sample.latent, own[key].latent, atol=0.02, rtol=0.02)
    assert run(tmp_path / "other", tmp_path / "wide", "--short-side", "32", "--reuse", str(first / "data")) == 2


def test_other_settings_are_refused(copy):
    source, folder = copy
    paint(source, [30])
    before = tars(folder)
    assert run(source, folder, "--short-side", "32") == 2 and tars(folder) == before


def test_copies_are_drawn_into_one_split(tmp_path):
    paint(tmp_path / "source", range(20))
    for path in list((tmp_path / "source").iterdir()):
        shutil.copy(path, path.with_stem(f"q{path.stem[1:]}"))
    assert run(tmp_path / "source", tmp_path / "data") == 0
    found = splits(tmp_path / "data")
    assert {found[f"p{key[1:]}"] == split for key, split in found.items()} == {True} and "val" in found.values()
    # also where a split would be empty without its only taker
    plans = ShardPlans(["a", "b"] * 10, 1e-9, 0.0, copies=[(i, i % 2) for i in range(2, 20)])
    assert {frozenset(i % 2 for i in plans.items_of(split)) for split in ("train", "val")} == {
        frozenset([0]),
        frozenset([1]),
    }
