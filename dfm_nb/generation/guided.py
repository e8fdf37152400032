"""The guided denoiser of a batch of requests: what a sampler calls, one packed forward per noise level.

Enters: a pipeline (model, texts, manifest) and requests that differ in prompt, negative prompt and seed only. Leaves: D(x; sigma), float64.
Guarantees: each sample is a segment of its own, so none depends on its neighbours; given frames (--init-image) stay as they are, at their own
noise level; where guidance is 1 the unconditional half is not computed. The text's keys and values are computed once per generation.
Cost: one forward of the conditional samples, and of as many unconditional ones where guidance acts (autoguidance: one of the guide; both kinds: both).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Sequence

import torch

from dfm_nb.diffusion import samplers
from dfm_nb.generation.request import Request
from dfm_nb.model.denoiser import PackDenoiser
from dfm_nb.packs.packs import CLEAN_SIGMA, Draw, Pack, PackSettings, pack_draws
from dfm_nb.packs.patches import patchify, unpatchify
from dfm_nb.parallel.groups import layout_of

if TYPE_CHECKING:
    from dfm_nb.generation.pipeline import Pipeline


class GuidedDenoiser:
    """The guided denoiser of a batch: x [N, C, T, H, W] float64, sigma -> D; one packed forward per call."""

    def __init__(
        self,
        pipe: Pipeline,
        requests: Sequence[Request],
        given: torch.Tensor | None,
        cond: list[torch.Tensor] | None = None,
    ):
        self.pipe, self.requests, self.first, self.given = pipe, requests, requests[0], given
        self.cond = pipe.encode_text([r.prompt for r in requests]) if cond is None else cond
        self.free, self.auto = self.first.weights(pipe.guide is not None)
        self.uncond = pipe.encode_text([r.negative_prompt for r in requests]) if self.free != 1 else []
        m = pipe.config.model
        self.patch = (m.patch_spatial, m.patch_temporal)
        self._packs: dict[bool, tuple[PackDenoiser, list[int]]] = {}
        self._guide = None
        if pipe.guide is not None:
            alone = [replace(r, guidance=1.0, autoguidance=None, negative_prompt="") for r in requests]
            self._guide = GuidedDenoiser(pipe.guide, alone, given, self.cond)  # one text encoder serves both

    def _denoiser(self, both: bool) -> tuple[PackDenoiser, list[int]]:
        """For the conditional samples, or for conditional and unconditional ones; and each segment's sample number."""
        if both not in self._packs:
            texts = self.cond + self.uncond if both else self.cond
            c, grid = self.pipe.config.model.in_channels, self.first.latent_grid
            blank = torch.zeros(c, *grid)
            given = 0 if self.given is None else self.given.shape[1]
            draws = [Draw(f"{i:06d}", blank, t, self.first.fps, 1.0, blank, given) for i, t in enumerate(texts)]
            layout = layout_of(self.pipe.config.model)
            settings = PackSettings(
                0,
                *self.patch,
                sigma_data=self.pipe.config.model.sigma_data,
                token_multiple=layout.token_multiple(),
                text_multiple=layout.text_multiple(),
            )
            pack: Pack = pack_draws(draws, settings)
            assert abs(float(pack.sigma[0]) - (CLEAN_SIGMA if given else 1.0)) < 1e-6
            denoiser = PackDenoiser(self.pipe.chunks, pack, self.pipe.config.model.sigma_data, self.pipe.device)
            self._packs[both] = denoiser, [int(k) for k in pack.keys]
        return self._packs[both]

    def with_given(self, x: torch.Tensor) -> torch.Tensor:
        if self.given is None:
            return x
        x = x.clone()
        x[:, :, : self.given.shape[1]] = self.given.to(x)
        return x

    def _evaluate(self, x: torch.Tensor, sigma: float, both: bool) -> torch.Tensor:
        denoiser, order = self._denoiser(both)
        n = len(x)
        tokens = [patchify(x[i % n], *self.patch) for i in order]
        padding = denoiser.pack.cu_q[-1] - sum(map(len, tokens))
        packed = torch.cat([*tokens, x.new_zeros(padding, tokens[0].shape[1])])
        D = denoiser(packed, sigma)
        t, h, w = self.first.latent_grid
        grid = (t // self.patch[1], h // self.patch[0], w // self.patch[0])
        per = len(tokens[0])
        out: list = [None] * len(order)
        for segment, i in enumerate(order):
            out[i] = unpatchify(D[segment * per : (segment + 1) * per], grid, *self.patch)
        return torch.stack(out)

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        level = float(sigma)
        x = self.with_given(x)
        free, auto = (samplers.guidance_at(level, w, self.first.guidance_interval) for w in (self.free, self.auto))
        if free == auto == 1:
            return self.with_given(self._evaluate(x, level, both=False))
        if free == 1:
            D = D_cond = self._evaluate(x, level, both=False)
        else:
            D_cond, D_uncond = self._evaluate(x, level, both=True).chunk(2)
            D = samplers.classifier_free(D_cond, D_uncond, free)
        if auto != 1:
            away = samplers.autoguidance(D_cond, self._guide._evaluate(x, level, both=False), auto)
            D = away if free == 1 else D + (away - D_cond)  # what each adds to D_cond, added up
        if self.first.guidance_rescale:
            D = samplers.rescale(D, D_cond, self.first.guidance_rescale)
        return self.with_given(D)
