"""Memory of training on one process.

A layer keeps for backward the tensors that autograd saves, which tests count on real layers;
`benchmarks/results/plan.md` compares the total with the peak of real steps on CPU.

Letters: t tokens of a pack on a rank, h hidden size, f MLP width, p values in a token of the latent, e bytes of a
value.
"""

from dataclasses import replace

from dfm_nb.config import counts, networks
from dfm_nb.config.schema import ModelConfig
from dfm_nb.planner.layouts import GpuLayout, Load


def training_bytes(model: ModelConfig, plan: GpuLayout, load: Load) -> dict[str, int]:
    """Bytes on the fullest process, which is on the first or the last stage, by owner."""
    first = stage_bytes(model, plan, load, 0)
    last = stage_bytes(model, plan, load, plan.pp - 1)
    return last if sum(last.values()) > sum(first.values()) else first


def stage_bytes(model: ModelConfig, plan: GpuLayout, load: Load, stage: int) -> dict[str, int]:
    """Bytes on one process of a pipeline stage; the averages of the weights count as the optimizer's."""
    e = load.bytes_per_number
    count, trained = parameters(model, plan, stage)
    adam = trained * (8 if e == 4 else 12)  # two moments in float32, and a float32 copy of bf16 weights
    if plan.distributed_optimizer:
        adam //= plan.dp * plan.cp
    averages = 4 * trained * load.ema_averages
    # One-forward-one-backward schedule: stage i starts PP - i packs before its first backward.
    in_flight = min(plan.pp - stage, max(1, load.packs // plan.dp))
    pack = model.num_layers // plan.pp * layer_saved_bytes(model, plan, load) + _outside_bytes(model, plan, load, stage)
    activations = in_flight * pack + _backward_bytes(model, plan, load, stage)
    # When activations are freed, all gradients of a pack wait for their sum (`Trainer._add_gradients`); and averages of
    # bf16 weights in shards need float32 copies of them.
    waiting = 0
    if plan.distributed_optimizer:
        waiting = 4 * trained if load.ema_averages and e < 4 else 0
    elif plan.tp == plan.pp == 1 and (load.cpu or plan.dp == 1):
        waiting = e * trained
    return {
        # a student has its teacher beside it, unless that is the base of its LoRA
        "parameters": e * count * (2 if model.student and not model.lora.rank else 1),
        "gradients": 4 * trained,
        "optimizer": adam + averages,
        "activations": max(activations, waiting),
    }


def parameters(model: ModelConfig, plan: GpuLayout, stage: int = 0) -> tuple[int, int]:
    """Parameters of the network on a process, and how many are trained: with LoRA only the adapters.

    Frozen weights are held once, in the network's dtype: no gradients, optimizer state, float32 copies or averages.
    """
    count = counts.parameter_count(model, plan.tp, plan.pp, stage)
    if not model.lora.rank:
        return count, count
    trained = counts.lora_parameter_count(model, model.lora.rank, plan.tp, plan.pp)
    return count + trained, trained


def layer_saved_bytes(model: ModelConfig, plan: GpuLayout, load: Load) -> int:
    """Bytes that autograd keeps for one layer (`model.dit.DiTLayer`) between forward and backward.

    Example: DiT-XL (h = 1152), packs of t = 8192 tokens, bf16, one process. A tensor [t, h] has 18.9 MB. The layer
    keeps 12 of them around its branches and 14 inside: q, k, v and the result; q and the result; 4 before and 4 after
    GELU. In total these are 490 MB, and 14 GB in 28 layers.
    """
    h = model.hidden_size
    e = load.bytes_per_number
    t = plan.local_tokens(load)
    outside = plan.outside_tokens(load)
    if plan.recompute == "full":  # only the layer's input
        return outside * h * e
    kept = model.network.residual_tensors * outside * h * e
    # Mean and inverse deviation of each norm; float32 on GPUs.
    kept += 3 * 2 * outside * (e if load.cpu else 4)
    # Inside the branches tensors are split over TP. A product's result is kept by the next operation, attention or
    # GELU, and the second product's input by that product. Attention keeps its result too, but it is the same tensor.
    kept += t * counts.inner_widths(model).total() // plan.tp * e
    kept += load.text * counts.text_width(model) // plan.tp * e
    kept += load.rows * counts.row_width(model) * e
    if model.lora.rank:  # A x of six products of the video and one of the text
        kept += (6 * t + load.text) * model.lora.rank * e
    return kept + _attention_saved_bytes(model, plan, load)


def _attention_saved_bytes(model: ModelConfig, plan: GpuLayout, load: Load) -> int:
    """Bytes that attention keeps in addition to queries, keys, values and its result."""
    e = load.bytes_per_number
    t = plan.local_tokens(load)
    width = model.hidden_size // plan.tp
    heads = model.num_attention_heads // plan.tp
    kept = 0
    if model.qk_layernorm:
        # The norms keep unit vectors and their scales in float32; attention keeps the norms' results. The three thirds
        # of the joint projection are also kept, because the values are a view of it.
        unit = model.network.norm_bytes(plan.tp)
        kept += 2 * t * (unit + width * e)
        if model.network.cross_norms:  # its raw queries are not kept
            kept += t * unit + load.text * (unit + width * e)
    if plan.recompute == "selective":  # attention is recomputed in backward and keeps nothing
        return kept
    kept += 2 * t * heads * 4  # logarithm of the softmax's denominator, of self and of cross attention
    if plan.cp > 1:
        # Keys and values of the complete pack are gathered. They replace the local ones, and with norms also the
        # complete joint projection and the normed keys.
        kept += 2 * load.tokens * width * e - (4 if model.qk_layernorm else 2) * t * width * e
    return kept


def _outside_bytes(model: ModelConfig, plan: GpuLayout, load: Load, stage: int) -> int:
    """Bytes that a pack in flight keeps outside of the layers: embedders, final layer, loss."""
    h = model.hidden_size
    e = load.bytes_per_number
    t = plan.local_tokens(load)
    p = model.network.patch_dim
    assert model.text_dim is not None
    frozen = bool(model.lora.rank)  # then embedders have no backward, and the layers keep only the text embedding
    # Text embedder: its input, and what the network keeps of its result.
    text_width = h if frozen else model.network.text_tensors * h + model.text_dim
    kept = load.text * text_width * e
    kept += load.rows * (9 * h + 2 * networks.SINUSOID_DIM) * e  # embedders of noise level and frame rate
    kept += load.rows * load.text * e  # weights of the pooled text
    if model.rope:  # cosines and sines, which layers share
        heads = model.num_attention_heads // plan.tp if load.cpu else 1
        kept += 2 * 4 * t * h // model.num_attention_heads * heads
    if stage == 0 and not frozen:
        kept += t * p * e
    if stage == plan.pp - 1:
        kept += _final_bytes(model, plan, load)
        kept += 6 * t * p * 4  # latent, noise, input, output, target and difference, in float32
    return kept


def _final_bytes(model: ModelConfig, plan: GpuLayout, load: Load) -> int:
    """Bytes that the final layer keeps: its norm's input and result, and its product's input if that is trained."""
    return (2 if model.lora.rank else 3) * plan.local_tokens(load) * model.hidden_size * load.bytes_per_number


def _backward_bytes(model: ModelConfig, plan: GpuLayout, load: Load, stage: int) -> int:
    """Peak memory of the backward of a stage's last layer, in addition to the kept tensors."""
    h = model.hidden_size
    e = load.bytes_per_number
    t = plan.local_tokens(load)
    f = counts.inner_widths(model)["mlp"] // 2 // plan.tp
    # The peak is in the MLP, where tensors are widest: gradients of GELU's result, the residual stream and fc2. A
    # frozen fc2 has no gradient, but then GELU's result has one for each product (fc2, LoRA's A), and their sum.
    peak = t * f * e + plan.outside_tokens(load) * h * e + (t if model.lora.rank else h) * f * e
    if plan.recompute == "full":  # the layer's tensors are recomputed
        return peak + layer_saved_bytes(model, replace(plan, recompute="none"), load)
    # the final layer's tensors are freed by then
    freed = _final_bytes(model, plan, load) if stage == plan.pp - 1 else 0
    return max(peak - freed, 3 * t * h * e)
