"""The DiT as a denoiser: network, preconditioning and packs together, for training, validation and generation.

Preconditioning is float32 (in sampling: float64) whatever the network's dtype. A context-parallel rank computes its
slice of the tokens; noise levels and noise are drawn for the complete pack.
"""

from dataclasses import dataclass
from typing import Any, Callable, Iterable, NamedTuple

import torch
from megatron.core import parallel_state as mpu

from dfm_nb.diffusion import edm
from dfm_nb.diffusion.objective import Objective, pseudo_huber
from dfm_nb.model.attention import collect
from dfm_nb.model.pack_slice import PackSlice
from dfm_nb.packs.packs import Pack, PackLayout
from dfm_nb.parallel.groups import broadcast_from_last_stage


@dataclass
class TokenLosses:
    """Losses of this rank's tokens, the mask of those that count, and their weights in the gradient."""

    loss: torch.Tensor  # float32 [S_local], the objective's, averaged over the patch; a student's is pseudo-Huber
    mask: torch.Tensor  # bool [S_local]
    weight: torch.Tensor  # float32 [S_local]
    row: torch.Tensor


class PackInputs(NamedTuple):
    """A training pack on this rank's device.

    x0, noise, target : float32 [S, p]; mask : bool [S]; weight : float32 [S]; sigma : float32 [R].
    """

    part: PackSlice
    sigma: torch.Tensor
    x0: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor | None

    @classmethod
    def of(cls, pack: Pack, device: torch.device, backend: str) -> "PackInputs":
        """backend : of attention."""
        part = PackSlice.of(pack, device).for_backend(backend)
        sigma = pack.sigma.to(device, non_blocking=True)
        target = None if pack.target is None else part.take(pack.target)
        masks = part.take(pack.loss_mask), part.take(pack.weight)
        return cls(part, sigma, part.take(pack.x0), part.take(pack.noise), *masks, target)


def forward(
    model: Any, pack: Pack, objective: Objective, device: torch.device
) -> tuple[torch.Tensor, Callable[[torch.Tensor], TokenLosses]]:
    """Run the network on a noised pack.

    Returns (output, loss_of): on the last pipeline stage `loss_of(output)` returns `TokenLosses`.
    """
    return run(model, PackInputs.of(pack, device, model.config.packed_attention_backend), objective)


def run(
    model: torch.nn.Module, pack: PackInputs, objective: Objective
) -> tuple[torch.Tensor, Callable[[torch.Tensor], TokenLosses]]:
    """`forward` from what is on the device."""
    token_sigma = pack.sigma[pack.part.row][:, None]
    x = pack.x0 + token_sigma * pack.noise
    output = model(objective.scaled(x, token_sigma), edm.c_noise(pack.sigma), pack.part)

    def loss_of(network_output: torch.Tensor) -> TokenLosses:
        if pack.target is None:
            loss = objective.loss(network_output, pack.x0, pack.noise, token_sigma).mean(-1)
        else:
            loss = pseudo_huber(objective.residual(network_output, pack.target, x, token_sigma))
        return TokenLosses(loss, pack.mask, pack.weight, pack.part.row)

    return output, loss_of


class PackDenoiser:
    """D(x; sigma) for the segments of one fixed pack, at many noise levels: the function that samplers call.

    The text's keys and values are computed at the first call and kept. It works in every layout: the results of
    context-parallel ranks and pipeline stages are combined on every rank.

    Parameters
    ----------
    chunks : this rank's model chunks. pack : tokens outside `loss_mask` (given frames, padding) keep `pack.sigma`.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], pack: PackLayout, objective: Objective, device: torch.device):
        self.chunks = list(chunks)
        self.objective = objective
        self.device = device
        self.part = PackSlice.of(pack, device)
        self.part.text_cache = {}
        rows = torch.zeros(len(pack.sigma), dtype=torch.bool)
        rows[pack.row[pack.loss_mask]] = True
        self.noisy_row = rows.to(device)  # rows at the sampler's noise level; the others keep the pack's
        self.row_sigma = pack.sigma.to(device)
        self.row = pack.row.to(device)

    @torch.no_grad()  # in inference mode megatron-core 0.16 would gather (SP) into a buffer that training cannot write
    def __call__(self, x: torch.Tensor, sigma: float | torch.Tensor) -> torch.Tensor:
        """x : float64 [S, p] on the device, all tokens of the pack; returns D as float64 [S, p] on every rank.

        sigma : of all noisy rows, or of each row [R].
        """
        sigmas = torch.where(self.noisy_row, torch.as_tensor(sigma).to(self.row_sigma), self.row_sigma)
        token_sigma = sigmas[self.part.row][:, None]
        scaled = self.objective.scaled(x[self.part.tokens], token_sigma).float()
        # the network is float32 or less; the preconditioning is float64, so that rounding does not lose small steps
        F_x = self._run(scaled, edm.c_noise(sigmas), x.shape)
        return self.objective.denoised(F_x, x, sigmas[self.row][:, None].double())

    def _run(self, scaled: torch.Tensor, c_noise: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The network's output for the complete pack, float32 of `shape`, from this rank's tokens `scaled`."""
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            local = self._run_pipeline(scaled, c_noise, shape)
        else:
            local = self.chunks[0](scaled, c_noise, self.part).float()
        if mpu.get_context_parallel_world_size() == 1:
            return local
        return collect(local, mpu.get_context_parallel_group())

    def _run_pipeline(self, scaled: torch.Tensor, c_noise: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(_batches, model):
            return model(scaled, c_noise, self.part), lambda output, non_loss_data=True: output

        chunks = self.chunks
        # with virtual stages the schedule needs a microbatch a stage: the same one, in stages that would else be idle
        microbatches = mpu.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=microbatches,
            seq_length=shape[0],
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,  # otherwise megatron-core needs a loss, and does not return the output
        )
        local = shape[0] // mpu.get_context_parallel_world_size()
        result = outputs[0].float() if outputs else torch.empty(local, shape[1], device=self.device)
        return broadcast_from_last_stage(result.contiguous())
