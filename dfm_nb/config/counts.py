"""The network as a table of its linear layers. Parameters, FLOPs, LoRA and memory estimates are computed from it.

The network itself could be counted instead: parameters on the meta device, FLOPs by torch's counter. That needs torch,
megatron-core and a process group and takes seconds, while `dfm plan` takes half a second and the training loop counts
each step in microseconds. So the table is written out here, without torch, and tests/config/test_counts.py compares it
with the network: each product by its name, shape, bias and tensor-parallel split, and the forward's FLOPs by
FlopCounterMode.

The argument of every function is the model group of a resolved configuration, with the data set's `in_channels` and
`text_dim`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Sequence

from dfm_nb.config.schema import ModelConfig

SINUSOID_DIM = 256
"""Width of the sinusoidal embedding of c_noise and of the frame rate (DiT, Peebles & Xie 2023)."""

VECTORS_PER_LAYER = 9
"""Shift, scale and gate for self attention, cross attention and MLP (adaLN-zero)."""


def patch_dim(model: ModelConfig) -> int:
    """Values per token of the latent: in_channels * patch_temporal * patch_spatial^2."""
    assert model.in_channels is not None
    return model.in_channels * model.patch_temporal * model.patch_spatial**2


@dataclass(frozen=True)
class Linear:
    """One product y = W x + b. The name is the module's in `model.dit`; for a layer's module, relative to the layer.

    applied_to : "video" or "text", once per token of it, or "sample", once per sample (noise level, frame rate, adaLN).
    split : what tensor parallelism divides: "column" the outputs, "row" the inputs (not the bias), None nothing.
    """

    name: str
    fan_in: int
    fan_out: int
    applied_to: str
    split: str | None = None
    bias: bool = True

    def sides(self, tp: int = 1) -> tuple[int, int]:
        """Inputs and outputs on one of `tp` ranks."""
        return self.fan_in // (tp if self.split == "row" else 1), self.fan_out // (tp if self.split == "column" else 1)

    def parameters(self, tp: int = 1) -> int:
        """Weights and biases on one of `tp` ranks."""
        fan_in, fan_out = self.sides(tp)
        return fan_in * fan_out + (fan_out if self.bias else 0)


def layer_linears(model: ModelConfig) -> tuple[Linear, ...]:
    """The products of each layer, in the order of the forward."""
    h, f, rank = model.hidden_size, model.ffn_hidden_size, model.adaln_lora_dim
    assert f is not None
    bias = model.variant != "dfm"  # NeMo DFM's has none here, and computes keys and values directly from the text
    text = h if bias else model.text_dim
    assert text is not None
    down = [Linear("adaln.down", h, rank, "sample", bias=False)] if rank else []
    adaln = [*down, Linear("adaln.up", rank or h, VECTORS_PER_LAYER * h, "sample", bias=bias)]
    return (
        *(adaln if model.variant != "wan" else ()),  # Wan's are a table, and a projection that all layers share
        Linear("self_attention.linear_qkv", h, 3 * h, "video", "column", bias),
        Linear("self_attention.linear_proj", h, h, "video", "row", bias),
        Linear("cross_attention.linear_q", h, h, "video", "column", bias),
        Linear("cross_attention.linear_kv", text, 2 * h, "text", "column", bias),
        Linear("cross_attention.linear_proj", h, h, "video", "row", bias),
        Linear("mlp.linear_fc1", h, f, "video", "column", bias),
        Linear("mlp.linear_fc2", f, h, "video", "row", bias),
    )


def outer_linears(model: ModelConfig) -> tuple[Linear, ...]:
    """The other products: `x_embedder` on the first pipeline stage, `final*` on the last, the rest on every stage."""
    h, p, text = model.hidden_size, patch_dim(model), model.text_dim
    assert text is not None
    ends = (Linear("x_embedder", p, h, "video"), Linear("final", h, p, "video"))
    if model.variant == "dfm":
        fps = _two_layers("fps_embedder", SINUSOID_DIM, SINUSOID_DIM, "sample")
        return (*_two_layers("sigma_embedder", h, h, "sample"), *fps, *ends)
    sigma = _two_layers("sigma_embedder", SINUSOID_DIM, h, "sample")
    if model.variant == "wan":
        modulations = Linear("sigma_embedder.proj", h, 6 * h, "sample")
        return (*sigma, modulations, *_two_layers("text_embedder", text, h, "text"), *ends)
    pool = [Linear("text_pool", h, h, "sample")] if model.pooled_text else []
    final = Linear("final_adaln.up", h, 2 * h, "sample")  # shift and scale
    fps = _two_layers("fps_embedder", SINUSOID_DIM, h, "sample")
    return (*sigma, *fps, Linear("text_embedder", text, h, "text"), *pool, final, *ends)


def _two_layers(name: str, fan_in: int, width: int, applied_to: str) -> tuple[Linear, Linear]:
    return Linear(f"{name}.fc1", fan_in, width, applied_to), Linear(f"{name}.fc2", width, width, applied_to)


# ---- parameters ---------------------------------------------------------------------------------------------------


def layer_parameter_count(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of one layer on one of `tp` ranks: the linear layers, norms, and Wan's table of modulations."""
    linears, h = sum(x.parameters(tp) for x in layer_linears(model)), model.hidden_size
    if model.variant == "wan":
        return linears + 4 * h // tp + (2 + 6) * h
    norms = 4 if model.variant == "dfm" else 2 if model.qk_layernorm else 0
    return linears + norms * h // model.num_attention_heads


