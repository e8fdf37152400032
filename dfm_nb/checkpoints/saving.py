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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from dfm_nb.base.files import Json, listed_as, remove_temporaries, seal, sync, write_atomically, write_json
from dfm_nb.base.log import log
from dfm_nb.base.process import end_with_parent
from dfm_nb.base.run import iteration_name
from dfm_nb.checkpoints.folders import CHECKSUMS, TRACKER, iteration_of, read_state, whole_checkpoints
from dfm_nb.checkpoints.tensor_files import EMA, INDEX, NAMES, OPTIMIZER, TensorIndex, write
from dfm_nb.model.ema import PowerEMA
from dfm_nb.parallel.groups import everyones, global_name, mpu, shard_dim

FILE, NOTE = "rank-{:05d}.safetensors", "rank-{:05d}.json"
"""A rank's tensors, and its note that they are on disk, with their index."""
POLL_S = 0.005
"""Interval of looking for the files of other processes."""


# ---- what is saved of a run: weights, optimizer state and averages, each a part of a named tensor ------------------


@dataclass
class Pieces:
    """What a checkpoint is made of: this rank's unwrapped chunks, megatron-core's optimizer and scheduler, averages."""

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    ema: PowerEMA


@dataclass
class LocalPart:
    """Elements first .. last of the box at `offset` that this rank has of the whole tensor `name`.

    Say tensor parallelism gives this rank rows 3 to 5 of a weight [6, 4]: a box [3, 4] at [3, 0]. Of the averages the
    rank has all 12 elements of the box; of the moments the distributed optimizer may leave it elements 7 .. 12.

    values : [last - first] elements in any shape, to write or to load into.
    written : whether this rank writes them; of ranks with equal elements, one does.
    """

    name: str
    whole: list[int]
    offset: list[int]
    shape: list[int]
    first: int
    last: int
    values: Tensor
    written: bool


def make_optimizer_state(optimizer: Any) -> None:
    """Create the state that AdamW makes at its first step, unless it exists."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                if inner.state[p]:
                    continue
                # Muon keeps other state than AdamW and says so per parameter (`training.muon`)
                moments = inner.moments(p) if hasattr(inner, "moments") else ("exp_avg", "exp_avg_sq")
                for name in moments:
                    inner.state[p][name] = torch.zeros_like(p.data)
                inner.state[p]["step"] = torch.zeros((), device=p.device)


def step_counts(optimizer: Any) -> list[Tensor]:
    """The optimizer's step counts, one per parameter."""
    counts = []
    for part in optimizer.chained_optimizers:
        counts += [state["step"] for state in part.optimizer.state.values()]
    return counts


def _optimized(p: torch.nn.Parameter, optimizer: Any) -> tuple[Tensor, int, dict[str, Tensor]] | None:
    """The optimizer's float32 values of a parameter, their first element, and its state; None if it has none.

    The float32 values are the parameter itself or, with bfloat16, a copy of it.
    """
    for part in optimizer.chained_optimizers:
        main = getattr(p, "main_param", p)
        first = 0
        if isinstance(part, DistributedOptimizer):  # public names of 0.16 to 0.19
            if p not in part.model_param_group_index_map:
                continue
            group, order = part.model_param_group_index_map[p]
            main = part.optimizer.param_groups[group]["params"][order]
            buffer, dtype, bucket = part.model_param_gbuf_map[p]
            first = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][p]["param"].start
        if main in part.optimizer.state:
            return main, first, {k: v for k, v in part.optimizer.state[main].items() if k != "step"}
    return None


