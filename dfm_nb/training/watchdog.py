"""Ends a distributed run that hangs, and reports the process that blocks it.

Once a second each process writes a heartbeat to the process group's store: its time, phase, and whether its main thread
waits in a collective. If its neighbour's heartbeats stop, or its own main thread exceeds the limit, a watchdog inspects
all ranks. Ranks without heartbeats were stopped or lost; otherwise the others wait for those that are in no collective.
It reports these ranks and exits, and torchrun ends the others. A machine that sleeps, or a complete job that is
suspended and continued, does not count as a hang.

Nor does a busy machine: a process's clock stops while it waits for a processor (`Stalled`), and ranks that wait for a
computing process use that process's clock from its heartbeat. Where the system does not report this, all time counts.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil

from dfm_nb.base import process
from dfm_nb.base.log import legible
from dfm_nb.base.torchrun import HUNG, mark_hung

PERIOD_S = 1.0
"""Interval of heartbeats."""
CONFIRM_BEATS = 4
"""A suspected hang must last this many more heartbeats before the run ends: one can be late, four are not."""
_COLLECTIVES = ("distributed_c10d.py", "p2p_communication.py")
"""torch's file of collectives, for every backend, and megatron-core's of communication between pipeline stages: a rank
with one of these files on its stack is waiting for others."""


class Stalled:
    """How long a process waited for a processor: the longest time of one of its threads.

    pid : may have ended, or be 0: then the time is 0.
    """

    def __init__(self, pid: int):
        self._tasks = Path(f"/proc/{pid}/task")
        self._waited_ns = dict[str, int]()  # since its start, by thread
        self.lap()

    def lap(self) -> float:
        """Seconds since the last call, or since the start; 0 where the system does not report it."""
        longest_ns = 0
        for file in self._tasks.glob("*/schedstat"):
            thread = file.parent.name
            with contextlib.suppress(OSError):  # a thread that ends
                waited_ns = int(file.read_text().split()[1])
                longest_ns = max(longest_ns, waited_ns - self._waited_ns.get(thread, 0))
                self._waited_ns[thread] = waited_ns
        return longest_ns / 1e9


class Watchdog:
    """Watches from its start to `close`, and is fed by `beat`.

    Parameters
    ----------
    store : with `set(key, value)` and `get(key)`, shared by all processes.
    limit_s : longest time in a watched phase, or five times the longest so far if that is more, as steps may be longer
        than the limit; five is a margin for other load, not a measured one.
    """

    def __init__(self, store, rank: int, world: int, limit_s: float):
        self.store = store
        self.rank = rank
        self.world = world
        self.limit_s = limit_s
        self._stalled = Stalled(os.getpid())
        self._lost_s = 0.0
        self._beaten = time.monotonic()
        self._phase = "starting"
        self._since = self._clock()
        self._watched = False
        self._waits = False
        self._longest_s = 0.0  # without a move, in the watched phases so far
        self._done = threading.Event()
        self._send_heartbeat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def beat(self, phase: str, iteration: int, watched: bool = True) -> None:
        """The main thread enters a phase. watched=False: it may take long, as saving and validation do."""
        now = self._clock()
        if self._watched:
            self._longest_s = max(self._longest_s, now - self._since)
        self._phase = f"at iteration {iteration}, {phase}"
        self._since = now
        self._watched = watched

    def _clock(self) -> float:
        """Seconds, without those in which this process could not run."""
        return time.monotonic() - self._lost_s

    def _send_heartbeat(self) -> None:
        elapsed_s = time.monotonic() - self._beaten
        lost_s = self._stalled.lap()
        self._beaten += elapsed_s
        # stopped, or stalled
        self._lost_s += elapsed_s if elapsed_s > 5 * PERIOD_S else min(lost_s, elapsed_s)
        # the only way to another thread's stack; at interpreter exit there is none
        top = sys._current_frames().get(threading.main_thread().ident or 0)
        # innermost first; threading.py is skipped, because its caller is more telling
        stack = traceback.StackSummary.extract(traceback.walk_stack(top), lookup_lines=False) if top else []
        frames = [frame for frame in stack if "threading.py" not in frame.filename]
        where = "".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames[:1])
        waits = any(frame.filename.endswith(_COLLECTIVES) for frame in frames)
        if waits != self._waits:  # it makes progress
            self._waits = waits
            self._since = self._clock()
        own = process.identity()
        beat = {
            "rank": self.rank,
            "sent": time.monotonic_ns(),
            **own,
            "waits": waits,
            "still_s": self._clock() - self._since,
            "about": f"rank {self.rank} (host {own['host']}, process {own['pid']}) {self._phase}, in {where}",
        }
        self.store.set(f"watchdog/{self.rank}", json.dumps(beat))

    def _read(self, rank: int) -> dict:
        return json.loads(self.store.get(f"watchdog/{rank}"))

    def _watch(self) -> None:
        heard = self._clock()  # the neighbour's last new heartbeat
        neighbour = (self.rank + 1) % self.world
        sent = None
        while not self._done.wait(PERIOD_S):
            # if the process that serves the store ends, torchrun ends the others
            with contextlib.suppress(Exception):
                self._send_heartbeat()
                latest = self._read(neighbour)["sent"]
                if latest != sent:
                    sent = latest
                    heard = self._clock()
                if self._overdue() or self._clock() - heard > self.limit_s:
                    self._end_if_confirmed()

    def _allowed_s(self) -> float:
        return max(self.limit_s, 5 * self._longest_s)

    def _overdue(self) -> bool:
        return self._watched and self._clock() - self._since > self._allowed_s()

    def _end_if_confirmed(self) -> None:
        """End the run, unless it moves again in the next seconds.

        Of four ranks, 2 reads a file that never comes: 0, 1 and 3 wait in a collective, so `busy` is [2], and 2 is
        reported and killed. Had 2 been stopped, it would send nothing: `silent` is [2]. If all wait for each other,
        none is to blame, and all are reported. If 2 computes, but got no processor for most of the time, its own clock
        has not reached the limit, and the run continues.
        """
        before = [self._read(rank) for rank in range(self.world)]
        stalled = []
        for beat in before:
            other = process.find(beat)
            stalled.append(Stalled(other.pid if other else 0))  # 0: on another host
        begun = time.monotonic()
        for _ in range(CONFIRM_BEATS):
            if self._done.wait(PERIOD_S):
                return
            self._send_heartbeat()
        states = [self._read(rank) for rank in range(self.world)]
        most_s = (time.monotonic() - begun) / 2
        silent = [s for s, b, k in zip(states, before, stalled) if s["sent"] == b["sent"] and k.lap() < most_s]
        busy = [s for s in states if not s["waits"]]
        still = self._overdue() and all(s["still_s"] > self._allowed_s() for s in busy or states)
        if not silent and not still:
            return
        # the first living rank reports it
        if self.rank == next(s["rank"] for s in states if s not in silent):
            named = "; ".join(s["about"] for s in (silent or busy or states)[:4])
            why = ": no heartbeats; it was stopped or its machine is lost" if silent else ""
            what = f"the run hangs, for {self.limit_s:g} s or more: {named}{why}"
            hint = "the same command resumes from the last checkpoint (dist.hang_timeout_s sets the limit, 0 is none)"
            print(legible(f"error: {what}. The job ends; {hint}"), file=sys.stderr, flush=True)
        else:
            # the first process to exit ends the others: let the message be printed before
            time.sleep(PERIOD_S)
        mark_hung()
        # SIGKILL, as torchrun would wait for a stopped process to answer its SIGTERM. Other users of the machine can
        # write to the store: only what our own parent started is killed.
        ours = psutil.Process(os.getppid()).children()
        blamed = [process.find(s) for s in silent or busy if s["rank"] != self.rank]
        process.send([p for p in blamed if p in ours], signal.SIGKILL)
        os._exit(HUNG)
