"""Sharded checkpoints that are whole or absent, in any parallel layout, on megatron-core's dist_checkpointing (torch_dist).

Enters: model chunks, optimizer, scheduler, averages and a JSON-able state. Leaves: `iter_0001000/` folders.
Guarantees: a checkpoint is written beside its final name and renamed when everything, the checksums last, is on disk; only then does
`latest_checkpointed_iteration.txt` move; what a checksum contradicts is refused by name; loading runs no code from a file.
Cost: a blocking save writes all of the state; an asynchronous one copies it to host memory and returns.

    iter_0001000/  *.distcp .metadata common.pt metadata.json   megatron-core's
                   state.json      iteration, place in the data, consumed samples and tokens
                   config.yaml     the resolved configuration
                   checksums.json  sha256 and size of each of the above
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from dfm_nb.ema import PowerEMA

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
_LAYOUT_FREE = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the one form that continues exactly in another layout
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names it and says why."""


def folder_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


def whole_checkpoints(root: str | Path) -> list[Path]:
    """Finished checkpoint folders, oldest first. A folder without a checksum file is not finished."""
    return sorted(
        (p for p in Path(root).glob("iter_*") if p.name[5:].isdigit() and (p / CHECKSUMS).is_file()), key=iteration_of
    )


def verify(folder: Path) -> None:
    """Raise `CheckpointError` when a file is missing, short or changed."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {CHECKSUMS} (its writing was cut off)")
    for name, expected in json.loads(listing.read_text()).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{folder} is damaged: {name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            )
        if _sha256(path) != expected["sha256"]:
            raise CheckpointError(f"{folder} is damaged: the content of {name} does not match its checksum")
    refuse_code(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class _NamesOnly(pickle.Unpickler):
    """Loads torch's checkpoint index, which is a pickle, knowing only the names such an index is made of."""

    ALLOWED = {
        "torch.distributed.checkpoint.metadata": None, "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"}, "torch": {"Size", "device", "float32", "bfloat16", "float16", "float64",
        "int64", "int32", "int16", "int8", "uint8", "bool", "strided"}, "torch._C": {"_get_layout"},
        "collections": {"OrderedDict"}, "pathlib": {"PosixPath", "Path", "PurePosixPath"}, "builtins": {"set", "frozenset"},
    }  # fmt: skip

    def find_class(self, module, name):
        names = self.ALLOWED.get(module, set())
        if names is not None and name not in names:
            raise CheckpointError(f"the checkpoint's index names {module}.{name}, which no checkpoint needs: refused")
        return super().find_class(module, name)


def refuse_code(folder: Path) -> None:
    """The index of a torch_dist checkpoint is a pickle: read it once with an unpickler that knows no callables of interest."""
    with (folder / ".metadata").open("rb") as f:
        _NamesOnly(f).load()


def find(path: str | Path) -> Path:
    """The checkpoint that a user's path means: an `iter_*` folder, a folder of them, or a run folder; newest whole one.

    Damaged or unfinished newer ones are named in `CheckpointError.args` only when nothing else is left.
    """
    path = Path(path)
    if not path.exists():
        near = [p.name for p in path.parent.glob("iter_*")] if path.parent.is_dir() else []
        hint = f"; there is {', '.join(sorted(near)[-3:])}" if near else ""
        padded = path.parent / folder_name(int(path.name[5:])) if path.name[5:].isdigit() else None
        if padded is not None and padded.exists():  # iter_5000 for iter_0005000
            return find(padded)
        raise FileNotFoundError(f"there is no checkpoint at {path}{hint}")
    if path.name.startswith("iter_"):
        verify(path)
        return path
    for root in (path, path / "checkpoints"):
        candidates = whole_checkpoints(root)
        if candidates:
            return candidates[-1]
    raise FileNotFoundError(
        f"{path} holds no finished checkpoint (no iter_*/ with {CHECKSUMS}); train first, or name another folder"
    )


def usable(root: Path, say) -> Path | None:
    """The newest checkpoint under `root` that passes `verify`; every one passed over is named through `say`."""
    for folder in sorted(root.glob("iter_*"), reverse=True):
        if folder.suffix == ".tmp":
            say(f"{folder.name} was not finished and is not used")
            continue
        try:
            verify(folder)
            return folder
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
    return None


@dataclass
class Pieces:
    """What a checkpoint is made of."""

    chunks: Sequence  # unwrapped DiT chunks of this rank
    optimizer: object
    scheduler: object
    ema: PowerEMA


def _model_state(chunks, metadata) -> dict:
    state = {}
    for i, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{i}"] = chunk.sharded_state_dict(metadata=metadata)
    return state


def _ema_state(ema: PowerEMA, model_state: dict) -> dict:
    """The averages, sharded as the weights they average, in float32."""
    out: dict = {}
    for sigma_rel in ema.sigma_rels:
        for (chunk_key, chunk_state), averages in zip(model_state.items(), ema.named(sigma_rel)):
            for name, sharded in chunk_state.items():
                if isinstance(sharded, ShardedTensor) and name in averages:
                    value = averages[name]
                    out[f"ema.{sigma_rel:g}.{chunk_key}.{name}"] = replace(
                        sharded, key=f"ema.{sigma_rel:g}.{sharded.key}", data=value, dtype=value.dtype
                    )
    return out


