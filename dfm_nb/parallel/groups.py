"""Process groups, devices and seeds: NCCL on CUDA and gloo elsewhere, with torchrun or as one process.

A machine without CUDA runs the same megatron-core code (see `megatron_cpu`).
"""

import datetime
import gc
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch.distributed.rendezvous import rendezvous

from dfm_nb.base.argv import from_launcher
from dfm_nb.base.torchrun import group_of_this_machine

AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
}
"""Fields of `Layout`, and their names in the settings' group `model`."""


@dataclass(frozen=True)
class Layout:
    """Degrees of the axes; dp = world / (tp * pp * cp). Ranks are ordered tp-cp-dp-pp, as megatron-core does."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings in the group `model`."""
        return {name: getattr(self, axis) for axis, name in AXES.items()}

    @property
    def model_size(self) -> int:
        """Processes that hold one replica of the model."""
        return self.tp * self.pp * self.cp

    def token_multiple(self) -> int:
        """A packed sequence's length must be a multiple of this: cp splits it, then sequence parallelism."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    def text_multiple(self) -> int:
        """The same for a pack's text tokens, which cp does not split."""
        return self.tp if self.sequence_parallel else 1

    def __str__(self) -> str:
        parts = [f"{n}{v}" for n, v in (("TP", self.tp), ("PP", self.pp), ("CP", self.cp)) if v > 1]
        if self.sequence_parallel:
            parts.append("SP")
        if self.vpp:
            parts.append(f"VPP{self.vpp}")
        return "x".join(parts) or "DP only"


def layout_of(model: Any) -> Layout:
    """The layout in the settings' group `model`."""
    return Layout(**{axis: getattr(model, name) for axis, name in AXES.items()})


def device() -> torch.device:
    """This process's device: the CUDA device of LOCAL_RANK, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", from_launcher("LOCAL_RANK") % torch.cuda.device_count())
    return torch.device("cpu")


def init(layout: Layout | None = None, timeout_s: float = 600, seed: int = 1) -> None:
    """Start the process group (NCCL on CUDA, gloo elsewhere) and megatron-core's model-parallel groups.

    It works under torchrun and, without its environment, as a group of one. It can be called again with another layout.
    """
    layout = layout or Layout()
    if not dist.is_initialized():
        _start_process_group(timeout_s)
    world = dist.get_world_size()
    if world % layout.model_size:
        raise ValueError(
            f"the number of processes must divide by tp*pp*cp = {layout.model_size}; got {world}; "
            f"start {layout.model_size * max(1, round(world / layout.model_size))} processes or change the degrees"
        )
    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    minutes = max(1, round(timeout_s / 60))
    mpu.initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp, context_parallel_size=layout.cp, distributed_timeout_minutes=minutes
    )
    # megatron-core creates and recomputes layers within its RNG tracker, which needs a state; we draw by `base.seeds`.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _start_process_group(timeout_s: float) -> None:
    timeout, dev = datetime.timedelta(seconds=timeout_s), device()
    how: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
    if dev.type == "cuda":
        torch.cuda.set_device(dev)
        how |= {"backend": "nccl", "device_id": dev}  # else NCCL guesses it from the rank, and warns at each barrier
    here = group_of_this_machine(timeout)
    if here or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":  # then the store is new
        dist.init_process_group(**how, **here)
    else:
        shared, rank, world = next(rendezvous("env://", timeout=timeout))
        fresh = _fresh_prefix(shared, rank, world, timeout_s)
        dist.init_process_group(**how, store=fresh, rank=rank, world_size=world)


def _fresh_prefix(shared: dist.Store, rank: int, world: int, timeout_s: float) -> dist.Store:
    """A prefix of torchrun's store that is fresh for this restart.

    torchrun keeps its store over restarts, and gloo would find the addresses of dead processes in it. So the ranks
    agree on a new prefix, which each must have seen. Here rank 1 first reads the prefix of an earlier start, `a`:

        rank 0: set prefix = b, wait for b/1 ............. it is y: set b/all = [y], done with b
        rank 1: read prefix = a, set a/1 = y, y not in a/all; read prefix = b, set b/1 = y, y is in b/all: done with b

    The names b and y are random. a/all holds the name of the earlier process of rank 1, so y is never in it.
    """
    name, end = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        shared.set("dfm_nb/prefix", name)
        others = [shared.get(f"dfm_nb/{name}/{r}").decode() for r in range(1, world)]  # `get` waits for the key
        shared.set(f"dfm_nb/{name}/all", " ".join(others))
        return dist.PrefixStore(name, shared)
    while time.monotonic() < end:
        prefix = shared.get("dfm_nb/prefix").decode()
        shared.set(f"dfm_nb/{prefix}/{rank}", name)
        if shared.check([f"dfm_nb/{prefix}/all"]) and name in shared.get(f"dfm_nb/{prefix}/all").decode():
            return dist.PrefixStore(prefix, shared)
        time.sleep(0.05)
    raise TimeoutError(f"rank {rank} found no other process within {timeout_s:g} s (dist.timeout_s)")


def shutdown() -> None:
    """End the groups. Call it after dropping models and optimizers; the barrier avoids gloo's abort at exit."""
    if dist.is_initialized():
        dist.barrier()
        gc.collect()
        if mpu.is_initialized():
            mpu.destroy_model_parallel()
        dist.destroy_process_group()


def rank() -> int:
    """This process's rank; 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else from_launcher("RANK")


def store() -> dist.Store:
    """The process group's key-value store, under our prefix."""
    return dist.PrefixStore("dfm_nb", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]


def is_first_of_model() -> bool:
    """Whether this is the first of the processes that hold one replica of the model."""
    first_of_stage = mpu.get_tensor_model_parallel_rank() == mpu.get_context_parallel_rank() == 0
    return first_of_stage and mpu.get_pipeline_model_parallel_rank() == 0


def everyones(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The objects of all ranks, by rank, on every rank."""
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value, group=group)
    return out


def broadcast_from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcast the last pipeline stage's values to every stage, in place."""
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            tensor, mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group()
        )
    return tensor


def global_name(name: str, module: torch.nn.Module) -> str:
    """A parameter's name with the layer's number in the complete model instead of in this pipeline stage.

    With 2 stages of 2 layers, the second stage's `decoder.layers.0.mlp...` becomes `decoder.layers.2.mlp...`.
    """
    if name.startswith("decoder.layers."):
        _, _, index, rest = name.split(".", 3)
        layers: Any = module.get_submodule("decoder.layers")
        return f"decoder.layers.{layers[int(index)].layer_number - 1}.{rest}"  # numbers begin at 1
    return name


def shard_dim(parameter: torch.nn.Parameter) -> int | None:
    """The dim along which tensor parallelism splits a parameter; None if it is replicated over the tp axis."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return parameter.partition_dim  # type: ignore[attr-defined]  # megatron-core sets both


def own_part(whole: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This tensor-parallel rank's part of the complete tensor of `parameter`."""
    dim = shard_dim(parameter)
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    return whole if dim is None else whole.chunk(size, dim)[rank]
