"""The tensor-parallel linear layers of attention and MLP, with optional LoRA (Hu et al. 2021).

W x + b + (alpha / rank) B A x. Without a rank these are megatron-core's layers. With one, B starts at zero, so a new
model equals its base. A is `lora_A` [rank, in], B is `lora_B` [out, rank]. A column-parallel layer splits B over tp, a
row-parallel one splits A; the other half is replicated, so only `rank` channels are communicated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel

A, B = "lora_A", "lora_B"


def is_lora(name: str) -> bool:
    """Whether a parameter belongs to LoRA, by its name."""
    return name.endswith((A, B))


class _LowRank:
    """The common part of both layers; `config` has `lora_rank` and `lora_alpha`."""

    exchange: Callable
    exchange_sp: Callable
    """Communication of the `rank` channels between A and B over tp, and its replacement with sequence parallelism."""

    split: str
    """A or B: the one that tp splits, along its long dim."""

    def __init__(self: Any, *args, **kwargs):
        """Create A and B if the configuration has a rank."""
        super().__init__(*args, **kwargs)
        self.alone = self.tp_group.size() == 1
        rank = self.config.lora_rank
        self.lora_scale = 0.0
        if not rank:
            return
        out, inputs = self.weight.shape  # of this tp rank
        self.lora_scale = (self.config.lora_alpha or rank) / rank
        kind = dict(dtype=self.weight.dtype, device=self.weight.device)
        self.lora_A = torch.nn.Parameter(torch.zeros(rank, inputs, **kind))
        self.lora_B = torch.nn.Parameter(torch.zeros(out, rank, **kind))
        for name, p, dim in ((A, self.lora_A, 1), (B, self.lora_B, 0)):
            if name == self.split:
                tensor_parallel.set_tensor_model_parallel_attributes(p, True, dim, 1)
            else:  # with SP each tp rank sees only its own tokens: sum the gradients over tp
                p.sequence_parallel = self.config.sequence_parallel

    def _forward(self: Any, input_: torch.Tensor, communicating: Callable) -> torch.Tensor:
        """W x + b, plus scale * B A x if there is LoRA. communicating : megatron-core's forward."""
        if self.alone:
            output = F.linear(input_, self.weight, self.bias)
        else:
            output, bias = communicating(input_)  # megatron-core returns some biases separately, for fusion
            output = output if bias is None else output + bias
        if not self.lora_scale:
            return output
        inner = F.linear(input_, self.lora_A)
        if not self.alone:
            exchange = self.exchange_sp if self.sequence_parallel else self.exchange
            inner = exchange(inner, group=self.tp_group)
        return output + F.linear(inner, self.lora_B) * self.lora_scale


class ColumnLinear(_LowRank, tensor_parallel.ColumnParallelLinear):
    """megatron-core's layer, but it returns one tensor, and is one operation if there is nothing to communicate."""

    exchange = staticmethod(tensor_parallel.copy_to_tensor_model_parallel_region)
    exchange_sp = staticmethod(tensor_parallel.gather_from_sequence_parallel_region)
    split = B

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return self._forward(input_, super().forward)


class RowLinear(_LowRank, tensor_parallel.RowParallelLinear):
    """As `ColumnLinear`."""

    exchange = staticmethod(tensor_parallel.reduce_from_tensor_model_parallel_region)
    exchange_sp = staticmethod(tensor_parallel.reduce_scatter_to_sequence_parallel_region)
    split = A

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return self._forward(input_, super().forward)


@contextmanager
def without_lora(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """The base alone within the block."""
    layers = [(layer, layer.lora_scale) for c in chunks for layer in c.modules() if isinstance(layer, _LowRank)]
    for layer, _ in layers:
        layer.lora_scale = 0.0
    try:
        yield
    finally:
        for layer, scale in layers:
            layer.lora_scale = scale


def freeze_base(chunk: torch.nn.Module) -> None:
    """Freeze a chunk except for its LoRA parameters."""
    for name, p in chunk.named_parameters():
        p.requires_grad_(is_lora(name))
    embedder = getattr(chunk, "x_embedder", None)
    if embedder is not None:  # recomputed layers pass gradients on only if their input requires them
        embedder.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(torch.is_grad_enabled()))


def merged(tensors: Mapping[str, torch.Tensor], name: str, scale: float) -> torch.Tensor:
    """The tensor of that name, with LoRA merged if it has any: W + scale * B A, computed in float64.

    scale : alpha / rank.
    """
    w = tensors[name]
    stem = name.removesuffix("weight")
    if stem == name or stem + A not in tensors:
        return w
    return (w.double() + scale * (tensors[stem + B].double() @ tensors[stem + A].double())).to(w.dtype)
