"""The teacher of a few-step student, which learns to jump along the teacher's own guided paths.

A student samples with one Euler step from each of its few noise levels to the next. The teacher goes the same way from
the same noise in more steps, with guidance. At each level the student's target is the estimate whose Euler step lands
where the teacher is at the next level. Salimans & Ho (2022) halve the steps in this way, from noised data; guidance is
taken over as by Meng et al. (2023).
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.checkpoints.loading import Weights, find_weights
from dfm_nb.diffusion import samplers
from dfm_nb.diffusion.objective import Objective
from dfm_nb.diffusion.samplers import classifier_free
from dfm_nb.model.build import build_chunks
from dfm_nb.model.denoiser import PackDenoiser
from dfm_nb.model.linear import without_lora
from dfm_nb.packs.packs import Pack, retexted
from dfm_nb.parallel.groups import layout_of


class Teacher:
    """The frozen average of the weights that the student began with, in the student's layout.

    Parameters
    ----------
    student : this rank's chunks. With LoRA their base, which is frozen, is the teacher.
    empty_text : [L, D], for guidance.
    source : the teacher's weights; None: those of `checkpoint.pretrained`.
    guidance : what the teacher recommends, if it is known; a resumed LoRA student then needs no `source`.
    """

    def __init__(
        self,
        config: cfg.Config,
        student: Sequence[torch.nn.Module],
        objective: Objective,
        empty_text: torch.Tensor | None,
        source: Weights | None = None,
        guidance: float | None = None,
    ):
        assert empty_text is not None
        if guidance is None:
            place = source or config.checkpoint.pretrained
            if not place:  # no rule of the configuration: an export names no teacher
                raise ValueError("checkpoint.pretrained must name the teacher of a student: a run or exported weights")
            source = find_weights(place)
            guidance = source.config.generation.guidance
        if source and source.config.model.student:
            raise ValueError(f"{source.record['path']} is a student itself; use its teacher")
        if source and source.config.model.lora.rank:
            must = f"a teacher must be whole weights; {source.record['path']} has LoRA weights apart from their base"
            raise ValueError(f"{must}; distil what dfm export --lora merged makes of it")
        self.student = student
        self.objective = objective
        self.device = parallel.device()
        own = config.generation
        wanted = config.train.teacher_guidance
        self.guidance = guidance if wanted is None else wanted
        self.each = max(2, math.ceil(config.train.teacher_steps / own.num_steps))
        self.path = samplers.flow_sigmas(self.each * own.num_steps, sigma_max=own.sigma_max, shift=own.shift)
        self.levels = self.path[:: self.each]
        missing = max(0, (config.model.text_padding or 0) - len(empty_text))
        self.empty_text = F.pad(empty_text, (0, 0, 0, missing))
        self.text_multiple = layout_of(config.model).text_multiple()
        self.chunks: Sequence[torch.nn.Module] = student
        if not config.model.lora.rank:
            assert source is not None
            _, self.chunks = build_chunks(config.model, config.mixed_precision, seed=0)
            source.load(self.chunks)

    def lessons(self, pack: Pack) -> list[Pack]:
        """A pack for each level of the student: the teacher's state there, and what the student must estimate."""
        own = PackDenoiser(self.chunks, pack, self.objective, self.device)
        without = None
        if self.guidance != 1:
            empty = retexted(pack, self.empty_text, self.text_multiple)
            without = PackDenoiser(self.chunks, empty, self.objective, self.device)
        free = pack.loss_mask.to(self.device)[:, None]
        x0 = pack.x0.to(self.device, torch.float64)
        states = [torch.where(free, self.path[0] * pack.noise.to(x0), x0)]

        def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            D = own(x, sigma)
            if without is not None:
                D = classifier_free(D, without(x, sigma), self.guidance)
            return torch.where(free, D, x)  # what is given stays

        with without_lora(self.chunks) if self.chunks is self.student else contextlib.nullcontext():
            samplers.sample_unipc(denoise, states[0], self.path, lambda *of: states.append(of[2]), order=2)
        noise = torch.zeros_like(x0, dtype=torch.float32)
        packs = []
        for (s, s_next), (x, x_next) in zip(pairwise(self.levels.tolist()), pairwise(states[:: self.each])):
            target = x + (x_next - x) / (1 - s_next / s)
            sigma = torch.where(own.noisy_row, s, own.row_sigma)
            packs.append(replace(pack, x0=x.float(), noise=noise, sigma=sigma, target=target.float()))
        return packs
