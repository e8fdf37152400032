"""The DiT of NeMo DFM (`model.variant=dfm`), for weights that were trained there (`dfm import`).

It follows its source at 7cb7634, dfm/src/megatron/model/dit. Differences from `DiT`: attention, MLP and adaLN have no
biases; the text goes directly into the keys and values, padded with zero rows that are attended to (`packs`); cross
attention normalises queries and keys; sinusoids, widths of the embedders and positions; the output layer has no norm.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec

from dfm_nb.config.networks import SINUSOID_DIM
from dfm_nb.model.adaln import Rows
from dfm_nb.model.dit import DiT, DiTConfig, RMSNorm, TextCrossAttention, TwoLayers, layer_spec
from dfm_nb.model.pack_slice import PackSlice
from dfm_nb.model.positions import sinusoids

POSITIONS = (34, 40, 40)
"""Frames, rows and columns of its table of positions (max_frames 34, max_img_h and max_img_w 80, patches of 2 x 2)."""


def position_embedding(positions: torch.Tensor, dim: int) -> torch.Tensor:
    """float [N, 3], frame, row and column from the corner -> float64 [N, dim].

    Rows are looked up in a table of `POSITIONS`, with an index in which column 40 of a row is column 0 of the next. We
    reproduce this for wider pictures, because the weights were trained with it.
    """
    _, h, w = POSITIONS
    frame, row, column = positions.long().unbind(-1)
    index = frame * h * w + row * w + column
    parts = (
        sinusoids(index // (h * w), dim // 4, dtype=torch.float64),
        sinusoids(index % w, dim * 3 // 8, dtype=torch.float64),
        sinusoids(index % (h * w) // w, dim * 3 // 8, dtype=torch.float64),
    )
    return torch.cat(parts, -1)


class Embedder(TwoLayers):
    """Sinusoids of a scalar, then two layers of the same width."""

    def __init__(self, dim: int, shift: int, dtype: torch.dtype):
        super().__init__(dim, dim, dtype)
        self.shift = shift

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(sinusoids(value, self.fc1.in_features, self.shift))


class PlainTextCrossAttention(TextCrossAttention):
    """Keys and values directly from the text; normed queries and keys."""

    norm = RMSNorm

    def __init__(self, config: DiTConfig, submodules, *args, **kwargs):
        super().__init__(config, submodules, *args, **kwargs)
        self.linear_kv = submodules.linear_kv(  # megatron-core's expects text of the hidden size
            config.text_dim,
            2 * self.kv_projection_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            skip_bias_add=False,
            is_expert=False,
        )


class NeMoDiT(DiT):
    """See the module."""

    fields = {"add_bias_linear": False}

    def spec(self) -> ModuleSpec:
        return layer_spec(RMSNorm, PlainTextCrossAttention)

    def add_embedders(self) -> None:
        c = self.config
        self.sigma_embedder = Embedder(c.hidden_size, 0, c.params_dtype)
        self.fps_embedder = Embedder(SINUSOID_DIM, 1, c.params_dtype)

    def add_output(self) -> None:
        self.final = nn.Linear(self.config.hidden_size, self.config.patch_dim, dtype=self.config.params_dtype)

    def conditioning(self, c_noise: torch.Tensor, part: PackSlice) -> tuple[torch.Tensor, torch.Tensor]:
        cond = self.sigma_embedder(c_noise)
        fps = F.pad(self.fps_embedder(part.fps), (0, cond.shape[1] - SINUSOID_DIM))
        return cond + fps, part.text.to(cond.dtype)

    def position_embedding(self, positions: torch.Tensor) -> torch.Tensor:
        return position_embedding(positions, self.config.hidden_size)

    def output(self, hidden: torch.Tensor, cond: torch.Tensor, rows: Rows) -> torch.Tensor:
        return self.final(hidden)
