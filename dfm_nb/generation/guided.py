"""The guided denoiser of a batch of clips, called by a sampler: one packed forward per noise level.

Each sample is a separate segment, so it does not depend on its neighbours. Where guidance is 1 the unconditional half
is not computed. What is given (--init-image, --last-image, --given) does not change and has its own noise level.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dfm_nb.config.schema import ModelConfig
from dfm_nb.diffusion import samplers
from dfm_nb.diffusion.objective import get_objective
from dfm_nb.generation.request import Request
from dfm_nb.model.denoiser import PackDenoiser
from dfm_nb.packs.packs import pack_layout, patch_grid, sample_segment
from dfm_nb.packs.patches import patchify, unpatchify
from dfm_nb.parallel.groups import layout_of


class BatchDenoiser:
    """D(x; sigma) of N latents of one size by one network, for M texts: text i is for latent i modulo N.

    So a list of N texts, or of N captions and then N negative prompts, is one packed forward.

    Parameters
    ----------
    chunks : this process's stages of the network. model : its `config.model` group.
    texts : [L, D] each. starts : N latents [C, T, H, W], of which the network sees the given frames instead of x.
    ends : frames given at the start and at the end. given : for each of N, latents of pictures and clips [C, t, h, w].
    without : number of last texts without the latter.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        model: ModelConfig,
        device: torch.device,
        texts: Sequence[Tensor],
        starts: Sequence[Tensor],
        fps: float,
        ends: tuple[int, int],
        given: Sequence[Sequence[Tensor]],
        without: int = 0,
    ):
        self.patch = (model.patch_spatial, model.patch_temporal)
        self.grid = patch_grid(model, starts[0].shape[1:])
        segments = []
        x0 = []
        for i, text in enumerate(texts):
            beside = given[i % len(starts)] if i < len(texts) - without else ()
            grids = [patch_grid(model, z.shape[1:]) for z in beside]
            # The noise level of a segment does not matter: every call replaces it by the sampler's.
            segments.append(sample_segment(model, self.grid, text, 1.0, fps, ends, grids))
            x0.append(torch.cat([patchify(z, *self.patch) for z in (starts[i % len(starts)], *beside)]))
        # Equal lengths become neighbours, so that one batched attention call serves them.
        self.order = sorted(range(len(texts)), key=lambda i: (-len(x0[i]), len(texts[i])))
        layout = layout_of(model)
        in_order = [segments[i] for i in self.order]
        pack = pack_layout(in_order, model, layout.token_multiple(), layout.text_multiple())
        self.cu_seqlens = pack.cu_q
        self.noisy = pack.loss_mask[:, None].to(device)
        tokens = torch.cat([x0[i] for i in self.order])
        self.x0 = F.pad(tokens, (0, 0, 0, len(self.noisy) - len(tokens))).to(device)
        self.denoise = PackDenoiser(chunks, pack, get_objective(model.objective, model.sigma_data), device)

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        """float64 [N, C, T, H, W] -> float64 [M, C, T, H, W], in the order of the texts."""
        length = math.prod(self.grid)  # the sample's own tokens, before those of what is given beside it
        tokens = self.x0.clone()
        for i, start in zip(self.order, self.cu_seqlens):
            tokens[start : start + length] = patchify(x[i % len(x)], *self.patch)
        D = self.denoise(torch.where(self.noisy, tokens, self.x0), sigma)
        by_text = {}
        for i, start in zip(self.order, self.cu_seqlens):
            by_text[i] = unpatchify(D[start : start + length], self.grid, *self.patch)
        return torch.stack([by_text[i] for i in sorted(by_text)])


@dataclass
class GuidedDenoiser:
    """The estimate that a sampler follows: (x [N, C, T, H, W], sigma) -> D, both float64.

    Parameters
    ----------
    request : its guidance settings are used; they are the same for all N samples.
    start : [N, C, T, H, W], where the samples start, without noise.
    cond : the network for N captions. both : for N captions and N negative prompts; needed if guidance is not 1. With a
        --given-guidance other than 1, also for the negative prompts without what is given.
    free : bool, where the samples change from `start`; None: everywhere.
    """

    request: Request
    start: Tensor
    cond: BatchDenoiser
    both: BatchDenoiser | None = None
    free: Tensor | None = None

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        D = self._guided(x, float(sigma))
        if self.free is None:
            return D
        # Where D is the start, x stays start + sigma * noise, so what is kept is not noised again at each step.
        return torch.where(self.free, D, self.start)

    def _guided(self, x: Tensor, level: float) -> Tensor:
        interval = self.request.guidance_interval
        words = samplers.guidance_at(level, self.request.guidance, interval)
        of_given = samplers.guidance_at(level, self.request.given_guidance, interval)
        if words == of_given == 1:
            return self.cond(x, level)
        assert self.both is not None
        D_cond, D_uncond, *D_none = self.both(x, level).split(len(x))
        D = samplers.classifier_free(D_cond, D_uncond, words)
        for none in D_none:  # Brooks et al. 2023, Eq. 3: words and pictures are weighed separately
            D = D + (of_given - 1) * (D_uncond - none)
        if self.request.guidance_rescale:
            D = samplers.rescale(D, D_cond, self.request.guidance_rescale)
        return D
