"""Names the process that holds up a distributed run, and ends the run, instead of leaving all the others to wait.

Enters: `beat(phase, iteration)` from the training loop. Leaves: one sentence on stderr that names rank, host, iteration, phase and line of code, and
an exit that torchrun passes on to all processes.
How: each process tells the others every second, through the process group's store, whether its main thread waits in a collective, and watches its
neighbour. A neighbour that tells nothing any more, or an own main thread that has been in one phase for too long, makes a watchdog look at all of them:
those that tell nothing were stopped or are lost, those that do not wait in a collective are the ones the others wait for.
Guarantees: a machine that sleeps, or a whole job that is suspended and continued, is no hang. Cost: one small store write a second and process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

PERIOD_S = 1.0
CONFIRM_S = 4.0
EXIT_CODE = 3
_COLLECTIVES = ("distributed_c10d.py",)


def main_thread_stack() -> list[tuple[str, int, str]]:
    """(file, line, function) of the main thread, innermost first."""
    frame, out = sys._current_frames().get(threading.main_thread().ident), []
    while frame is not None:
        out.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return out


class Watchdog:
    """Started by `start`, fed by `beat`, ended by `close`.

    Parameters
    ----------
    store : with `set(key, value)` and `get(key)`, shared by all processes.
    limit_s : longest time in a watched phase; at least five times the longest that was seen.
    """

    def __init__(self, store, rank: int, world: int, limit_s: float):
        self.store, self.rank, self.world, self.limit_s = store, rank, world, limit_s
        self._phase, self._iteration, self._since, self._watched = "starting", 0, time.monotonic(), False
        self._longest_s, self._told = 0.0, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._tell()
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

    def _allowed_s(self) -> float:
        return max(self.limit_s, 5 * self._longest_s)

    def _tell(self) -> None:
        stack = main_thread_stack()
        where = next((f"{Path(f).name}:{line} in {name}" for f, line, name in stack if "threading.py" not in f), "?")
        self._told += 1
        self.store.set(
            f"watchdog/{self.rank}",
            json.dumps(
                {
                    "told": self._told,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "phase": self._phase,
                    "iteration": self._iteration,
                    "waits": any(f.endswith(_COLLECTIVES) for f, _, _ in stack),
                    "where": where,
                }
            ),
        )

    def _watch(self) -> None:
        woke = heard = time.monotonic()
        neighbour, told = (self.rank + 1) % self.world, None
        while not self._done.wait(PERIOD_S):
            now = time.monotonic()
            if now - woke > 5 * PERIOD_S:  # this process itself was stopped for a while
                self._since = heard = now
            woke = now
            try:
                self._tell()
                latest = self._read(neighbour)["told"]
                if latest != told:
                    told, heard = latest, now
                if self._overdue() or now - heard > self.limit_s:
                    self._end()
            except Exception:  # the store goes with its process, and torchrun ends the others
                if self._done.is_set():
                    return

    def _overdue(self) -> bool:
        return self._watched and time.monotonic() - self._since > self._allowed_s()

    def _read(self, rank: int) -> dict:
        return json.loads(self.store.get(f"watchdog/{rank}"))

    def _end(self) -> None:
        """End the run, unless it moves again in the next seconds."""
        ranks = range(self.world)
        before = [self._read(r)["told"] for r in ranks]
        end = time.monotonic() + CONFIRM_S
        while time.monotonic() < end:
            if self._done.wait(PERIOD_S):
                return
            self._tell()
        states = [self._read(r) for r in ranks]
        silent = [r for r in ranks if states[r]["told"] == before[r]]
        if not silent and not self._overdue():
            return
        busy = [r for r in ranks if not states[r]["waits"]]
        if self.rank == next(r for r in ranks if r not in silent):
            print(self._sentence(states, silent, busy), file=sys.stderr, flush=True)
        else:
            time.sleep(PERIOD_S)  # the sentence first
        for r in silent or busy:  # a stopped process would make torchrun wait for it
            if r != self.rank and states[r]["host"] == socket.gethostname():
                os.kill(states[r]["pid"], signal.SIGKILL)
        os._exit(EXIT_CODE)

    def _sentence(self, states: list[dict], silent: list[int], busy: list[int]) -> str:
        def name(r: int) -> str:
            s = states[r]
            return f"rank {r} (host {s['host']}, process {s['pid']}) at iteration {s['iteration']}, {s['phase']}"

        if silent:
            what = "; ".join(name(r) for r in silent[:4]) + ": no sign of life, it was stopped or its machine is lost"
        elif busy and len(busy) < self.world:
            what = "; ".join(f"{name(r)}, in {states[r]['where']}" for r in busy[:4])
        else:
            what = (
                "all ranks "
                + ("wait for each other" if not busy else "are busy")
                + "; "
                + "; ".join(f"rank {r} in {states[r]['where']}" for r in range(min(self.world, 4)))
            )
        return (
            f"error: the run hangs, for {self.limit_s:g} s or more: {what}. The job ends; the same command goes on from the last "
            "checkpoint (dist.hang_timeout_s sets the limit, 0 turns this off)"
        )
