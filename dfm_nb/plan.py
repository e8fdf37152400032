"""`dfm plan`: which layouts of a model fit a number of GPUs, what each holds per GPU, and which step is the shortest.

Nothing is built: parameters, FLOPs and widths come from `config.counts`, and memory and time are arithmetic on them.
What a layer keeps for backward is the list of tensors that autograd saves, which tests count on real layers;
`benchmarks/plan_memory.py` holds the total against the peak of real steps on CPU. What CUDA and NCCL keep for
themselves, and fragmentation, are not in it: `--margin` is for them.

Letters: t tokens of a pack on a rank, h hidden size, f MLP width, p numbers in a token of the latent, e bytes of a
number.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Iterable, Iterator

from dfm_nb import config as cfg
from dfm_nb.base import geometry
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.cpu import precision
from dfm_nb.config import counts, sizes
from dfm_nb.config.checks import divisors, layout_faults
from dfm_nb.config.schema import ModelConfig

if TYPE_CHECKING:
    import pandas as pd

GIB = 1 << 30
FED = {"model.in_channels": sizes.LATENT_CHANNELS, "model.text_dim": sizes.TEXT_DIM}
RECOMPUTE = ("none", "selective", "full")
SHOWN = 12
"""Layouts in the table."""


@dataclass(frozen=True)
class Load:
    """What is trained on: packs of `tokens` tokens from `samples` samples, `packs` of them a step over all processes.

    A last segment for padding is counted as one more conditioning row.
    cpu : attention is one SDPA call for each run of equal segments, as on CPU, instead of one kernel for the pack.
    runs : how many such runs there are; the results of several are joined by a copy.
    imbalance : work of the slowest data-parallel rank over the mean, as benchmarks/packing.py measures it.
    """

    tokens: int
    samples: int = 1
    text_tokens: int = 512
    packs: int = 32
    bytes_per_number: int = 2
    ema_averages: int = 2
    cpu: bool = False
    runs: int = 1
    imbalance: float = 1.0

    @property
    def text(self) -> int:
        """Text tokens of a pack."""
        return self.text_tokens * self.samples

    @property
    def rows(self) -> int:
        return self.samples + 1


@dataclass(frozen=True)
class Plan:
    """A layout: degrees of tensor, context, pipeline and data parallelism, and what is sharded or recomputed."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    distributed_optimizer: bool = False
    recompute: str = "none"

    def __str__(self) -> str:
        degrees = {"TP": self.tp, "CP": self.cp, "PP": self.pp, "DP": self.dp}
        words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1] or ["one GPU"]
        if self.sp:
            words.append("SP")
        if self.distributed_optimizer:
            words.append("distributed optimizer")
        return " ".join([*words, f"recompute {self.recompute}"])

    def overrides(self) -> list[str]:
        """The settings of `dfm pretrain` that ask for this layout."""
        granularity = "null" if self.recompute == "none" else self.recompute
        return [
            f"model.tensor_model_parallel_size={self.tp}",
            f"model.sequence_parallel={str(self.sp).lower()}",
            f"model.context_parallel_size={self.cp}",
            f"model.pipeline_model_parallel_size={self.pp}",
            f"optimizer.use_distributed_optimizer={str(self.distributed_optimizer).lower()}",
            f"model.recompute_granularity={granularity}",
        ]

    def local_tokens(self, load: Load) -> int:
        """Tokens of a pack that a rank's matrix products see: t."""
        return load.tokens // self.cp

    def outside_tokens(self, load: Load) -> int:
        """Those that it holds between the products, where sequence parallelism splits them over TP."""
        return self.local_tokens(load) // (self.tp if self.sp else 1)


# ---- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on one process at its fullest moment, and its pipeline stage."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    stage: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def layer_saved_bytes(model: ModelConfig, plan: Plan, load: Load) -> int:
    """Bytes that autograd keeps of one layer between its forward and its backward, on one process."""
    h, e = model.hidden_size, load.bytes_per_number
    t, outside = plan.local_tokens(load), plan.outside_tokens(load)
    if plan.recompute == "full":  # the layer's input alone
        return outside * h * e
    # Each of the three branches keeps its norm's input, the norm's result (for the gradient of the scale), that shifted
    # and scaled (the product's input), and its own result (for the gradient of the gate). Wan's cross attention, which
    # has neither scale nor gate, keeps the first and the third. A frozen product's input is that of its update.
    kept = (10 if model.variant == "wan" else 12) * outside * h * e
    # Mean and inverse deviation of each norm; float32 on GPUs.
    kept += 3 * 2 * outside * (e if load.cpu else 4)
    # Inside the branches tensors are split over TP. A product's result is kept by what comes next, attention or GELU,
    # and the second product's input by that product. Attention keeps its result too, but it is the same tensor.
    kept += t * counts.inner_widths(model).total() // plan.tp * e
    kept += load.text * counts.text_width(model) // plan.tp * e
    kept += load.rows * counts.row_width(model) * e
    if model.lora.rank:  # A x of six products of the video and one of the text
        kept += (6 * t + load.text) * model.lora.rank * e
    return kept + _attention_saved_bytes(model, plan, load)


