"""Processes: start one, know it again, see whether it lives, end it with everything below it.

A record `{"pid", "host", "started_s"}` names a process for good, also in a file: a reused pid has another start time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl, which Python has no names for."""
POLL_S = 0.05
"""Between two looks at a process: an end is seen at once, and a look at all of a machine's costs milliseconds."""
GRACE_S = 120.0
"""A run that is asked to stop saves a checkpoint first; only one that hangs takes this long."""
MARGIN_S = 20.0
"""More than the grace, for whoever passes the request on: it ends what hangs before it counts as hung itself."""
SETTLE_S = 10.0
"""After a SIGKILL: for a parent to collect and record what was killed below it, on a busy machine."""


def identity() -> dict[str, Any]:
    """The record of this process."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "started_s": psutil.Process().create_time()}


def find(record: Mapping[str, Any]) -> psutil.Process | None:
    """The living process that a record names; None when it has ended or runs on another host, or nothing is named."""
    try:
        process = psutil.Process(int(record["pid"]))
        same = abs(process.create_time() - float(record["started_s"])) < 1 and record["host"] == socket.gethostname()
        return process if same and is_alive(process) else None
    except (psutil.Error, KeyError, TypeError, ValueError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """A zombie, which has ended and waits to be collected by its parent, is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def tree(top: psutil.Process) -> list[psutil.Process]:
    """What lives of a process and all below it, itself first."""
    try:
        return [p for p in (top, *top.children(recursive=True)) if is_alive(p)]
    except psutil.Error:
        return []


def send(processes: Iterable[psutil.Process], number: int) -> None:
    """A signal to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def start(command: Sequence[object], log: Path, own_session: bool, **env: str) -> psutil.Popen:
    """A command without input.

    Parameters
    ----------
    log : gets what it prints, at its end. env : set on top of this process's environment.
    own_session : Ctrl-C here, and the end of the terminal, do not reach it.
    """
    with log.open("ab") as out:
        return psutil.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        )


def end(top: psutil.Process, grace_s: float) -> None:
    """Ask a process to end, and kill what lives of it and below it after `grace_s`; returns when nothing does.

    It passes the request on as it sees fit: a supervisor asks the trainers, which save first.
    """
    known = set(tree(top))
    send([top], signal.SIGTERM)
    give_up = time.monotonic() + grace_s
    while any(map(is_alive, known)) and time.monotonic() < give_up:
        time.sleep(POLL_S)
        known |= set(tree(top))  # also those that came up meanwhile
    send(known - {top}, signal.SIGKILL)
    psutil.wait_procs([top], timeout=SETTLE_S)  # a supervisor still records how that ended
    send(known, signal.SIGKILL)
    psutil.wait_procs(known, timeout=SETTLE_S)


def adopt_orphans() -> None:
    """Become the parent of what is below this process when its own parent ends (Linux), instead of init."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """When the process that started this one is gone, this one gets a signal instead of working on unseen.

    Linux sends it at once; elsewhere, and where it gets lost, a look at the parent does within a second.

    parent : its pid, where it may have gone before this call; default: the parent of now.
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
