"""This rank's part of a run's state: weights, optimizer state and averages, each a part of a named tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from dfm_nb.checkpoints.tensor_files import TensorIndex
from dfm_nb.model.ema import PowerEMA
from dfm_nb.parallel.groups import global_name, mpu, shard_dim

OPTIMIZER, EMA = "optimizer.", "ema."
"""Name prefixes of tensors that are not weights: `optimizer.exp_avg.final.weight`, `ema.0.1.final.weight`."""


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


def box_of(p: torch.nn.Parameter) -> tuple[list[int], list[int], list[int]]:
    """Shape of the whole tensor that a parameter is part of, where in it the part begins, and the part's shape."""
    whole = list(p.shape)
    offset = [0] * p.dim()
    dim = shard_dim(p)
    if dim is not None:
        offset[dim] = mpu.get_tensor_model_parallel_rank() * whole[dim]
        whole[dim] *= mpu.get_tensor_model_parallel_world_size()
    return whole, offset, list(p.shape)


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
            box = box_of(p)
            # replicated over tensor-parallel ranks, or (`shared`) over pipeline stages: the first rank
            # writes it
            first_of_model = shard_dim(p) is not None or mpu.get_tensor_model_parallel_rank() == 0
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


@torch.no_grad()
def load_into(pieces: Pieces, index: TensorIndex) -> None:
    """Load this rank's part from a checkpoint of any layout.

    CheckpointError : a tensor is missing or has another shape.
    """
    for part in local_parts(pieces):
        index.entry(part.name, part.whole)
        values = index.elements(part.name, part.offset, part.shape, part.first, part.last)
        part.values.copy_(values.view(part.values.shape))
