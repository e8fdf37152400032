"""Memory and time of a training step on one process, by owner and by cause.

A layer keeps for backward the tensors that autograd saves, which tests count on real layers;
`benchmarks/results/plan.md` compares the total with the peak of real steps on CPU. Time is that of matrix products at
one rate, of memory traffic, links and the pipeline's bubble. Latency is not counted. Rates are those of data sheets:
they give ratios between layouts, not times.

Letters: t tokens of a pack on a rank, h hidden size, f MLP width, p values in a token of the latent, e bytes of a
value.
"""

import math
from dataclasses import dataclass, replace

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


# ---- time -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Rates that convert work to time.

    gpu_tflops : 10^12 operations per second of one GPU. link_gb_s : 10^9 bytes per second from one GPU to its peers
    within a node. node_link_gb_s : to other nodes. gpus_per_node : GPUs joined by the faster links.
    memory_tb_s : 10^12 bytes per second of one GPU's memory.
    """

    gpu_tflops: float
    link_gb_s: float
    node_link_gb_s: float
    gpus_per_node: int
    memory_tb_s: float
    gpu_memory_gib: float

    def link(self, stride: int, n: int, gpus: int) -> float:
        """Bytes per second that each rank of a group sends in a ring over `n` ranks, `stride` apart, of `gpus` in all.

        Between nodes a ring uses the adapters of all its members in a node. Groups begin at multiples of their span and
        nodes at multiples of theirs, so the smallest overlap is the greatest common divisor.

        Example: 4 ranks 2 apart on nodes of 8 GPUs span 8, so they share one node: `link_gb_s`. 8 ranks 2 apart span
        16, two nodes with 4 members each: 4 adapters, 4 * `node_link_gb_s`.
        """
        shared = math.gcd(self.gpus_per_node, stride * n)
        if gpus <= self.gpus_per_node or shared == stride * n:
            return 1e9 * self.link_gb_s
        return 1e9 * min(self.link_gb_s, max(1, shared // stride) * self.node_link_gb_s)


# Data sheets: A100, H100 and H200 SXM, their DGX and the B200's, GB200 and GB300 NVL72 (NVIDIA). Dense bf16 is half
# of their figure with sparsity, NVLink one way half of its total; between nodes one adapter per GPU: ConnectX-6
# (200 Gb/s), ConnectX-7 (400 Gb/s), in GB300 ConnectX-8 (800 Gb/s). Their GB of memory are within 2 % of the GiB that
# drivers report.
MACHINES: dict[str, Machine] = {
    "a100-80": Machine(312, 300, 25, 8, 2.039, 80),
    "h100": Machine(989, 450, 50, 8, 3.35, 80),
    "h200": Machine(989, 450, 50, 8, 4.8, 141),
    "b200": Machine(2250, 900, 50, 8, 8, 180),
    "gb200": Machine(2500, 900, 50, 72, 8, 186),
    "gb300": Machine(2500, 900, 100, 72, 8, 279),
}


def step_seconds(model: ModelConfig, plan: GpuLayout, load: Load, machine: Machine) -> dict[str, float]:
    """Seconds of one optimizer step by cause: a process's packs in a row, the pipeline's bubble, summed gradients."""
    packs = load.packs // plan.dp
    lengths = [load.tokens // load.samples] * load.samples
    texts = [load.text_tokens] * load.samples
    rate = plan.tp * plan.cp * plan.pp * 1e12 * machine.gpu_tflops
    forward = counts.forward_flops(model, lengths, texts) / rate
    products = counts.model_flops(model, lengths, texts) / rate
    attention = counts.attention_flops(model, lengths, texts) / rate
    again = {"none": 0.0, "selective": attention, "full": forward}[plan.recompute]
    layers = model.num_layers // plan.pp
    moved = layers * _moved_bytes(model, plan, load) / (1e12 * machine.memory_tb_s)
    # Ranks are ordered along TP first, then CP, DP and PP, as in megatron-core.
    over_tp, over_cp = _layer_traffic(model, plan, load)
    links = layers * over_tp / machine.link(1, plan.tp, plan.gpus)
    links += layers * over_cp / machine.link(plan.tp, plan.cp, plan.gpus)
    if plan.pp > 1:  # hidden states to the next stage, gradients back; with several nodes one boundary is between nodes
        sent = 2 * plan.outside_tokens(load) * model.hidden_size * load.bytes_per_number
        links += sent / machine.link(plan.gpus, 1, plan.gpus)
    return {
        "compute": products * packs,
        "recompute_time": again * packs,
        "elementwise": moved * packs,
        "communication": links * packs + _exchange_s(model, plan, load, machine, products - forward + again),
        "bubble": (plan.pp - 1) * (products + again + moved + links),
    }


def _exchange_s(model: ModelConfig, plan: GpuLayout, load: Load, machine: Machine, backward_s: float) -> float:
    """Gradients are summed over replicas: a reduce-scatter, then an all-gather of gradients or of new weights.

    The last pack's backward hides the transfers that can be sent before it ends; the distributed optimizer's new
    weights are known only after the step.
    """
    replicas = plan.dp * plan.cp
    _, count = parameters(model, plan)
    link = machine.link(plan.tp, replicas, plan.gpus)
    sum_s = _ring(replicas, 4 * count) / link  # gradients are float32, and gathered as they are
    covered = backward_s if plan.dp > 1 else 0.0
    if plan.distributed_optimizer:
        return max(0.0, sum_s - covered) + _ring(replicas, load.bytes_per_number * count) / link
    return max(0.0, 2 * sum_s - covered)


def _ring(n: int, size: float) -> float:
    """Bytes that each of n ranks sends to gather (or reduce and scatter) `size` bytes."""
    return (n - 1) / n * size


def _layer_traffic(model: ModelConfig, plan: GpuLayout, load: Load) -> tuple[float, float]:
    """Bytes that a process sends for one layer and pack over TP and over CP: forward, backward, and recomputation."""
    hidden = plan.local_tokens(load) * model.hidden_size * load.bytes_per_number
    text = load.text * model.hidden_size * load.bytes_per_number
    # After attention, cross attention and MLP. An all-reduce is a reduce-scatter and an all-gather. With SP they are
    # separate, the text is gathered too, and backward gathers each branch's input again.
    forward = 3 * 2 * _ring(plan.tp, hidden)
    backward = 3 * 2 * _ring(plan.tp, hidden) + 2 * _ring(plan.tp, text)
    if plan.sp:
        forward += _ring(plan.tp, text)
        backward += 3 * _ring(plan.tp, hidden)
    gathered = _ring(plan.cp, 2 * load.tokens * model.hidden_size // plan.tp * load.bytes_per_number)  # keys and values
    if plan.recompute == "full":
        backward += forward
    return forward + backward, gathered * (2 if plan.recompute == "none" else 3)


def _moved_bytes(model: ModelConfig, plan: GpuLayout, load: Load) -> float:
    """Bytes that one layer's elementwise work reads and writes for a pack, on one process.

    Each tensor kept for backward is written once and read once in forward. Backward reads it, and writes and reads its
    gradient. Recomputation repeats forward's part. Weights and tensors that are not kept do not count.
    """
    kept = layer_saved_bytes(model, replace(plan, recompute="none"), load)
    return kept * (7 if plan.recompute == "full" else 5)