def _attention_saved_bytes(model: ModelConfig, plan: Plan, load: Load) -> int:
    """What attention keeps beside queries, keys, values and its result."""
    e, t = load.bytes_per_number, plan.local_tokens(load)
    width, heads = model.hidden_size // plan.tp, model.num_attention_heads // plan.tp
    kept = 0
    if model.qk_layernorm:
        # The norms keep unit vectors and their scales in float32; attention keeps the norms' results. The three thirds
        # of the joint projection stay as well, because the values are a view of it.
        unit = 4 * (width + heads)
        if model.variant == "wan":  # one scale for all heads; under TP a norm that is trained keeps its input too
            unit = 4 * (width * (2 if plan.tp > 1 and not model.lora.rank else 1) + 1)
        kept += 2 * t * (unit + width * e)
        if model.variant != "dit":  # cross attention has both norms too; its raw queries do not stay
            kept += t * unit + load.text * (unit + width * e)
    if plan.recompute == "selective":  # attention runs again in backward and keeps nothing of its own
        return kept
    kept += 2 * t * heads * 4  # logarithm of the softmax's denominator, of self and of cross attention
    if plan.cp > 1:
        # Keys and values of the whole pack are gathered. They take the place of the local ones, and with norms that of
        # the whole joint projection and the normed keys.
        kept += 2 * load.tokens * width * e - (4 if model.qk_layernorm else 2) * t * width * e
    if load.cpu and load.runs > 1:
        kept += 2 * t * width * e  # the runs' results, before they are joined
    return kept


def _outside_bytes(model: ModelConfig, plan: Plan, load: Load, stage: int) -> int:
    """What a pack in flight keeps outside the layers: embedders, final layer, loss."""
    h, e, t, p = model.hidden_size, load.bytes_per_number, plan.local_tokens(load), counts.patch_dim(model)
    assert model.text_dim is not None
    frozen = bool(model.lora.rank)  # then embedders have no backward, and the layers keep the text's embedding alone
    # Text embedder: its input and result, and between them the input of DiT's norm or both sides of Wan's activation.
    kept = load.text * (h if frozen else (3 if model.variant == "wan" else 2) * h + model.text_dim) * e
    kept += load.rows * (9 * h + 2 * counts.SINUSOID_DIM) * e  # embedders of noise level and frame rate
    kept += load.rows * load.text * e  # weights of the pooled text
    if model.rope:  # cosines and sines, which layers share
        kept += 2 * 4 * t * h // model.num_attention_heads * (model.num_attention_heads // plan.tp if load.cpu else 1)
    if stage == 0 and not frozen:
        kept += t * p * e
    if stage == plan.pp - 1:
        kept += _final_bytes(model, plan, load)
        kept += 6 * t * p * 4  # latent, noise, input, output, target and difference, in float32
    return kept


def _final_bytes(model: ModelConfig, plan: Plan, load: Load) -> int:
    """What the final layer keeps: its norm's input and result, and its product's input if that is trained."""
    return (2 if model.lora.rank else 3) * plan.local_tokens(load) * model.hidden_size * load.bytes_per_number


def _backward_bytes(model: ModelConfig, plan: Plan, load: Load, stage: int) -> int:
    """The most that the backward of a stage's last layer holds beyond what was kept for it."""
    h, e, t = model.hidden_size, load.bytes_per_number, plan.local_tokens(load)
    f = counts.inner_widths(model)["mlp"] // 2 // plan.tp
    # It is fullest in the MLP, where tensors are widest: gradients of GELU's result, of the residual stream and of fc2.
    # The frozen fc2 beside an update has no gradient, but then GELU's result has one of each product, and their sum.
    held = t * f * e + plan.outside_tokens(load) * h * e + (t if model.lora.rank else h) * f * e
    if plan.recompute == "full":  # the layer's own tensors come back
        return held + layer_saved_bytes(model, replace(plan, recompute="none"), load)
    # the final layer's tensors have gone by then
    freed = _final_bytes(model, plan, load) if stage == plan.pp - 1 else 0
    return max(held - freed, 3 * t * h * e)


