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
    """Saves checkpoints under one root; asynchronous ones are finished by `poll` (each step) and `close`.

    Parameters
    ----------
    keep_last : number of newest checkpoints to keep; 0 keeps all, as does the attribute `rotates` = False.
    keep_every : iterations divisible by this are always kept, as is the attribute `best`.
    asynchronous : return as soon as training can continue; the files are then written in the background.
    """

    def __init__(self, root: str | Path, keep_last: int = 0, keep_every: int | None = None, asynchronous: bool = False):
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.best: int | None = None
        self.rotates = True
        self.asynchronous = asynchronous
        self._child: _Child | None = None  # the process that writes a checkpoint

    def save(
        self, pieces: Pieces, iteration: int, state: dict, config_yaml: str, assets: Mapping[str, bytes] = {}
    ) -> None:
        """Write `iter_<iteration>`; `assets` are small files (name -> content) that generation needs.

        Raises
        ------
        ValueError : the disk is full or failed; the message has the last good checkpoint.
        """
        self.close()
        self._pending = self.root / iteration_name(iteration)
        self._temporary = temporary = self.root / f"{iteration_name(iteration)}.tmp"
        rank = dist.get_rank()
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            # not the root, which a run made: it is missing where it was moved meanwhile
            temporary.mkdir()
        dist.barrier()  # the folder is there
        parts = []
        for part in local_parts(pieces):
            if part.written:
                part.values = part.values.detach().contiguous().to("cpu", non_blocking=True)
                parts.append(part)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        # a step changes all parameters or none
        (count,) = {int(step) for step in step_counts(pieces.optimizer)} or {0}
        state = {**state, "optimizer_step": count, "scheduler": pieces.scheduler.state_dict()}
        small = {"state.json": json.dumps(state).encode(), "config.yaml": config_yaml.encode(), **assets}

        def work() -> None:
            _write(parts, temporary, rank)
            if rank == 0:
                self._close(small)

        self._child = _Child(work)
        if not self.asynchronous:
            self.close()

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

    def close(self) -> None:
        """Wait until the last save is complete."""
        while self.busy:
            self.poll()
            time.sleep(POLL_S)

    def _give_up(self, cause: str) -> None:
        """Rank 0 reports a disk error in one line; complete checkpoints are kept."""
        if dist.get_rank() != 0:
            raise SystemExit(2)
        whole = whole_checkpoints(self.root)
        last = f"the last good one is {whole[-1].name}" if whole else "there is none before it"
        fault = "could not be written to"
        if self._pending in whole:
            fault = "is whole, but older ones could not be removed from"
        free_gib = shutil.disk_usage(self.root).free / 2**30
        shutil.rmtree(self._temporary, ignore_errors=True)
        raise ValueError(
            f"the checkpoint {self._pending.name} {fault} {self.root} ({free_gib:.1f} GiB free; "
            f"{cause}); {last}: make room or lift the quota and give the same command again"
        )

    def _close(self, small: Mapping[str, bytes]) -> None:
        """In rank 0's child: the index, the small files, the listing of all checksums, the final name, the pointer.

        In this order, so that at every instant a folder without `.tmp` is whole: everything is on disk before the
        checksums are, these are before the folder gets its name, and only then is the tracker updated.
        """
        temporary = self._temporary
        index: dict[str, dict] = {}
        listing = {}
        for rank in range(dist.get_world_size()):
            note = temporary / NOTE.format(rank)
            file = temporary / FILE.format(rank)
            # not `exists`, whose answer NFS may remember
            while note.name not in os.listdir(temporary):
                time.sleep(POLL_S)
            written = json.loads(note.read_bytes())
            if not file.is_file():
                raise OSError(f"{file.name} is not there: all nodes must share this folder")
            listing[file.name] = written["listed"]
            for name, entry in written["index"].items():
                if name in index:
                    index[name]["pieces"] += entry["pieces"]
                else:
                    index[name] = entry
            note.unlink()
        for name, content in {tensor_files.INDEX: json.dumps(index).encode(), **small}.items():
            write_atomically(temporary / name, content)
            listing[name] = listed_as(temporary / name)
        seal(temporary / CHECKSUMS, listing)
        sync(temporary)
        _discard(self._pending)
        os.rename(temporary, self._pending)
        write_atomically(self.root / TRACKER, str(iteration_of(self._pending)).encode())
        sync(self.root)
        self._prune()

    def _prune(self) -> None:
        whole = {iteration_of(folder): folder for folder in whole_checkpoints(self.root)}
        keep_last = self.keep_last if self.rotates else 0
        for iteration in whole.keys() - kept([*whole], keep_last, self.keep_every, self.best):
            _discard(whole[iteration])
        remove_temporaries(self.root)  # of the tracker, left by a killed process
        for leftover in self.root.glob("iter_[0-9]*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)


def kept(iterations: list[int], keep_last: int, keep_every: int | None, best: int | None) -> set[int | None]:
    """Those of the iterations, oldest first, whose checkpoints stay. keep_last : 0 keeps all."""
    every = [i for i in iterations if keep_every and i % keep_every == 0]
    return {*iterations[-keep_last:], *every, best}


# ---- the writing process ------------------------------------------------------------------------------------------


class _Child:
    """A fork of this process that does `work` and ends."""

    def __init__(self, work: Callable[[], None]):
        receive, send = os.pipe()
        self._error: str | None = None
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            try:
                # Python 3.12 warns of locks that other threads hold: the child takes none
                self.pid = os.fork()
            except OSError as error:  # too many processes, or no memory
                self.pid = -1
                self._error = str(error)
        if self.pid:
            os.close(send)
            self._receive = os.fdopen(receive)
            return
        try:
            # It must not free a process group, which would wait for threads that the fork does not have.
            gc.disable()
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
    file = folder / FILE.format(rank)
    index = {}
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
