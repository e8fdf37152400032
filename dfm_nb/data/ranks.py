"""The processes of a preparation: rank, devices, and the few points at which they wait for each other."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from dfm_nb.base.argv import LAUNCHER, USER_ERRORS, from_launcher
from dfm_nb.base.torchrun import group_of_this_machine

PATIENCE = timedelta(days=30)  # ranks wait for each other: for the fit, and at the end
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's rank in the preparation; gloo, because encoders do not communicate."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def from_env(cls) -> Self:
        """From torchrun's environment; one rank without it."""
        return cls(*map(from_launcher, LAUNCHER))

    def __enter__(self) -> Self:
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE, **group_of_this_machine(PATIENCE))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        if self.world > 1 and kind is None:  # after an error, torchrun stops the others
            # if a rank exits while another still communicates with it, gloo aborts that one (in 2
            # of 6 preparations)
            dist.barrier()
            gc.collect()
            dist.destroy_process_group()

    def first(self, function: Callable[[], T]) -> T:
        """`function()` on rank 0 when all arrived; all get the result. A user's error is logged once and ends all."""
        if self.world == 1:
            return function()
        dist.barrier()
        shared: list[Any] = [None, False]  # the result, whether it failed
        error: BaseException | None = None
        if self.rank == 0:
            try:
                shared[0] = function()
            except USER_ERRORS as fault:
                error = fault
                shared[1] = True
        dist.broadcast_object_list(shared, src=0)
        if shared[1]:
            raise error or SystemExit(2)
        return shared[0]

    def device(self, asked: str | None) -> str:
        """The requested device; by default this process's own GPU, or the CPU without one."""
        if asked or not torch.cuda.is_available():
            return asked or "cpu"
        index = self.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return f"cuda:{index}"
