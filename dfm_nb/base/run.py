"""A run folder: its paths, its owner, its samples."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import orjson
import psutil
from filelock import FileLock, Timeout

from dfm_nb.base import process
from dfm_nb.base.files import local, read_json, remove_temporaries, write_atomically

IDENTITY, OWNER = ".run.json", "owner.json"
"""In a run folder: its id, host and inode. In a folder of checkpoints: the path and id of the run that owns it."""
MEDIA = {".mp4": "video/mp4", ".png": "image/png", ".gif": "image/gif", ".webp": "image/webp"}
"""Suffixes of samples, and their media types."""
_ITERATION = re.compile(r"iter_(\d+)")


def iteration_name(iteration: int) -> str:
    """`iter_0000100`: sorts by iteration as text."""
    return f"iter_{iteration:07d}"


def is_iteration(path: str | Path) -> bool:
    """Whether a path names one checkpoint."""
    return _ITERATION.fullmatch(Path(path).name) is not None


def written_path(path: str | Path) -> Path:
    """A user's path: `iter_0005000` for `iter_5000`, unless that exists as written; `~` is the home folder."""
    path = Path(path).expanduser()
    padded = path.with_name(f"iter_{path.name[5:]:0>7}") if is_iteration(path) else path
    return padded if os.path.exists(padded) and not os.path.exists(path) else path


class Run:
    """Paths of a run folder; the constructor does not access the disk, `create` does."""

    def __init__(self, path: Path):
        self.path, self.name = path, path.name
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.pid_file = path / "run.pid"
        self.checkpoints, self.samples = path / "checkpoints", path / "samples"

    @classmethod
    def create(cls, path: str | Path) -> Run:
        """The folder, created if missing; an existing run is opened, to be resumed.

        Raises
        ------
        NotADirectoryError : the path is a file.
        FileExistsError : the folder holds a data set. ValueError : the path is a URL.
        """
        folder = local(path)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"the run folder {folder} is a file; give the name of a folder")
        if (folder / ".nv-meta").exists() or (folder / "manifest.json").exists():
            raise FileExistsError(f"{folder} holds a data set, not a run; choose another --run-dir")
        run = cls(folder.resolve())
        run.samples.mkdir(parents=True, exist_ok=True)
        return run

    def sample_folder(self, iteration: int) -> Path:
        """`samples/iter_0000100`, created if missing."""
        folder = self.samples / iteration_name(iteration)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def newest_samples(self, until: float = float("inf")) -> tuple[int, list[Path]] | None:
        """The last iteration with samples, at most `until`, and its pictures and clips by name; None without any."""
        for iteration, folder in reversed(iteration_folders(self.samples)):
            if iteration <= until and (media := media_in(folder)):
                return iteration, media
        return None

    def save_config(self, text: str) -> None:
        """Write `config.yaml` atomically."""
        write_atomically(self.config_file, text.encode())

    # ---- the folder's owner ---------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Make this process the folder's only writer, until `release` or its end; `run.pid` identifies it.

        It is a kernel lock, so two processes cannot both get it, and it ends with its owner. On some network file
        systems the lock works on one host only: there the owner also touches `run.pid` every few seconds.

        Raises
        ------
        FileExistsError : another live process has the folder.
        """
        if self._key in _HELD:
            return
        here, place = socket.gethostname(), self.path / ".run.lock"
        # without kernel locks no lock file replaces them: the lock file of a lost host would stay forever
        lock = FileLock(place, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
            free = True
        except Timeout:
            free = False
        except OSError:  # a file system without locks: `run.pid` must suffice
            free = self.owner() is None
        owner = read_json(self.pid_file) or {}
        elsewhere = owner.get("host", here) != here and _age_s(self.pid_file) < STALE_S
        if elsewhere or not free:
            lock.release()
            who = f"process {owner['pid']} of {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
            raise FileExistsError(
                f"{who} is writing to {self.path}; wait for it, stop it, or choose another --run-dir (one that was "
                f"killed on another host counts for {STALE_S} s)"
            )
        remove_temporaries(self.path)  # of a killed owner
        identity = {"host": here, "inode": self.path.stat().st_ino, "id": self.id or uuid.uuid4().hex}
        write_atomically(self.path / IDENTITY, orjson.dumps(identity))
        write_atomically(self.pid_file, orjson.dumps(process.identity()))
        _HELD[self._key] = lock
        threading.Thread(target=self._beat, name="run owner", daemon=True).start()

    @property
    def id(self) -> str | None:
        """Created by the first `claim`; a moved or copied folder keeps it."""
        return (read_json(self.path / IDENTITY) or {}).get("id")

    def made_here(self, record: dict[str, Any] | None = None) -> bool:
        """Whether a record (default: the folder's) was written on this host for this folder, not for a copy of it."""
        record = record or read_json(self.path / IDENTITY) or {}
        return record.get("host") == socket.gethostname() and record.get("inode") == self.path.stat().st_ino

    def own(self, root: Path) -> None:
        """Assign a folder of checkpoints to this run, which may then replace and remove its checkpoints.

        Raises
        ------
        FileExistsError : it is outside of the run, and has another owner, or checkpoints and no owner.
        """
        record = read_json(root / OWNER) or {}
        whose = record.get("run") or ("an unknown run" if iteration_folders(root) else str(self.path))
        if whose != str(self.path) and record.get("id") != self.id and root != self.checkpoints:
            raise FileExistsError(
                f"a run may replace and remove only its own checkpoints; {root} has those of {whose}; choose another "
                f"checkpoint.checkpoint_dir (checkpoint.load={root} starts from them)"
            )
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(root / OWNER, orjson.dumps({"run": str(self.path), "id": self.id}))

    def tell(self, phase: str) -> None:
        """Write the owner's current activity and its start into `run.pid`; other processes write nothing."""
        if self._key in _HELD:
            told = {**process.identity(), "phase": phase, "since_s": time.time()}
            with contextlib.suppress(OSError):  # the folder may have been moved, and a checkpoint must still be saved
                write_atomically(self.pid_file, orjson.dumps(told))

    def release(self) -> None:
        """Release the folder, if it is ours."""
        if lock := _HELD.pop(self._key, None):
            self.pid_file.unlink(missing_ok=True)
            lock.release()

    def owner(self) -> psutil.Process | None:
        """The live process of this host that has claimed the folder, or None."""
        return process.find(read_json(self.pid_file) or {})

    @property
    def _key(self) -> tuple[Path, int]:
        return self.path, os.getpid()  # a fork inherits _HELD, but is not the owner

    def _beat(self) -> None:
        while self._key in _HELD:
            with contextlib.suppress(OSError):
                os.utime(self.pid_file)
            time.sleep(BEAT_S)


BEAT_S, STALE_S = 10, 60
"""Seconds after which a run counts as dead: several heartbeats may be late on a busy machine."""
_HELD: dict[tuple[Path, int], FileLock] = {}  # by folder and process


def _age_s(path: Path) -> float:
    """Seconds since the file was written, by the clock of its file system, because hosts may disagree on the time."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now-") as now:
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime


def media_in(folder: Path) -> list[Path]:
    """The pictures and clips of a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix in MEDIA and not p.name.startswith("."))


def iteration_folders(parent: Path) -> list[tuple[int, Path]]:
    """The `iter_N` folders below `parent`, by iteration."""
    if not parent.is_dir():
        return []
    found = [(_ITERATION.fullmatch(p.name), p) for p in parent.iterdir() if p.is_dir()]
    return sorted((int(m[1]), p) for m, p in found if m)
