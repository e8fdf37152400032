"""A run folder: its paths, its owner, its samples."""

import contextlib
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
from filelock import FileLock, Timeout

from dfm_nb.base import process
from dfm_nb.base.files import (
    Json,
    check_free,
    is_foreign,
    local,
    read_json,
    remove_temporaries,
    subfolder,
    unlinked,
    write_json,
)
from dfm_nb.base.log import log
from dfm_nb.base.metrics import compared_loss, damage_of, series

WRITTEN = frozenset(
    "config.yaml metrics.jsonl skipped.jsonl log.txt loss.png run.pid checkpoints samples tensorboard".split()
)
"""What a run writes into its folder, besides its record and lock."""
IDENTITY = ".run.json"
"""In a run folder: its id, host and inode."""
LOCK = ".run.lock"
"""In a run folder: its writer's lock."""
OWNER = "owner.json"
"""In a folder of checkpoints: path and id of their run."""
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


def ended(last: int, of: Any) -> Literal["not started", "finished", "stopped"]:
    """The state of a run that is not running, by its newest iteration and its `train_iters`."""
    if not last:
        return "not started"
    return "finished" if isinstance(of, int) and last >= of else "stopped"


class Run:
    """Paths of a run folder; the constructor does not access the disk, `create` does."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.name
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.pid_file = path / "run.pid"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"

    @classmethod
    def create(cls, path: str | Path, names: Collection[str] = WRITTEN) -> "Run":
        """The folder, created if missing; an existing run is opened, to be resumed.

        names : what will be written there.

        Raises
        ------
        NotADirectoryError : the path is a file. ValueError : it is a URL, or one of the names is a link.
        FileExistsError : the folder holds a data set, or one of the names without a record of ours.
        PermissionError : it, or its record, belongs to another user.
        """
        folder = local(path)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"the run folder {folder} is a file; give the name of a folder")
        if (folder / ".nv-meta").exists() or (folder / "manifest.json").exists():
            raise FileExistsError(f"{folder} holds a data set, not a run; choose another --run-dir")
        run = cls(folder.resolve())
        run.path.mkdir(parents=True, exist_ok=True)
        if run.is_foreign(IDENTITY):
            raise PermissionError(
                f"{run.path} or its record belongs to another user: copy it, chown it where a container or network "
                f"drive changed owners, or start from its weights with checkpoint.pretrained={run.path}"
            )
        for name in sorted(names):
            check_free(run.path / name, run.id is not None, "choose another folder")
        for name in (*names, "wandb", LOCK):
            unlinked(run.path / name)
        for entry in (*run.samples.glob("*"), *run.checkpoints.glob("*")):
            unlinked(entry)
        return run

    def is_foreign(self, record: str) -> bool:
        """Whether the folder, or that record in it, belongs to another user."""
        return is_foreign(self.path, self.path / record)

    def sample_folder(self, of: int | str) -> Path:
        """`samples/iter_0000100` of an iteration, or another of `samples`, created if missing."""
        return subfolder(self.path, "samples", of if isinstance(of, str) else iteration_name(of))

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
        here = socket.gethostname()
        # without kernel locks no lock file replaces them: the lock file of a lost host would stay forever
        lock = FileLock(self.path / LOCK, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
            free = True
        except Timeout:
            free = False
        except OSError:  # a file system without locks: `run.pid` must suffice
            free = self.owner() is None
        owner = read_json(self.pid_file)
        elsewhere = owner.get("host", here) != here and _age_s(self.pid_file) < STALE_S
        if elsewhere or not free:
            lock.release()
            who = "another process"
            if {"pid", "host"} <= owner.keys():
                who = f"process {owner['pid']} of {owner['host']}"
            raise FileExistsError(
                f"{who} is writing to {self.path}; wait for it, stop it, or choose another --run-dir (one that was "
                f"killed on another host counts for {STALE_S} s)"
            )
        if self.id:
            remove_temporaries(self.path)  # of a killed owner
        inode = self.path.stat().st_ino
        identity = {"host": here, "inode": inode, "id": self.id or uuid.uuid4().hex}
        write_json(self.path / IDENTITY, identity)
        write_json(self.pid_file, process.identity())
        _HELD[self._key] = lock, inode
        threading.Thread(target=self._beat, name="run owner", daemon=True).start()

    @property
    def id(self) -> str | None:
        """Created by the first `claim`; a moved or copied folder keeps it."""
        return read_json(self.path / IDENTITY).get("id")

    def doubt(self, record: str = IDENTITY) -> str:
        """Why the folder may be somebody else's; "" if the record is of this host and folder, and both are our user's.

        A copy has another inode than its record.
        """
        if self.is_foreign(record):
            return f"{self.path} or its {record} belongs to another user"
        created = read_json(self.path / record)
        here = created.get("host") == socket.gethostname() and created.get("inode") == self.path.stat().st_ino
        return "" if here else f"{self.path} was not created on this machine"

    def own(self, root: Path) -> None:
        """Assign a folder of checkpoints to this run, which may then replace and remove its checkpoints.

        Raises
        ------
        FileExistsError : it is outside of the run, and has another owner, or checkpoints and no owner.
        """
        record = read_json(root / OWNER)
        whose = record.get("run")
        if not whose:
            has_checkpoints = any(root.glob("iter_*")) or any(root.glob("latest_*"))
            whose = "an unknown run" if has_checkpoints else str(self.path)
        if whose != str(self.path) and record.get("id") != self.id and root != self.checkpoints:
            raise FileExistsError(
                f"a run may replace and remove only its own checkpoints; {root} has those of {whose}; choose another "
                f"checkpoint.checkpoint_dir (checkpoint.load={root} starts from them)"
            )
        root.mkdir(parents=True, exist_ok=True)
        write_json(root / OWNER, {"run": str(self.path), "id": self.id})

    def check_place(self) -> None:
        """FileNotFoundError if the folder of which this process is the writer is not at its path any more."""
        if self._key in _HELD and _HELD[self._key][1] != (self.path.exists() and self.path.stat().st_ino):
            raise FileNotFoundError(
                f"{self.path} must stay in its place while the run writes there; it was moved, replaced or removed; "
                "give the command again with the folder's new name as --run-dir: it resumes from the newest checkpoint"
            )

    def tell(self, phase: str) -> None:
        """Write the owner's current activity and its start into `run.pid`; other processes write nothing."""
        self.check_place()
        if self._key in _HELD:
            try:
                write_json(self.pid_file, {**process.identity(), "phase": phase, "since_s": time.time()})
            except OSError as error:  # a checkpoint must still be saved
                log.warning("the run folder %s cannot be written (%s)", self.path, error.strerror)

    def release(self) -> None:
        """Release the folder, if it is ours."""
        if self._key in _HELD:
            with contextlib.suppress(FileNotFoundError):  # the folder was moved
                self.check_place()
                self.pid_file.unlink()
            _HELD.pop(self._key)[0].release()

    def owner(self) -> psutil.Process | None:
        """The live process of this host that has claimed the folder, or None."""
        return process.find(read_json(self.pid_file))

    def figures(self, train_iters: Any) -> Json:
        """Its progress and losses, as `dfm_nb.compare` and `dfm pretrain --json` show them."""
        records, damage = damage_of(self.path)
        compared = compared_loss(set().union(*records))
        _, losses = series(records, "loss")
        _, seconds = series(records, "elapsed_s")
        _, rounds = series(records, "val_loss")
        at, averaged = series(records, compared)
        last = records[-1]["iteration"] if records else 0
        best = min(zip(averaged, at), default=(None, None))
        return {
            "state": damage or ("running" if self.owner() else ended(last, train_iters)),
            "iterations": last,
            "best_val_loss": best[0],
            "best_at": best[1],
            "val_loss": rounds[-1] if rounds else None,
            "loss": losses[-1] if losses else None,
            "seconds": seconds[-1] if seconds else None,
        }

    @property
    def _key(self) -> tuple[Path, int]:
        return self.path, os.getpid()  # a fork inherits _HELD, but is not the owner

    def _beat(self) -> None:
        while self._key in _HELD:
            with contextlib.suppress(OSError):
                os.utime(self.pid_file)
            time.sleep(BEAT_S)


