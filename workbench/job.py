"""A command in its own process group, with a folder as its address: start it, find it again, stop it, explain it.

    FOLDER/launch.json  pid, start time, command, exit code        FOLDER/launch.log  everything it printed

Any process can make a `Job` again from the folder alone. The command survives the kernel, unless `die_with_parent`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Mapping, Sequence

import psutil

from dfm_nb.base.files import read_json
from dfm_nb.base.run import Run
from workbench.outcome import clean_lines, explain
from workbench.supervisor import signal_all

State = Literal["not started", "running", "finished", "stopped", "failed", "lost"]
RECORD, LOG = "launch.json", "launch.log"
SUPERVISOR = Path(__file__).with_name("supervisor.py")
START_TIMEOUT_S = 20.0
GRACE_S = 120.0
"""A run that is asked to stop saves a checkpoint first; only one that hangs takes this long."""
SWEEP_S = 10.0
TAIL_BYTES = 1 << 18
RECORD_TYPES: dict[str, Any] = {
    **dict.fromkeys(("pid", "nproc", "log_offset_bytes", "inode"), int),
    **dict.fromkeys(("host", "program", "cwd"), str),
    **dict.fromkeys(("argv", "command"), list),
    **dict.fromkeys(("started_s", "grace_s"), (int, float)),
    "exit_code": (int, type(None)),
}


class RunFailed(RuntimeError):
    """The command ended with an error; the message ends with the command's own."""


