"""Muon for the matrices of the transformer's layers, AdamW for all else.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. Each matrix is orthogonalised whole in any layout:
tensor-parallel parts are put together first, and the queries, keys and values of one weight are three matrices.
The data-parallel processes share the work: 5 iterations of 2 r^2 (2 c + r) FLOPs for r x c, r <= c.

Why not a library's: `torch.optim.Muon` iterates in bfloat16 alone and knows neither tensor-parallel nor fused matrices.
megatron-core's needs emerging-optimizers, which needs Python 3.12 and imports Triton, so it does not run on a CPU.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dfm_nb.config.schema import OptimizerConfig
from dfm_nb.model.linear import is_lora
from dfm_nb.parallel.groups import mpu, shard_dim

BATCH = 2**24
"""Values of equal matrices that are orthogonalised at a time: 64 MiB of float32, of which five or six copies live."""
PARTS = {"linear_qkv": 3, "linear_kv": 2}
"""How many matrices megatron-core keeps in one, interleaved by head."""


def orthogonal(m: Tensor, iterations: int = 5) -> Tensor:
    """Nearly the orthogonal factors of matrices [n, a, b], in their own precision.

    The quintic Newton-Schulz iteration of Jordan et al. (2024). The singular vectors stay; singular values end
    between 0.7 and 1.2.
    """
    tall = m.shape[1] > m.shape[2]
    x = m.mT.contiguous() if tall else m  # the Gram matrix of the short side is the smaller one
    # the iteration needs singular values of 1 at most
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        # x <- a x + (b g + c g^2) x with g = x x^T, and Jordan's coefficients
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if tall else x


@dataclass(frozen=True)
class Matrix:
    """How a weight [out, in] of this rank is a part of whole matrices.

    parts : matrices in it, interleaved by head along `out`.
    heads : of the whole weight; used where parts > 1.
    dim : the one that tensor parallelism splits, or None.
    """

    parts: int = 1
    heads: int = 1
    dim: int | None = None

    def blocks(self, whole: Tensor) -> Tensor:
        """[..., out, in] -> [..., parts, out / parts, in]."""
        return whole.unflatten(-2, (self.heads, self.parts, -1)).transpose(-4, -3).flatten(-3, -2)

    def join(self, blocks: Tensor) -> Tensor:
        """Inverse of `blocks`."""
        return blocks.unflatten(-2, (self.heads, -1)).transpose(-4, -3).flatten(-4, -2)


def matrices_of(chunks: Iterable[torch.nn.Module]) -> dict[Tensor, Matrix]:
    """The trained matrices of the layers' attention and MLP.

    With mixed precision these are the optimizer's float32 copies, which megatron-core stores on the parameter as
    `main_param`.
    """
    out: dict[Tensor, Matrix] = {}
    for chunk in chunks:
        heads: int = chunk.config.num_attention_heads  # type: ignore[union-attr, assignment]
        for name, p in chunk.named_parameters():
            kind = name.split(".")[-2:][0]
            if kind.startswith("linear_") and name.endswith("weight") and p.requires_grad and not is_lora(name):
                parts = PARTS.get(kind, 1)
                out[getattr(p, "main_param", p)] = Matrix(parts, heads if parts > 1 else 1, shard_dim(p))
    return out


class Muon(torch.optim.AdamW):
    """AdamW whose steps are Muon's for `matrices` (r x c):

    W -= lr * (weight_decay * W + scale * sqrt(max(r, c)) * orthogonal(momentum)).

    Parameters
    ----------
    groups : parameter groups of an AdamW, with their learning rates and weight decay.
    settings : those named `muon_*`; the scale of 0.2 makes an update about AdamW's (Liu et al. 2025, arXiv:2502.16982).
    dtype : of the iteration that orthogonalises, and of the updates that the processes exchange; Jordan et al. use
        bfloat16.
    """

    def __init__(
        self,
        groups: list[dict],
        matrices: Mapping[Tensor, Matrix],
        settings: OptimizerConfig,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(groups)
        self.matrices = matrices
        self.settings = settings
        self.dtype = dtype
        # the ranks that share the work
        self.share = mpu.get_data_parallel_group(with_context_parallel=True)
        self.tp = mpu.get_tensor_model_parallel_group()
        # The next largest matrix goes to the process with the least work so far.
        load = [0] * self.share.size()
        self.owned: list[list[Tensor]] = [[] for _ in load]  # by data-parallel process
        # a stable sort: the same on every process
        for p in sorted(matrices, key=self._work, reverse=True):
            least = load.index(min(load))
            self.owned[least].append(p)
            load[least] += self._work(p)
        # equal matrices of a process together: a few large products instead of many small ones
        self.batches: list[tuple[int, Matrix, list[Tensor]]] = []
        for owner, ps in enumerate(self.owned):
            equal: dict[tuple, list[Tensor]] = defaultdict(list)
            for p in ps:
                equal[matrices[p], p.shape].append(p)
            for (matrix, shape), alike in equal.items():
                size = max(1, BATCH // shape.numel())
                for first in range(0, len(alike), size):
                    self.batches.append((owner, matrix, alike[first : first + size]))

    def moments(self, p: Tensor) -> tuple[str, ...]:
        """Names of a parameter's state, without `step`."""
        return ("momentum_buffer",) if p in self.matrices else ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def step(self, closure=None):
        """Like AdamW's, gradients are divided by `grad_scale`, and a true `found_inf` changes nothing: both tensors."""
        found_inf = getattr(self, "found_inf", None)
        applied = 1.0 if found_inf is None else 1 - found_inf
        own: dict[Tensor, Tensor] = {}
        for owner, matrix, batch in self.batches:
            direction = self._direction(batch, found_inf)
            if owner == self.share.rank():
                own |= zip(batch, self._update(direction, matrix).mul_(applied).unbind())
        for p in self.matrices:
            self.state[p]["step"] += applied
            p.grad = None  # AdamW's step passes over parameters without a gradient
        loss = super().step(closure)
        updates = self._everyones(own)
        for group in self.param_groups:
            changed = [p for p in group["params"] if p in self.matrices]
            decay = group["lr"] * group["weight_decay"] * applied
            if changed:
                torch._foreach_mul_(changed, 1 - decay)
                torch._foreach_add_(changed, [updates[p] for p in changed], alpha=-group["lr"])
        return loss

    def _work(self, p: Tensor) -> int:
        """The cost of orthogonalising a matrix, in arbitrary units."""
        parts = self.matrices[p].parts
        short, long = sorted((p.shape[0] // parts, p.shape[1]))
        return parts * short**2 * (2 * long + short)

    def _direction(self, batch: list[Any], found_inf: Tensor | None) -> Tensor:
        """[n, out, in], Nesterov's direction of equal matrices, after updating their momenta."""
        for p in batch:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device)
                state["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in batch]
        momentum = torch.stack(momenta)
        grad = torch.stack([p.grad for p in batch])
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            grad.div_(grad_scale)
        if found_inf is not None:
            grad = torch.where(found_inf > 0, momentum, grad)  # so that the momentum stays, exactly
        momentum.lerp_(grad, 1 - self.settings.muon_momentum)
        torch._foreach_copy_(momenta, list(momentum.unbind()))
        return grad.lerp_(momentum, self.settings.muon_momentum)

    def _update(self, direction: Tensor, matrix: Matrix) -> Tensor:
        """[n, out, in], this rank's part of the scaled updates of equal matrices, in `dtype`."""
        s = self.settings
        blocks = matrix.blocks(self._whole(direction, matrix.dim)).to(self.dtype)
        blocks = orthogonal(blocks.flatten(0, 1), s.muon_num_ns_steps).unflatten(0, (-1, matrix.parts))
        whole = matrix.join(blocks).mul_(s.muon_extra_scale_factor * max(blocks.shape[-2:]) ** 0.5)
        if matrix.dim is None:
            return whole
        return whole.chunk(self.tp.size(), matrix.dim + 1)[self.tp.rank()]

    def _whole(self, part: Tensor, dim: int | None) -> Tensor:
        """Matrices [n, out, in] of which this tp rank has a part along `dim` (0 or 1)."""
        if dim is None or self.tp.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tp.size())]
        dist.all_gather(parts, part.contiguous(), group=self.tp)
        return torch.cat(parts, dim + 1)

    def _everyones(self, own: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The updates of all matrices, from the data-parallel processes that made them."""
        if self.share.size() == 1:
            return own
        sizes = [sum(p.numel() for p in ps) for ps in self.owned]
        some = next(iter(self.matrices))
        # all_gather needs equal lengths: padded to the longest
        sent = some.new_zeros(max(sizes), dtype=self.dtype)
        if own:
            rank = self.share.rank()
            sent[: sizes[rank]] = torch.cat([own[p].flatten() for p in self.owned[rank]])
        received = [torch.empty_like(sent) for _ in self.owned]
        dist.all_gather(received, sent, group=self.share)
        out: dict[Tensor, Tensor] = {}
        for flat, ps, size in zip(received, self.owned, sizes):
            pieces = flat[:size].split([p.numel() for p in ps])
            for p, piece in zip(ps, pieces):
                out[p] = piece.view_as(p)
        return out
