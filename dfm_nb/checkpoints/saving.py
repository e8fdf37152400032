"""Write checkpoints, also while training continues, and load one into a trainer. Each is whole or absent.

Every rank writes its part from a fork of itself. The child has the state at the fork, whatever training does next; the
kernel copies a page only when training changes it. A fork cannot read GPU memory, so tensors on a GPU are copied first.
The child of rank 0 waits for the files of the other ranks and completes the checkpoint.
"""

import gc
import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dfm_nb.base.files import listed_as, remove_temporaries, seal, sync, write_atomically, write_json
from dfm_nb.base.log import log
from dfm_nb.base.process import end_with_parent
from dfm_nb.base.run import iteration_name
from dfm_nb.checkpoints import tensor_files
from dfm_nb.checkpoints.folders import CHECKSUMS, TRACKER, iteration_of, read_state, whole_checkpoints
from dfm_nb.checkpoints.state import LocalPart, Pieces, load_into, local_parts, step_counts
from dfm_nb.parallel.groups import everyones

FILE, NOTE = "rank-{:05d}.safetensors", "rank-{:05d}.json"
"""A rank's tensors, and its note that they are on disk, with their index."""
POLL_S = 0.005
"""Interval of looking for the files of other processes."""


class Writer:
    """Saves checkpoints under one root; asynchronous ones are finished by `poll` (each step) and `finish`.

    Parameters
    ----------
    keep_last : number of newest checkpoints to keep; 0 keeps all, as does the attribute `rotates` = False.
    keep_every : iterations divisible by this are always kept, as is the attribute `best`.
    asynchronous : return as soon as training can continue; the files are then written in the background.
    """

    def __init__(self, root: str | Path, keep_last: int = 0, keep_every: int | None = None, asynchronous: bool = False):
        self.root, self.keep_last, self.keep_every = Path(root), keep_last, keep_every
        self.best: int | None = None
        self.rotates = True
        self.asynchronous = asynchronous
        self._pending = Path()  # the folder that is being written
        self._child: _Child | None = None  # the process that writes it

    def save(
        self, pieces: Pieces, iteration: int, state: dict, config_yaml: str, assets: Mapping[str, bytes] | None = None
    ) -> None:
        """Write `iter_<iteration>`; `assets` are small files (name -> content) that generation needs.

        Raises
        ------
        ValueError : the disk is full or failed; the message has the last good checkpoint.
        """
        self.finish()
        self._pending = final = self.root / iteration_name(iteration)
        temporary = final.with_name(final.name + ".tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()  # not the root, which a run made: it is missing where it was moved meanwhile
        dist.barrier()  # the folder is there
        parts = [part for part in local_parts(pieces) if part.written]
        for part in parts:
            part.values = part.values.detach().contiguous().to("cpu", non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        (count,) = {int(step) for step in step_counts(pieces.optimizer)} or {0}  # a step changes all parameters or none
        common = {"optimizer_step": count, "scheduler": pieces.scheduler.state_dict()}
        small = {"state.json": json.dumps(state | common).encode(), "config.yaml": config_yaml.encode()}

        def work() -> None:
            _write(parts, temporary, dist.get_rank())
            if dist.get_rank() == 0:
                self._close(temporary, final, small | dict(assets or {}))

        self._child = _Child(work)
        if not self.asynchronous:
            self.finish()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written; the same on every rank."""
        return self._child is not None

    def poll(self) -> None:
        """Check whether the last save is complete, with the same result on every rank; cheap if none is in progress.

        Raises
        ------
        ValueError : it could not be written. Other ranks raise SystemExit, so the error is printed once.
        """
        if self._child is None:
            return
        outcomes = everyones(self._child.outcome())
        if any(outcomes):
            self._child.end()
            self._child = None
            self._give_up(next(filter(None, outcomes)))
        if None not in outcomes:
            self._child = None
            if dist.get_rank() == 0:
                log.info("Checkpoint saved: %s/", self._pending)

    def finish(self) -> None:
        """Wait until the last save is complete."""
        while self.busy:
            self.poll()
            time.sleep(POLL_S)

    close = finish

    def _give_up(self, cause: str) -> None:
        """Rank 0 reports a disk error in one line; complete checkpoints are kept."""
        if dist.get_rank() != 0:
            raise SystemExit(2)
        whole = whole_checkpoints(self.root)
        last = f"the last good one is {whole[-1].name}" if whole else "there is none before it"
        kept = self._pending in whole
        fault = "is whole, but older ones could not be removed from" if kept else "could not be written to"
        free_gib = shutil.disk_usage(self.root).free / 2**30
        shutil.rmtree(self._pending.with_name(self._pending.name + ".tmp"), ignore_errors=True)
        raise ValueError(
            f"the checkpoint {self._pending.name} {fault} {self.root} ({free_gib:.1f} GiB free; "
            f"{cause}); {last}: make room or lift the quota and give the same command again"
        )

    def _close(self, temporary: Path, final: Path, small: Mapping[str, bytes]) -> None:
        """In rank 0's child: the index, the small files, the listing of all checksums, the final name, the pointer.

        In this order, so that at every instant a folder without `.tmp` is whole: everything is on disk before the
        checksums are, these are before the folder gets its name, and only then is the tracker updated.
        """
        index: dict[str, dict] = {}
        listing = {}
        for rank in range(dist.get_world_size()):
            note, file = temporary / NOTE.format(rank), temporary / FILE.format(rank)
            while note.name not in os.listdir(temporary):  # not `exists`, whose answer NFS may remember
                time.sleep(POLL_S)
            written = json.loads(note.read_bytes())
            if not file.is_file():
                raise OSError(f"{file.name} is not there: all nodes must share this folder")
            listing[file.name] = written["listed"]
            for name, entry in written["index"].items():
                index.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
            note.unlink()
        for name, content in {tensor_files.INDEX: json.dumps(index).encode(), **small}.items():
            write_atomically(temporary / name, content)
            listing[name] = listed_as(temporary / name)
        seal(temporary / CHECKSUMS, listing)
        sync(temporary)
        _discard(final)
        os.rename(temporary, final)
        write_atomically(self.root / TRACKER, str(iteration_of(final)).encode())
        sync(self.root)
        self._prune()

    def _prune(self) -> None:
        old = whole_checkpoints(self.root)[: -self.keep_last] if self.keep_last and self.rotates else []
        for folder in old:
            iteration = iteration_of(folder)
            if iteration != self.best and not (self.keep_every and iteration % self.keep_every == 0):
                _discard(folder)
        remove_temporaries(self.root)  # of the tracker, left by a killed process
        for leftover in self.root.glob("iter_[0-9]*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)


# ---- the writing process ------------------------------------------------------------------------------------------


class _Child:
    """A fork of this process that does `work` and ends."""

    def __init__(self, work: Callable[[], None]):
        receive, send = os.pipe()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            try:
                self.pid = os.fork()  # Python 3.12 warns of locks that other threads hold: the child takes none
            except OSError as error:  # too many processes, or no memory
                self.pid, failed = -1, str(error)
        if self.pid:
            os.close(send)
            self._error: str | None = failed if self.pid < 0 else None
            self._receive = os.fdopen(receive)
            return
        try:
            gc.disable()  # it must not free a process group, which would wait for threads that the fork does not have
            end_with_parent()
            # Signals reach the whole process group but are for the trainer, which waits for this process.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            os.nice(5)  # training first
            work()
        except BaseException as error:
            os.write(send, f"{error or type(error).__name__}".encode()[:1000])
        finally:
            os._exit(0)

    def outcome(self, options: int = os.WNOHANG) -> str | None:
        """None while it runs, then its error, or "" if it succeeded."""
        if self._error is None:
            ended, status = os.waitpid(self.pid, options)
            if ended:
                with self._receive:
                    error = self._receive.read()
                self._error = error or (f"its writing process ended with status {status}" if status else "")
        return self._error

    def end(self) -> None:
        if self._error is None:
            os.kill(self.pid, signal.SIGKILL)
            self.outcome(options=0)


def _write(parts: list[LocalPart], folder: Path, rank: int) -> None:
    file, index = folder / FILE.format(rank), {}
    listed = tensor_files.write(file, {part.name: part.values.view(-1) for part in parts}, {})
    for part in parts:
        piece = {"file": file.name, "offset": part.offset, "shape": part.shape, "elements": [part.first, part.last]}
        index[part.name] = {"dtype": tensor_files.NAMES[part.values.dtype], "shape": part.whole, "pieces": [piece]}
    write_json(folder / NOTE.format(rank), {"listed": listed, "index": index})


def _discard(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill during removal leaves no incomplete one."""
    if folder.exists():
        away = folder.with_name(f"{folder.name}.removed.tmp")
        shutil.rmtree(away, ignore_errors=True)  # left by an earlier kill
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


# ---- loading ------------------------------------------------------------------------------------------------------


def load(pieces: Pieces, folder: Path) -> dict[str, Any]:
    """Load everything into `pieces`, in this layout; returns the JSON state. The folder must have passed `verify`.

    Learning rate, weight decay and other optimizer settings remain those of `pieces`.
    """
    state = read_state(folder)
    load_into(pieces, tensor_files.TensorIndex(folder))
    count = state.pop("optimizer_step")
    for step in step_counts(pieces.optimizer):
        step.fill_(count)
    pieces.scheduler.load_state_dict(state.pop("scheduler"))
    return state
