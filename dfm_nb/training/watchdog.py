"""Ends a distributed run that hangs, and reports the process that blocks it.

Once a second each process writes a heartbeat to the process group's store: its time, phase, and whether its main thread
waits in a collective. If its neighbour's heartbeats stop, or its own main thread exceeds the limit, a watchdog inspects
all ranks. Ranks without heartbeats were stopped or lost; otherwise the others wait for those that are in no collective.
It reports these ranks and exits, and torchrun ends the others. A machine that sleeps, or a complete job that is
suspended and continued, does not count as a hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from dfm_nb.base import process
from dfm_nb.base.torchrun import HUNG, mark_hung

PERIOD_S = 1.0
"""Between two heartbeats."""
CONFIRM_BEATS = 4
"""A suspected hang must last so many more heartbeats before the run is ended: one may be late, four are not."""
_COLLECTIVES = "distributed_c10d.py"
"""torch's file of `all_reduce` and the like, whatever the backend: who waits for others is in there."""


class Watchdog:
    """Watches from its start to `close`, and is fed by `beat`.

    Parameters
    ----------
    store : with `set(key, value)` and `get(key)`, shared by all processes.
    limit_s : longest time in a watched phase. Five times the longest one so far is allowed in any case.
    """

    def __init__(self, store, rank: int, world: int, limit_s: float):
        self.store, self.rank, self.world, self.limit_s = store, rank, world, limit_s
        self._phase, self._since, self._watched = "starting", time.monotonic(), False
        self._longest_s = 0.0  # of the watched phases so far
        self._done = threading.Event()
        self._send_heartbeat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def beat(self, phase: str, iteration: int, watched: bool = True) -> None:
        """The main thread enters a phase. watched=False: it may take long, as saving and validation do."""
        now = time.monotonic()
        if self._watched:
            self._longest_s = max(self._longest_s, now - self._since)
        self._phase, self._since, self._watched = f"at iteration {iteration}, {phase}", now, watched

    def _send_heartbeat(self) -> None:
        # the one way to another thread's stack; it has none while the interpreter ends
        top = sys._current_frames().get(threading.main_thread().ident or 0)
        # innermost first; a wait in threading.py says less than who called it
        stack = traceback.StackSummary.extract(traceback.walk_stack(top), lookup_lines=False) if top else []
        frames = [frame for frame in stack if "threading.py" not in frame.filename]
        where = "".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames[:1])
        own = process.identity()
        beat = {
            "rank": self.rank,
            "sent": time.monotonic_ns(),
            **own,
            "waits": any(frame.filename.endswith(_COLLECTIVES) for frame in frames),
            "told": f"rank {self.rank} (host {own['host']}, process {own['pid']}) {self._phase}, in {where}",
        }
        self.store.set(f"watchdog/{self.rank}", json.dumps(beat))

    def _read(self, rank: int) -> dict:
        return json.loads(self.store.get(f"watchdog/{rank}"))

    def _watch(self) -> None:
        woke = heard = time.monotonic()  # this thread's last turn; the neighbour's last new heartbeat
        neighbour, sent = (self.rank + 1) % self.world, None
        while not self._done.wait(PERIOD_S):
            now = time.monotonic()
            if now - woke > 5 * PERIOD_S:  # this process itself was stopped for a while: start counting again
                self._since = heard = now
            woke = now
            # the store ends with the process that serves it, and torchrun then ends all the others
            with contextlib.suppress(Exception):
                self._send_heartbeat()
                if (latest := self._read(neighbour)["sent"]) != sent:
                    sent, heard = latest, now
                if self._overdue() or now - heard > self.limit_s:
                    self._end_if_confirmed()

    def _overdue(self) -> bool:
        return self._watched and time.monotonic() - self._since > max(self.limit_s, 5 * self._longest_s)

    def _end_if_confirmed(self) -> None:
        """End the run, unless it moves again in the next seconds.

        Of four ranks, 2 reads a file that never comes: 0, 1 and 3 wait in a collective, so `busy` is [2], and 2 is
        reported and killed. Had 2 been stopped, it would send nothing: `silent` is [2]. If all wait for each other,
        none is to blame, and all are reported.
        """
        before = [self._read(rank)["sent"] for rank in range(self.world)]
        for _ in range(CONFIRM_BEATS):
            if self._done.wait(PERIOD_S):
                return
            self._send_heartbeat()
        states = [self._read(rank) for rank in range(self.world)]
        silent = [s for s, sent in zip(states, before) if s["sent"] == sent]
        busy = [s for s in states if not s["waits"]]
        if not silent and not self._overdue():
            return
        if self.rank == next(s["rank"] for s in states if s not in silent):  # one of those that live says it
            named = "; ".join(s["told"] for s in (silent or busy or states)[:4])
            why = ": no sign of life, it was stopped or its machine is lost" if silent else ""
            what = f"the run hangs, for {self.limit_s:g} s or more: {named}{why}"
            hint = "the same command resumes from the last checkpoint (dist.hang_timeout_s sets the limit, 0 is none)"
            print(f"error: {what}. The job ends; {hint}", file=sys.stderr, flush=True)
        else:
            time.sleep(PERIOD_S)  # the first process to exit ends the others: let the sentence be printed before
        mark_hung()
        # SIGKILL, as torchrun would wait for a stopped process to answer its SIGTERM
        blamed = [process.find(s) for s in silent or busy if s["rank"] != self.rank]
        process.send(filter(None, blamed), signal.SIGKILL)
        os._exit(HUNG)
