"""The guided denoiser of a batch of clips, called by a sampler: one packed forward per noise level.

Each sample is a separate segment, so it does not depend on its neighbours. Where guidance is 1 the unconditional half
is not computed. What is given (--init-image, --last-image, --given) does not change and has its own noise level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

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
        texts: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor],
        fps: float,
        ends: tuple[int, int],
        given: Sequence[Sequence[torch.Tensor]],
        without: int = 0,
    ):
        self.patch, self.grid = (model.patch_spatial, model.patch_temporal), patch_grid(model, starts[0].shape[1:])
        more = [given[i % len(starts)] if i < len(texts) - without else () for i in range(len(texts))]
        grids = [[patch_grid(model, z.shape[1:]) for z in own] for own in more]
        # Equal lengths become neighbours, so that one batched attention call serves them.
        self.order = sorted(range(len(texts)), key=lambda i: (-sum(map(math.prod, grids[i])), len(texts[i])))
        # The noise level of a segment does not matter: every call replaces it by the sampler's.
        segments = [sample_segment(model, self.grid, texts[i], 1.0, fps, ends, grids[i]) for i in self.order]
        x0 = ([patchify(z, *self.patch) for z in (starts[i % len(starts)], *more[i])] for i in self.order)
        self.clean = [(torch.cat(z).to(device), s.noisy[:, None].to(device)) for z, s in zip(x0, segments)]
        layout = layout_of(model)
        pack = pack_layout(segments, model, layout.token_multiple(), layout.text_multiple())
        self.length = pack.cu_q[-1]
        self.denoise = PackDenoiser(chunks, pack, get_objective(model.objective, model.sigma_data), device)

    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """float64 [N, C, T, H, W] -> float64 [M, C, T, H, W], in the order of the texts."""
        tokens = []
        for i, (x0, noisy) in zip(self.order, self.clean):
            own = patchify(x[i % len(x)], *self.patch)
            tokens.append(torch.where(noisy, torch.cat((own, x0[len(own) :])), x0))
        lengths = list(map(len, tokens))
        padding = x.new_zeros(self.length - sum(lengths), tokens[0].shape[1])
        D = self.denoise(torch.cat([*tokens, padding]), sigma)
        pieces = (piece[: math.prod(self.grid)] for piece in D.split([*lengths, len(padding)]))
        by_text = {i: unpatchify(piece, self.grid, *self.patch) for i, piece in zip(self.order, pieces)}
        return torch.stack([by_text[i] for i in range(len(by_text))])


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

    def __init__(
        self,
        request: Request,
        start: torch.Tensor,
        cond: BatchDenoiser,
        both: BatchDenoiser | None = None,
        free: torch.Tensor | None = None,
    ):
        self.request, self.start, self.free = request, start, free
        self.cond, self.both = cond, both

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        D = self._guided(x, float(sigma))
        # where D is the start, x stays start + sigma * noise, so what is kept need not be noised again at each step
        return D if self.free is None else torch.where(self.free, D, self.start)

    def _guided(self, x: torch.Tensor, level: float) -> torch.Tensor:
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