def _parameters(model: ModelConfig, plan: Plan, stage: int = 0) -> tuple[int, int]:
    """What a process holds of the network, and how much of it is trained: with low-rank updates nothing but those.

    Frozen weights are held once, in the network's arithmetic: no gradients, optimizer state, float32 copies, averages.
    """
    count = counts.parameter_count(model, plan.tp, plan.pp, stage)
    if not model.lora.rank:
        return count, count
    trained = counts.lora_parameter_count(model, model.lora.rank, plan.tp, plan.pp)
    return count + trained, trained


def stage_memory(model: ModelConfig, plan: Plan, load: Load, stage: int) -> Memory:
    """Bytes on one process of a pipeline stage."""
    e = load.bytes_per_number
    count, trained = _parameters(model, plan, stage)
    adam = trained * (8 if e == 4 else 12)  # two moments in float32, and a float32 copy of bf16 weights
    if plan.distributed_optimizer:
        adam //= plan.dp * plan.cp
    averages = 4 * trained * load.ema_averages
    # One-forward-one-backward schedule: stage i has begun PP - i packs before its first backward.
    in_flight = min(plan.pp - stage, max(1, load.packs // plan.dp))
    pack = model.num_layers // plan.pp * layer_saved_bytes(model, plan, load) + _outside_bytes(model, plan, load, stage)
    activations = in_flight * pack + _backward_bytes(model, plan, load, stage)
    # After backward activations are gone, but averaging bf16 weights makes float32 copies of them.
    update = 4 * trained if load.ema_averages and e < 4 else 0
    return Memory(e * count, 4 * trained, adam + averages, max(activations, update), stage)


def memory(model: ModelConfig, plan: Plan, load: Load) -> Memory:
    """That of the fullest process: on the first stage or on the last."""
    return max((stage_memory(model, plan, load, stage) for stage in (0, plan.pp - 1)), key=lambda m: m.total)


# ---- time ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Rates that turn work into time; only their ratios matter for the ranking.

    flops : operations a second of one GPU, of which matrix products reach the share `efficiency`.
    bytes_per_s : what one GPU sends a second to its peers within a node, node_bytes_per_s to other nodes.
    gpus_per_node : GPUs that the faster links join. memory_bytes_per_s : of one GPU's memory; infinite: it costs no
    time. The defaults are the data sheet of the DGX H100: bf16 dense, NVLink and InfiniBand one way.
    """

    flops: float = 989e12
    bytes_per_s: float = 450e9
    node_bytes_per_s: float = 50e9
    gpus_per_node: int = 8
    memory_bytes_per_s: float = math.inf
    memory_gib: float = 80
    efficiency: float = 1.0

    def link(self, stride: int, n: int, gpus: int) -> float:
        """Bytes a second that each rank of a group sends in a ring over `n` ranks, `stride` apart, of `gpus` in all.

        Between nodes a ring has the adapters of all its members in a node. Groups begin at multiples of their reach and
        nodes at multiples of theirs, so the least that both share is the greatest common divisor.
        """
        shared = math.gcd(self.gpus_per_node, stride * n)
        if gpus <= self.gpus_per_node or shared == stride * n:
            return self.bytes_per_s
        return min(self.bytes_per_s, max(1, shared // stride) * self.node_bytes_per_s)


# Data sheets: H100 and H200 SXM, DGX H100, H200 and B200, GB200 and GB300 NVL72 (NVIDIA). Dense bf16 is half of what
# they print with sparsity, NVLink one way half of its total; between nodes an adapter a GPU: ConnectX-7 (400 Gb/s), in
# GB300 ConnectX-8 (800 Gb/s). What they call GB of memory is within 2 % of the GiB that drivers report.
MACHINES: dict[str, Machine] = {
    "h100": Machine(memory_bytes_per_s=3.35e12),
    "h200": Machine(memory_bytes_per_s=4.8e12, memory_gib=141),
    "b200": Machine(2250e12, 900e9, memory_bytes_per_s=8e12, memory_gib=180),
    "gb200": Machine(2500e12, 900e9, 50e9, 72, 8e12, 186),
    "gb300": Machine(2500e12, 900e9, 100e9, 72, 8e12, 279),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause, at the machine's rates; nominal ones give ratios, and measured ones times.

    elementwise : reading and writing the tensors between matrix products.
    """

    compute: float
    recompute: float
    elementwise: float
    communication: float
    bubble: float

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.elementwise + self.communication + self.bubble


def _ring(n: int, size: float) -> float:
    """Bytes that each of n ranks sends to gather (or reduce and scatter) `size` bytes."""
    return (n - 1) / n * size


def _layer_traffic(model: ModelConfig, plan: Plan, load: Load) -> tuple[float, float]:
    """Bytes a process sends for one layer and pack over TP and over CP: forward, backward, and what recomputation
    sends again.
    """
    hidden = plan.local_tokens(load) * model.hidden_size * load.bytes_per_number
    text = load.text * model.hidden_size * load.bytes_per_number
    # After attention, cross attention and MLP. An all-reduce is a reduce-scatter and an all-gather. With SP they are
    # apart, the text is gathered too, and backward gathers each branch's input once more.
    forward = 3 * 2 * _ring(plan.tp, hidden)
    backward = 3 * 2 * _ring(plan.tp, hidden) + 2 * _ring(plan.tp, text)
    if plan.sp:
        forward += _ring(plan.tp, text)
        backward += 3 * _ring(plan.tp, hidden)
    gathered = _ring(plan.cp, 2 * load.tokens * model.hidden_size // plan.tp * load.bytes_per_number)  # keys and values
    if plan.recompute == "full":
        backward += forward
    return forward + backward, gathered * (2 if plan.recompute == "none" else 3)


def _moved_bytes(model: ModelConfig, plan: Plan, load: Load) -> float:
    """Bytes that one layer's elementwise work reads and writes for a pack, on one process.

    Each tensor kept for backward is written once and read once in forward. Backward reads it, and writes and reads its
    gradient. Recomputation does forward's part again. Weights, and what is not kept, are left out.
    """
    kept = layer_saved_bytes(model, replace(plan, recompute="none"), load)
    return kept * (7 if plan.recompute == "full" else 5)


def step_time(model: ModelConfig, plan: Plan, load: Load, machine: Machine) -> StepTime:
    """Time of one optimizer step: a process's packs in a row, the pipeline's bubble, gradients summed over replicas."""
    packs = load.packs // plan.dp
    lengths, texts = [load.tokens // load.samples] * load.samples, [load.text_tokens] * load.samples
    rate = plan.tp * plan.cp * plan.pp * machine.flops * machine.efficiency
    if plan.dp > 1:  # all wait for the rank with the most work
        rate /= load.imbalance
    forward = counts.forward_flops(model, lengths, texts) / rate
    products = counts.model_flops(model, lengths, texts) / rate
    attention = counts.attention_flops(model, lengths, texts) / rate
    again = {"none": 0.0, "selective": attention, "full": forward}[plan.recompute]
    layers = model.num_layers // plan.pp
    moved = layers * _moved_bytes(model, plan, load) / machine.memory_bytes_per_s
    # Ranks count along TP first, then CP, DP and PP, as in megatron-core.
    replicas, gpus = plan.dp * plan.cp, plan.tp * plan.cp * plan.dp * plan.pp
    over_tp, over_cp = _layer_traffic(model, plan, load)
    links = layers * over_tp / machine.link(1, plan.tp, gpus) + layers * over_cp / machine.link(plan.tp, plan.cp, gpus)
    if plan.pp > 1:  # hidden states to the next stage, their gradients back; of several nodes one boundary is between
        sent = 2 * plan.outside_tokens(load) * model.hidden_size * load.bytes_per_number
        links += sent / machine.link(gpus, 1, gpus)
    bubble = (plan.pp - 1) * (products + again + moved + links)

    # Gradients are summed over replicas: a reduce-scatter, then an all-gather of gradients or, with a distributed
    # optimizer, of new weights. The last pack's backward covers what can be sent before it ends.
    (_, count), between = _parameters(model, plan), machine.link(plan.tp, replicas, gpus)
    reduce = _ring(replicas, 4 * count) / between
    covered = products - forward + again if plan.dp > 1 else 0.0
    if plan.distributed_optimizer:
        spread = _ring(replicas, load.bytes_per_number * count) / between
        exchange = max(0.0, reduce - covered) + spread  # new weights are known only after the step
    else:
        spread = _ring(replicas, 4 * count) / between
        exchange = max(0.0, reduce + spread - covered)
    return StepTime(products * packs, again * packs, moved * packs, links * packs + exchange, bubble)


# ---- layouts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A legal layout with the memory of its fullest process, its time, and whether it fits."""

    plan: Plan
    memory: Memory
    time: StepTime
    fits: bool


class Layouts(list[Candidate]):
    """Layouts, the shortest step first. gpu_memory_gib : of the GPUs that they were looked for on."""

    def __init__(self, candidates: Iterable[Candidate], gpu_memory_gib: float):
        super().__init__(candidates)
        self.gpu_memory_gib = gpu_memory_gib

    def to_frame(self) -> pd.DataFrame:
        """A row a layout: its degrees, GiB per GPU by what holds them, its time relative to the first that fits.

        `recompute_time`, `elementwise`, `communication` and `bubble` are the parts of that time that are no matrix
        products of the model. `step_s` is the time itself, at the machine's rates.
        """
        import pandas as pd

        best = next((c for c in self if c.fits), self[0]).time.total
        return pd.DataFrame([_row(c, best) for c in self])

    def table(self) -> pd.DataFrame:
        """What is worth reading of the shortest that fit; where none does, of those that need least memory."""
        frame = self.to_frame()
        best = frame[frame.fits] if frame.fits.any() else frame.sort_values("gib_total")
        unread = [*(f.name for f in fields(Plan)), "fullest_stage", "fits", "overrides"]
        return best.drop(columns=unread).head(SHOWN)

    def __str__(self) -> str:
        """How many fit, the table, and the settings of its first row."""
        table = self.table()
        settings = "The first one's settings: " + " ".join(self[table.index[0]].plan.overrides())
        return "\n".join([self._count(), table.to_string(index=False, float_format="%.2f"), settings])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table, with a bar for each share of a GPU's memory."""
        table = self.table()
        gib = [name for name in table.columns if name.startswith("gib_")]
        style = table.style.hide().format(precision=2)
        bars = style.bar(subset=gib, color="#8888", vmin=0, vmax=self.gpu_memory_gib)
        return f"<div>{self._count()}</div>{bars.to_html()}"

    def _count(self) -> str:
        least = {r: min(c.memory.total for c in self if c.plan.recompute == r) / GIB for r in RECOMPUTE}
        each = ", ".join(f"{r} {gib:.1f}" for r, gib in least.items())
        found = f"{sum(c.fits for c in self)} of {len(self)} layouts fit"
        return f"{found}; the smallest takes {min(least.values()):.1f} GiB a GPU (recompute {each})."


def _row(c: Candidate, best: float) -> dict[str, Any]:
    m = c.memory
    return {
        "layout": str(c.plan),
        **asdict(c.plan),
        "gib_parameters": m.parameters / GIB,
        "gib_gradients": m.gradients / GIB,
        "gib_optimizer": m.optimizer / GIB,  # with the averages of the weights
        "gib_activations": m.activations / GIB,
        "gib_total": m.total / GIB,
        "fullest_stage": m.stage,
        "fits": c.fits,
        "step_s": c.time.total,
        "relative_time": c.time.total / best,
        "recompute_time": c.time.recompute / best,
        "elementwise": c.time.elementwise / best,
        "communication": c.time.communication / best,
        "bubble": c.time.bubble / best,
        "overrides": c.plan.overrides(),
    }


def layouts(gpus: int) -> Iterator[Plan]:
    """Every way to split `gpus` processes; SP needs TP, and a distributed optimizer something to share it over."""
    for tp in divisors(gpus):
        for cp in divisors(gpus // tp):
            for pp in divisors(gpus // tp // cp):
                dp = gpus // tp // cp // pp
                sp = (False, True) if tp > 1 else (False,)
                sharded = (False, True) if dp * cp > 1 else (False,)
                for flags in itertools.product(sp, sharded, RECOMPUTE):
                    yield Plan(tp, cp, pp, dp, *flags)


def _faults(config: cfg.Config, plan: Plan) -> list[cfg.Fault]:
    """Why a layout is not legal. The degrees of `config` itself are overwritten; nothing else reads them."""
    m = config.model
    m.tensor_model_parallel_size, m.context_parallel_size, m.pipeline_model_parallel_size = plan.tp, plan.cp, plan.pp
    m.sequence_parallel = plan.sp
    return layout_faults(config, plan.tp * plan.cp * plan.pp * plan.dp)


def plan_layouts(model: str, **flags: Any) -> Layouts:
    """Every legal layout of a model on some GPUs: the shortest step first, and of equal ones the one of least memory.

    Parameters
    ----------
    model : a size, for example "DiT-XL".
    **flags : those of `dfm plan` with underscores (`gpus`, `gpu_memory_gib`, `seq_length`, ...), and
        `overrides`, more settings as ["group.key=value"] or {"group.key": value}.

    Raises
    ------
    ValueError : a number is not positive, a setting is wrong, or no layout is legal (with the faults of plain DP).

    >>> plan_layouts("DiT-S", gpus=2, overrides={"model.num_layers": 4}).to_frame()  # doctest: +SKIP
    """
    p = parser()
    args = p.read(p.words({"model": model, **flags}))
    return search(args, *workload(args))


def search(args: argparse.Namespace, config: cfg.Config, load: Load) -> Layouts:
    """What the command line asks for, of a `workload`."""
    machine, found = machine_of(args), []
    for plan in layouts(args.gpus):
        if not _faults(config, plan):
            needed = memory(config.model, plan, load)
            fits = needed.total * (1 + args.margin / 100) <= machine.memory_gib * GIB
            found.append(Candidate(plan, needed, step_time(config.model, plan, load, machine), fits))
    if not found:
        fault = _faults(config, Plan(dp=args.gpus))[0]
        raise ValueError(f"no layout of {args.gpus} GPUs is legal for this model and batch: {fault}")
    return Layouts(sorted(found, key=lambda c: (round(c.time.total, 9), c.memory.total)), machine.memory_gib)


RATES = {
    "gpu_tflops": ("flops", 1e12),
    "efficiency": ("efficiency", 1),
    "link_gb_s": ("bytes_per_s", 1e9),
    "node_link_gb_s": ("node_bytes_per_s", 1e9),
    "gpus_per_node": ("gpus_per_node", 1),
    "gpu_memory_gib": ("memory_gib", 1),
}
"""Flags that change one rate of a machine, and their units."""


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine named, else one whose memory costs no time, with what other flags say."""
    given = {
        name: getattr(args, flag) * unit for flag, (name, unit) in RATES.items() if getattr(args, flag) is not None
    }
    return replace(MACHINES.get(args.machine, Machine()), **given)


def workload(args: argparse.Namespace) -> tuple[cfg.Config, Load]:
    """The settings, and the packs of a step."""
    for name in ("seq_length", "gpus", "samples", "text_tokens", *RATES):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be a positive number; got {value:g}")
    if args.efficiency is not None and args.efficiency > 1:
        raise ValueError(f"--efficiency is a share of the peak, at most 1; got {args.efficiency:g}")
    if not 1 <= args.imbalance < math.inf:
        raise ValueError(f"--imbalance is slowest over mean, 1 or more; got {args.imbalance:g}")
    if not 0 <= args.margin < math.inf:
        raise ValueError(f"--margin must be 0 percent or more; got {args.margin:g}")
    if args.samples > args.seq_length:
        raise ValueError(
            f"--samples must be at most --seq-length = {args.seq_length}, a token each; got {args.samples}"
        )
    asked = [
        f"model.size={args.model}",
        f"mixed_precision={args.mixed_precision}",
        f"dataset.task_encoder_seq_length={args.seq_length}",
        f"train.global_batch_size={args.global_batch_size}",
    ]
    config = cfg.resolve(None, overrides=[*asked, *args.overrides]).with_derived(FED, "assumed").config
    tokens = config.train.micro_batch_size * config.dataset.task_encoder_seq_length
    packs = config.train.global_batch_size // config.train.micro_batch_size
    number = 4 if config.mixed_precision == "fp32" else 2
    averages = len(config.ema.sigma_rels)
    text = config.model.text_padding or args.text_tokens
    return config, Load(tokens, args.samples, text, packs, number, averages, imbalance=args.imbalance)


# ---- one training -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """What a training takes: parameters, bytes on the fullest process, FLOPs of all processes to its last step."""

    parameters: int
    bytes: int
    flops: int


def estimate(resolved: cfg.Resolved, processes: int = 1, text_tokens: int = 24) -> Estimate:
    """Before anything is built, on packs full of samples as large as validation generates, else of one sample each.

    Parameters
    ----------
    processes : all of them. text_tokens : of a sample's caption where `model.text_padding` is null; 24 is a sentence.
    """
    config = resolved.with_derived(FED, "assumed").config
    m, v = config.model, config.validation
    text_tokens = m.text_padding or text_tokens
    tokens = config.train.micro_batch_size * config.dataset.task_encoder_seq_length
    samples = 1
    if v.frames and v.height and v.width:
        t, height, width = geometry.latent_size(geometry.round_frames(v.frames), v.height, v.width)
        length = -(-t // m.patch_temporal) * (height // m.patch_spatial) * (width // m.patch_spatial)
        samples = max(1, tokens // max(1, length))
    packs = config.train.global_batch_size // config.train.micro_batch_size
    tp, cp, pp = m.tensor_model_parallel_size, m.context_parallel_size, m.pipeline_model_parallel_size
    layout = Plan(
        tp,
        cp,
        pp,
        max(1, processes // (tp * cp * pp)),
        m.sequence_parallel,
        config.optimizer.use_distributed_optimizer,
        m.recompute_granularity or "none",
    )
    number = 4 if precision(config.mixed_precision) == "fp32" else 2
    load = Load(tokens, samples, text_tokens, packs, number, len(config.ema.sigma_rels), cpu=True)
    step = packs * counts.model_flops(m, [tokens // samples] * samples, [text_tokens] * samples)
    held = memory(m, layout, load).total
    return Estimate(counts.parameter_count(m), held, step * config.train.train_iters)


# ---- command ------------------------------------------------------------------------------------------------------


def parser() -> ArgumentParser:
    usual = cfg.Config()
    p = ArgumentParser(
        prog="dfm plan", description="Layouts of a model on a number of GPUs: memory per GPU and time of a step."
    )
    p.add_argument("--model", required=True, help=f"a size: {', '.join(sizes.SIZES)}")
    p.add_argument("--seq-length", type=int, default=usual.dataset.task_encoder_seq_length, help="tokens of a pack")
    p.add_argument("--gpus", type=int, default=8, help="processes, one per GPU")
    p.add_argument("--machine", type=str.lower, choices=MACHINES, help="data sheet; default: H100, free memory access")
    p.add_argument("--gpus-per-node", type=int, help="GPUs that NVLink joins; without --machine 8")
    p.add_argument("--gpu-memory-gib", type=float, help="memory of one GPU; without --machine 80")
    p.add_argument("--mixed-precision", choices=("bf16", "fp32"), default="bf16", help="arithmetic")
    p.add_argument("--global-batch-size", type=int, default=usual.train.global_batch_size, help="packs of a step")
    p.add_argument("--samples", type=int, default=Load.samples, help="samples in a pack")
    p.add_argument("--text-tokens", type=int, default=Load.text_tokens, help="of a caption, without model.text_padding")
    p.add_argument("--margin", type=float, default=15, help="percent that has to be left beside the estimate")
    p.add_argument("--gpu-tflops", type=float, help="10^12 operations a second of a GPU; without --machine 989")
    p.add_argument("--efficiency", type=float, help="share of them that matrix products reach (1)")
    p.add_argument("--link-gb-s", type=float, help="10^9 bytes/s of a GPU to peers in its node; without --machine 450")
    p.add_argument("--node-link-gb-s", type=float, help="the same to other nodes; without --machine 50")
    p.add_argument("--imbalance", type=float, default=1, help="work of the slowest rank's packs over the mean")
    p.add_argument("--json", action="store_true", help="every layout as JSON")
    p.add_argument("overrides", nargs="*", metavar="group.key=value", help="settings, as for dfm pretrain")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_intermixed_args(argv)
    config, load = workload(args)
    found = search(args, config, load)
    if args.json:
        print(found.to_frame().to_json(orient="records", indent=1))
        return 0
    model, rank = config.model, config.model.lora.rank
    updates = f", {counts.lora_parameter_count(model, rank) / 1e6:.1f} M of rank {rank} trained" if rank else ""
    print(
        f"{model.size}, {counts.parameter_count(model) / 1e6:,.0f} M parameters{updates}, packs of {load.tokens} "
        f"tokens, {load.packs} a step, {config.mixed_precision}, on GPUs of {found.gpu_memory_gib:g} GiB "
        f"({args.margin:g} % left free)"
    )
    print(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
