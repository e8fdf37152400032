"""Parameters, FLOPs, LoRA and widths of a network, from its table of linear layers (`config.networks`).

The network itself could be counted instead: parameters on the meta device, FLOPs by torch's counter. That needs torch,
megatron-core and a process group and takes seconds, while `dfm plan` takes half a second and the training loop counts
each step in microseconds. tests/config/test_counts.py compares the two.

The argument of every function is the model group of a resolved configuration, with the data set's `in_channels` and
`text_dim`.
"""

from collections import Counter
from typing import Sequence

from dfm_nb.config.schema import ModelConfig

# ---- parameters ---------------------------------------------------------------------------------------------------


def layer_parameter_count(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of one layer on one of `tp` ranks: the linear layers, norms and other vectors."""
    return sum(x.parameters(tp) for x in model.network.layer_linears()) + model.network.layer_vectors(tp)


def parameter_count(model: ModelConfig, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
    """Parameters of the DiT, without LoRA: of the complete model, or of one process of a layout.

    Parameters
    ----------
    tp, pp : tensor- and pipeline-parallel degrees. stage : the process's pipeline stage, from 0.
    """
    last = stage == pp - 1
    total = model.num_layers // pp * layer_parameter_count(model, tp) + model.network.outer_vectors(last)
    for x in model.network.outer_linears():
        other_stage = (stage and x.name == "x_embedder") or (not last and x.name.startswith("final"))
        if not other_stage:
            total += x.parameters()
    return total


def lora_parameter_count(model: ModelConfig, rank: int, tp: int = 1, pp: int = 1) -> int:
    """Parameters of LoRA: A [rank, in] and B [out, rank] for each product of attention and MLP.

    They are of the complete network, or of one process of a layout: tp splits the side that it splits of the weight.
    """
    return model.num_layers // pp * rank * sum(sum(x.sides(tp)) for x in model.network.layer_linears() if x.split)


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
    layer = sum(x.fan_in * x.fan_out * times[x.applied_to] for x in model.network.layer_linears())
    outer = sum(x.fan_in * x.fan_out * times[x.applied_to] for x in model.network.outer_linears())
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
    for x in model.network.layer_linears():
        if x.applied_to == "video":
            widths[x.name.split(".")[0]] += x.fan_out if x.split == "column" else x.fan_in
    return widths


def text_width(model: ModelConfig) -> int:
    """Values per text token in a layer: its keys and values."""
    return sum(x.fan_out for x in model.network.layer_linears() if x.applied_to == "text")


def row_width(model: ModelConfig) -> int:
    """Values per sample in a layer's adaLN: inputs of its products, and the shifts, scales and gates."""
    inputs = sum(x.fan_in for x in model.network.layer_linears() if x.applied_to == "sample")
    return inputs + model.network.vectors_per_layer * model.hidden_size
