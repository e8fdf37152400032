"""A command in its own process group, identified by a folder: start it, find it again, stop it, explain its end.

    FOLDER/launch.json  pid, start time, command, exit code        FOLDER/launch.log  everything it printed
    FOLDER/../.launch.lock  held while a command is started

Any process can recreate a `Job` from the folder alone. The command survives the kernel, unless its record has a
`parent`.
"""

import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Callable, Literal

import psutil
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from dfm_nb.base import process
from dfm_nb.base.files import UNLIMITED, is_plain, read_json
from dfm_nb.base.run import Run, turn
from workbench.supervisor import RECORD, write_record

State = Literal["not started", "running", "finished", "stopped", "failed", "lost"]
LOCK = ".launch.lock"
SUPERVISOR = Path(__file__).with_name("supervisor.py")
TAIL_BYTES = 1 << 18
"""How much of a log is read, which may have gigabytes: enough for a traceback of every rank of a machine."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)")
_SECOND_HAND = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "Broken pipe")
_FIRST = re.compile(r"^rank (\d+) failed first", re.M)
"""As `dfm_nb.base.torchrun` prints for ranks other than 0."""


class Record(TypedDict, total=False):
    """`launch.json`: written when a command starts, by its supervisor once it runs, and at the end."""

    command: list[str]
    cwd: str
    parent: int | None  # when this process ends, the command is ended
    log_offset_bytes: Annotated[int, Field(ge=0, lt=2**62)]
    inode: int  # of the folder: a copy has a different one
    program: str
    argv: list[str]
    nproc: int
    pid: int
    host: str
    started_s: FiniteFloat
    since_boot_s: FiniteFloat
    exit_code: int | None
    stopped: bool


_RECORD = TypeAdapter(Record)


class RunEnded(RuntimeError):
    """A run that did not finish; a notebook shows it without a traceback and without the log, which the panel has."""

    def _render_traceback_(self) -> list[str]:
        own = [line for line in str(self).split("\n") if not line.startswith("    ")]
        return [": ".join([type(self).__name__, *own])]


class RunFailed(RunEnded):
    """The command failed; the message ends with the command's own error."""


