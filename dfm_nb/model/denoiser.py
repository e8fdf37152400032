"""The DiT as EDM's denoiser: where network, preconditioning and packs meet; shared by training, validation and generation.

Enters: a `Pack` and a model. Leaves: per-token losses, or D(x; sigma).
Guarantees: preconditioning in float32 (sampling: float64 state) whatever the network's dtype; on a context-parallel rank only its slice
of the tokens, while noise levels and noise are those of the whole pack.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu

from dfm_nb.diffusion import edm
from dfm_nb.model.attention import PackedLayout, SegmentLayout
from dfm_nb.model.dit import ModelInputs, TextCrossAttention
from dfm_nb.packs.packs import Pack
from dfm_nb.parallel.groups import broadcast_from_last_stage


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
        tokens,
        to(pack.row[tokens]),
        to(pack.positions[tokens]),
        to(pack.text),
        to(pack.pool),
        to(pack.fps),
        PackedLayout(self_layout),
        PackedLayout(cross_layout),
        device,
    )


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


class PackDenoiser:
    """D(x; sigma) for the segments of one fixed pack, over many noise levels: what samplers call.

    The text's keys and values are computed at the first call and kept. Works in every layout: context-parallel slices and
    pipeline stages are put together again on every rank.

    Parameters
    ----------
    chunks : this rank's model chunks. pack : tokens outside `loss_mask` (given frames, padding) keep `pack.sigma`.
    """

    def __init__(self, chunks, pack: Pack, sigma_data: float, device: torch.device, cache_text: bool = True):
        self.chunks, self.pack, self.sigma_data, self.device = list(chunks), pack, sigma_data, device
        self.part = slice_pack(pack, device)
        self.cache: dict | None = {} if cache_text else None
        rows = torch.zeros(len(pack.sigma), dtype=torch.bool)
        rows[pack.row[pack.loss_mask]] = True
        self.noisy_row = rows.to(device)  # rows that follow the sampler; the others keep their own noise level
        self.row_sigma = pack.sigma.to(device)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """x : float64 [S, p] on the device, all tokens of the pack; returns D as float64 [S, p] on every rank."""
        sigmas = torch.where(self.noisy_row, torch.full_like(self.row_sigma, sigma), self.row_sigma)
        local = x[self.part.tokens]
        token_sigma = sigmas[self.part.row][:, None]
        scaled = (edm.c_in(token_sigma, self.sigma_data) * local).float()
        F_x = self._run(self.part.inputs(scaled, edm.c_noise(sigmas)), x.shape)
        token_sigma = sigmas[self.pack.row.to(self.device)][:, None].double()
        return edm.denoised(F_x, x, token_sigma, self.sigma_data)

    def _run(self, inputs: ModelInputs, shape: torch.Size) -> torch.Tensor:
        with _text_cache(self.chunks, self.cache):
            if mpu.get_pipeline_model_parallel_world_size() > 1:
                local = self._run_pipeline(inputs, shape)
            else:
                local = self.chunks[0](inputs).float()
        size = mpu.get_context_parallel_world_size()
        if size == 1:
            return local
        out = local.new_empty(size * local.shape[0], local.shape[1])
        torch.distributed.all_gather_into_tensor(out, local.contiguous(), group=mpu.get_context_parallel_group())
        return out

    def _run_pipeline(self, inputs: ModelInputs, shape: torch.Size) -> torch.Tensor:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(_batches, model):
            return model(inputs), lambda output, non_loss_data=True: output

        chunks = self.chunks
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=1,
            seq_length=shape[0],
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
        local = shape[0] // mpu.get_context_parallel_world_size()
        result = outputs[0].float() if outputs else torch.empty(local, shape[1], device=self.device)
        return broadcast_from_last_stage(result.contiguous())


@contextlib.contextmanager
def _text_cache(chunks, cache: dict | None):
    """Lend `cache` to every cross attention for the length of one call."""
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TextCrossAttention)]
    for layer in layers:
        layer.kv_cache = cache
    try:
        yield
    finally:
        for layer in layers:
            layer.kv_cache = None
