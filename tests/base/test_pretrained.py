"""A model that comes with the package: found by its name wherever weights are read, and all that it needs is in it."""

import shutil

import pytest
import torch

from dfm_nb import Pipeline, export, prepare_dataset, train_model
from dfm_nb.base import plugins, pretrained
from dfm_nb.base.files import sha256
from dfm_nb.checkpoints import exported, folders, loading
from dfm_nb.train import TrainOptions
from tests import tiny_run
from tests.refusals import refused

SIZE = dict(height=32, width=32, num_steps=2, guidance=2.0)
MEAN_COLOURS = {"butterflies": (124, 155, 116), "butterflies-student": (126, 157, 116), "drawings": (200, 107, 93)}
"""Red, green and blue of the still that each packaged model generates below."""
FAST = ["train.global_batch_size=1", "dataset.task_encoder_seq_length=160"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where packaged models lie: an empty file `moths` here. Work goes on in another folder."""
    of, folders = plugins.load_all, {"theirs": tmp_path / "pretrained"}
    monkeypatch.setattr(plugins, "load_all", lambda kind: folders if kind == "pretrained" else of(kind))
    monkeypatch.setattr(pretrained, "DEFAULT", "moths")
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained" / "moths.safetensors").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "pretrained"


def make(place) -> None:
    """Data prepared with the packaged tokenizer, and the file of a model trained on them, whose run is gone."""
    how = {"num_images": 20, "num_clips": 2, "short_side": 32, "tokenizer": "residual"}
    prepare_dataset(output_dir=place / "data", **how)
    settings = ["model.P_mean=-0.7", "model.rope=true", "generation.num_steps=9"]
    run = tiny_run.train(place / "data", place / "run", *settings)
    export.export_weights(run, place / "moths.safetensors", dtype="bf16")
    shutil.rmtree(run)
    shutil.move(place / "data", place / "moved")


@pytest.fixture
def moths(folder, make_once):
    """The data, with that model packaged as `moths`."""
    place = make_once("packaged", make)
    shutil.copy(place / "moths.safetensors", folder)
    return place / "moved"


def test_a_name_means_the_packaged_file_where_no_weights_have_that_path(folder):
    file = folder / "moths.safetensors"
    assert list(pretrained.files()) == ["moths"] and pretrained.weights_path("moths") == file
    for other in ("../pretrained/moths", str(folder / "moths"), "./moth", "moth"):
        assert pretrained.packaged(other) is None and pretrained.weights_path(other) != file
    (folder.parent / "work" / "moths").mkdir()
    assert not pretrained.weights_path("moths").is_absolute() and pretrained.packaged("moths") == file
    (folder.parent / "work" / "moths" / ".nv-meta").mkdir()  # prepared data
    assert pretrained.weights_path("moths") == file


@pytest.mark.parametrize("load", [Pipeline.from_pretrained, Pipeline.from_checkpoint, loading.find_weights])
def test_a_wrong_name_lists_the_right_ones(folder, load):
    refused(r"\bmoth\b.*moths", load, "moth", error=FileNotFoundError)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, prompt",
    [(name, "A plain blue morpho over a meadow.") for name in ("butterflies", "butterflies-student")]
    + [("drawings", "red apple, fruit, food")],
)
def test_each_packaged_model_is_its_cards_and_generates(name, prompt, one_rank):
    file = pretrained.packaged(name)
    assert sha256(file) in file.with_suffix(".md").read_text() and file.stat().st_size < 15e6
    (clip,) = Pipeline.from_pretrained(name)(prompt, num_video_frames=1, height=64, width=64, num_steps=4, seed=1)
    assert clip.frames[0].mean((0, 1)) == pytest.approx(MEAN_COLOURS[name], abs=4)  # bf16 rounds by the machine


@pytest.mark.parametrize("fast", [True, False])
def test_weights_of_bf16_are_computed_in_fp32_where_bf16_is_slow(moths, one_rank, monkeypatch, fast):
    monkeypatch.setattr("dfm_nb.generation.pipeline.fast_bf16", lambda: fast)
    source = loading.find_weights("moths")
    source.config.mixed_precision = "bf16"
    assert Pipeline.from_checkpoint(source).config.mixed_precision == ("bf16" if fast else "fp32")
    config = Pipeline.from_checkpoint(source, mixed_precision="bf16").config
    assert config.mixed_precision == "bf16"
    assert config.dataset.path is None and config.checkpoint == type(config.checkpoint)(), "it names no folder"


@pytest.mark.slow
def test_training_takes_the_network_from_the_weights_it_starts_from(moths, tmp_path):
    def resolve(*words):
        return TrainOptions.parse(["--dataset-path", str(moths), "checkpoint.pretrained=moths", *words]).resolve(1)

    plain, demo = resolve(), resolve("--recipe", "demo")
    for settled in (plain, demo):
        m = settled.config.model
        assert (m.hidden_size, m.num_layers, m.P_mean, m.rope, m.in_channels) == (48, 2, -0.7, True, None)
        assert settled.provenance["model.P_mean"] == "weights of moths" and settled.config.generation.num_steps == 9
    assert plain.config.train.train_iters == 10000 and demo.config.train.train_iters == 1600
    file = tmp_path / "own.yaml"
    file.write_text("model:\n  P_mean: 0.3\n")
    assert resolve("--config-file", str(file)).config.model.P_mean == 0.3
    assert resolve("--recipe", str(file)).config.model.P_mean == 0.3
    assert resolve("--config-file", str(file), "model.P_mean=0.4").config.model.P_mean == 0.4


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["model.lora.rank=2"]], ids=["full", "lora"])
def test_fine_tuning_starts_from_the_packaged_model_and_goes_on(moths, folder, tmp_path, make_once, lora):
    """On other data with other statistics; the same colour must stay the same input, after a resume too."""
    of = dict(tokenizer="residual", num_images=6, num_clips=0, short_side=32, seed=9)
    data = make_once("own", lambda place: prepare_dataset("synthetic", output_dir=place, **of))

    def tune(iters, *words):
        settings = ["checkpoint.pretrained=moths", *lora, f"train.train_iters={iters}", "scheduler.lr_decay_iters=3"]
        settings += ["dataset.use_train_split_for_val=true", "train.eval_interval=1", *FAST, *words]
        return train_model(dataset_path=data, run_dir=tmp_path / "run", recipe="demo", overrides=settings)

    refused(r"model.num_layers=3", tune, 2, "model.num_layers=3")
    wanted, others = (folders.read_statistics(place) for place in (moths, data))
    assert not torch.allclose(wanted.mean, others.mean, atol=0.02)
    for iters in (2, 3):  # the same command goes on
        run = tune(iters)
        used = folders.read_statistics(folders.find(run.path))
        assert torch.equal(used.mean, wanted.mean) and torch.equal(used.std, wanted.std)
    assert run.config.get("model.hidden_size") == 48
    assert "weights of moths" in log(run) and "of another tokenizer" not in log(run)
    assert list(run.metrics.loc[run.metrics["loss"].notna(), "iteration"]) == [1, 2, 3]
    file = export.export_weights(run, tmp_path / "tuned.safetensors", dtype="bf16")
    before, after = (exported.read(f)[0] for f in (folder / "moths.safetensors", file))
    assert before.keys() == after.keys() and any(not torch.equal(before[n], after[n]) for n in before)
    (clip,) = Pipeline.from_checkpoint(file)("a moth", **SIZE)
    assert clip.frames.shape == (1, 32, 32, 3)


def log(run) -> str:
    return (run.path / "log.txt").read_text()
