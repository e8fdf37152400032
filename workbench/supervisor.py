"""The process between a kernel and torchrun: `python supervisor.py REQUEST.json`; it starts in 0.1 s, without torch.

It writes `launch.json` at once (pid, start time) and at the end (exit code), and the command's output to `launch.log`.
SIGTERM stops the whole tree. The workers are asked first, so that a trainer saves and exits with 0. After `grace_s`, or
on a second signal, the rest is killed. Workers whose launcher was killed are adopted and killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from dfm_nb.base.files import write_atomically

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.1
AGENT_GRACE_S = 5.0
SETTLE_S = 0.3


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def write_json(path: Path, value: dict) -> None:
    """Whole or not at all."""
    write_atomically(path, json.dumps(value, indent=1).encode())


def descendants() -> list[psutil.Process]:
    """All living processes below this one; zombies are left out."""
    found = []
    for p in psutil.Process().children(recursive=True):
        try:
            if p.status() != psutil.STATUS_ZOMBIE:
                found.append(p)
        except psutil.Error:
            pass
    return found


def signal_all(processes: list[psutil.Process], number: int) -> None:
    for p in processes:
        try:
            p.send_signal(number)
        except psutil.Error:
            pass


class Supervisor:
    def __init__(self, request: dict):
        self.request, self.asked = request, 0  # requests to stop, so far
        self.folder = Path(request["folder"])
        me = psutil.Process()
        self.record = {
            "pid": me.pid,
            "host": socket.gethostname(),
            "started_s": me.create_time(),
            "command": request["command"],
            "cwd": request["cwd"],
            "log_offset_bytes": request["log_offset_bytes"],
            "exit_code": None,
            "stopped": False,
            **request["about"],
        }

    def note(self, _number: int, _frame: object) -> None:
        self.asked += 1

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        if self.request["die_with_parent"]:
            _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != self.request["parent"]:  # it died before the line above
                return 1
        write_json(self.folder / "launch.json", self.record)
        try:
            code = self.watch()
        except OSError as error:  # the command cannot be run at all
            print(f"error: {error}", flush=True)
            code = 127
        self.record |= {"exit_code": code, "stopped": bool(self.asked), "ended_s": time.time()}
        write_json(self.folder / "launch.json", self.record)
        return code

    def watch(self) -> int:
        die = (lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)) if sys.platform == "linux" else None
        agent = subprocess.Popen(
            self.request["command"], cwd=self.request["cwd"], stdin=subprocess.DEVNULL, preexec_fn=die
        )  # one thread here, so preexec_fn is safe
        while agent.poll() is None and not self.asked:
            time.sleep(POLL_S)
        if self.asked and agent.poll() is None:
            self.stop(agent)
        code = agent.wait()
        self.sweep()
        return code

    def stop(self, agent: subprocess.Popen) -> None:
        """Ask the workers; then the launcher; what is left is killed by `sweep`."""
        workers = [p for p in descendants() if p.pid != agent.pid and _parent(p) == agent.pid]
        signal_all(workers or [psutil.Process(agent.pid)], signal.SIGTERM)
        self.wait(agent, self.request["grace_s"])
        if agent.poll() is None and self.asked == 1:
            agent.terminate()
            self.wait(agent, min(AGENT_GRACE_S, self.request["grace_s"]))
        if agent.poll() is None:
            signal_all(descendants(), signal.SIGKILL)

    def wait(self, agent: subprocess.Popen, timeout_s: float) -> None:
        """Until the launcher has ended, the time is up, or a second request to stop comes."""
        deadline = time.monotonic() + timeout_s
        while agent.poll() is None and self.asked == 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def sweep(self) -> None:
        """Kill what the command left behind, and collect it."""
        deadline = time.monotonic() + SETTLE_S
        while descendants() and time.monotonic() < deadline:  # loader processes that are on their way out
            time.sleep(0.02)
        while left := descendants():
            signal_all(left, signal.SIGKILL)
            psutil.wait_procs(left, timeout=1)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _parent(p: psutil.Process) -> int:
    try:
        return p.ppid()
    except psutil.Error:
        return 0


if __name__ == "__main__":
    path = Path(sys.argv[1])
    asked_for = json.loads(path.read_text())
    path.unlink()
    raise SystemExit(min(255, abs(Supervisor(asked_for).run())))