@dataclass
class Job:
    """A started command, known by its folder; `Job(folder)` looks, it starts nothing."""

    folder: Path
    _popen: subprocess.Popen | None = field(default=None, repr=False)

    # ---- starting -------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        folder: str | Path,
        command: Sequence[str],
        *,
        about: Mapping[str, Any] | None = None,
        grace_s: float = GRACE_S,
        die_with_parent: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> Job:
        """Start a command; its output is appended to `launch.log`.

        Parameters
        ----------
        about : further keys for `launch.json`. grace_s : seconds from the request to stop until the rest is killed.
        die_with_parent : stop when the calling thread's process ends (call it from the main thread).

        Raises
        ------
        FileExistsError : a command runs in this folder already.
        """
        folder = Path(folder).expanduser().resolve()
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"the run folder {folder} is a file; give the name of a folder")
        folder.mkdir(parents=True, exist_ok=True)
        running = cls(folder).pid
        if running is not None:
            raise FileExistsError(f"process {running} already runs in {folder}; stop it, or choose another run folder")
        log = folder / LOG
        offset = log.stat().st_size if log.exists() else 0
        request = folder / f".launch-request-{os.getpid()}-{time.monotonic_ns()}.json"
        wanted = {
            "folder": str(folder),
            "command": list(map(str, command)),
            "cwd": str(cwd or Path.cwd()),
            "parent": os.getpid(),
            "grace_s": grace_s,
            "die_with_parent": die_with_parent,
            "log_offset_bytes": offset,
            "about": {**(about or {}), "inode": folder.stat().st_ino},
        }
        request.write_text(json.dumps(wanted))
        with log.open("ab") as out:
            popen = subprocess.Popen(
                [sys.executable, "-P", str(SUPERVISOR), str(request)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )
        job = cls(folder, popen)
        job._wait_for_record(request)
        return job

    def _wait_for_record(self, request: Path) -> None:
        assert self._popen is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.record.get("pid") != self._popen.pid:
            if self._popen.poll() is not None or time.monotonic() > deadline:
                request.unlink(missing_ok=True)
                raise RunFailed(f"the command could not be started; see {self.folder / LOG}\n{self.tail(20)}")
            time.sleep(0.01)

    # ---- looking --------------------------------------------------------------------------------------------------

    @property
    def record(self) -> dict[str, Any]:
        """`launch.json`; {} when nothing was started here, or when it is damaged."""
        value = read_json(self.folder / RECORD) or {}
        sound = all(isinstance(value[name], kind) for name, kind in RECORD_TYPES.items() if name in value)
        texts = [*value.get("argv", ()), *value.get("command", ())] if sound else []
        return value if sound and all(isinstance(text, str) for text in texts) else {}

    @property
    def pid(self) -> int | None:
        """The living process in charge: our supervisor, or a trainer that was started in a terminal; None when none."""
        if self._popen is not None:
            self._popen.poll()  # collects the zombie
        record = self.record
        if _alive(record):
            return int(record["pid"])
        owner = Run(self.folder).owner()
        return int(owner["pid"]) if owner else None

    @property
    def state(self) -> State:
        if self.pid is not None:
            return "running"
        record = self.record
        if not record:
            return "not started"
        if record.get("exit_code") is None:
            return "lost"
        return "stopped" if record.get("stopped") else "finished" if record["exit_code"] == 0 else "failed"

    def processes(self) -> list[psutil.Process]:
        """The process in charge and everything below it."""
        pid = self.pid
        if pid is None:
            return []
        try:
            top = psutil.Process(pid)
            return [top, *top.children(recursive=True)]
        except psutil.Error:
            return []

    def output(self) -> str:
        """What the last start printed (its last 256 KiB)."""
        path = self.folder / LOG
        if not path.exists():
            return ""
        begin = int(self.record.get("log_offset_bytes", 0))
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(begin if begin <= size else 0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def tail(self, lines: int = 12) -> str:
        """The last lines that were printed; of a redrawn progress bar its last state."""
        return "\n".join(clean_lines(self.output())[-lines:])

    def cause(self) -> str:
        """One or two sentences on why it failed; "" when it did not."""
        state = self.state
        if state == "lost":
            return (
                "the process vanished without an exit code (killed, or the machine restarted); "
                "Continue goes on from the last checkpoint"
            )
        return explain(self.output(), int(self.record["exit_code"])) if state == "failed" else ""

    def ended(self) -> str:
        """The day and the time of the last line of the log."""
        log = self.folder / LOG
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(log.stat().st_mtime if log.exists() else None))

    # ---- stopping -------------------------------------------------------------------------------------------------

    def stop(self, grace_s: float | None = None) -> None:
        """Ask the whole process tree to end, wait, and kill what is left; returns when nothing of it is alive.

        grace_s : seconds to save and exit; default: what `start` was given.
        """
        tree = self.processes()
        if not tree:
            return
        supervised = tree[0].pid == self.record.get("pid")
        grace = float(self.record.get("grace_s", GRACE_S)) + 2 * SWEEP_S if grace_s is None else grace_s
        signal_all(tree[:1], signal.SIGTERM)
        tree += self._wait_for_end(grace, tree)
        end = time.monotonic() + 2 * SWEEP_S
        while supervised and self.pid is not None and time.monotonic() < end:
            # A second SIGTERM means "at once". Two that arrive together count as one, so it is sent again.
            signal_all(tree[:1], signal.SIGTERM)
            tree += self._wait_for_end(1.0, tree)
        left = [p for p in tree if _is_alive(p)]
        signal_all(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=5)
        if self._popen is not None:
            self._popen.poll()

    def _wait_for_end(self, timeout_s: float, known: list[psutil.Process]) -> list[psutil.Process]:
        """Wait for the process in charge; returns processes that came up meanwhile."""
        deadline, more = time.monotonic() + timeout_s, []
        while self.pid is not None and time.monotonic() < deadline:
            more += [p for p in self.processes() if p not in known and p not in more]
            time.sleep(0.05)
        return more


def _is_alive(p: psutil.Process) -> bool:
    try:
        return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _alive(record: Mapping[str, Any]) -> bool:
    """Does the process of a `launch.json` live on this host? A reused pid is told apart by its start time."""
    if not record or record.get("host") != socket.gethostname():
        return False
    try:
        p = psutil.Process(int(record["pid"]))
        return abs(p.create_time() - float(record["started_s"])) < 1 and p.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, ValueError):
        return False
