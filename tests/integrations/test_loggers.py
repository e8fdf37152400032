"""TensorBoard and Weights & Biases (a stand-in for its package), scalars and media."""

import math
import sys
import types
from unittest.mock import Mock

import pytest

from dfm_nb.base import plugins, video
from dfm_nb.base.run import Run
from dfm_nb.config.schema import LoggerConfig
from dfm_nb.training.report import Loggers
from tests.frames import noise
from tests.refusals import refused

RECORD = {"iteration": 3, "loss": 0.5, "lr": 1e-3, "grad_norm": math.inf, "note": "text"}
ROUND = {"val_loss": 0.4, "val_loss_by_sigma": [0.1, None], "val_sigmas": [0.05, 2.0]}
ROUND |= {"val_loss_ema_0.1_by_sigma": [0.2, 0.3]}
WANTED = {"loss": 0.5, "lr": 1e-3, "val_loss": 0.4, "val_loss/sigma_0.05": 0.1}
WANTED |= {"val_loss_ema_0.1/sigma_0.05": 0.2, "val_loss_ema_0.1/sigma_2": 0.3}


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "run")
    run.samples.mkdir()
    video.write_mp4(run.samples / "clip.mp4", noise(5, 32, 48), 12.0)
    video.write_png(run.samples / "still.png", noise(32, 48))
    return run


def log_everything(run, **settings):
    loggers = Loggers(LoggerConfig(**settings), run, {"config": "model: {}"})
    loggers.scalars(3, RECORD)
    loggers.scalars(3, ROUND)
    loggers.sample(3, 0, "a blue morpho", run.samples / "clip.mp4")
    loggers.sample(3, 1, "a monarch", run.samples / "still.png")
    loggers.close()


def test_tensorboard_has_scalars_and_samples(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_everything(run)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) == WANTED.keys()
    for name, value in WANTED.items():
        (point,) = events.Scalars(name)
        assert point.step == 3 and point.value == pytest.approx(value)
    clip, still = (events.Images(f"samples/{i}")[0] for i in (0, 1))
    assert (clip.width, clip.height, still.width, still.height) == (5 * 48, 32, 48, 32)
    assert any("samples/0" in t for t in tags["tensors"])


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package; `init` returns it too."""
    fake = Mock(Error=type("Error", (Exception,), {}))
    fake.Image, fake.Video = (lambda path, caption, kind=kind: (kind, path, caption) for kind in ("image", "video"))
    fake.init.return_value = fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake)
    return fake


def test_wandb_has_scalars_settings_and_media(run, wandb):
    log_everything(run, report_to=["wandb"], wandb_project="butterflies", wandb_mode="offline")
    logged = {name: value for call in wandb.log.call_args_list for name, value in call.args[0].items()}
    media = {"samples/0": ("video", str(run.samples / "clip.mp4"), "a blue morpho")}
    media["samples/1"] = ("image", str(run.samples / "still.png"), "a monarch")
    assert logged == WANTED | media and {call.kwargs["step"] for call in wandb.log.call_args_list} == {3}
    begun = wandb.init.call_args.kwargs
    assert (begun["project"], begun["name"], begun["mode"]) == ("butterflies", "run", "offline")
    assert begun["config"] == {"config": "model: {}"} and wandb.finish.called
    assert not (run.path / "tensorboard").exists()


def test_a_logger_that_fails_costs_neither_the_run_nor_the_others(run, wandb, caplog):
    for broken in ("finish", "log"):
        setattr(wandb, broken, None)
        log_everything(run, report_to=["wandb", "tensorboard"], wandb_project="p")
    assert caplog.text.count("wandb failed") == 2 and (run.path / "tensorboard").exists()


def test_wandb_run_of_a_folder_goes_on_and_is_not_shared(tmp_path, wandb):
    for parent in ("a", "a", "b"):
        run = Run.create(tmp_path / parent / "run")
        run.claim()
        Loggers(LoggerConfig(report_to=["wandb"], wandb_project="p"), run, {}).close()
        run.release()
    ids = [call.kwargs["id"] for call in wandb.init.call_args_list]
    assert ids[0] == ids[1] != ids[2] and None not in ids


def test_wandb_that_is_missing_or_refuses_is_said_and_left_out(run, monkeypatch, caplog, wandb):
    assert Loggers(LoggerConfig(report_to=[]), run, {})._open == [] and not caplog.text
    for refusal in (wandb.Error("no key"), ValueError("no text as id"), OSError("name too long")):
        wandb.init.side_effect = refusal
        assert Loggers(LoggerConfig(report_to=["wandb"], wandb_project="p"), run, {})._open == []
        assert str(refusal) in caplog.text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Loggers(LoggerConfig(report_to=["wandb"], wandb_project="p"), run, {})._open == []
    assert "dfm_nb[wandb]" in caplog.text


def test_a_logger_of_a_module_gets_everything_and_one_that_is_none_is_named(run, monkeypatch):
    told = []

    def mine(run, config, settings):
        try:
            while True:
                told.append((yield))
        finally:
            told.append("closed")

    plugins.trust("my_logger:mine my_logger:other my_logger:none")
    monkeypatch.setitem(sys.modules, "my_logger", types.SimpleNamespace(mine=mine, other=lambda *args: None))
    log_everything(run, report_to=["my_logger:mine"])
    assert told[0] == (3, {"loss": 0.5, "lr": 1e-3}) and told[-1] == "closed"
    assert told[2] == (3, {"samples/0": ("a blue morpho", run.samples / "clip.mp4")})
    for name in ("my_logger:other", "my_logger:none", "tensorbord"):
        refused(name, Loggers, LoggerConfig(report_to=[name]), run, {})
