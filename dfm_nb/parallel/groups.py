"""Processes and devices: starts and ends the process groups, sets seeds, says who this rank is.

Enters: the parallel degrees; torchrun's environment (or none: one process). Leaves: megatron-core's parallel state, a device.
Guarantees: on a machine without CUDA the same megatron-core code runs on gloo (see `megatron_cpu`); `shutdown` ends cleanly;
parameters are initialised from (seed, name), so every layout starts from the same weights.
"""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
import time
import uuid
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch.distributed.rendezvous import rendezvous


def layout_of(model) -> Layout:
    return Layout(
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
        model.virtual_pipeline_model_parallel_size,
        model.sequence_parallel,
    )


@dataclass(frozen=True)
class Layout:
    """Degrees of the axes; dp = world / (tp * pp * cp). Ranks are ordered tp-cp-dp-pp, as megatron-core does."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False

    @property
    def model_size(self) -> int:
        return self.tp * self.pp * self.cp

    def token_multiple(self) -> int:
        """A packed sequence's length must divide by this: cp slices it, and sequence parallelism slices it again."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    def text_multiple(self) -> int:
        return self.tp if self.sequence_parallel else 1

    def __str__(self) -> str:
        parts = [f"{n}{v}" for n, v in (("TP", self.tp), ("PP", self.pp), ("CP", self.cp)) if v > 1]
        if self.sequence_parallel:
            parts.append("SP")
        if self.vpp:
            parts.append(f"VPP{self.vpp}")
        return "x".join(parts) or "DP only"


def device() -> torch.device:
    """This process's device: the CUDA device of LOCAL_RANK, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def init(layout: Layout | None = None, timeout_s: float = 600, seed: int = 1) -> Layout:
    """Start the process group (NCCL on CUDA, gloo elsewhere) and megatron-core's model-parallel groups.

    Works under torchrun and, without its environment, as a group of one. May be called again with another layout.
    """
    layout = layout or Layout()
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dev = device()
        if dev.type == "cuda":
            torch.cuda.set_device(dev)
        backend = "nccl" if dev.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
                shared, rank, world = next(rendezvous("env://", timeout=timeout))
                store = _store_of_this_life(shared, rank, world, timeout_s)
                dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
            else:
                dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    world = dist.get_world_size()
    if world % layout.model_size:
        raise ValueError(
            f"the number of processes must divide by tp*pp*cp = {layout.model_size}; got {world}; "
            f"start {layout.model_size * max(1, round(world / layout.model_size))} processes or change the degrees"
        )
    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        context_parallel_size=layout.cp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return layout


def _store_of_this_life(shared: dist.Store, rank: int, world: int, timeout_s: float) -> dist.Store:
    """A part of torchrun's store with nothing of an earlier life in it.

    torchrun's restarts keep the store, in which a process finds the addresses of those that died. All agree on a new name: rank 0 invents it and
    lists whoever answered to it; a name of an earlier life has no list with this process in it.
    """
    me, end = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        shared.set("dfm_nb/life", me)
        others = [shared.get(f"dfm_nb/{me}/{r}").decode() for r in range(1, world)]
        shared.set(f"dfm_nb/{me}/all", " ".join(others))
        return dist.PrefixStore(me, shared)
    while time.monotonic() < end:
        life = shared.get("dfm_nb/life").decode()
        shared.set(f"dfm_nb/{life}/{rank}", me)
        if shared.check([f"dfm_nb/{life}/all"]) and me in shared.get(f"dfm_nb/{life}/all").decode():
            return dist.PrefixStore(life, shared)
        time.sleep(0.05)
    raise TimeoutError(f"rank {rank} found no other process within {timeout_s:g} s (dist.timeout_s)")


def shutdown() -> None:
    """End the groups. Call after dropping models and optimizers; the barrier avoids gloo's abort at exit."""
    if dist.is_initialized():
        dist.barrier()
        gc.collect()
        if mpu.is_initialized():
            mpu.destroy_model_parallel()
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def store() -> dist.Store:
    """The process group's own key-value store, with keys apart from its."""
    return dist.PrefixStore("dfm_nb", dist.distributed_c10d._get_default_store())


def is_last_pipeline_stage() -> bool:
    return mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1


def broadcast_from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """In place: the last pipeline stage's values on every stage."""
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            tensor, mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group()
        )
    return tensor


def global_name(name: str, module: torch.nn.Module) -> str:
    """A parameter's name with the layer's number in the whole model instead of in this pipeline stage."""
    if name.startswith("decoder.layers."):
        _, _, index, rest = name.split(".", 3)
        return f"decoder.layers.{module.decoder.layers[int(index)].layer_number - 1}.{rest}"
    return name


def shard_dim(parameter: torch.nn.Parameter) -> int | None:
    """The dim along which tensor parallelism splits a parameter; None when every rank of the tp axis has it whole."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