BEAT_S = 10
STALE_S = 60
"""Seconds after which a run counts as dead: several heartbeats may be late on a busy machine."""
_HELD: dict[tuple[Path, int], tuple[FileLock, int]] = {}  # by folder and process; with the folder's inode


@contextlib.contextmanager
def turn(place: Path, busy: str) -> Iterator[None]:
    """Hold a lock file, after its holder has released it, whom `busy` names; nothing where there are no locks.

    A holder that moves the folder away keeps those out who wait: each attempt opens the path anew.

    Raises
    ------
    FileNotFoundError, FileExistsError : the lock's folder is absent, or was moved just now.
    """
    lock = FileLock(place, fallback_to_soft=False)  # why: `claim`
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log.warning("%s; waiting for it to end", busy)
        lock.acquire()
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:  # such as ENOLCK of NFS without its lock daemon
        pass
    try:
        yield
    finally:
        lock.release()


def _age_s(path: Path) -> float:
    """Seconds since the file was written, by the clock of its file system, because hosts may disagree on the time."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now-") as now:
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime


def iteration_folders(parent: Path) -> list[tuple[int, Path]]:
    """The `iter_N` folders below `parent`, by iteration."""
    if not parent.is_dir():
        return []
    folders = [path for path in parent.iterdir() if is_iteration(path) and path.is_dir()]
    return sorted((int(path.name.removeprefix("iter_")), path) for path in folders)
