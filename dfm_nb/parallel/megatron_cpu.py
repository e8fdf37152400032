"""Preparation of megatron-core, in one call, `prepare()`; every assumption about its internals is here.

`prepare()` does these things, in this order.

1. It imports megatron-core without what this project does not use, which would take several times as long in every
   process of a run (`benchmarks/results/start_up.md`). `LEFT_OUT` and `FSDP` say what and why.
2. Without a CUDA device it gives some modules of megatron-core a stand-in for the name `torch`. They name CUDA outright
   (`torch.cuda.current_device()`, `device="cuda"`); the stand-in answers for the CPU and passes all else on to torch.
3. It joins the kernels of an optimizer step (`_join_kernels`).

Tested with the versions in `TESTED_VERSIONS`; tests/parallel/test_megatron_cpu.py fails if another version differs.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import sys
import types
import warnings
from typing import Any, Iterable, Iterator

import torch
import torch.distributed as dist

from dfm_nb.base.argv import imported_without

TESTED_VERSIONS = ("0.16.1", "0.19.2")

MODULES = (
    "utils",  # current_device(), device="cuda" of the global memory buffer
    "timers",  # synchronize() around each measurement
    "rerun_state_machine",  # the random state of CUDA, and flags with device="cuda"
    "parallel_state",  # synchronize(), current_device()
    # weights, buffers and gathered tensors made on current_device()
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.utils",
    "tensor_parallel.random",  # get_rng_state(), set_rng_state(), manual_seed() of its tracker
    # receive buffers on current_device(); token counts with device="cuda"
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    # flat buffers on current_device(), synchronize(), empty_cache()
    "distributed.param_and_grad_buffer",
    "distributed.distributed_data_parallel",
    # device="cuda" of overflow flags, norms and scales; current_device() of gathered states
    "optimizer.optimizer",
    "optimizer.distrib_optimizer",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
)
"""Modules of megatron.core that hard-code CUDA and need the stand-in, with their uses in 0.16.1."""

_CPU = torch.device("cpu")


class _CudaOnCpu:
    """The functions of `torch.cuda` that the modules call, for the CPU."""

    current_device = staticmethod(lambda: _CPU)
    get_rng_state = staticmethod(lambda *_args, **_kwargs: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_args, **_kwargs: torch.set_rng_state(state))
    manual_seed = staticmethod(torch.default_generator.manual_seed)
    synchronize = empty_cache = current_stream = staticmethod(lambda *_args, **_kwargs: None)

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


LEFT_OUT = (
    "multistorageclient",  # storage on `msc://` addresses
    "wandb",  # megatron's logging; `integrations.loggers` imports these two if they are configured
    "tensorboard",
)
FSDP = ("torch.distributed.tensor", "torch.distributed.fsdp")
"""What megatron-core's FSDP needs, and with it sympy: 0.8 s. It is optional in 0.16, and a CPU does without it; 0.19
needs it, because its checkpoints import `torch.distributed.checkpoint`."""


@contextlib.contextmanager
def _lean_imports() -> Iterator[None]:
    """Block imports of `LEFT_OUT`; without a CUDA device also of `FSDP` (0.16), and make `torch.compile` the identity.

    megatron-core decorates fused operations with `torch.compile`, which imports Inductor; a CPU uses the plain
    functions.
    """
    instead: dict[str, Any] = dict.fromkeys(LEFT_OUT)  # None: importing it raises ModuleNotFoundError
    if not torch.cuda.is_available() and importlib.metadata.version("megatron-core").startswith("0.16."):
        instead |= dict.fromkeys(FSDP)
        # it imports this name of it with FSDP or without (transformer.fsdp_dtensor_checkpoint)
        instead["torch.distributed.checkpoint"] = types.SimpleNamespace(default_planner=None)
    compile_ = torch.compile
    if not torch.cuda.is_available():
        torch.compile = lambda model=None, **_: (lambda f: f) if model is None else model  # type: ignore[assignment]
    try:
        with imported_without(instead):
            yield
    finally:
        torch.compile = compile_


def prepare() -> None:
    """Import megatron-core quickly and, without a CUDA device, make it run on the CPU. Calling it again does nothing.

    Importing `dfm_nb.parallel` calls it, and the rooms that import megatron import `dfm_nb.parallel` first. If
    megatron.core was already imported, only step 1 is skipped.
    """
    # megatron-core 0.19 imports torch's builder of extensions, which warns where nvcc is and no GPU
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda r: "No CUDA runtime" not in r.getMessage())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns at import about missing packages: Transformer Engine, Apex
        if "megatron.core" not in sys.modules:
            with _lean_imports():
                importlib.import_module("megatron.core")
        if not torch.cuda.is_available():
            apply()
        _join_kernels()


class _Dynamo(types.ModuleType):
    """`torch._dynamo` before its import, which takes a second with sympy: more than this is imported when asked for.

    torch's optimizers (2.13) call these two even if nothing is compiled; they then do nothing.
    """

    disable = staticmethod(lambda function, *_args, **_kwargs: function)
    graph_break = staticmethod(lambda *_args, **_kwargs: None)

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__path__":  # `inspect` asks all modules for their files
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def spare_dynamo() -> None:
    """Optimizers built from now on do not import `torch._dynamo`; only without a CUDA device."""
    if not torch.cuda.is_available():
        sys.modules.setdefault("torch._dynamo", _Dynamo("torch._dynamo"))


def apply() -> None:
    """Make megatron-core run on a CPU. Raises ImportError if one of its modules lacks a name to replace."""
    for name in MODULES:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        if getattr(module, "torch", None) not in (torch, STAND_IN):
            raise ImportError(
                f"megatron.core.{name} no longer has `torch` as a global: CPU support is tested with megatron-core "
                f"{', '.join(TESTED_VERSIONS)}; install one of these or adapt dfm_nb/parallel/megatron_cpu.py"
            )
        module.torch = STAND_IN
    from megatron.core.tensor_parallel import random as mcore_random

    # 0.16.1 indexes torch.cuda.default_generators, which is empty without a device.
    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # fork() warns if the CPU generator advances inside it; on a CPU that is its purpose
    logging.getLogger(mcore_random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())


def _join_kernels() -> None:
    """One kernel for many tensors around the optimizer's step, and a gradient norm that does not wait for the device.

    Without Transformer Engine and Apex, megatron-core 0.16 to 0.19 goes tensor by tensor, and reads every gradient's
    norm on the host. For DiT-XL's 551 tensors that was a fifth of a step (65 of 302 ms on an H100).
    """
    from megatron.core.optimizer import optimizer

    optimizer.get_grad_norm_fp32 = _grad_norm
    optimizer._multi_tensor_copy_this_to_that = _copy_all
    optimizer.Float16OptimizerWithFloat16Params._get_model_and_main_params_data_float16 = _low_and_main


def _grad_norm(grads_for_norm, norm_type: float = 2, grad_stats_parallel_group=None) -> torch.Tensor:
    """Float32 [], the norm of all gradients of the group's ranks; megatron-core's own returns a number."""
    assert norm_type == 2, norm_type
    if grads_for_norm:
        square = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads_for_norm))).square()
    else:  # of a stage whose tensors are all shared with another
        square = torch.zeros((), device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(square, group=grad_stats_parallel_group)
    return square.sqrt()


def _low_and_main(self: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The bfloat16 weights and their float32 copies; megatron-core's own makes a view of each."""
    low: list[torch.Tensor] = []
    main: list[torch.Tensor] = []
    for low_group, main_group in zip(self.float16_groups, self.fp32_from_float16_groups):
        low += low_group
        main += main_group
    return low, main


@torch.no_grad()
def _copy_all(this: list[torch.Tensor], that: list[torch.Tensor], overflow_buf: object = None) -> None:
    if that:
        torch._foreach_copy_(that, this)


@contextlib.contextmanager
def cuda_type_names(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Make `param.type()` return CUDA's names, by which the mixed-precision optimizers sort parameters.

    0.16.1 compares with "torch.cuda.BFloat16Tensor" and raises TypeError for other types.
    """
    names = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
    parameters = list(parameters)
    for p in parameters:
        p.type = functools.partial(lambda name: name, names[p.dtype])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for p in parameters:
            del p.type
