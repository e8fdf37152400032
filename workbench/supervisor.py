"""The process between a kernel and torchrun: `python supervisor.py FOLDER`; it starts in 0.1 s, without torch.

It runs the command of `launch.json`, and records its own identity there, and at the end the exit code. SIGTERM is first
sent to the workers, so that a trainer saves and exits with 0; after two minutes the remaining processes are killed.
Workers whose launcher was killed are adopted and killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from dfm_nb.base import process
from dfm_nb.base.files import read_json, write_json
from dfm_nb.base.run import Run

RECORD = "launch.json"
SETTLE_S = 0.3
"""Time for the loader processes of a finished run to exit."""


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record atomically: whole or absent."""
    write_json(folder / RECORD, record, indent=1)


def supervise(folder: Path) -> None:
    os.chdir(folder)  # which may be moved meanwhile: the end is written where the command was started
    here = Path()
    own = process.identity()
    record = read_json(here / RECORD)
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stops.append(received))
    process.adopt_orphans()
    if record["parent"]:
        process.end_with_parent(signal.SIGTERM, record["parent"])
    record |= own
    write_record(here, record)
    try:
        agent = psutil.Popen(record["command"], cwd=record["cwd"], stdin=subprocess.DEVNULL)
        code = watch(agent, stops)
    except OSError as error:  # the command cannot be run at all
        print(f"error: {error}", flush=True)
        code = 127
    if read_json(here / RECORD).items() >= own.items():  # no other supervisor's record is ended
        write_record(here, record | {"exit_code": code, "stopped": bool(stops)})
        if code and Run(here).owner():  # a run from a terminal was first: the folder is its, and this one never began
            (here / RECORD).unlink()


def watch(agent: psutil.Popen, stops: list[int]) -> int:
    """Wait for the command, or end it once `stops` has a signal; then kill what it left. Returns its exit code."""
    while agent.poll() is None and not stops:
        time.sleep(process.POLL_S)
    if agent.poll() is None:
        process.send(agent.children() or [agent], signal.SIGTERM)
        with contextlib.suppress(psutil.TimeoutExpired):
            agent.wait(process.GRACE_S)
        process.send(below(), signal.SIGKILL)
    code = agent.wait()
    psutil.wait_procs(below(), timeout=SETTLE_S)
    left = below()
    while left:
        process.send(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=1)
        left = below()
    return code


def below() -> list[psutil.Process]:
    """The descendants of this process."""
    return process.tree(psutil.Process())[1:]


if __name__ == "__main__":
    supervise(Path(sys.argv[1]))
