"""What stops a run, and what it says before its first step."""

import functools
import logging
import os
import signal
import weakref

import pytest

from dfm_nb import config as cfg
from dfm_nb.config import counts
from dfm_nb.data.stores import MockStore
from dfm_nb.training import loop
from dfm_nb.training.batches import packed_loader
from dfm_nb.training.loop import OUT_OF_TIME, StopRequest


@pytest.fixture
def handlers():
    """Those of before are back after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_or_the_end_of_the_time_stops_a_run(one_rank, handlers):
    stop = StopRequest(on_signal=True)
    assert stop.agreed(out_of_time=False, news=False) == (0, 0)
    assert stop.agreed(out_of_time=True, news=True) == (OUT_OF_TIME, 1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.agreed(out_of_time=True, news=False) == (signal.SIGUSR1, 0)


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


def test_signal_handlers_keep_no_process_group_alive(one_rank, handlers):
    """A forked writer of checkpoints drops them, and must not end a process group: it has none of its threads."""
    stop = StopRequest(on_signal=True)
    gone = weakref.ref(stop)
    del stop
    assert gone() is None


def test_long_step_is_told_before_it(one_rank, caplog, monkeypatch):
    """All tokens of the packs count, padding too: the machine multiplies it."""
    caplog.set_level(logging.INFO, "dfm_nb")
    fed = {"model.in_channels": 16, "model.text_dim": 384}
    resolved = cfg.resolve("default", overrides=["dataset.num_workers=0", "train.global_batch_size=2"])
    config = resolved.with_derived(fed, "test").config
    packs = packed_loader(config, MockStore([(1, 8, 8), (3, 8, 8)], length=64), 0, 1).next_step()
    lengths = [p.lengths(padding=True) for p in packs]
    assert all(sum(q) == 8192 for q, _ in lengths)
    step_s = sum(counts.model_flops(config.model, q, kv) for q, kv in lengths) / 1e10
    monkeypatch.setattr(loop, "mlp_flops_per_s", lambda *_: 1e15)
    loop.tell_duration(config, packs)
    assert not caplog.text
    monkeypatch.setattr(loop, "mlp_flops_per_s", lambda *_: 1e10)
    loop.tell_duration(config, packs)
    assert f"about {loop.duration(step_s)} on this CPU, all 10000 {loop.duration(10000 * step_s)}" in caplog.text
