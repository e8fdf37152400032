"""Writes checkpoints, also beside training, and loads one into a trainer; each is whole or absent."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from dfm_nb.base.files import listed_as, seal, sync, write_atomically
from dfm_nb.base.run import iteration_name
from dfm_nb.checkpoints.background import checksum_file, optimizer_shards, request_of
from dfm_nb.checkpoints.state import LAYOUT_FREE, ema_state, load_ema, load_model, model_state
from dfm_nb.checkpoints.torch_dist import COMMON, data_files, load_tensors
from dfm_nb.checkpoints.weights import CHECKSUMS, TRACKER, iteration_of, read_object, whole_checkpoints
from dfm_nb.model.ema import PowerEMA


@dataclass
class Pieces:
    """What a checkpoint is made of: this rank's unwrapped chunks, megatron-core's optimizer and scheduler, averages."""

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    ema: PowerEMA


def _sharded_state(pieces: Pieces, loading: bool) -> dict[str, Any]:
    model = model_state(pieces.chunks)
    state: dict[str, Any] = {**model, "ema": ema_state(pieces.ema, model), "scheduler": pieces.scheduler.state_dict()}
    inner = pieces.optimizer.chained_optimizers
    if loading or not isinstance(inner[0], DistributedOptimizer):
        # the optimizer looks for its parameters among the tensors of one chunk, or in a dict of chunks
        named = model["model"] if len(pieces.chunks) == 1 else model
        state["optimizer"] = pieces.optimizer.sharded_state_dict(
            dict(named), is_loading=loading, metadata=dict(LAYOUT_FREE)
        )
    else:
        # The same content, from the ranks that have it: megatron-core would gather it on one rank first.
        assert len(inner) == 1
        tensors = [t for chunk in model.values() for t in chunk.values() if isinstance(t, ShardedTensor)]
        state["optimizer"], state["optimizer_shards"] = optimizer_shards(inner[0], tensors)
    return state


FORM = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""How megatron-core knows its checkpoints: `metadata.json`."""


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: a plan is 100,000 objects, all needed, and each search through them costs time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Writer:
    """Saves checkpoints under one root; asynchronous ones are finished by `poll` (each step) and `finish`.

    Parameters
    ----------
    keep_last : remove all but the newest so many; 0 keeps all. keep_every : iterations divisible by this stay anyway,
        and so does that of the attribute `best`.
    asynchronous : return as soon as training may go on; the files are written beside it (`checkpoints.background`).
    say : gets a line for each finished checkpoint, on rank 0.
    """

    def __init__(
        self,
        root: str | Path,
        keep_last: int = 0,
        keep_every: int | None = None,
        asynchronous: bool = False,
        say: Callable[[str], object] = print,
    ):
        self.root, self.keep_last, self.keep_every, self.say = Path(root), keep_last, keep_every, say
        self.best: int | None = None
        self._queue = AsyncCallsQueue() if asynchronous else None
        self._validated = False
        self._pending = ""  # name of the checkpoint that is being written
        # An asynchronous save ends in two steps: all ranks' files are written (the queue knows), then rank 0 closes it.
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # used on rank 0
        self._closed: Future | None = None  # the last save's, on rank 0
        self._unconfirmed = False  # on every rank: written, but rank 0 may not have closed it

    @_no_collection()
    def save(
        self, pieces: Pieces, iteration: int, state: dict, config_yaml: str, assets: Mapping[str, bytes] | None = None
    ) -> None:
        """Write `iter_<iteration>`; `assets` are small files (name -> content) that generation needs.

        Raises
        ------
        ValueError : the disk is full or at fault; the message names the last good checkpoint.
        """
        final = self.root / iteration_name(iteration)
        temporary = final.with_name(final.name + ".tmp")
        self.finish()
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()  # the folder is there
        self._pending = final.name
        with self._explained():
            # The steps of `megatron.core.dist_checkpointing.save`, which from 0.18 on pickles the common values. They
            # are rank 0's, and checked to be the same on all, but for the optimizer's, which are each rank's own.
            kept = _sharded_state(pieces, loading=False) | {"content_metadata": dict(LAYOUT_FREE)}
            sharded, common = save_preprocess(kept, not self._validated, _without_optimizer)
            if dist.get_rank() == 0:
                torch.save(common, temporary / COMMON)
            request = request_of(sharded, temporary)
            if self._queue is None:
                request.execute_sync()
        self._validated = True  # the next ones have the same parts
        small = {"metadata.json": json.dumps(FORM).encode(), "state.json": json.dumps(state).encode()}
        small |= {"config.yaml": config_yaml.encode(), **(assets or {})}
        if self._queue is None:
            dist.barrier()  # every rank has written its files
            with self._explained():
                if dist.get_rank() == 0:
                    self._finalize(temporary, final, small)
            dist.barrier()
        else:
            request.add_finalize_fn(lambda: self._finalize_in_background(temporary, final, small))
            self._queue.schedule_async_request(request)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A fault of the disk becomes one sentence of one rank; what is whole stays as it is."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            if dist.get_rank() != 0:
                raise SystemExit(2) from None  # megatron-core's CheckpointException reaches all ranks: one speaks
            whole = whole_checkpoints(self.root)
            last = f"the last good one is {whole[-1].name}" if whole else "there is none before it"
            free_gib = shutil.disk_usage(self.root).free / 2**30
            shutil.rmtree(self.root / f"{self._pending}.tmp", ignore_errors=True)
            cause = str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
            raise ValueError(
                f"the checkpoint {self._pending} could not be written to {self.root} ({free_gib:.1f} GiB free; "
                f"{cause}); {last}: make room or lift the quota and give the same command again"
            ) from None

    def _finalize(self, temporary: Path, final: Path, small: Mapping[str, bytes]) -> None:
        """On rank 0: the small files, the listing of all checksums, the final name, and then the pointer.

        In this order, so that at every instant a folder without `.tmp` is whole: everything is on disk before the
        checksums are, they are before the folder gets its name, and the tracker moves to a name that is there.
        """
        for name, content in small.items():
            (temporary / name).write_bytes(content)
        listing = {}
        for name in data_files(temporary):  # the ranks have synced these
            waiting = checksum_file(temporary / name)
            if not waiting.is_file() or not (temporary / name).is_file():
                raise OSError(f"{name} is not there: all nodes must share this folder")
            listing[name] = json.loads(waiting.read_text())
            waiting.unlink()
        for path in sorted(p for p in temporary.iterdir() if p.is_file() and p.name not in listing):
            listing[path.name] = listed_as(path)
            sync(path)
        seal(temporary / CHECKSUMS, listing)
        sync(temporary)
        _discard(final)
        os.rename(temporary, final)
        write_atomically(self.root / TRACKER, str(iteration_of(final)).encode())
        sync(self.root)
        self.say(f"Checkpoint saved: {final}/")
        self._prune()

    def _finalize_in_background(self, temporary: Path, final: Path, small: Mapping[str, bytes]) -> None:
        self._unconfirmed = True
        if dist.get_rank() == 0:
            self._closed = self._closing.submit(self._finalize, temporary, final, small)

    def _prune(self) -> None:
        old = whole_checkpoints(self.root)[: -self.keep_last] if self.keep_last else []
        for folder in old:
            iteration = iteration_of(folder)
            if iteration != self.best and not (self.keep_every and iteration % self.keep_every == 0):
                _discard(folder)
        for leftover in self.root.glob("iter_[0-9]*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    @property
    def busy(self) -> bool:
        """Whether an asynchronous save is being written; the same on every rank."""
        return self._queue is not None and self._queue.get_num_unfinalized_calls() > 0

    @_no_collection()
    def poll(self) -> None:
        """Finish asynchronous saves whose writing is done on every rank; cheap when there is none."""
        with self._explained():
            if self._closed is not None and self._closed.done():
                self._closed.result()
            self._finish_written(blocking=False)

    def finish(self) -> None:
        """Wait until the last save is whole."""
        with self._explained():
            self._finish_written(blocking=True)
            if self._closed is not None:
                self._closed.result()
        if self._unconfirmed:
            dist.barrier()  # rank 0 has closed it
        self._closed, self._unconfirmed = None, False

    def _finish_written(self, blocking: bool) -> None:
        if self._queue is not None and self.busy:
            self._queue.maybe_finalize_async_calls(blocking=blocking)

    def close(self) -> None:
        """Wait until the last save is whole, and end the threads."""
        self.finish()
        if self._queue is not None:
            self._queue.close()
        self._closing.shutdown()


def _discard(folder: Path) -> None:
    """Remove a checkpoint; its name goes first, so that a kill on the way leaves none that lacks files."""
    if folder.exists():
        away = folder.with_name(f"{folder.name}.removed.tmp")
        shutil.rmtree(away, ignore_errors=True)  # an earlier kill's
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _without_optimizer(common: dict) -> dict:
    return {k: v for k, v in common.items() if k != "optimizer"}


def read_state(folder: Path) -> dict[str, Any]:
    """What `Writer.save` got as `state`: iteration, steps taken, place in the data."""
    return read_object(folder / "state.json")


def _make_optimizer_state(optimizer: Any) -> None:
    """AdamW makes its state at the first step, but a distributed optimizer (0.16) loads into state that is there."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        for p in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[p]:
                # Muon keeps other state than AdamW and says so per parameter (`training.muon`)
                moments = inner.moments(p) if hasattr(inner, "moments") else ("exp_avg", "exp_avg_sq")
                inner.state[p].update({name: torch.zeros_like(p.data) for name in moments})
                inner.state[p]["step"] = torch.zeros((), device=p.device)


SET_BY_CONFIG = ("max_lr", "min_lr", "betas", "eps", "momentum")
"""What a parameter group holds of the configuration. A checkpoint's would win silently over settings changed since."""


def load(pieces: Pieces, folder: Path) -> dict[str, Any]:
    """Load everything into `pieces`, in this layout; returns the JSON state. The folder must have passed `verify`.

    Learning rate, decay and the optimizer's other settings stay those that `pieces` were built with.
    """
    _make_optimizer_state(pieces.optimizer)
    settings = [{k: group[k] for k in SET_BY_CONFIG if k in group} for group in pieces.optimizer.param_groups]
    state = load_tensors(_sharded_state(pieces, loading=True), folder)
    load_model(pieces.chunks, state)
    pieces.optimizer.load_state_dict(state["optimizer"])
    for group, own in zip(pieces.optimizer.param_groups, settings):
        group.update(own)
    pieces.scheduler.load_state_dict(state["scheduler"])
    load_ema(pieces.ema, state["ema"])
    return read_state(folder)