def _sharded_state(pieces: Pieces, loading: bool) -> dict:
    metadata = dict(_LAYOUT_FREE)
    state = _model_state(pieces.chunks, metadata)
    flat = {k: v for chunk in state.values() for k, v in chunk.items()} if len(pieces.chunks) == 1 else state
    state["optimizer"] = pieces.optimizer.sharded_state_dict(
        flat if len(pieces.chunks) == 1 else state, is_loading=loading, metadata=metadata
    )
    model_only = {k: v for k, v in state.items() if k.startswith("model")}
    state["ema"] = _ema_state(pieces.ema, model_only)
    state["scheduler"] = pieces.scheduler.state_dict()
    return state


class Writer:
    """Saves under one root; asynchronous saves are finished by `poll` (each step) and `finish`."""

    def __init__(self, root: str | Path, keep_last: int = 0, keep_every: int | None = None, asynchronous: bool = False, say=print):
        self.root, self.keep_last, self.keep_every, self.say = Path(root), keep_last, keep_every, say
        self._queue = AsyncCallsQueue() if asynchronous else None

    def save(self, pieces: Pieces, iteration: int, state: dict, config_yaml: str) -> None:
        final = self.root / folder_name(iteration)
        temporary = final.with_name(final.name + ".tmp")
        self.finish()
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            (temporary / "state.json").write_text(json.dumps(state))
            (temporary / "config.yaml").write_text(config_yaml)
        dist.barrier()
        request = dist_checkpointing.save(
            _sharded_state(pieces, loading=False),
            str(temporary),
            async_sharded_save=self._queue is not None,
            content_metadata=dict(_LAYOUT_FREE),
        )
        if self._queue is None:
            dist.barrier()
            self._finalize(temporary, final)
        else:
            request.add_finalize_fn(lambda: self._finalize(temporary, final))
            self._queue.schedule_async_request(request)

    def _finalize(self, temporary: Path, final: Path) -> None:
        if dist.get_rank() == 0:
            files = sorted(p for p in temporary.iterdir() if p.is_file())
            listing = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
            (temporary / CHECKSUMS).write_text(json.dumps(listing, indent=1))
            for p in [*files, temporary / CHECKSUMS]:
                _fsync(p)
            _fsync(temporary)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            tracker = self.root / (TRACKER + ".tmp")
            tracker.write_text(str(iteration_of(final)))
            _fsync(tracker)
            os.replace(tracker, self.root / TRACKER)
            _fsync(self.root)
            self.say(f"Checkpoint saved: {final}/")
            self._prune()
        dist.barrier()

    def _prune(self) -> None:
        if not self.keep_last:
            return
        for folder in whole_checkpoints(self.root)[: -self.keep_last]:
            if not (self.keep_every and iteration_of(folder) % self.keep_every == 0):
                shutil.rmtree(folder)

    def poll(self) -> None:
        """Finish asynchronous saves whose writing is done on every rank; cheap when there is none."""
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            self._queue.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        self.finish()
        if self._queue is not None:
            self._queue.close()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_state(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())


def seed_optimizer_state(optimizer) -> None:
    """torch's AdamW makes its state at the first step, but a distributed optimizer loads into state that is there."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                if not part.optimizer.state[p]:
                    part.optimizer.state[p].update(
                        step=torch.tensor(0.0), exp_avg=torch.zeros_like(p.data), exp_avg_sq=torch.zeros_like(p.data)
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


def _load_model(chunks, state: dict) -> None:
    for i, chunk in enumerate(chunks):
        values = state["model" if len(chunks) == 1 else f"model{i}"]
        _, unexpected = chunk.load_state_dict(values, strict=False)
        assert not unexpected, unexpected


@torch.no_grad()
def _load_ema(ema: PowerEMA, values: dict) -> None:
    for sigma_rel in ema.sigma_rels:
        for i, averages in enumerate(ema.named(sigma_rel)):
            chunk_key = "model" if len(ema.chunks) == 1 else f"model{i}"
            for name, average in averages.items():
                average.copy_(values[f"ema.{sigma_rel:g}.{chunk_key}.{name}"])


def stored_ema(folder: Path) -> list[float]:
    """Lengths (sigma_rel) of the averages a checkpoint holds, from its configuration."""
    from dfm_nb import config

    return list(config.from_yaml(folder / "config.yaml").config.ema.sigma_rels)


def load_weights(chunks, folder: Path, sigma_rel: float | None = None) -> None:
    """Only the weights, in this layout: raw, or the average of length `sigma_rel`."""
    refuse_code(folder)
    model_state = _model_state(chunks, dict(_LAYOUT_FREE))
    if sigma_rel is None:
        state = dist_checkpointing.load(model_state, str(folder))
    else:
        ema = PowerEMA(chunks, [sigma_rel])
        state = dist_checkpointing.load({"ema": _ema_state(ema, model_state)}, str(folder))
        _load_ema(ema, state["ema"])
        with torch.no_grad():
            for p, a in zip(ema.parameters, ema.averages[sigma_rel]):
                p.copy_(a)
        return
    _load_model(chunks, state)