def local_parts(pieces: Pieces) -> Iterator[LocalPart]:
    """Every tensor of the run, under the parameter's full name; optimizer state and averages have a prefix.

    A weight is saved as the optimizer's float32 copy, if there is one: the bfloat16 weight is its rounding.
    """
    make_optimizer_state(pieces.optimizer)
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    averages = {s: pieces.ema.named(s) for s in pieces.ema.sigma_rels}
    distributed = any(isinstance(part, DistributedOptimizer) for part in pieces.optimizer.chained_optimizers)
    for i, chunk in enumerate(pieces.chunks):
        for local, p in chunk.named_parameters():
            name = global_name(local, chunk)
            whole = list(p.shape)
            offset = [0] * p.dim()
            dim = shard_dim(p)
            if dim is not None:
                offset[dim] = mpu.get_tensor_model_parallel_rank() * whole[dim]
                whole[dim] *= mpu.get_tensor_model_parallel_world_size()
            box = whole, offset, list(p.shape)
            # replicated over tensor-parallel ranks, or (`shared`) over pipeline stages: the first rank
            # writes it
            first_of_model = dim is not None or mpu.get_tensor_model_parallel_rank() == 0
            first_of_model &= not getattr(p, "shared", False)
            first_of_all = first_of_model and replica == 0
            optimized = _optimized(p, pieces.optimizer)
            # each data-parallel rank has and writes its own elements
            split = distributed and p.requires_grad
            # The parameter itself is always loaded, but saved only if no float32 values of it are saved
            # below: not if data-parallel ranks hold parts of them, nor if the optimizer has a copy (a
            # frozen parameter has none).
            written = first_of_all and not split and (optimized is None or optimized[0] is p)
            yield LocalPart(name, *box, 0, p.numel(), p, written)
            if optimized is not None:
                main, first, state = optimized
                last = first + main.numel()
                writes = first_of_model if split else first_of_all
                if main is not p:
                    yield LocalPart(name, *box, first, last, main, writes)
                for kind, values in state.items():
                    yield LocalPart(f"{OPTIMIZER}{kind}.{name}", *box, first, last, values, writes)
            for length, of_chunks in averages.items():
                if local in of_chunks[i]:
                    yield LocalPart(f"{EMA}{length:g}.{name}", *box, 0, p.numel(), of_chunks[i][local], first_of_all)


# ---- writing ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Writer:
    """Saves checkpoints under one root; asynchronous ones are finished by `poll` (each step) and `close`.

    Parameters
    ----------
    keep_last : number of newest checkpoints to keep; 0 keeps all, as does `rotates` = False.
    keep_every : iterations divisible by this are always kept, as is `best`.
    asynchronous : return as soon as training can continue; the files are then written in the background.
    """

    folder: InitVar[str | Path]
    keep_last: int = 0
    keep_every: int | None = None
    asynchronous: bool = False
    best: int | None = None
    rotates: bool = True
    _child: "_Child | None" = None  # the process that writes a checkpoint

    def __post_init__(self, folder: str | Path) -> None:
        self.root = Path(folder)

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
        for name, content in {INDEX: json.dumps(index).encode(), **small}.items():
            write_atomically(temporary / name, content)
            listing[name] = listed_as(temporary / name)
        seal(temporary / CHECKSUMS, listing)
        sync(temporary)
        _discard(self._pending)
        os.rename(temporary, self._pending)
        write_atomically(self.root / TRACKER, str(iteration_of(self._pending)).encode())
        sync(self.root)
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
    listed = write(file, {part.name: part.values.view(-1) for part in parts}, {})
    for part in parts:
        piece = {"file": file.name, "offset": part.offset, "shape": part.shape, "elements": [part.first, part.last]}
        index[part.name] = {"dtype": NAMES[part.values.dtype], "shape": part.whole, "pieces": [piece]}
    write_json(folder / NOTE.format(rank), {"listed": listed, "index": index})


def _discard(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill during removal leaves no incomplete one."""
    if folder.exists():
        away = folder.with_name(f"{folder.name}.removed.tmp")
        shutil.rmtree(away, ignore_errors=True)  # left by an earlier kill
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


# ---- loading ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(pieces: Pieces, folder: Path) -> Json:
    """Load this rank's part of a checkpoint of any layout, which must have passed `verify`; returns the JSON state.

    Learning rate, weight decay and other optimizer settings remain those of `pieces`.

    CheckpointError : a tensor is missing or has another shape.
    """
    state = read_state(folder)
    index = TensorIndex(folder)
    for part in local_parts(pieces):
        index.entry(part.name, part.whole)
        values = index.elements(part.name, part.offset, part.shape, part.first, part.last)
        part.values.copy_(values.view(part.values.shape))
    count = state.pop("optimizer_step")
    for step in step_counts(pieces.optimizer):
        step.fill_(count)
    pieces.scheduler.load_state_dict(state.pop("scheduler"))
    return state
