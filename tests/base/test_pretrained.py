"""A model that comes with the package: found by its name wherever weights are read, and all that it needs is in it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from dfm_nb import Pipeline, export, generate, train
from dfm_nb.base import pretrained
from dfm_nb.checkpoints import weights as checkpoint
from tests import tiny_run

SIZE = dict(height=32, width=32, num_steps=2, guidance=2.0)
FLAGS = ["--prompt", "a moth", "--height", "32", "--width", "32", "--num-steps", "2", "--guidance", "2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where packaged models lie: an empty file `moths` here. Work goes on in another folder."""
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "pretrained")
    monkeypatch.setattr(pretrained, "DEFAULT", "moths")
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained" / "moths.safetensors").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "pretrained"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(prepared with the packaged tokenizer, the file of a model trained on it), of which data and run move away."""
    from dfm_nb.prepare import main

    place = tmp_path_factory.mktemp("made")
    argv = ["--source", "synthetic", "--num-images", "20", "--num-clips", "2", "--short-side", "32"]
    assert main([*argv, "--tokenizer", "residual", "--output-dir", str(place / "data")]) == 0
    run = tiny_run.train(
        place / "data", place / "run", "model.P_mean=-0.7", "model.rope=true", "generation.num_steps=9"
    )
    file = export.export_weights(run, place / "moths.safetensors", dtype="bf16")
    shutil.move(place / "data", place / "moved")
    shutil.rmtree(run)
    return place / "moved", file


@pytest.fixture
def moths(folder, made):
    """The data, with that model packaged as `moths`."""
    shutil.copy(made[1], folder)
    return made[0]


def test_a_name_means_the_packaged_file_where_no_weights_have_that_path(folder):
    file = folder / "moths.safetensors"
    assert pretrained.names() == ["moths"] and pretrained.weights_path("moths") == file
    for other in ("../pretrained/moths", str(folder / "moths"), "./moth", "moth"):
        assert pretrained.packaged(other) is None and pretrained.weights_path(other) != file
    (folder.parent / "work" / "moths").mkdir()
    assert not pretrained.weights_path("moths").is_absolute() and pretrained.packaged("moths") == file
    (folder.parent / "work" / "moths" / ".nv-meta").mkdir()  # prepared data
    assert pretrained.weights_path("moths") == file


@pytest.mark.parametrize("load", [Pipeline.from_pretrained, Pipeline.from_checkpoint, checkpoint.find_weights])
def test_a_wrong_name_lists_the_right_ones(folder, load):
    with pytest.raises(FileNotFoundError, match="no checkpoint at moth.*packaged: moths") as error:
        load("moth")
    assert "\n" not in str(error.value)
    (folder / "moths.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="packaged: none"):
        load("moths")


def test_training_names_the_packaged_model_that_was_meant(folder):
    args = train.parse(["--mock", "checkpoint.pretrained=moth"])
    with pytest.raises(ValueError, match="pretrained must exist; got 'moth'; did you mean moths"):
        train.resolve(args, 1)


@pytest.mark.slow
def test_the_file_alone_generates_from_a_prompt(moths, one_rank):
    pipe = Pipeline.from_pretrained("moths")
    (clip,) = pipe("a blue moth", num_video_frames=5, **SIZE)
    (empty,) = pipe("", num_video_frames=5, **SIZE)
    assert clip.frames.shape == (5, 32, 32, 3) and not torch.equal(clip.latent, empty.latent)
    assert pipe.manifest["tokenizer"]["name"] == "residual" and pipe.manifest["text_encoder"]["name"] == "minilm"
    assert pipe.recommended["num_steps"] == 9
    about = pipe.config
    assert about.dataset.path is None and about.checkpoint == type(about.checkpoint)(), "it names no folder"


@pytest.mark.slow
def test_generate_takes_the_packaged_model_by_default_and_by_name(moths, capsys):
    work = moths.parent / "clips"
    assert generate.main([*FLAGS, "--video-save-path", f"{work}/default.png"]) == 0
    said = capsys.readouterr().out
    assert said.count("moths") == 1 and said.startswith("[INFO] no --checkpoint-path")
    assert generate.main([*FLAGS, "--checkpoint-path", "moths", "--video-save-path", f"{work}/name.png"]) == 0
    assert "moths" not in capsys.readouterr().out
    default, name = (json.loads((work / f"{n}.png.json").read_text()) for n in ("default", "name"))
    assert default["frames_sha256"] == name["frames_sha256"]
    assert default["checkpoint"]["file"] == name["checkpoint"]["file"] == "moths.safetensors"
