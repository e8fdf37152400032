"""Shards that NeMo DFM's writer made, adopted: measured, completed, and the tars left as they are."""

import contextlib
import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dfm_nb import Pipeline, adopt, inspect
from dfm_nb.base.argv import guard
from dfm_nb.base.files import sha256
from dfm_nb.checkpoints import folders
from dfm_nb.data import adoption, shards
from dfm_nb.data.prepared_folder import read_checksums
from dfm_nb.data.stores import ShardStore
from tests import tiny_run
from tests.attacks.sample_files import add_sample, saved
from tests.data import dfm_shards
from tests.json_files import read_json
from tests.refusals import refused

pytestmark = pytest.mark.slow  # networks, process groups or whole preparations in most of them


@pytest.fixture
def folder(theirs, tmp_path) -> Path:
    return shutil.copytree(theirs / "data", tmp_path / "data")


def run(folder: Path, *more: object) -> int:
    return guard(adopt.main, [str(folder), "--tokenizer", "cosmos_cv", "--text-encoder", "t5", *map(str, more)])


def paths(theirs: Path) -> list[object]:
    return ["--tokenizer_cache_dir", theirs / "cosmos", "--t5_cache_dir", theirs / "t5"]


def state(folder: Path) -> dict[str, bytes]:
    """The content of every file but the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def test_folder_becomes_whole_and_the_tars_stay(folder, theirs, capsys):
    """A second call gives the same."""
    assert inspect.main([str(folder), "--samples=0"]) == 0 and f"dfm adopt {folder} " in capsys.readouterr().out
    before = {p.name: sha256(p) for p in folder.glob("*.tar")}
    assert len(before) == 2 and run(folder, *paths(theirs)) == 0
    assert "dataset.use_train_split_for_val=true" in capsys.readouterr().err
    assert {p.name: sha256(p) for p in folder.glob("*.tar")} == before
    manifest = read_json(folder / "manifest.json")
    assert manifest["counts"]["train"] == manifest["counts"]["samples"] == 12
    listed = read_checksums(folder)
    assert {s["name"]: listed[s["name"]]["sha256"] for s in manifest["shards"]} == before
    assert manifest["tokenizer"]["name"] == "cosmos_cv" and len(manifest["tokenizer"]) > 1
    store = ShardStore(folder)
    assert manifest["text_encoder"]["dim"] == store.text_dim and manifest["empty_caption"] == "text encoder"
    assert load_file(folder / "text_empty.safetensors")["text_emb"].shape == (1, 1, store.text_dim)  # </s>
    flat = np.concatenate([store.read(i).latent[0].double().flatten(1).numpy() for i in range(len(store))], 1)
    np.testing.assert_allclose(manifest["latent_mean"], flat.mean(1), rtol=1e-9)
    np.testing.assert_allclose(manifest["latent_std"], flat.std(1), rtol=1e-9)
    assert [store.grid(i) for i in range(3)] == [(1, 4, 6), (1, 6, 4), (2, 4, 4)]
    after = state(folder)
    assert run(folder, *paths(theirs)) == 0 and state(folder) == after


def test_a_model_of_adopted_shards_needs_nothing_of_them(folder, theirs, one_rank, tmp_path):
    assert run(folder, *paths(theirs)) == 0
    wanted = ShardStore(folder).statistics
    refused("val", ShardStore, folder, "val")
    trained = tiny_run.train(folder, tmp_path / "run")
    shutil.rmtree(folder)
    assert torch.equal(folders.read_statistics(folders.find(trained)).mean, wanted.mean)
    pipe = Pipeline.from_checkpoint(trained, tokenizer_path=theirs / "cosmos", text_encoder_path=theirs / "t5")
    assert pipe("a blue butterfly", height=32, width=32, num_frames=5, num_steps=2)[0].frames.shape == (5, 32, 32, 3)


def test_without_weights_the_names_are_kept_and_the_empty_caption_is_zeros(folder, theirs):
    assert run(folder) == 0
    manifest = read_json(folder / "manifest.json")
    assert manifest["tokenizer"] == {"name": "cosmos_cv"} and manifest["empty_caption"] == "zeros"
    assert not load_file(folder / "text_empty.safetensors")["text_emb"].any()
    assert run(folder, *paths(theirs)) == 0  # the weights came later
    manifest = read_json(folder / "manifest.json")
    assert manifest["empty_caption"] == "text encoder" and "dim" in manifest["text_encoder"]
    assert load_file(folder / "text_empty.safetensors")["text_emb"].any()


def test_killed_adoption_leaves_an_unfinished_folder_and_is_given_again(folder, theirs, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    monkeypatch.setattr(adoption, "write_manifest", killed)
    with pytest.raises(Killed):
        run(folder, *paths(theirs))
    refused("dfm adopt", ShardStore, folder, error=FileNotFoundError)
    monkeypatch.undo()
    assert run(folder, *paths(theirs)) == 0 and len(ShardStore(folder)) == 12


def test_samples_that_cannot_be_used_are_counted_named_and_left_out(folder, theirs, capsys):
    good = shards.samples_of(folder / "rank1-000000.tar")[0].parts()
    latent = torch.zeros(1, 16, 1, 4, 4)
    bad = {
        "nan": {**good, "pth": saved(latent.clone().fill_(float("nan")))},
        "odd": {**good, "pth": saved(torch.zeros(1, 16, 1, 5, 4))},
        "textless": {"pth": good["pth"], "json": good["json"]},
    }
    for key, parts in bad.items():
        add_sample(folder / "rank1-000000.tar", key, **parts)
    assert run(folder, *paths(theirs)) == 0
    manifest = read_json(folder / "manifest.json")
    assert manifest["counts"]["dropped"] == 3 and manifest["counts"]["samples"] == 12
    reasons = {"nan": "not_finite", "odd": "odd_size", "textless": "missing_part"}
    assert {d["key"]: d["reason"] for d in manifest["drops"]} == reasons
    assert "rank1-000000.tar: sample nan" in capsys.readouterr().err
    store = ShardStore(folder)
    assert len(store) == 12 and not set(store.keys) & set(bad)
    assert [store.read(i).key for i in range(12)] == store.keys


def test_tars_without_samples_are_left_out_and_one_that_was_cut_is_named(folder, capsys, wrong_use):
    tarfile.open(folder / "rank9-000000.tar", "w").close()
    assert run(folder) == 0 and "rank9-000000.tar" in capsys.readouterr().err and len(ShardStore(folder)) == 12
    first, *_ = shards.samples_of(folder / "rank1-000000.tar")
    os.truncate(folder / "rank1-000000.tar", first.offset + first.size)
    assert "rank1-000000.tar" in wrong_use(run, folder)


def test_validation_takes_whole_shards(theirs, tmp_path):
    writer = dfm_shards.Writer(theirs / "cosmos", theirs / "t5")
    folder = writer.write(tmp_path / "data", counts=(3, 2, 4), sizes=((1, 32, 32),))
    refused("val-fraction", adopt.adopt_dataset, folder, "cosmos_cv", "t5", val_fraction=1.0)
    manifest = adopt.adopt_dataset(folder, "cosmos_cv", "t5", val_fraction=0.1)
    assert [s["split"] for s in sorted(manifest["shards"], key=lambda s: s["name"])] == ["train", "val", "train"]
    assert len(ShardStore(folder, "val")) == 2 and len(ShardStore(folder)) == 7


def test_energons_own_metadata_and_splits_are_kept_and_later_tars_are_named(folder, theirs, tmp_path, capsys):
    with contextlib.redirect_stdout(io.StringIO()):
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors import BaseWebdatasetFactory

        ratio = [("train", 1.0), ("val", 1.0), ("test", 0.0)]
        names = ["rank0-000000.tar", "rank1-000000.tar"]
        BaseWebdatasetFactory.prepare_dataset(EPath(str(folder)), names, split_parts_ratio=ratio, workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    before = state(folder / ".nv-meta")
    assert run(folder) == 0 and state(folder / ".nv-meta") == before
    manifest = read_json(folder / "manifest.json")
    assert manifest["counts"]["train"] == manifest["counts"]["val"] == 6
    train = [s["name"] for s in manifest["shards"] if s["split"] == "train"]
    assert train == shards.splits_of(folder)["train"]
    shutil.copy(folder / "rank1-000000.tar", folder / "rank2-000000.tar")
    assert run(folder) == 0 and "leaves out 1 of the tars" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, named",
    [
        (["--t5-cache-dir", "NOWHERE"], "NOWHERE"),
        (["--text-encoder", "minilm"], "384"),
        (["--tokenizer", "pca"], "pca"),
        (["--val-fraction", "1"], "--val-fraction"),
        (["--reindex"], "--reindex"),
    ],
)
def test_mistakes_are_named(folder, wrong_use, more, named):
    tars = sorted(folder.iterdir())
    assert named in wrong_use(run, folder, *more).strip().splitlines()[-1] and not (folder / "manifest.json").exists()
    if named != "384":  # before any work
        assert sorted(folder.iterdir()) == tars


def test_shards_of_another_width_of_text_are_named(folder, wrong_use):
    parts = shards.samples_of(folder / "rank1-000000.tar")[0].parts()
    add_sample(folder / "rank2-000000.tar", "k", **{**parts, "pickle": pickle.dumps(torch.zeros(1, 2, 8))})
    assert "rank2-000000.tar" in wrong_use(run, folder).splitlines()[-1]


def test_folders_that_cannot_be_adopted_are_named(tiny_data, tmp_path, wrong_use):
    assert str(tiny_data) in wrong_use(run, tiny_data)  # of `dfm prepare`
    assert str(tmp_path) in wrong_use(run, tmp_path)
    assert "--tokenizer" in wrong_use(guard, adopt.main, [str(tmp_path)])
    add_sample(tmp_path / "a.tar", "k", txt=b"a caption")
    assert "a.tar: sample k" in wrong_use(run, tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "checksums.json", "text_empty.safetensors"])
def test_a_listing_of_another_tool_is_kept(folder, wrong_use, name):
    (folder / name).write_text('{"theirs": 1}')
    assert name in wrong_use(run, folder)
    assert (folder / name).read_text() == '{"theirs": 1}'
