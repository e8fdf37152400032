"""Writing checkpoints beside training, and loading one into a trainer."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from dfm_nb.base.files import sha256, sync, write_atomically
from dfm_nb.base.run import iteration_name
from dfm_nb.checkpoints.background import SaveStrategy, checksum_file, optimizer_shards
from dfm_nb.checkpoints.state import _LAYOUT_FREE, _ema_state, _load_ema, _load_model, _model_state
from dfm_nb.checkpoints.weights import CHECKSUMS, TRACKER, data_files, iteration_of, whole_checkpoints
from dfm_nb.model.ema import PowerEMA


@dataclass
class Pieces:
    """What a checkpoint is made of."""

    chunks: Sequence  # unwrapped DiT chunks of this rank
    optimizer: object
    scheduler: object
    ema: PowerEMA


def _sharded_state(pieces: Pieces, loading: bool) -> dict:
    metadata = dict(_LAYOUT_FREE)
    state = _model_state(pieces.chunks, metadata)
    flat = {k: v for chunk in state.values() for k, v in chunk.items()} if len(pieces.chunks) == 1 else state
    distributed = [o for o in pieces.optimizer.chained_optimizers if isinstance(o, DistributedOptimizer)]
    if loading or not distributed:
        state["optimizer"] = pieces.optimizer.sharded_state_dict(
            flat if len(pieces.chunks) == 1 else state, is_loading=loading, metadata=metadata
        )
    else:  # the same content, but from the ranks that have it
        assert len(pieces.optimizer.chained_optimizers) == 1
        tensors = [t for k, chunk in state.items() for t in chunk.values() if isinstance(t, ShardedTensor)]
        state["optimizer"], state["optimizer_shards"] = optimizer_shards(distributed[0], tensors)
    model_only = {k: v for k, v in state.items() if k.startswith("model")}
    state["ema"] = _ema_state(pieces.ema, model_only)
    state["scheduler"] = pieces.scheduler.state_dict()
    return state


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: a plan is some 100,000 objects that are all needed, and each search through them holds training up."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Writer:
    """Saves under one root; asynchronous saves are finished by `poll` (each step) and `finish`."""

    def __init__(
        self, root: str | Path, keep_last: int = 0, keep_every: int | None = None, asynchronous: bool = False, say=print
    ):
        self.root, self.keep_last, self.keep_every, self.say = Path(root), keep_last, keep_every, say
        self._queue = AsyncCallsQueue() if asynchronous else None
        self._strategy, self._validated = SaveStrategy(), False
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # used on rank 0
        self._closed: Future | None = None  # the last asynchronous save's, on rank 0
        self._unconfirmed = False  # on every rank: written, but rank 0 may not have closed it

    @_no_collection()
    def save(
        self, pieces: Pieces, iteration: int, state: dict, config_yaml: str, assets: Mapping[str, bytes] | None = None
    ) -> None:
        """Write `iter_<iteration>`; `assets` are small files (name -> content) that generation needs."""
        final = self.root / iteration_name(iteration)
        temporary = final.with_name(final.name + ".tmp")
        self.finish()
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        self._pending = final
        with self._explained():
            request = dist_checkpointing.save(
                _sharded_state(pieces, loading=False),
                str(temporary),
                sharded_strategy=self._strategy,
                validate_access_integrity=not self._validated,  # the next ones have the same parts
                async_sharded_save=self._queue is not None,
                content_metadata=dict(_LAYOUT_FREE),
                # each rank's optimizer has a note of its own among the unsharded values, which is not saved
                preprocess_common_before_consistancy_check=lambda common: {
                    k: v for k, v in common.items() if k != "optimizer"
                },
            )
        self._validated = True
        small = {"state.json": json.dumps(state).encode(), "config.yaml": config_yaml.encode(), **(assets or {})}
        if self._queue is None:
            dist.barrier()
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
                raise SystemExit(2) from None  # CheckpointException reaches all ranks
            whole = whole_checkpoints(self.root)
            last = f"the last good one is {whole[-1].name}" if whole else "there is none before it"
            free_gib = shutil.disk_usage(self.root).free / 2**30
            cause = str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
            raise ValueError(
                f"the checkpoint {self._pending.name} could not be written to {self.root} ({free_gib:.1f} GiB free; {cause}); {last}: "
                "make room or lift the quota and give the same command again"
            ) from None

    def _finalize(self, temporary: Path, final: Path, small: Mapping[str, bytes]) -> None:
        """On rank 0: the small files, the listing of all checksums, the final name, and then the pointer."""
        for name, content in small.items():
            (temporary / name).write_bytes(content)
        listing = {}
        for name in data_files(temporary):  # on disk already
            waiting = checksum_file(temporary / name)
            if not waiting.is_file() or not (temporary / name).is_file():
                raise OSError(f"{name} is not there: all nodes must share this folder")
            listing[name] = json.loads(waiting.read_text())
            waiting.unlink()
        for path in sorted(p for p in temporary.iterdir() if p.is_file() and p.name not in listing):
            listing[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            sync(path)
        (temporary / CHECKSUMS).write_text(json.dumps(listing, indent=1))
        sync(temporary / CHECKSUMS)
        sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
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
        if not self.keep_last:
            return
        for folder in whole_checkpoints(self.root)[: -self.keep_last]:
            if not (self.keep_every and iteration_of(folder) % self.keep_every == 0):
                shutil.rmtree(folder)

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
            if self.busy:
                self._queue.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Wait until the last save is whole."""
        with self._explained():
            if self.busy:
                self._queue.maybe_finalize_async_calls(blocking=True)
            if self._closed is not None:
                self._closed.result()
        if self._unconfirmed:
            dist.barrier()
        self._closed, self._unconfirmed = None, False

    def close(self) -> None:
        self.finish()
        if self._queue is not None:
            self._queue.close()
        self._closing.shutdown()


def read_state(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())


def seed_optimizer_state(optimizer) -> None:
    """torch's AdamW makes its state at the first step, but a distributed optimizer loads into state that is there."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    # an optimizer that keeps other state than AdamW says so per parameter (`training.muon`)
                    moments = inner.moments(p) if hasattr(inner, "moments") else ("exp_avg", "exp_avg_sq")
                    inner.state[p].update(
                        step=torch.zeros((), device=p.device), **{name: torch.zeros_like(p.data) for name in moments}
                    )


def load(pieces: Pieces, folder: Path) -> dict:
    """Load everything into `pieces`, in this layout; returns the JSON state. The folder must have passed `verify`."""
    seed_optimizer_state(pieces.optimizer)
    state = dist_checkpointing.load(_sharded_state(pieces, loading=True), str(folder))
    _load_model(pieces.chunks, state)
    pieces.optimizer.load_state_dict(state["optimizer"])
    pieces.scheduler.load_state_dict(state["scheduler"])
    _load_ema(pieces.ema, state["ema"])
    return read_state(folder)
