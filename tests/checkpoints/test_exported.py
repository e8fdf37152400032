"""A file of `dfm export` is all that generation needs, and only as it was written."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dfm_nb import export
from dfm_nb.checkpoints import consolidated, exported, folders, loading
from dfm_nb.checkpoints.tensor_files import CheckpointError
from dfm_nb.generation.pipeline import Pipeline
from tests.attacks.checkpoint_files import NAME
from tests.refusals import refused

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank")]

SUFFIXES = [".safetensors", ".pth"]
SIZE = dict(height=32, width=32, num_video_frames=5, num_steps=3, guidance=1.0)


def export_to(run, file):
    assert export.main([str(run), "--output", str(file)]) == 0
    return file


def text_of(file):
    if file.suffix == ".pth":
        return torch.load(file, weights_only=True)["dfm_nb"]
    with safe_open(file, "pt") as f:
        return f.metadata()["dfm_nb"]


def write(file, tensors, text):
    if file.suffix == ".pth":
        torch.save({**tensors, "dfm_nb": text}, file)
    else:
        save_file(tensors, file, metadata={"dfm_nb": text})


def why_refused(file) -> str:
    return str(refused(str(file), loading.find_weights, file, error=CheckpointError))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_alone_generates_what_its_run_does(run, tmp_path, suffix):
    (want,) = Pipeline.from_checkpoint(run)([""], **SIZE)
    file = export_to(run, tmp_path / "out" / f"model{suffix}")
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    manifest = folders.read_manifest(run / "checkpoints" / NAME)
    elsewhere = tmp_path / "elsewhere" / f"copy{suffix}"
    elsewhere.parent.mkdir()
    shutil.move(file, elsewhere)
    shutil.rmtree(run)
    pipe = Pipeline.from_checkpoint(elsewhere)
    (got,) = pipe([""], **SIZE)
    assert torch.equal(got.latent, want.latent) and (got.frames == want.frames).all()
    for what in ("tokenizer", "text_encoder", "latent_mean", "latent_std"):
        assert pipe.manifest[what] == manifest[what]
    assert "arguments" not in pipe.manifest and "shards" not in pipe.manifest


def test_bfloat16_file_holds_rounded_weights_in_half_the_room(run, tmp_path):
    whole = export_to(run, tmp_path / "whole.safetensors")
    half = export.export_weights(run, tmp_path / "half.safetensors", dtype="bf16")
    tensors, rounded = exported.read(whole)[0], exported.read(half)[0]
    assert {t.dtype for t in tensors.values()} == {torch.float32} and tensors.keys() == rounded.keys()
    assert all(torch.equal(rounded[n], t.bfloat16()) for n, t in tensors.items())
    assert whole.stat().st_size - half.stat().st_size >= 2 * sum(t.numel() for t in tensors.values()) - 2000
    refused("half.safetensors", export_to, run, tmp_path / "half.safetensors", error=FileExistsError)
    export.export_weights(half, whole, overwrite=True)
    assert {t.dtype for t in exported.read(whole)[0].values()} == {torch.bfloat16}
    again = export_to(half, tmp_path / "again.safetensors")  # of an exported file, as it is
    assert all(torch.equal(t, rounded[n]) for n, t in exported.read(again)[0].items())


@pytest.mark.parametrize(
    "change, suffix", [("weight", ".pth"), ("setting", ".safetensors"), ("name", ".safetensors"), ("file", ".pth")]
)
def test_changed_content_is_refused(run, tmp_path, suffix, change):
    file = export_to(run, tmp_path / f"model{suffix}")
    text = text_of(file)
    tensors, files = exported.read(file)
    binary = [k for k in files if k.endswith(".safetensors")]
    tensors |= {f"file.{k}": torch.frombuffer(bytearray(files[k]), dtype=torch.uint8) for k in binary}
    tensors = {name: t.clone() for name, t in tensors.items()}
    write(file, tensors, text)
    loading.find_weights(file)  # written anew as it was
    if change == "weight":
        tensors["final.weight"].view(torch.int32)[0, 0] ^= 1
    elif change == "setting":
        text = text.replace("num_steps", "num_stepz").replace("pca", "pcb")
    elif change == "name":
        tensors["final.heavy"] = tensors.pop("final.weight")
    else:
        tensors["file.tokenizer.safetensors"][100] ^= 1
    write(file, tensors, text)
    why_refused(file)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_file_is_one_sentence(run, tmp_path, suffix):
    file = export_to(run, tmp_path / f"model{suffix}")
    content = file.read_bytes()
    for cut in (0, 7, 1000, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:cut])
        why_refused(file)
    middle = bytearray(content)
    middle[len(content) // 2] ^= 16
    file.write_bytes(middle)
    why_refused(file)


def test_average_that_cannot_be_rebuilt_is_refused_with_the_range(run, tmp_path):
    refused("0.1", export.main, [str(run), "--output", str(tmp_path / "model.pth"), "--ema-sigma-rel=0.1"])
    assert not (tmp_path / "model.pth").exists()


def test_a_choice_among_the_weights_of_a_file_is_refused(run, tmp_path):
    """It has one set of them."""
    file = export_to(run, tmp_path / "model.pth")
    for ema in (None, 0.1):
        refused("model.pth", Pipeline.from_checkpoint, file, ema=ema)
    for choice in ("--raw", "--ema-sigma-rel=0.05"):
        refused("model.pth", export.main, [str(file), "--output", str(tmp_path / "other.pth"), choice])
    assert not (tmp_path / "other.pth").exists()


def test_other_files_are_not_unpacked(tmp_path):
    tensors, texts = {"file.../evil": torch.zeros(2, dtype=torch.uint8)}, {"config.yaml": "model: {}"}
    about = exported.About(files=texts, sha256=exported.checksum(texts, tensors))
    write(tmp_path / "model.pth", tensors, about.json_text())
    assert "../evil" in why_refused(tmp_path / "model.pth")


@pytest.mark.parametrize("suffix, name", [(s, name) for s in SUFFIXES for name in ("final.weight", "dfm_nb")])
def test_file_of_tensors_alone_is_refused_with_the_way_out(tmp_path, suffix, name):
    file, tensors = tmp_path / f"model{suffix}", {name: torch.zeros(2)}
    (save_file if suffix == ".safetensors" else torch.save)(tensors, file)
    assert "dfm import" in why_refused(file)


def test_file_without_manifest_does_not_take_the_one_beside_it(run, tmp_path):
    tensors, files = exported.read(export_to(run, tmp_path / "model.pth"))
    (tmp_path / "manifest.json").write_bytes(files.pop("manifest.json"))
    consolidated.write(tmp_path / "model.pth", tensors, files)
    refused("manifest.json", Pipeline.from_checkpoint, tmp_path / "model.pth", error=FileNotFoundError)


ODD = ["", "[]", "[" * 100_000, '{"format": "dfm_nb.weights.2"}']
ODD += [
    json.dumps({"format": "dfm_nb.weights.1", "files": files, "sha256": "0"})
    for files in ({"../config.yaml": ""}, {"config.yaml": 1}, {"config.yaml": "model: {}"})
]


@pytest.mark.parametrize("text", ODD, ids=lambda t: t[:60] or "empty")
def test_odd_text_is_one_sentence(tmp_path, text):
    file = tmp_path / "model.safetensors"
    write(file, {"final.weight": torch.zeros(2)}, text)
    why_refused(file)
