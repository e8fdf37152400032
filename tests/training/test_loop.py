"""What stops a run, and that it goes on as if it had not stopped."""

import functools
import os
import shutil
import signal
import weakref
from unittest import mock

import numpy as np
import pytest

from dfm_nb import config as cfg
from dfm_nb.base import process
from dfm_nb.base.run import Run
from dfm_nb.checkpoints.folders import read_state
from dfm_nb.data.adoption import index_dataset
from dfm_nb.data.shards import splits_of
from dfm_nb.training import loop
from dfm_nb.training.loop import OUT_OF_TIME, StopRequest
from tests import tiny_run


@pytest.fixture
def handlers():
    """Those of before are back after the test."""
    before = {number: signal.getsignal(number) for number in process.STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_or_the_end_of_the_time_stops_a_run(one_rank, handlers):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, where it stays ignored
    stop = StopRequest(on_signal=True)
    assert stop.agreed(out_of_time=False, news=False) == (0, 0)
    assert stop.agreed(out_of_time=True, news=True) == (OUT_OF_TIME, 1)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        assert stop.agreed(out_of_time=True, news=False) == (number, 0)


@pytest.mark.parametrize("launcher", ["", "SIGTERM,SIGHUP"])
def test_a_hangup_that_nohup_ignores_stays_ignored(one_rank, handlers, monkeypatch, launcher):
    """Unless the user's torchrun forwards it, and would kill those that ignore it."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", launcher)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest(on_signal=True)
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.agreed(out_of_time=False, news=False) == (signal.SIGHUP if launcher else 0, 0)


def test_given_frames_without_clips_are_said(one_rank, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(loop, "Training", mock.Mock())
    monkeypatch.setattr(loop.parallel, "shutdown", mock.Mock())
    for key, sizes in (("condition_frames_prob", "[[1,8,8]]"), ("condition_last_prob", "[[3,8,8]]")):
        given = ["dataset.mock=true", "model.size=tiny", f"dataset.{key}=0.5", f"dataset.mock_latent_sizes={sizes}"]
        loop._train(cfg.resolve(None, overrides=given), Run.create(tmp_path / f"{key}{sizes}"))
        assert (key in caplog.text) == (sizes == "[[1,8,8]]")
        caplog.clear()


def test_a_step_of_more_than_all_samples_is_said(caplog):
    store = mock.MagicMock(**{"voxels.return_value": np.full(40, 64), "__len__.return_value": 40})
    for packs in (2, 1):  # of 512 tokens; the samples have 640
        settings = ["model.size=tiny", "dataset.task_encoder_seq_length=512", f"train.global_batch_size={packs}"]
        loop._warn_of_large_steps(cfg.resolve(None, overrides=settings).config, store)
        assert ("global_batch_size" in caplog.text) == (packs == 2)
        caplog.clear()


def test_the_same_signal_once_more_ends_the_process(monkeypatch, capfd):
    """Not one that comes with the first, as from a scheduler and from torchrun."""
    endings = []
    for again_s in (60.0, -1.0):
        monkeypatch.setattr(loop, "AGAIN_S", again_s)
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGTERM, functools.partial(loop._note, {}))
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        endings.append(os.waitpid(child, 0)[1])
    assert endings == [0, signal.SIGTERM] and capfd.readouterr().err.count("SIGTERM") == 2


def test_an_interrupt_stops_like_a_signal_and_the_second_one_raises(one_rank, handlers, monkeypatch):
    stop = StopRequest(on_signal=True)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.agreed(out_of_time=False, news=False) == (signal.SIGINT, 0)
    monkeypatch.setattr(loop, "AGAIN_S", -1.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_was_interrupted_says_so_to_its_caller(one_rank, monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "_train", lambda *_: signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        loop.run(cfg.resolve(None, overrides=["dataset.mock=true"]), str(tmp_path))


def test_signal_handlers_keep_no_process_group_alive(one_rank, handlers):
    """A forked writer of checkpoints drops them, and must not end a process group: it has none of its threads."""
    stop = StopRequest(on_signal=True)
    gone = weakref.ref(stop)
    del stop
    assert gone() is None


def test_a_run_goes_on_with_data_that_grew_if_it_is_told(shards_of_four, tmp_path):
    """From the switch on resume is exact again, also from the checkpoint before it; foreign data are refused."""
    data, often = shutil.copytree(shards_of_four, tmp_path / "data"), ["checkpoint.save_interval=1"]
    splits = data / ".nv-meta" / "split.yaml"
    last = splits_of(data)["train"][-1]
    splits.write_text("".join(line for line in splits.read_text().splitlines(True) if last not in line))
    (data / last).unlink()
    index_dataset(data)
    run, grow, two = tmp_path / "run", "dataset.may_grow=true", "train.train_iters=2 scheduler.lr_decay_iters=5".split()
    five = ["train.train_iters=5", "scheduler.lr_decay_iters=5"]
    tiny_run.train(data, run, *often, *two)
    shutil.copytree(shards_of_four, data, dirs_exist_ok=True)

    def losses(run, *more):
        tiny_run.train(data, run, *often, *five, *more)
        return tiny_run.losses(run)

    with pytest.raises(AssertionError, match="may_grow"):
        losses(run)
    runs = [shutil.copytree(run, tmp_path / name) for name in ("stopped", "killed")]
    always = losses(run, grow)
    for stopped in runs:
        assert len(losses(stopped, grow, "train.exit_duration_s=1e-9")) == 3
    shutil.rmtree(runs[1] / "checkpoints" / "iter_0000003")
    assert [losses(stopped, grow) for stopped in runs] == [always, always] and len(always) == 5
    state = read_state(run / "checkpoints" / "iter_0000005")
    assert state["grown"] == [2] and state["data"]["lanes"][0]["epoch"] > 0
    shutil.rmtree(data)
    tiny_run.prepare(data, "synthetic:square")
    with pytest.raises(AssertionError, match="dataset.path"):
        losses(run, grow, "train.train_iters=6")
