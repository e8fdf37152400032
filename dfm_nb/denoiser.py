"""The DiT as EDM's denoiser: where network, preconditioning and packs meet; shared by training, validation and generation.

Enters: a `Pack` and a model. Leaves: per-token losses, or D(x; sigma).
Guarantees: preconditioning in float32 (sampling: float64 state) whatever the network's dtype; on a context-parallel rank only its slice
of the tokens, while noise levels and noise are those of the whole pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu

from dfm_nb import edm
from dfm_nb.attention import PackedLayout, SegmentLayout
from dfm_nb.dataset import Pack
from dfm_nb.dit import ModelInputs


@dataclass
class Slice:
    """The tokens of a pack that this context-parallel rank holds, on its device, and the layouts it attends by."""

    tokens: slice
    row: torch.Tensor
    positions: torch.Tensor
    text: torch.Tensor
    pool: torch.Tensor
    fps: torch.Tensor
    self_layout: PackedLayout
    cross_layout: PackedLayout
    device: torch.device

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of a [S, ...] CPU tensor, on the device."""
        return tensor[self.tokens].to(self.device, non_blocking=True)

    def inputs(self, x: torch.Tensor, c_noise: torch.Tensor) -> ModelInputs:
        return ModelInputs(
            x, c_noise, self.fps, self.row, self.positions, self.text, self.pool, self.self_layout, self.cross_layout
        )


def slice_pack(pack: Pack, device: torch.device) -> Slice:
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    self_layout = SegmentLayout(pack.cu_q, pack.cu_q, device)
    cross_layout = SegmentLayout(pack.cu_q, pack.cu_kv, device)
    length = pack.cu_q[-1]
    assert length % size == 0, (length, size)
    tokens = slice(rank * length // size, (rank + 1) * length // size)
    if size > 1:
        self_layout, cross_layout = self_layout.local(rank, size), cross_layout.local(rank, size)
    to = lambda t: t.to(device, non_blocking=True)  # noqa: E731
    return Slice(
        tokens, to(pack.row[tokens]), to(pack.positions[tokens]), to(pack.text), to(pack.pool), to(pack.fps),
        PackedLayout(self_layout), PackedLayout(cross_layout), device,
    )  # fmt: skip


@dataclass
class TokenLosses:
    """Losses of this rank's tokens, and which of them count."""

    loss: torch.Tensor  # float32 [S_local], lambda(sigma) * |D - x0|^2 averaged over the patch
    mask: torch.Tensor  # bool [S_local]
    row: torch.Tensor


def forward(model, pack: Pack, sigma_data: float, device: torch.device, sigma: torch.Tensor | None = None):
    """Run the network on a noised pack.

    Returns (output, loss_of): on the last pipeline stage `loss_of(output)` gives `TokenLosses`. The weighted EDM loss
    lambda(sigma) |D - x0|^2 is computed as |F - (x0 - c_skip x) / c_out|^2, which it equals because lambda c_out^2 = 1.
    """
    part = slice_pack(pack, device)
    sigma = (pack.sigma if sigma is None else sigma).to(device, non_blocking=True)
    x0, noise = part.take(pack.x0), part.take(pack.noise)
    token_sigma = sigma[part.row][:, None]
    x = x0 + token_sigma * noise
    inputs = part.inputs(edm.c_in(token_sigma, sigma_data) * x, edm.c_noise(sigma))
    output = model(inputs)

    def loss_of(network_output: torch.Tensor) -> TokenLosses:
        target = edm.effective_target(x0, noise, token_sigma, sigma_data)
        loss = (network_output.float() - target).square().mean(-1)
        return TokenLosses(loss, part.take(pack.loss_mask), part.row)

    return output, loss_of
