"""The transformer of Wan 2.1 (`model.variant=wan`; arXiv 2503.20314), text to video, for its published weights.

It follows its source and diffusers' `WanTransformer3DModel`, with equal outputs. Differences from `DiT`: positions are
rotary only; queries and keys are normed over all heads together; cross attention is neither shifted, scaled nor gated;
a layer's six modulations are its own table plus a projection of the time that all layers share; the text is padded with
zero rows that are attended to (`model.text_padding`); no frame rate, no pooled text. The noise input is 1000 t with
t = sigma / (1 + sigma), whatever the objective.

Rotations act on the pairs (i, i + d/2) of a head here, and on (2i, 2i + 1) there; `names` reorders the weights.
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from dfm_nb.config.networks import SINUSOID_DIM
from dfm_nb.model.adaln import Rows, add_gated, modulated_norm
from dfm_nb.model.dit import DiT, DiTConfig, DiTLayer, RMSNorm, TextCrossAttention, TwoLayers, layer_spec
from dfm_nb.model.pack_slice import PackSlice
from dfm_nb.model.positions import sinusoids

THETA = 10_000.0
GELU = partial(F.gelu, approximate="tanh")


def axial_angles(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Angles of the rotary embedding: float [S, 3] -> float64 [S, head_dim / 2], by frame, row and column.

    Rows and columns have 2 * (head_dim // 6) channels each, frames the rest.
    """
    side = 2 * (head_dim // 6)
    angles = []
    for axis, dim in enumerate((head_dim - 2 * side, side, side)):
        exponent = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim
        angles.append(positions[:, axis : axis + 1].double() * THETA**-exponent)
    return torch.cat(angles, 1)


class HeadsRMSNorm(RMSNorm):
    """Root mean square norm over all heads together, [S, H, d]; tensor parallelism splits the heads."""

    def __init__(self, hidden_size: int, config: DiTConfig, eps: float = 1e-6, **_kwargs):
        self.width = config.hidden_size
        self.tp = config.tensor_model_parallel_size
        super().__init__(config.num_attention_heads // self.tp * hidden_size, config, eps)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp == 1:
            return super().forward(x.flatten(-2)).view(x.shape)
        wide = x.float()
        # Every rank's result depends on the sum over all heads: all-reduce in forward and backward.
        total = tensor_parallel.reduce_from_tensor_model_parallel_region(wide.square().sum((-2, -1), keepdim=True))
        scale = torch.rsqrt(tensor_parallel.copy_to_tensor_model_parallel_region(total) / self.width + self.eps)
        return (wide * scale * self.weight.float().view(x.shape[-2:])).type_as(x)


class HeadsNormedCrossAttention(TextCrossAttention):
    norm = HeadsRMSNorm


class WanLayer(DiTLayer):
    """Self attention and MLP, each normed, shifted, scaled and gated, and between them cross attention, only normed."""

    def add_modulation(self):
        attention = self.self_attention
        eps = self.config.layernorm_epsilon
        # Not in the spec, because megatron-core 0.19 then needs `qk_layernorm`, and sums such gradients over tp.
        attention.q_layernorm = HeadsRMSNorm(attention.hidden_size_per_attention_head, self.config, eps)
        attention.k_layernorm = HeadsRMSNorm(attention.hidden_size_per_attention_head, self.config, eps)
        h = self.config.hidden_size
        dtype = self.config.params_dtype
        self.scale_shift_table = nn.Parameter(torch.empty(6, h, dtype=dtype))
        self.cross_norm = nn.LayerNorm(h, eps, dtype=dtype)
        for p in (self.scale_shift_table, *self.cross_norm.parameters()):  # as those of `AdaLN`
            p.sequence_parallel = self.config.sequence_parallel

    def inner(self, x_Sh, cond, text_Kh, rows, self_bounds, cross_bounds, rotary, text_cache) -> torch.Tensor:
        """As `DiTLayer`'s, but cond is [R, 7 h]: the time embedding, which layers do not use, and its six projections
        that all layers share. This layer's table is added to those.
        """
        norm = partial(modulated_norm, rows=rows, eps=self.config.layernorm_epsilon)
        table_R6h = self.scale_shift_table + cond[:, x_Sh.shape[-1] :].unflatten(-1, (6, -1))
        shift1, scale1, gate1, shift2, scale2, gate2 = table_R6h.unbind(1)
        x_Sh = add_gated(x_Sh, gate1, self.self_attention(norm(x_Sh, shift1, scale1), self_bounds, rotary), rows)
        x_Sh = x_Sh + self.cross_attention(self.cross_norm(x_Sh), text_Kh, cross_bounds, text_cache)
        return add_gated(x_Sh, gate2, self.feed_forward(norm(x_Sh, shift2, scale2)), rows)


class TimeEmbedder(TwoLayers):
    """1000 t [R] -> [R, 7 h]: its embedding, and the embedding's projection to the layers' six modulations."""

    def __init__(self, config: DiTConfig):
        super().__init__(SINUSOID_DIM, config.hidden_size, config.params_dtype)
        self.proj = nn.Linear(config.hidden_size, 6 * config.hidden_size, dtype=config.params_dtype)

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(sinusoids(time, SINUSOID_DIM).roll(SINUSOID_DIM // 2, -1))  # cosines first
        return torch.cat((embedded, self.proj(F.silu(embedded))), -1)


class TextEmbedder(TwoLayers):
    """Two layers over the text encoder's states."""

    activation = staticmethod(GELU)


class Wan(DiT):
    """See the module."""

    # With `qk_layernorm` megatron-core sums gradients of the norms over tp; but tp splits these norms.
    fields = {"qk_layernorm": False, "activation_func": GELU}

    def spec(self) -> ModuleSpec:
        return layer_spec(IdentityOp, HeadsNormedCrossAttention, WanLayer)

    def add_embedders(self) -> None:
        c = self.config
        self.sigma_embedder = TimeEmbedder(c)
        self.text_embedder = TextEmbedder(c.text_dim, c.hidden_size, c.params_dtype)

    def add_output(self) -> None:
        h = self.config.hidden_size
        dtype = self.config.params_dtype
        self.final_table = nn.Parameter(torch.empty(2, h, dtype=dtype))
        self.final = nn.Linear(h, self.config.patch_dim, dtype=dtype)

    def conditioning(self, c_noise: torch.Tensor, part: PackSlice) -> tuple[torch.Tensor, torch.Tensor]:
        # t = sigma / (1 + sigma) = sigmoid(ln sigma), and c_noise is ln(sigma) / 4
        # float64, because the fastest sinusoid rotates by a radian per unit of 1000 t
        time = 1000 * torch.sigmoid(4 * c_noise.double())
        return self.sigma_embedder(time.float()), self.text_embedder(part.text)

    def position_embedding(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.new_zeros(())

    def rotary_angles(self, positions: torch.Tensor) -> torch.Tensor:
        return axial_angles(positions, self.config.hidden_size // self.config.num_attention_heads)

    def output(self, hidden: torch.Tensor, cond: torch.Tensor, rows: Rows) -> torch.Tensor:
        h = self.config.hidden_size
        shift, scale = (self.final_table + cond[:, None, :h]).unbind(1)
        return self.final(modulated_norm(hidden, shift, scale, rows, self.config.layernorm_epsilon))
