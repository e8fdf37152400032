"""The guided denoiser of a batch of clips, called by a sampler: one packed forward per noise level.

Each sample is a separate segment, so it does not depend on its neighbours. Where guidance is 1 the unconditional half
is not computed. Given frames (--init-image) do not change and have their own noise level.
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
    """D(x; sigma) of N latents of one size by one network, for M texts: text i belongs to latent i modulo N.

    So a list of N texts, or of N captions and then N negative prompts, is one packed forward.

    Parameters
    ----------
    chunks : this process's stages of the network. model : its `config.model` group.
    texts : [L, D] each. latent_grid : T, H, W. given_frames : latent frames at the start that stay at `CLEAN_SIGMA`.
    given : latents of pictures and clips beside each, [C, t, h, w]. without : number of last texts without them.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        model: ModelConfig,
        device: torch.device,
        texts: Sequence[torch.Tensor],
        latent_grid: tuple[int, int, int],
        fps: float,
        given_frames: int = 0,
        given: Sequence[torch.Tensor] = (),
        without: int = 0,
    ):
        ps, pt = self.patch = model.patch_spatial, model.patch_temporal
        self.grid, *grids = (patch_grid(model, size) for size in (latent_grid, *(z.shape[1:] for z in given)))
        self.given, self.with_given = [patchify(z, ps, pt) for z in given], len(texts) - without
        # Equal lengths become neighbours, so that one batched attention call serves them.
        self.order = sorted(range(len(texts)), key=lambda i: (i >= self.with_given, len(texts[i])))
        # The noise level of a segment does not matter: every call replaces it by the sampler's.
        segments = [
            sample_segment(
                model, self.grid, texts[i], 1.0, fps, given_frames // pt, grids if i < self.with_given else ()
            )
            for i in self.order
        ]
        layout = layout_of(model)
        pack = pack_layout(segments, model, layout.token_multiple(), layout.text_multiple())
        self.length = pack.cu_q[-1]
        self.denoise = PackDenoiser(chunks, pack, get_objective(model.objective, model.sigma_data), device)

    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """float64 [N, C, T, H, W] -> float64 [M, C, T, H, W], in the order of the texts."""
        given = [z.to(x) for z in self.given]
        own = (patchify(x[i % len(x)], *self.patch) for i in self.order)
        tokens = [torch.cat([z, *given]) if i < self.with_given else z for i, z in zip(self.order, own)]
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
    cond : the network for N captions. both : for N captions and N negative prompts; needed if guidance is not 1. With a
        --given-guidance other than 1, also for the negative prompts without what is given.
    guide : the weaker network for N captions; None: no autoguidance.
    given : latent [C, t, H, W] of given first frames, kept in every sample.
    """

    def __init__(
        self,
        request: Request,
        cond: BatchDenoiser,
        both: BatchDenoiser | None = None,
        guide: BatchDenoiser | None = None,
        given: torch.Tensor | None = None,
    ):
        self.request, self.cond, self.both, self.guide, self.given = request, cond, both, guide, given
        self.free, self.auto = request.weights(guide is not None)

    def with_given(self, x: torch.Tensor) -> torch.Tensor:
        if self.given is None:
            return x
        x = x.clone()
        x[:, :, : self.given.shape[1]] = self.given.to(x)
        return x

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        level, interval = float(sigma), self.request.guidance_interval
        x = self.with_given(x)
        free, auto = (samplers.guidance_at(level, weight, interval) for weight in (self.free, self.auto))
        of_given = samplers.guidance_at(level, self.request.given_guidance, interval)
        if free == auto == of_given == 1:
            return self.with_given(self.cond(x, level))
        if free == of_given == 1:
            D = D_cond = self.cond(x, level)
        else:
            assert self.both is not None
            D_cond, D_uncond, *D_none = self.both(x, level).split(len(x))
            D = samplers.classifier_free(D_cond, D_uncond, free)
            for none in D_none:  # Brooks et al. 2023, Eq. 3: words and pictures are weighed separately
                D = D + (of_given - 1) * (D_uncond - none)
        if auto != 1:
            assert self.guide is not None
            away = samplers.classifier_free(D_cond, self.guide(x, level), auto)
            # With both kinds, their corrections to D_cond are summed.
            D = away if free == of_given == 1 else D + (away - D_cond)
        if self.request.guidance_rescale:
            D = samplers.rescale(D, D_cond, self.request.guidance_rescale)
        return self.with_given(D)
