"""The teacher of a few-step student: consistency tuning (Geng et al. 2024, "Consistency Models Made Easy").

A student's estimate at any noise level of a path is the path's end, as if guided. Its target at level t is its own
estimate at the lower level r that the teacher reaches from t in one guided step. At level 0 an estimate is the state
itself, by EDM's c_skip and c_out as by flow matching's t: from there the ends spread to higher levels.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.checkpoints.loading import find_weights
from dfm_nb.diffusion.objective import Objective
from dfm_nb.diffusion.samplers import classifier_free
from dfm_nb.model.build import build_chunks
from dfm_nb.model.denoiser import PackDenoiser
from dfm_nb.model.linear import without_lora
from dfm_nb.packs.packs import Pack, PackLayout, retexted
from dfm_nb.parallel.groups import layout_of

STEP = 0.5
"""r / t. Nearer to 1 the teacher's steps are more exact, but the ends have more steps to spread over."""


class Teacher:
    """The frozen average of `checkpoint.pretrained`, in the student's layout.

    Parameters
    ----------
    student : this rank's chunks. With LoRA their base, which is frozen, is the teacher.
    empty_text : [L, D], for the guidance that the teacher recommends.
    """

    def __init__(
        self,
        config: cfg.Config,
        student: Sequence[torch.nn.Module],
        objective: Objective,
        empty_text: torch.Tensor | None,
    ):
        if not config.checkpoint.pretrained:  # no rule of the configuration: an exported student names no teacher
            raise ValueError("checkpoint.pretrained must name the teacher of a student: a run or exported weights")
        assert empty_text is not None
        source = find_weights(config.checkpoint.pretrained)
        if source.config.model.student:
            raise ValueError(f"{config.checkpoint.pretrained} is a student itself; use its teacher")
        self.student, self.objective, self.device = student, objective, parallel.device()
        self.guidance = source.config.generation.guidance
        missing = max(0, (config.model.text_padding or 0) - len(empty_text))
        self.empty_text = F.pad(empty_text, (0, 0, 0, missing))
        self.text_multiple = layout_of(config.model).text_multiple()
        self.chunks: Sequence[torch.nn.Module] = student
        if not config.model.lora.rank:
            _, self.chunks = build_chunks(config.model, config.mixed_precision, seed=0)
            source.load(self.chunks)

    def _estimate(self, chunks: Sequence[torch.nn.Module], pack: PackLayout, x: torch.Tensor, sigma: torch.Tensor):
        return PackDenoiser(chunks, pack, self.objective, self.device)(x, sigma)

    def with_target(self, pack: Pack) -> Pack:
        """The pack with what the student, with its weights of now, must estimate."""
        t = pack.sigma.to(self.device)
        x = (pack.x0 + pack.sigma[pack.row][:, None] * pack.noise).to(self.device, torch.float64)
        with without_lora(self.chunks) if self.chunks is self.student else contextlib.nullcontext():
            D = self._estimate(self.chunks, pack, x, t)
            if self.guidance != 1:
                unconditional = retexted(pack, self.empty_text, self.text_multiple)
                D = classifier_free(D, self._estimate(self.chunks, unconditional, x, t), self.guidance)
        stepped = torch.where(pack.loss_mask.to(self.device)[:, None], D + STEP * (x - D), x)
        return replace(pack, target=self._estimate(self.student, pack, stepped, STEP * t).float().cpu())
