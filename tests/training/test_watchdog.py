"""The watchdog's verdict: whom it ends, what a loaded machine excuses, which processes it may kill."""

import itertools
import json
import subprocess
import sys
import time
from unittest.mock import Mock

import psutil
import pytest

from dfm_nb.base import process
from dfm_nb.base.torchrun import HUNG
from dfm_nb.training import watchdog


class Store(dict):
    """Rank 1 sends what it is given, with a new time at each look unless `stopped`."""

    def __init__(self, stopped=False, **beat):
        self.count = itertools.repeat(0) if stopped else itertools.count()
        self.beat = {"rank": 1, "waits": False, "still_s": 99.0, "about": "rank 1", **process.identity(), **beat}

    set = dict.__setitem__

    def get(self, key):
        return json.dumps({**self.beat, "sent": next(self.count)}) if key == "watchdog/1" else self[key]


@pytest.fixture
def ended(monkeypatch):
    """`ended(store)`: whether rank 0 ends the run, and whom it kills."""
    exits, kills = Mock(), Mock()
    for where, name, instead in ((watchdog.os, "_exit", exits), (process, "send", kills)):
        monkeypatch.setattr(where, name, instead)
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.02)
    monkeypatch.setattr(watchdog, "_COLLECTIVES", (__file__,))  # rank 0 waits

    def judge(store, excused_s=0.0):
        monkeypatch.setattr(watchdog.Stalled, "lap", lambda self: excused_s)
        dog = watchdog.Watchdog(store, 0, 2, limit_s=0.1)
        dog.beat("in a step", 1)
        time.sleep(0.5)
        dog.close()
        return {call.args for call in exits.call_args_list} == {(HUNG,)}, [
            call.args[0] for call in kills.call_args_list
        ]

    return judge


@pytest.mark.parametrize(
    "store, excused_s, ends",
    [
        (Store(), 0, True),
        (Store(still_s=0.01), 0, False),  # it computes, and its own clock stood
        (Store(waits=True), 0, True),  # all wait for each other
        (Store(waits=True, still_s=0.01), 0, False),
        (Store(stopped=True), 0, True),
        (Store(stopped=True), 9, False),  # it only got no processor
        (Store(), 9, False),
    ],
)
def test_who_could_run_and_did_not_ends_the_run(ended, store, excused_s, ends):
    assert ended(store, excused_s)[0] == ends


def test_only_what_our_launcher_started_is_killed(ended):
    """Whatever pid stands in the store, which other users of the machine can write to."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        since_boot_s = psutil.Process(other.pid).create_time() - psutil.boot_time()
        ends, kills = ended(Store(pid=other.pid, since_boot_s=since_boot_s))
        other.kill()
    assert ends and not any(kills)


def test_waiting_for_a_processor_is_counted_and_sleep_is_not():
    kept = watchdog.Stalled(psutil.Process().pid)
    time.sleep(0.5)
    assert kept.lap() < 0.4
    load = [subprocess.Popen([sys.executable, "-SEc", "while True: pass"]) for _ in range(4 * psutil.cpu_count())]
    kept.lap()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    for busy in load:
        busy.kill()
        busy.wait()
    assert kept.lap() > 0.3