@dataclass(frozen=True)
class Job:
    """A started command, identified by its folder; `Job(folder)` only reads, it starts nothing."""

    folder: Path

    def start(self, record: Record, aside: Callable[[], Path] | None = None) -> None:
        """Start the record's `command` in its `cwd`; its output is appended to `launch.log`.

        Of several processes that start one in this folder, one does, and the others are refused.

        With a `parent`, which must be this process, call it from the main thread: Linux ties the command to the thread.

        aside : a folder that has files is first moved to the path that this returns.

        Raises
        ------
        FileExistsError : a command already runs in this folder, or it is a file, or another's.
        """
        folder = self.folder
        log = self.log
        folder.parent.mkdir(parents=True, exist_ok=True)
        # the lock is beside the folder, which may be moved
        with turn(folder.parent / LOCK, f"another process starts a command in {folder.parent}"):
            folder.mkdir(exist_ok=True)
            theirs = log.exists() and not (folder / RECORD).exists()
            if theirs or log.is_symlink() or Run(folder).is_foreign(RECORD):
                raise FileExistsError(f"{log} must be that of a run of yours; choose another run folder, or move it")
            running = self.pid
            if running:
                raise FileExistsError(f"process {running} runs in {folder}; stop it, or choose another run folder")
            if aside and any(folder.iterdir()):
                folder.rename(aside())
                folder.mkdir()
            size = log.stat().st_size if log.exists() else 0
            begun = {**record, "log_offset_bytes": size, "inode": folder.stat().st_ino, "exit_code": None}
            begun["host"] = socket.gethostname()  # before the supervisor's own record, others must know it for ours
            write_record(folder, begun)
            supervisor = process.start([sys.executable, "-P", SUPERVISOR, folder], log, own_session=True)
            threading.Thread(target=supervisor.wait, daemon=True).start()  # collects the zombie
            while self.record.get("pid") != supervisor.pid:  # from now on it can be stopped
                if not process.is_alive(supervisor):
                    raise RunFailed(f"the command could not be started; see {log}\n{self.tail(20)}")
                time.sleep(0.01)

    # ---- looking --------------------------------------------------------------------------------------------------

    @property
    def log(self) -> Path:
        return self.folder / "launch.log"

    @property
    def record(self) -> Record:
        """`launch.json`; {} when nothing was started here, or when it is damaged."""
        try:
            return _RECORD.validate_python(read_json(self.folder / RECORD), strict=True)
        except ValidationError:
            return {}

    @property
    def _top(self) -> psutil.Process | None:
        """The live main process: our supervisor, or a trainer that was started in a terminal."""
        return process.find(self.record) or Run(self.folder).owner()

    @property
    def pid(self) -> int | None:
        """Pid of the live main process; None if there is none."""
        top = self._top
        return top.pid if top else None

    def processes(self) -> list[psutil.Process]:
        """The live main process and its descendants."""
        top = self._top
        return process.tree(top) if top else []

    @property
    def state(self) -> State:
        if self.pid is not None:
            return "running"
        record = self.record
        if not record:
            return "not started"
        code = record.get("exit_code")
        if code is None:
            return "lost"
        if record.get("stopped"):
            return "stopped"
        return "failed" if code else "finished"

    def output(self) -> str:
        """Output of the last start (its last 256 KiB)."""
        return self.written(self.record.get("log_offset_bytes", 0), TAIL_BYTES).decode(errors="replace")

    def written(self, begin: int, most_bytes: int) -> bytes:
        """The end of the log after `begin` bytes, or of all of it if it has fewer."""
        if not is_plain(self.log, None, UNLIMITED):
            return b""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if begin > size:
                begin = 0
            file.seek(max(begin, size - most_bytes))
            return file.read()

    def tail(self, lines: int) -> str:
        """The last lines of output; of a redrawn progress bar its last state."""
        return "\n".join(clean_lines(self.output())[-lines:])

    def cause(self) -> str:
        """One or two sentences on why it failed; "" when it did not."""
        state = self.state
        if state == "lost":
            return "it vanished without an exit code (killed, or the machine restarted); Continue resumes it"
        return explain(self.output(), self.record["exit_code"] or 0) if state == "failed" else ""

    def ended(self) -> str:
        """Date and time of the last line of the log; without a log, now."""
        seconds = self.log.stat().st_mtime if self.log.exists() else None
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

    def stop(self, grace_s: float = process.GRACE_S + process.MARGIN_S) -> None:
        """Ask the process tree to end, wait, and kill what is left; returns when no process is alive.

        grace_s : seconds to save and exit. The default is enough for a run that does not hang.
        """
        top = self._top
        if top:
            process.end(top, grace_s)


# ---- why a command ended ----------------------------------------------------------------------------------------


def clean_lines(text: str) -> list[str]:
    """Non-empty lines without colour codes; only the last state of a progress bar."""
    lines = []
    for line in _ESCAPES.sub("", text).split("\n"):
        line = line.rstrip("\r").rpartition("\r")[2].rstrip()
        if line:
            lines.append(line)
    return lines


def explain(output: str, exit_code: int) -> str:
    """The cause of a failure, from output and exit code.

    A user's error (`error: ...`) has priority over an exception, and a rank's own exception over those that follow
    from it.

    >>> explain("[INFO] start\\nerror: --limit must be at least 1; got 0\\n", 2)
    '--limit must be at least 1; got 0'
    """
    lines = clean_lines(output)
    for i, line in enumerate(lines):
        if line.startswith("error: "):
            more = itertools.takewhile(lambda text: text.startswith("  "), lines[i + 1 :])
            return "\n".join([line.removeprefix("error: "), *more])
    first = _FIRST.search(output)
    where = f" (rank {first[1]})" if first else ""
    last = lines[-1] if lines else f"no output, exit code {exit_code}"
    for line in lines:
        raised = _EXCEPTION.match(line)
        if raised:
            last = raised[1]
            if not any(text in last for text in _SECOND_HAND):
                return last + where
    if exit_code < 0:
        name = {s.value: s.name for s in signal.Signals}.get(-exit_code, f"signal {-exit_code}")
        memory = "; the machine may have run out of memory" if name == "SIGKILL" else ""
        return f"a process was ended by {name}{memory}"
    return last + where
