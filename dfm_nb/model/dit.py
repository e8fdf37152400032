"""The Diffusion Transformer (Peebles & Xie 2023) on megatron-core: adaLN-zero, text cross attention, packed sequences.

Every sample of a pack has its own conditioning rows (noise level, fps, pooled text), positions and text. A new model
outputs zero. Its weights depend on (seed, parameter name), not on the layout.
`config.networks` has the table of its linear layers; tests keep the two equal. Other networks are subclasses.

Shapes, also in the names of tensors: S tokens of this rank, R conditioning rows of the pack, K text tokens, h hidden,
p = channels * patch volume, H heads of this tp rank, d channels of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.transformer import attention, transformer_block
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import make_viewless_tensor

from dfm_nb.base import plugins, seeds
from dfm_nb.config.networks import SINUSOID_DIM, Network
from dfm_nb.config.schema import ModelConfig
from dfm_nb.model.adaln import Rows, add_gated, modulated_norm
from dfm_nb.model.attention import PackedAttention, SegmentBounds, Varlen
from dfm_nb.model.linear import A, B, ColumnLinear, RowLinear
from dfm_nb.model.pack_slice import PackSlice
from dfm_nb.model.positions import factorised_sincos, rotary_angles
from dfm_nb.parallel.groups import global_name, own_part, shard_dim


@dataclass
class DiTConfig(TransformerConfig):
    """megatron-core's TransformerConfig with our additional fields."""

    patch_dim: int = 64  # channels * patch_temporal * patch_spatial^2
    text_dim: int = 384
    adaln_lora_dim: int | None = None
    pooled_text: bool = True
    rope: bool = False
    packed_attention_backend: str = "sdpa"
    lora_rank: int | None = None
    lora_alpha: float | None = None
    has_cond_embedder: bool = True  # finalize_model_grads then sums the gradients of `replicated` over the stages


class _RMSNormOnCPU(torch.autograd.Function):
    """x * w / sqrt(mean(x^2) + eps) over the last dim, with half of the elementwise operations of torch's on CPU."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx, grad):
        unit, scale, weight = ctx.saved_tensors
        product = grad * unit
        along = (product @ weight)[..., None] / unit.shape[-1]
        return torch.addcmul(grad * weight, unit, along, value=-1).mul_(scale), product.flatten(0, -2).sum(0), None


class RMSNorm(nn.Module):
    """RMS norm in float32; megatron-core 0.16's torch norm does not support sequence parallelism."""

    def __init__(self, hidden_size: int, config: DiTConfig, eps: float = 1e-6, **_kwargs):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return _RMSNormOnCPU.apply(x.float(), self.weight.float(), self.eps).type_as(x)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)  # CUDA's kernel is float32 inside


