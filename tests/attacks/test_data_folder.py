"""Damage to any file beside the samples is one sentence with the file's path, in training and in inspect."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dfm_nb.base import files
from dfm_nb.base.files import CHECKSUMS
from dfm_nb.base.records import SampleError
from dfm_nb.checkpoints import folders
from dfm_nb.data.adoption import index_dataset
from dfm_nb.data.shards import find_shards
from dfm_nb.data.stores import ShardStore
from dfm_nb.training.loop import BadSamples
from tests.attacks.sample_files import UNUSABLE, seal_as_it_is, spoil
from tests.json_files import change_json
from tests.refusals import refused


def manifest(**values):
    return lambda path: change_json(path, values)


def content(data: bytes):
    return lambda path: path.write_bytes(data)


def empty_text(tensor: torch.Tensor):
    return lambda path: save_file({"text_emb": tensor}, path)


CONTENTS = {
    "binary": content(b"\xff\xfe\x00" * 30),
    "list": content(b"[]"),
    "object": content(b"{}"),
    "deep": content(b"[" * 100_000),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}
FILES = ["manifest.json", ".nv-meta/split.yaml", "text_empty.safetensors", "rank0-000000.tar", "train.index.arrow"]
DAMAGE = {f"{file} cut": (file, CONTENTS["cut"]) for file in FILES}
DAMAGE |= {f"checksums.json {kind}": ("checksums.json", change) for kind, change in CONTENTS.items()}
DAMAGE |= {
    "no manifest": ("manifest.json", Path.unlink),
    "no text": ("text_empty.safetensors", Path.unlink),
    "sparse": ("text_empty.safetensors", lambda path: os.truncate(path, 1 << 36)),
}
FITS = {f"{file} {kind}": (file, change) for file in (FILES[0], FILES[2]) for kind, change in CONTENTS.items()}
FITS |= {
    "mean NaN": ("manifest.json", manifest(latent_mean=[float("nan")] * 16)),
    "mean of texts": ("manifest.json", manifest(latent_mean=["0"] * 16)),
    "drops": ("manifest.json", manifest(drops=[{}])),
    "source": ("manifest.json", manifest(source=None)),
    "no tokens": ("text_empty.safetensors", empty_text(torch.zeros(1, 0, 384))),
    "NaN": ("text_empty.safetensors", empty_text(torch.full((1, 2, 384), float("nan")))),
}


def check_refused(data, file) -> None:
    error = refused(str(data), lambda: BadSamples(ShardStore(data), 0.01))
    assert Path(file).name in str(error) and not isinstance(error, SampleError)


@pytest.mark.parametrize("file, change", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_one_sentence_with_a_path(data, file, change):
    change(data / file)
    check_refused(data, file)


@pytest.mark.parametrize("file, change", FITS.values(), ids=FITS)
def test_damage_under_checksums_that_fit_is_one_sentence_too(data, file, change):
    change(data / file)
    seal_as_it_is(data)
    check_refused(data, file)


@pytest.mark.parametrize("name", ["tokenizer.safetensors", "text_empty.safetensors"])
@pytest.mark.parametrize("planted", ["link", "pipe", "file"])
def test_no_other_file_gets_into_a_checkpoint(data, name, planted):
    """A checkpoint, and so an export, carries only what the folder's author knew the content of."""
    files.seal(data / CHECKSUMS, {k: v for k, v in files.read_listing(data / CHECKSUMS).items() if k != name})
    (data / name).unlink(missing_ok=True)
    (data.parent / "secret").write_text("a private key")
    how = {"link": lambda: (data / name).symlink_to("../secret"), "pipe": lambda: os.mkfifo(data / name)}
    how.get(planted, lambda: (data / name).write_text("?"))()
    check_refused(data, name)
    refused(name, folders.read_assets, data)


def test_shards_by_a_link_are_named_unless_listed_or_asked_for(data, caplog):
    """Shards on another disk are usual; those of a folder that somebody sent are not."""
    tar = data / "rank0-000000.tar"
    away = shutil.move(tar, data.parent / "away.tar")
    tar.symlink_to(away)
    assert tar in find_shards(data)
    (data / CHECKSUMS).unlink()
    assert tar not in find_shards(data) and tar.name in caplog.text
    assert tar in find_shards(data, allow_outside=True)


def test_edits_are_no_link(data):
    (data.parent / "secret").write_text("a private key")
    (data / "edits.jsonl").symlink_to("../secret")
    check_refused(data, "edits.jsonl")


def test_shards_outside_the_folder_are_not_opened(data):
    shutil.copy(data / "rank0-000000.tar", data.parent / "secret.tar")
    for file in (data / ".nv-meta" / ".info.json", data / ".nv-meta" / "split.yaml"):
        file.write_text(file.read_text().replace("rank0-000000.tar", "../secret.tar"))
    refused("../secret.tar", index_dataset, data)


@pytest.mark.parametrize("content", ["!!python/object/apply:os.system ['true']", "[]"])
def test_energons_files_that_are_damaged_are_one_sentence(data, content):
    (data / ".nv-meta" / "split.yaml").write_text(content)
    refused(".nv-meta", index_dataset, data)


def test_damage_in_the_middle_of_a_tar_costs_one_sample(data):
    """The headers of one sample are overwritten: the others are read where they are."""
    tar = data / "rank0-000000.tar"
    whole = bytearray(tar.read_bytes())
    at = int.from_bytes((data / "rank0-000000.tar.idx").read_bytes()[24:32], "little")
    whole[at : at + 512] = b"\x77" * 512
    tar.write_bytes(whole)
    store, good = ShardStore(data), 0
    for i in range(len(store)):
        try:
            good += bool(store.read(i).latent.isfinite().all())
        except SampleError as error:
            assert error.reason == "damaged_tar" and str(tar) in error.detail
    assert good == len(store) - 1 == 10
    before = (data / "train.index.arrow").read_bytes()
    refused(f"{tar}.*{at}", index_dataset, data)  # what comes behind it is not left out in silence
    assert (data / "train.index.arrow").read_bytes() == before


def test_a_folder_without_a_manifest_is_refused_until_it_is_adopted(data):
    (data / "manifest.json").unlink()
    seal_as_it_is(data)
    for read in (ShardStore, index_dataset):
        refused("manifest.json.*dfm adopt", read, data)


def test_folder_of_bad_samples_alone_is_one_sentence(tmp_path):
    spoil(tmp_path / "data", 0, *[UNUSABLE["cut pth"]] * 11)
    refused("image-000000", ShardStore, tmp_path / "data")
