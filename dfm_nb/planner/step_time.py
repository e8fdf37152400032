"""Time of a training step, by cause: matrix products at one rate, memory traffic, links, the pipeline's bubble.

Latency is not counted. Rates are those of data sheets: they give ratios between layouts, not times.
"""

import math
from dataclasses import dataclass, replace

from dfm_nb.config import counts
from dfm_nb.config.schema import ModelConfig
from dfm_nb.planner.layouts import GpuLayout, Load
from dfm_nb.planner.training_memory import layer_saved_bytes, parameters


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