class AdaLN(nn.Module):
    """Shift, scale and gate from the conditioning row; the last projection starts at zero (adaLN-zero).

    With a `rank` r the projection h -> n*h goes through r dims.
    """

    def __init__(self, config: DiTConfig, chunks: int, rank: int | None = None):
        super().__init__()
        h = config.hidden_size
        r = rank
        self.chunks = chunks
        self.down = nn.Linear(h, r, bias=False, dtype=config.params_dtype) if r else None
        self.up = nn.Linear(r or h, chunks * h, bias=config.add_bias_linear, dtype=config.params_dtype)

    def forward(self, cond: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`chunks` tables [R, h] of shifts, scales and gates."""
        c = F.silu(cond)
        return self.up(c if self.down is None else self.down(c)).chunk(self.chunks, -1)


class TwoLayers(nn.Module):
    """fc2(activation(fc1(x))), in the dtype of the weights."""

    activation = staticmethod(F.silu)

    def __init__(self, fan_in: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.fc1 = nn.Linear(fan_in, width, dtype=dtype)
        self.fc2 = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x.to(self.fc1.weight.dtype))))


class ScalarEmbedder(TwoLayers):
    """Log-spaced sinusoids of a scalar of order one (c_noise, ln(fps)/4), then two layers."""

    def __init__(self, config: DiTConfig):
        super().__init__(SINUSOID_DIM, config.hidden_size, config.params_dtype)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        # 0.1 to 100 radians per unit: 1 % more sigma (0.0025 of c_noise) rotates the fastest by a quarter radian
        omega = torch.logspace(-1, 2, SINUSOID_DIM // 2, device=value.device)
        angle = value.float()[:, None] * omega
        return super().forward(torch.cat((angle.cos(), angle.sin()), -1))


class _Rotate(torch.autograd.Function):
    """x * cos + swap(x) * sin for [S, heads, d], where `swap` exchanges the halves of d; see `rotary_table`."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _turned(grad, *ctx.saved_tensors, -1), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    wide = x.float()
    a, b = wide.chunk(2, -1)
    return torch.addcmul(wide * cos, torch.cat((b, a), -1), sin, value=direction).type_as(x)


def rotary_table(angles: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines, and sines signed by half, that rotate the pairs (x[i], x[i + d/2]) of [S, heads, d].

    angles : [S, d/2]. Returns float32 [S, 1, d], on CPU [S, heads, d]: there a broadcast over the heads is half as
    fast.
    """
    cos, sin = angles.cos().float(), angles.sin().float()
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    if angles.device.type == "cpu":
        cos, sin = (t.expand(-1, heads, -1).contiguous() for t in (cos, sin))
    return cos, sin


class _Attending:
    """The end of both attentions. Their modules are megatron-core's, so that names, shards and initialisation are, but
    their forward is not: for one sequence without a batch, megatron-core's makes 70 views a layer.
    """

    def attend(self: Any, query, key, value, bounds: SegmentBounds | Varlen) -> torch.Tensor:
        """[S, H, d], [K, H, d] twice -> [S, h]."""
        if self.checkpoint_core_attention and self.training:
            core = functools.partial(self.core_attention, bounds=bounds)
            mixed = tensor_parallel.checkpoint(core, False, query, key, value)
        else:
            mixed = self.core_attention(query, key, value, bounds)
        return self.linear_proj(mixed.to(self.config.params_dtype))

    def by_head(self: Any, projected: torch.Tensor, parts: int, bounds: SegmentBounds | Varlen):
        """[S, H * parts * d] -> `parts` tensors [S, H, d]: the parts of a head are neighbours in the weights."""
        if isinstance(bounds, SegmentBounds) and bounds.in_float32:
            projected = projected.float()  # once, and not around each of the steps up to the product
        return projected.unflatten(-1, (-1, parts * self.hidden_size_per_attention_head)).chunk(parts, -1)


class PackedSelfAttention(_Attending, attention.SelfAttention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.q_layernorm is None:  # megatron-core 0.19's, without `qk_layernorm`
            self.q_layernorm = self.k_layernorm = IdentityOp()

    def forward(self, x_Sh: torch.Tensor, bounds: SegmentBounds | Varlen, rotary=None) -> torch.Tensor:
        """rotary : a `rotary_table`, or None."""
        query, key, value = self.by_head(self.linear_qkv(x_Sh), 3, bounds)
        query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query, key = _Rotate.apply(query, *rotary), _Rotate.apply(key, *rotary)
        return self.attend(query, key, value, bounds)


class TextCrossAttention(_Attending, attention.CrossAttention):
    """Cross attention to the text, whose keys and values it can keep."""

    norm: type = IdentityOp
    """Of the queries and keys of each head."""

    def __init__(self, config: DiTConfig, submodules, *args, **kwargs):
        super().__init__(config, submodules, *args, **kwargs)
        width = self.hidden_size_per_attention_head
        eps = config.layernorm_epsilon
        self.q_layernorm = self.norm(width, config, eps)
        self.k_layernorm = self.norm(width, config, eps)

    def forward(self, x_Sh, text_Kh, bounds: SegmentBounds | Varlen, cache: dict | None = None) -> torch.Tensor:
        """cache : keys and values by layer number, filled at the first call; None computes them in each."""
        (query,) = self.by_head(self.linear_q(x_Sh), 1, bounds)
        if cache is not None and self.layer_number in cache:
            key, value = cache[self.layer_number]
        else:
            key, value = self.by_head(self.linear_kv(text_Kh), 2, bounds)
            key = self.k_layernorm(key)
            if cache is not None:
                cache[self.layer_number] = key, value
        return self.attend(self.q_layernorm(query), key, value, bounds)


@dataclass
class LayerContext:
    """The inputs of each `DiTLayer` in addition to hidden states and text, passed through megatron-core's block.

    `TransformerBlock` was written for language models and calls its layers with a fixed set of arguments. It passes two
    of them on unread: `attention_mask` and `packed_seq_params`. The conditioning is passed as the first, because with
    recomputed layers gradients reach only tensors that are arguments; everything else is passed as the second, in this
    object.

    self_bounds, cross_bounds : as the back end of attention takes them.
    """

    rows: Rows
    self_bounds: SegmentBounds | Varlen
    cross_bounds: SegmentBounds | Varlen
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    text_cache: dict | None
    qkv_format: str = "thd"  # as in `PackedSeqParams`

    def arguments(self, cond: torch.Tensor) -> dict:
        """The block's arguments with this object and the conditioning tables' input [R, h]."""
        return {"attention_mask": cond, "packed_seq_params": self}


class DiTLayer(TransformerLayer):
    """Self attention, text cross attention and MLP, each normalised, shifted, scaled and gated by adaLN-zero."""

    vectors = Network.vectors_per_layer
    compiled: Callable | None = None
    """`inner` for training, if it is compiled."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.add_modulation()

    def add_modulation(self):
        self.adaln = AdaLN(self.config, self.vectors, self.config.adaln_lora_dim)
        for p in self.adaln.parameters():  # under SP each tp rank sees its own tokens only: sum the gradients over tp
            p.sequence_parallel = self.config.sequence_parallel

    def forward(self, hidden_states, attention_mask=None, context=None, packed_seq_params=None, **_kwargs):
        """Called by the block, with `LayerContext.arguments`.

        `attention_mask` is not a mask but cond_Rh, and packed_seq_params is the `LayerContext`.
        """
        s = packed_seq_params
        # sampling and validation have other shapes, for which compiling would not pay
        inner = self.compiled if self.compiled and torch.is_grad_enabled() else type(self).inner
        inputs = (s.rows, s.self_bounds, s.cross_bounds, s.rotary, s.text_cache)
        return inner(self, hidden_states, attention_mask, context, *inputs), context

    def inner(self, x_Sh, cond_Rh, text_Kh, rows, self_bounds, cross_bounds, rotary, text_cache) -> torch.Tensor:
        """The layer as a function of tensors.

        x_Sh -> 9 tables [R, h] from cond_Rh -> x + gate1[row] * self_attention(norm(x) * (1 + scale1) + shift1)
             -> the same with cross attention to text_Kh (2) and with the MLP (3)
        """
        norm = functools.partial(modulated_norm, rows=rows, eps=self.config.layernorm_epsilon)
        shift1, scale1, gate1, shift2, scale2, gate2, shift3, scale3, gate3 = self.adaln(cond_Rh)
        y_Sh = self.self_attention(norm(x_Sh, shift1, scale1), self_bounds, rotary)
        x_Sh = add_gated(x_Sh, gate1, y_Sh, rows)
        y_Sh = self.cross_attention(norm(x_Sh, shift2, scale2), text_Kh, cross_bounds, text_cache)
        x_Sh = add_gated(x_Sh, gate2, y_Sh, rows)
        return add_gated(x_Sh, gate3, self.feed_forward(norm(x_Sh, shift3, scale3)), rows)

    def feed_forward(self, x_Sh: torch.Tensor) -> torch.Tensor:
        return self.mlp.linear_fc2(self.mlp.activation_func(self.mlp.linear_fc1(x_Sh)))


def layer_spec(
    norm: type, cross_attention: type[TextCrossAttention] = TextCrossAttention, layer: type[TransformerLayer] = DiTLayer
) -> ModuleSpec:
    """megatron-core's attention and MLP modules, with packed attention as their core.

    norm : norm of queries and keys in self attention.
    """
    parts = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    # megatron-core 0.16 builds the MLP from a spec; 0.19 warns about one and has this function instead
    build_mlp = getattr(MLP, "as_mlp_submodule", None)
    mlp = functools.partial(build_mlp, submodules=parts) if build_mlp else ModuleSpec(module=MLP, submodules=parts)
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=PackedSelfAttention,
                params={"attn_mask_type": AttnMaskType.padding},
                submodules=attention.SelfAttentionSubmodules(
                    linear_qkv=ColumnLinear,
                    core_attention=PackedAttention,
                    linear_proj=RowLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            cross_attention=ModuleSpec(
                module=cross_attention,
                params={"attn_mask_type": AttnMaskType.padding},
                submodules=attention.CrossAttentionSubmodules(
                    linear_q=ColumnLinear, linear_kv=ColumnLinear, core_attention=PackedAttention, linear_proj=RowLinear
                ),
            ),
            mlp=mlp,
        ),
    )


class DiT(MegatronModule):
    """One pipeline stage (or all) of the network, F of the objectives."""

    # attributes that megatron-core needs: how many tensors a stage passes on, and whether two stages share a weight
    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False
    fields: ClassVar[dict[str, Any]] = {}
    """Fields of `DiTConfig` that the network sets."""
    sigma_embedder: nn.Module
    fps_embedder: nn.Module
    text_embedder: nn.Module

    def __init__(
        self, config: DiTConfig, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ):
        super().__init__(config)
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        layers = transformer_block.get_num_layers_to_build(config, vp_stage)
        self.decoder = transformer_block.TransformerBlock(
            config,
            transformer_block.TransformerBlockSubmodules(layer_specs=[self.spec()] * layers),
            post_layer_norm=False,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        self.add_embedders()
        self.replicated = {name for name, _ in self.named_parameters() if not name.startswith("decoder.")}
        for name in self.replicated:
            p = self.get_parameter(name)
            p.pipeline_parallel = True  # gradients are summed over the stages ...
            p.shared = not pre_process  # ... and counted once in the gradient norm
        if pre_process:
            self.x_embedder = nn.Linear(config.patch_dim, config.hidden_size, dtype=config.params_dtype)
        if post_process:
            self.add_output()

    # ---- overridden by other networks: layers, conditioning, positions, output ----------------------------

    def spec(self) -> ModuleSpec:
        return layer_spec(RMSNorm if self.config.qk_layernorm else IdentityOp)

    def add_embedders(self) -> None:
        """The embedders of conditioning and text: every pipeline stage has an identical copy."""
        c = self.config
        self.sigma_embedder = ScalarEmbedder(c)
        self.fps_embedder = ScalarEmbedder(c)
        self.text_embedder = nn.Linear(c.text_dim, c.hidden_size, dtype=c.params_dtype)
        self.text_norm = RMSNorm(c.hidden_size, c)
        if c.pooled_text:
            self.text_pool = nn.Linear(c.hidden_size, c.hidden_size, dtype=c.params_dtype)

    def add_output(self) -> None:
        self.final_adaln = AdaLN(self.config, 2)
        self.final = nn.Linear(self.config.hidden_size, self.config.patch_dim, dtype=self.config.params_dtype)

    def conditioning(self, c_noise: torch.Tensor, part: PackSlice) -> tuple[torch.Tensor, torch.Tensor]:
        """Conditioning rows [R, h] and text context [K, h]."""
        dtype = self.config.params_dtype
        context = self.text_norm(self.text_embedder(part.text.to(dtype)))
        cond = self.sigma_embedder(c_noise) + self.fps_embedder(part.fps.log() / 4)
        if self.config.pooled_text:
            cond = cond + self.text_pool(part.pool.to(dtype) @ context)
        return cond, context

    def position_embedding(self, positions: torch.Tensor) -> torch.Tensor:
        """float [S, 3] -> float [S, h], or a shape that broadcasts to it."""
        return factorised_sincos(positions, self.config.hidden_size)

    def rotary_angles(self, positions: torch.Tensor) -> torch.Tensor:
        """float [S, 3] -> float [S, d/2] for heads of d channels."""
        return rotary_angles(positions, self.config.hidden_size // self.config.num_attention_heads)

    def output(self, hidden: torch.Tensor, cond: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[S, h] -> [S, p]."""
        shift, scale = self.final_adaln(cond)
        return self.final(modulated_norm(hidden, shift, scale, rows, self.config.layernorm_epsilon))

    # ---- shared by all networks -------------------------------------------------------------------------------

    def set_input_tensor(self, tensor) -> None:
        """tensor : [S, 1, h] from the stage before, or None, alone in a list or not; called by megatron-core."""
        hidden = tensor[0] if isinstance(tensor, list) else tensor
        self.decoder.set_input_tensor(None if hidden is None else hidden[:, 0])

    def forward(self, x: torch.Tensor, c_noise: torch.Tensor, part: PackSlice) -> torch.Tensor:
        """F(c_in x; c_noise) of this rank's tokens.

        Parameters
        ----------
        x : float [S, p], noisy tokens scaled by c_in. c_noise : float32 [R]. part : the rest of the pack.

        Returns
        -------
        float [S, p] on the last pipeline stage, hidden states [S, 1, h] on the others (megatron-core's shape).
        """
        c = self.config
        part = part.for_backend(c.packed_attention_backend)
        cond, context = self.conditioning(c_noise, part)
        rows = layer_rows = Rows.of(part.row, len(cond), c.params_dtype)
        layer_cond = cond
        hidden = None
        if self.pre_process:
            position = self.position_embedding(part.positions).to(c.params_dtype)
            hidden = self.x_embedder(x.to(c.params_dtype)) + position
        if c.sequence_parallel:
            if hidden is not None:
                hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
            context = tensor_parallel.scatter_to_sequence_parallel_region(context)
            own = part.row.chunk(c.tensor_model_parallel_size)[mpu.get_tensor_model_parallel_rank()]
            layer_rows = Rows.of(own, len(cond), c.params_dtype)
            # each tp rank's layers see only their own tokens: backward sums the conditioning's gradient over tp
            layer_cond = tensor_parallel.copy_to_tensor_model_parallel_region(cond)
        rotary = None
        if c.rope:
            angles = self.rotary_angles(part.positions)
            rotary = rotary_table(angles, c.num_attention_heads // c.tensor_model_parallel_size)
        step = LayerContext(layer_rows, part.self_bounds, part.cross_bounds, rotary, part.text_cache)
        hidden = self.decoder(hidden_states=hidden, context=context, **step.arguments(layer_cond))
        if not self.post_process:  # megatron-core frees it after sending it, and a view would keep its memory
            return make_viewless_tensor(inp=hidden[:, None], requires_grad=hidden.requires_grad, keep_graph=True)
        if c.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self.output(hidden, cond, rows)


@torch.no_grad()
def init_weights(model: DiT, seed: int) -> None:
    """Xavier-uniform projections, N(0, 0.02) embedders of noise level and fps, zero adaLN and output layers: as in the
    DiT paper's code.

    Each parameter is drawn at its full shape from (seed, its name in the complete model), then sliced for this tp rank.
    """
    for local_name, p in model.named_parameters():
        name = global_name(local_name, model)
        dim = shard_dim(p)
        shape = list(p.shape)
        if dim is not None:
            shape[dim] *= mpu.get_tensor_model_parallel_world_size()
        p.copy_(own_part(_initial_value(name, shape, seeds.generator_for(seed, "init", name)), p))


def _initial_value(name: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith(A):
        return (torch.rand(shape, generator=generator) * 2 - 1) * shape[1] ** -0.5
    if name.endswith("_table"):  # modulations that are a parameter
        return torch.randn(shape, generator=generator) * shape[1] ** -0.5
    if name.endswith(B) or ".up." in name or name.startswith(("final.", "final_adaln.up.")):
        return torch.zeros(shape)
    if "_embedder.fc" in name:
        return torch.randn(shape, generator=generator) * 0.02
    bound = math.sqrt(6 / (shape[0] + shape[1]))
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound


def network_class(model: ModelConfig) -> type[DiT]:
    """The network that `model.variant` names."""
    return plugins.code(model.network.transformer)


def transformer_config(model, mixed_precision: str = "fp32", backend: str = "sdpa", **overrides) -> DiTConfig:
    """megatron-core's configuration for a resolved `config.model` group (with `in_channels` and `text_dim` set)."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[mixed_precision]
    vpp = model.virtual_pipeline_model_parallel_size
    # fields with the same name: sizes, degrees of parallelism, ...
    own = {f.name for f in fields(DiTConfig)} - {"attention_backend"}
    settings = {name: value for name, value in dict(model).items() if name in own} | dict(
        patch_dim=model.network.patch_dim,
        lora_rank=model.lora.rank,
        lora_alpha=model.lora.alpha,
        packed_attention_backend=backend,
        # batched point-to-point calls are silently wrong for interleaved stages on gloo
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=vpp is None,
        normalization="RMSNorm",
        activation_func=F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=mixed_precision == "bf16",
        calculate_per_token_loss=True,  # sums over tokens, divided once by all ranks' count: packs differ in length
        use_cpu_initialization=not torch.cuda.is_available(),
        init_method=_leave,  # the values come from `init_weights`
        output_layer_init_method=_leave,
        # only the input of each layer is kept, and everything else is recomputed
        recompute_method="uniform" if model.recompute_granularity == "full" else None,
        recompute_num_layers=1 if model.recompute_granularity == "full" else None,
        recompute_modules=["core_attn"] if model.recompute_granularity == "selective" else None,
    )
    return DiTConfig(**(settings | network_class(model).fields | overrides))


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight
