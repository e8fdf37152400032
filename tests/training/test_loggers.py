"""TensorBoard and Weights & Biases (offline: its file is read back), scalars and media."""

import json
import math
import struct

import numpy as np
import pytest

from dfm_nb.base import video
from dfm_nb.base.run import Run
from dfm_nb.config.schema import LoggerConfig
from dfm_nb.training.loggers import Loggers

RECORD = {"iteration": 3, "loss": 0.5, "lr": 1e-3, "grad_norm": math.inf, "note": "text"}
ROUND = {
    "val_loss": 0.4,
    "val_loss_by_sigma": [0.1, None],
    "val_sigmas": [0.05, 2.0],
    "val_loss_ema_0.1_by_sigma": [0.2, 0.3],
}
WANTED = {
    "loss": 0.5,
    "lr": 1e-3,
    "val_loss": 0.4,
    "val_loss/sigma_0.05": 0.1,
    "val_loss_ema_0.1/sigma_0.05": 0.2,
    "val_loss_ema_0.1/sigma_2": 0.3,
}


def frames(count):
    return np.random.default_rng(0).integers(0, 255, (count, 32, 48, 3), dtype=np.uint8)


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "run")
    video.write_mp4(run.samples / "clip.mp4", frames(5), 12.0)
    video.write_png(run.samples / "still.png", frames(1)[0])
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


def test_wandb_offline_has_scalars_settings_and_media(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_everything(run, tensorboard=False, wandb_project="butterflies", wandb_mode="offline")
    history, settings = _wandb_records(run)
    merged = {k: v for row in history for k, v in row.items()}
    for name, value in WANTED.items():
        assert merged[name] == pytest.approx(value), name
    assert merged["_step"] == 3 and "grad_norm" not in merged
    assert merged["samples/0._type"] == "video-file" and merged["samples/0.caption"] == "a blue morpho"
    assert merged["samples/1._type"] == "image-file" and merged["samples/1.caption"] == "a monarch"
    (folder,) = (run.path / "wandb").glob("offline-run-*")
    files = {p.suffix for p in (folder / "files" / "media").rglob("*") if p.is_file()}
    assert files == {".mp4", ".png"}
    assert settings == {"config"}
    assert not (run.path / "tensorboard").exists()


def _wandb_records(run):
    from wandb.proto import wandb_internal_pb2

    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    history, settings = [], set()
    for data in _leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append({_name(i): json.loads(i.value_json) for i in record.history.item})
        elif record.WhichOneof("record_type") == "run":
            settings |= {i.key for i in record.run.config.update if not i.key.startswith("_")}
    return history, settings


def _leveldb_records(data):
    """Payloads of a LevelDB log: blocks of 32 KiB after 7 bytes of header; pieces are full, first, middle or last."""
    position, whole = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if left < 7 or kind == 0:
            position += left
            continue
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def _name(item):
    return item.key or ".".join(item.nested_key)


def test_wandb_run_of_a_folder_goes_on_and_is_not_shared(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for parent in ("a", "a", "b"):
        run = Run.create(tmp_path / parent / "run")
        run.claim()
        loggers = Loggers(LoggerConfig(tensorboard=False, wandb_project="p", wandb_mode="offline"), run, {})
        ids.append(loggers._wandb.id)
        loggers.close()
        run.release()
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("installed", [False, True])
def test_wandb_that_is_missing_is_said_and_left_out(tmp_path, monkeypatch, caplog, installed):
    if installed:
        pytest.importorskip("wandb")
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = Run.create(tmp_path / "run")
    assert Loggers(LoggerConfig(tensorboard=False), run, {})._wandb is None and not caplog.text
    assert Loggers(LoggerConfig(tensorboard=False, wandb_project="p"), run, {})._wandb is None
    assert ("WANDB_API_KEY" if installed else "dfm_nb[wandb]") in caplog.text
