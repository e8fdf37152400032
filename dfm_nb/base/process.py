"""Processes: start one, identify it later, check whether it is alive, end it with its descendants.

A record `{"pid", "host", "started_s", "since_boot_s"}` identifies a process permanently: a reused pid starts later.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from dfm_nb.base.files import Json, appending

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Options of Linux's prctl, which Python does not define."""
POLL_S = 0.05
"""Polling interval: short enough to see an end at once; polling all of a machine's processes costs milliseconds."""
GRACE_S = 120.0
"""Time for a stopping run to save a checkpoint; only a run that hangs needs all of it."""
MARGIN_S = 20.0
"""Added to the grace time for a process that forwards the request: it must end a hung child first."""
PARENT = "DFM_PARENT"
"""Environment variable of a command that must not outlive its parent, whose pid it has (`dfm_nb.base.argv.guard`)."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that save and end a run: Ctrl-C and an interrupted kernel, the end of a job, a scheduler's preemption, a
closed terminal."""
SETTLE_S = 10.0
"""Time after a SIGKILL for a parent to reap and record killed children, on a busy machine."""


def python_module(module: str) -> list[str]:
    """`python -m module` without the current folder on the module path: data in it are no code."""
    return [sys.executable, "-P", "-m", module]


def identity() -> Json:
    """The record of this process."""
    own = psutil.Process()
    return {
        "pid": own.pid,
        "host": socket.gethostname(),
        "started_s": own.create_time(),
        "since_boot_s": _since_boot_s(own),
    }


def _since_boot_s(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()  # the clock may be set while it runs, which moves both


def stops() -> list[signal.Signals]:
    """`STOPS` without SIGHUP where it is ignored, as under nohup.

    A torchrun that handles SIGHUP forwards it to its workers, which inherit that they ignore it, and then kills them:
    they must save.
    """
    forwarded = "SIGHUP" in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not forwarded
    return [number for number in STOPS if number != signal.SIGHUP or not ignored]


def find(record: Mapping[str, Any]) -> psutil.Process | None:
    """The live process of a record; None if it has ended or runs on another host, or the record is empty."""
    try:
        process = psutil.Process(int(record["pid"]))
        same = abs(_since_boot_s(process) - float(record["since_boot_s"])) < 0.1
        return process if same and record["host"] == socket.gethostname() and is_alive(process) else None
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is alive; a zombie, which has ended and waits for its parent to reap it, is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def tree(top: psutil.Process) -> list[psutil.Process]:
    """The live processes of a tree, the root first."""
    try:
        return [p for p in (top, *top.children(recursive=True)) if is_alive(p)]
    except psutil.Error:
        return []


def send(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def start(command: Sequence[object], log: Path, own_session: bool, **env: str) -> psutil.Popen:
    """A command without input.

    Parameters
    ----------
    log : its output is appended here. env : added to this process's environment.
    own_session : Ctrl-C here, and closing the terminal, do not affect it. Otherwise a `dfm` command ends with us.
    """
    tie = {} if own_session else {PARENT: str(os.getpid())}
    with appending(log) as out:
        return psutil.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **tie, **env},
        )


def end(top: psutil.Process, grace_s: float) -> None:
    """Ask a process to end, and kill it and its descendants after `grace_s`; returns when none is alive.

    The process may forward the request: a supervisor asks the trainers, which save first.
    """
    known = set(tree(top))
    send([top], signal.SIGTERM)
    give_up = time.monotonic() + grace_s
    while any(map(is_alive, known)) and time.monotonic() < give_up:
        time.sleep(POLL_S)
        known |= set(tree(top))  # including new ones
    send(known - {top}, signal.SIGKILL)
    psutil.wait_procs([top], timeout=SETTLE_S)  # a supervisor still records the exit
    send(known, signal.SIGKILL)
    psutil.wait_procs(known, timeout=SETTLE_S)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (Linux), instead of init."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Send this process a signal when its parent ends, so that it does not continue unseen.

    Linux sends it at once; elsewhere, and if it is lost, polling the parent does within a second.

    parent : its pid, if it may have ended before this call; default: the current parent.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
            os._exit(1)  # it was killed before: we now belong to init
    expected = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(1)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
