"""Latents and their noise, as a reference network takes them and as a pack does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dfm_nb.config.schema import ModelConfig
from dfm_nb.packs.packs import Draw, noised


@dataclass
class Noisy:
    """latent, noise : [C, T, H, W]; text : [L, D]."""

    key: str
    latent: torch.Tensor
    noise: torch.Tensor
    text: torch.Tensor
    sigma: float
    fps: float

    def draw(self, model: ModelConfig) -> Draw:
        return noised(model, **vars(self))