def parameter_count(model: ModelConfig, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
    """Parameters of the DiT, without LoRA: of the complete model, or of one process of a layout.

    Parameters
    ----------
    tp, pp : tensor- and pipeline-parallel degrees. stage : the process's pipeline stage, from 0.
    """
    first, last = stage == 0, stage == pp - 1
    vectors = {"dit": 1, "dfm": 0, "wan": 2 * last}[model.variant]  # the text's norm; the last modulation table
    layers = model.num_layers // pp * layer_parameter_count(model, tp)
    outer = [x for x in outer_linears(model) if first or x.name != "x_embedder"]
    outer = [x for x in outer if last or not x.name.startswith("final")]
    return layers + vectors * model.hidden_size + sum(x.parameters() for x in outer)


def lora_parameter_count(model: ModelConfig, rank: int, tp: int = 1, pp: int = 1) -> int:
    """Parameters of LoRA: A [rank, in] and B [out, rank] for each product of attention and MLP.

    They are of the complete network, or of one process of a layout: tp splits the side that it splits of the weight.
    """
    return model.num_layers // pp * rank * sum(sum(x.sides(tp)) for x in layer_linears(model) if x.split)


# ---- work ---------------------------------------------------------------------------------------------------------


def attention_flops(model: ModelConfig, q_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
    """FLOPs of q k^T and of weights times v, in all layers."""
    pairs = sum(q * (q + kv) for q, kv in zip(q_lens, kv_lens, strict=True))  # self and cross attention
    return model.num_layers * 2 * 2 * model.hidden_size * pairs


def forward_flops(model: ModelConfig, q_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
    """FLOPs of one forward over packed samples: products with weights and in attention; a multiply-add counts as two.

    Parameters
    ----------
    q_lens, kv_lens : video and text tokens of each sample, [num_samples].

    Notes
    -----
    True lengths are counted: padding, and pairs of tokens of different samples, do not count. Neither does the average
    over a caption's tokens, which the network computes as a product.
    """
    times = {"video": sum(q_lens), "text": sum(kv_lens), "sample": len(q_lens)}
    layer = sum(x.fan_in * x.fan_out * times[x.applied_to] for x in layer_linears(model))
    outer = sum(x.fan_in * x.fan_out * times[x.applied_to] for x in outer_linears(model))
    return 2 * (model.num_layers * layer + outer) + attention_flops(model, q_lens, kv_lens)


def model_flops(model: ModelConfig, q_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
    """Model FLOPs of one training step over these samples: forward and backward, three times `forward_flops`.

    With LoRA the weights are frozen, so their products count twice, attention's three times, and LoRA's not at all.
    Recomputed activations are not counted (as in the MFU of Chowdhery et al. 2022).
    """
    forward = forward_flops(model, q_lens, kv_lens)
    if model.lora.rank:
        return 2 * forward + attention_flops(model, q_lens, kv_lens)
    return 3 * forward


# ---- widths for the memory estimate -------------------------------------------------------------------------------


def inner_widths(model: ModelConfig) -> Counter[str]:
    """Values per video token between the first and the last product of each branch of a layer, before any split.

    Self attention: queries, keys, values and the result. Cross attention: queries and the result. MLP: both sides of
    its activation.
    """
    widths: Counter[str] = Counter()
    for x in layer_linears(model):
        if x.applied_to == "video":
            widths[x.name.split(".")[0]] += x.fan_out if x.split == "column" else x.fan_in
    return widths


def text_width(model: ModelConfig) -> int:
    """Values per text token in a layer: its keys and values."""
    return sum(x.fan_out for x in layer_linears(model) if x.applied_to == "text")


def row_width(model: ModelConfig) -> int:
    """Values per sample in a layer's adaLN: inputs of its products, and the shifts, scales and gates."""
    vectors = 6 if model.variant == "wan" else VECTORS_PER_LAYER
    return sum(x.fan_in for x in layer_linears(model) if x.applied_to == "sample") + vectors * model.hidden_size
