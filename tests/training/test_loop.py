"""What stops a run."""

import os
import signal
import weakref

import pytest

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


def test_signal_handlers_keep_no_process_group_alive(one_rank, handlers):
    """A forked writer of checkpoints drops them, and must not end a process group: it has none of its threads."""
    stop = StopRequest(on_signal=True)
    gone = weakref.ref(stop)
    del stop
    assert gone() is None
