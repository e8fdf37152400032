"""What megatron-core needs before we use it, in one call, `prepare()`; every assumption about its insides is here.

Import. Every process of a run imports megatron-core. Some of what it imports serves features that this project does not use, and takes two
thirds of the time (12 s of CPU time on one core, 4 s without; 3.11, megatron-core 0.16.1):
- `multistorageclient` (checkpoints and indexed data sets on `msc://` addresses) compiles a grammar of IRIs, by way of jsonschema.
- `wandb` and `tensorboard` serve megatron's own logging; `training.loggers` imports them where they are configured.
- `torch.compile` decorates fused operations, which imports Inductor. On CUDA that stays; on a CPU the plain functions are used.

CPU, only where there is no CUDA device.
megatron-core names CUDA outright in some modules (`torch.cuda.current_device()`, `device="cuda"`). `apply()` puts a stand-in for the
name `torch` into those modules only: calls that ask for CUDA get the CPU, everything else goes to the real torch, which stays as it is.
`fix_native_adam()` mends the distributed optimizer's use of torch's own AdamW, needed on any device without Transformer Engine or Apex.

Tested with megatron-core 0.16.1 on Python 3.11 and 0.19.2 on 3.12 (tests/parallel/test_megatron_cpu.py fails with a sentence when a new version moves something).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import types
import warnings
from typing import Iterable, Iterator

import torch

TESTED_VERSIONS = ("0.16.1", "0.19.2")

MODULES = (
    "utils",
    "timers",
    "rerun_state_machine",
    "parallel_state",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.utils",
    "tensor_parallel.random",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "distributed.param_and_grad_buffer",
    "distributed.distributed_data_parallel",
    "optimizer.optimizer",
    "optimizer.distrib_optimizer",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
)
"""Modules of megatron.core that hard-code CUDA and must see the stand-in."""

_CPU = torch.device("cpu")


class _CudaOnCpu:
    """What the modules call on `torch.cuda`, answered for the CPU."""

    @staticmethod
    def current_device() -> torch.device:
        return _CPU

    @staticmethod
    def get_rng_state(*_args, **_kwargs) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_args, **_kwargs) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    @staticmethod
    def _nothing(*_args, **_kwargs) -> None:
        return None

    synchronize = empty_cache = current_stream = _nothing

    def __getattr__(self, name: str):
        return getattr(torch.cuda, name)


def _on_cpu(factory):
    @functools.wraps(factory)
    def call(*args, device=None, **kwargs):
        wants_cuda = device is not None and str(device).startswith("cuda")
        return factory(*args, device=_CPU if wants_cuda else device, **kwargs)

    return staticmethod(call)


class _TorchOnCpu(types.ModuleType):
    cuda = _CudaOnCpu()
    tensor, zeros, ones = _on_cpu(torch.tensor), _on_cpu(torch.zeros), _on_cpu(torch.ones)
    empty, empty_like, full = _on_cpu(torch.empty), _on_cpu(torch.empty_like), _on_cpu(torch.full)

    def __getattr__(self, name: str):
        return getattr(torch, name)


STAND_IN = _TorchOnCpu("torch")


LEFT_OUT = ("multistorageclient", "wandb", "tensorboard")


@contextlib.contextmanager
def _lean_imports() -> Iterator[None]:
    """Within: `LEFT_OUT` cannot be imported, and without a CUDA device `torch.compile` gives back what it gets."""
    absent = [name for name in LEFT_OUT if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: importing it raises ModuleNotFoundError
    compile_ = torch.compile
    if not torch.cuda.is_available():
        torch.compile = lambda model=None, **_: (lambda f: f) if model is None else model  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_
        for name in absent:
            del sys.modules[name]


def prepare() -> None:
    """Import megatron-core in a third of the time and, without a CUDA device, make it run on the CPU. Idempotent.

    Importing `dfm_nb.parallel` calls it, and the rooms that import megatron import `dfm_nb.parallel` first. A megatron.core that was
    imported before stays as it is, but for the CPU support.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says at import what this project does without: Transformer Engine, Apex
        if "megatron.core" not in sys.modules:
            with _lean_imports():
                importlib.import_module("megatron.core")
        if not torch.cuda.is_available():
            apply()
        fix_native_adam()


def apply() -> None:
    """Idempotent. Raises ImportError with the module's name when megatron-core no longer has what is patched."""
    for name in MODULES:
        module = importlib.import_module(f"megatron.core.{name}")
        if getattr(module, "torch", None) not in (torch, STAND_IN):
            raise ImportError(
                f"megatron.core.{name} no longer has `torch` as a global: CPU support is tested with megatron-core "
                f"{', '.join(TESTED_VERSIONS)}; install one of these or adapt dfm_nb/parallel/megatron_cpu.py"
            )
        module.torch = STAND_IN
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import random as mcore_random

    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # fork() warns when the CPU generator moved inside it; on a CPU that is its purpose
    logging.getLogger(mcore_random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())
    optimizer.clip_grad_by_total_norm_fp32 = clip_grads.clip_grad_by_total_norm_fp32 = _clip_by_total_norm


def _clip_by_total_norm(parameters, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Same arithmetic as megatron-core's, without its assertion on the tensor's CUDA type name."""
    coefficient = max_norm / (total_norm + 1e-6)
    if coefficient < 1.0:
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, coefficient)


def fix_native_adam() -> None:
    """Make checkpoints of DistributedOptimizer with torch.optim.AdamW restore what was saved (upstream: KeyError 'step',
    and one `step` tensor shared by every parameter, which AdamW then advances once per parameter)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if getattr(DistributedOptimizer, "_native_adam_fixed", False):
        return

    @torch.no_grad()
    def set_main_param_and_states(self, model_param, tensors):
        group, index = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][index]
        targets = {"param": main, **self.optimizer.state[main]}
        for name in targets.keys() & tensors.keys():
            targets[name].copy_(tensors[name])

    original_load = DistributedOptimizer.load_state_dict

    def load_state_dict(self, state_dict):
        original_load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_main_param_and_states
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._native_adam_fixed = True


@contextlib.contextmanager
def cuda_type_names(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """The mixed-precision optimizers sort parameters by `param.type()` strings when they are built: answer as CUDA would."""
    names = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
    parameters = list(parameters)
    for p in parameters:
        p.type = functools.partial(lambda name: name, names[p.dtype])
    try:
        yield
    finally:
        for p in parameters:
            del p.type
