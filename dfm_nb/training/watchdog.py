"""Ends a distributed run that hangs, and names the process that holds it up.

Once a second each process writes a heartbeat to the process group's store: phase, iteration, and whether its main
thread waits in a collective. If its neighbour's heartbeats stop, or its own main thread exceeds the limit, a watchdog
inspects all ranks. Those without heartbeats were stopped or are lost; those that do not wait in a collective are the
ones that the others wait for. It prints one sentence that names them and exits, and torchrun ends the other
processes. A machine that sleeps, or a whole job that is suspended and continued, is no hang.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from dfm_nb.base.torchrun import HUNG

PERIOD_S = 1.0
"""Between two heartbeats."""
CONFIRM_S = 4.0
"""A suspected hang must last this much longer before the run is ended."""
_COLLECTIVES = ("distributed_c10d.py",)


def main_thread_stack() -> list[tuple[str, int, str]]:
    """(file, line, function) of the main thread, innermost first."""
    ident = threading.main_thread().ident
    assert ident is not None  # it has started
    top = sys._current_frames().get(ident)  # it has none while the interpreter ends
    frames = traceback.walk_stack(top) if top else ()
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


class Watchdog:
    """Started by `start`, fed by `beat`, ended by `close`.

    Parameters
    ----------
    store : with `set(key, value)` and `get(key)`, shared by all processes.
    limit_s : longest time in a watched phase. Five times the longest one so far is allowed in any case.
    """

    def __init__(self, store, rank: int, world: int, limit_s: float):
        self.store, self.rank, self.world, self.limit_s = store, rank, world, limit_s
        self._phase, self._iteration, self._since, self._watched = "starting", 0, time.monotonic(), False
        self._longest_s = 0.0  # of the watched phases so far
        self._beats = 0  # heartbeats sent
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._send_heartbeat()
        self._thread.start()
        return self

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def beat(self, phase: str, iteration: int, watched: bool = True) -> None:
        """The main thread enters a phase. watched=False: it may take long, as saving and validation do."""
        now = time.monotonic()
        if self._watched:
            self._longest_s = max(self._longest_s, now - self._since)
        self._phase, self._iteration, self._since, self._watched = phase, iteration, now, watched

    def _send_heartbeat(self) -> None:
        stack = main_thread_stack()
        where = next((f"{Path(f).name}:{line} in {name}" for f, line, name in stack if "threading.py" not in f), "?")
        self._beats += 1
        beat = {
            "beats": self._beats,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": self._phase,
            "iteration": self._iteration,
            "waits": any(f.endswith(_COLLECTIVES) for f, _, _ in stack),
            "where": where,
        }
        self.store.set(f"watchdog/{self.rank}", json.dumps(beat))

    def _watch(self) -> None:
        woke = heard = time.monotonic()  # this thread's last turn; the neighbour's last new heartbeat
        neighbour, beats = (self.rank + 1) % self.world, None
        while not self._done.wait(PERIOD_S):
            now = time.monotonic()
            if now - woke > 5 * PERIOD_S:  # this process itself was stopped for a while: start counting anew
                self._since = heard = now
            woke = now
            try:
                self._send_heartbeat()
                latest = self._read(neighbour)["beats"]
                if latest != beats:
                    beats, heard = latest, now
                if self._overdue() or now - heard > self.limit_s:
                    self._end_if_confirmed()
            except Exception:  # the store ends with the process that serves it, and torchrun then ends all the others
                if self._done.is_set():
                    return

    def _overdue(self) -> bool:
        return self._watched and time.monotonic() - self._since > max(self.limit_s, 5 * self._longest_s)

    def _read(self, rank: int) -> dict:
        return json.loads(self.store.get(f"watchdog/{rank}"))

    def _end_if_confirmed(self) -> None:
        """End the run, unless it moves again in the next seconds."""
        ranks = range(self.world)
        before = [self._read(r)["beats"] for r in ranks]
        end = time.monotonic() + CONFIRM_S
        while time.monotonic() < end:
            if self._done.wait(PERIOD_S):
                return
            self._send_heartbeat()
        states = [self._read(r) for r in ranks]
        silent = [r for r in ranks if states[r]["beats"] == before[r]]
        if not silent and not self._overdue():
            return
        busy = [r for r in ranks if not states[r]["waits"]]
        if self.rank == next(r for r in ranks if r not in silent):  # one of those that live says it
            print(self._sentence(states, silent, busy), file=sys.stderr, flush=True)
        else:
            time.sleep(PERIOD_S)  # the first process to exit ends the others: let the sentence be printed before
        for r in silent or busy:  # SIGKILL, as torchrun would wait for a stopped process to answer its SIGTERM
            if r != self.rank and states[r]["host"] == socket.gethostname():
                os.kill(states[r]["pid"], signal.SIGKILL)
        os._exit(HUNG)

    def _sentence(self, states: list[dict], silent: list[int], busy: list[int]) -> str:
        def name(r: int) -> str:
            s = states[r]
            return f"rank {r} (host {s['host']}, process {s['pid']}) at iteration {s['iteration']}, {s['phase']}"

        if silent:
            what = "; ".join(name(r) for r in silent[:4]) + ": no sign of life, it was stopped or its machine is lost"
        elif busy and len(busy) < self.world:
            what = "; ".join(f"{name(r)}, in {states[r]['where']}" for r in busy[:4])
        else:
            places = "; ".join(f"rank {r} in {s['where']}" for r, s in enumerate(states[:4]))
            what = f"all ranks {'are busy' if busy else 'wait for each other'}; {places}"
        return (
            f"error: the run hangs, for {self.limit_s:g} s or more: {what}. The job ends; the same command goes on "
            "from the last checkpoint (dist.hang_timeout_s sets the limit, 0 turns this off)"
        )
