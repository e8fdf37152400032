"""`dfm plan`: which layouts of a model fit a number of GPUs, what each holds per GPU, and which step is the shortest.

What enters: a model size, a sequence length, GPUs and their memory. What leaves: layouts with bytes per GPU and a relative step time, best
first, and the nearest of those that do not fit.
Guarantees: nothing is built. Weights, gradients and optimizer follow from `sizes`; the bytes that a layer keeps for backward are the
list of tensors that autograd saves, counted on real layers by tests/test_plan.py and, for TP, SP and CP, tests/distributed/test_plan_layouts.py;
benchmarks/plan_memory.py holds the total against the peak memory of real steps on CPU. What CUDA and NCCL keep for themselves, and
fragmentation, are not in it: `--margin` is for them.
Times are a model: matrix products at one rate, links at another, see `Machine`.
Cost: milliseconds, without torch.

Letters: S tokens of a pack, t = S / CP those of a rank, K text tokens, R conditioning rows, h hidden size, f MLP width, e bytes of a number.
"""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import asdict, dataclass, replace
from typing import Iterator

from dfm_nb import config as cfg
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.config import sizes
from dfm_nb.config.sizes import VECTORS_PER_LAYER, Shape

GIB = 1 << 30
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Load:
    """What one process is given: packs of `tokens` tokens from `samples` samples, `packs` of them a step over all processes.

    A last segment for padding is counted as one more row. cpu : plain SDPA for each run of equal segments instead of one kernel for all;
    runs : how many runs there are (several are joined by a copy).
    """

    tokens: int
    samples: int = 1
    text_tokens: int = 512
    packs: int = 32
    bytes_per_number: int = 2
    ema_averages: int = 2
    cpu: bool = False
    runs: int = 1


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
        degrees = [f"{n}{v}" for n, v in (("TP", self.tp), ("CP", self.cp), ("PP", self.pp), ("DP", self.dp)) if v > 1]
        flags = ["SP"] * self.sp + ["distributed optimizer"] * self.distributed_optimizer
        return " ".join([*(degrees or ["one GPU"]), *flags, f"recompute {self.recompute}"])

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


@dataclass(frozen=True)
class Memory:
    """Bytes on one process at its fullest moment, and which stage that is on."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def stage_parameters(s: Shape, plan: Plan, stage: int) -> int:
    """Parameters of one process of pipeline stage `stage`; equal to what megatron-core builds there.

    Tensor parallelism splits attention and MLP; the modulation (adaLN), the embedders, norms and row biases are on every rank.
    """
    h, f, table = s.hidden_size, s.ffn_hidden_size, sizes.parameter_table(s)
    split = (3 * h * h + 3 * h) + h * h + (h * h + h) + (2 * h * h + 2 * h) + h * h + (h * f + f) + f * h
    layers = s.num_layers // plan.pp
    layer = table["layers"] // s.num_layers
    count = layers * (layer - split + split // plan.tp)
    count += sum(table[part] for part in ("sigma_embedder", "fps_embedder", "text_embedder", "pooled_text"))
    count += table["x_embedder"] * (stage == 0) + table["final_layer"] * (stage == plan.pp - 1)
    return count


def layer_saved_bytes(s: Shape, plan: Plan, load: Load) -> int:
    """Bytes that autograd keeps of one layer between its forward and its backward, on one process.

    Parameters
    ----------
    plan : with recompute "full" this is the layer's input alone.
    """
    h, f, e, tp = s.hidden_size, s.ffn_hidden_size, load.bytes_per_number, plan.tp
    t, heads = load.tokens // plan.cp, s.num_attention_heads // plan.tp
    outside = t // tp if plan.sp else t  # tokens outside the matrix products
    if plan.recompute == "full":
        return outside * h * e
    text, rows = load.text_tokens * load.samples, load.samples + 1
    flash = plan.recompute == "none"
    # three branches: input and output of the norm, shifted and scaled input of the product, branch output before its gate
    kept = 12 * outside * h * e + 3 * 2 * outside * (e if load.cpu else 4)
    kept += 2 * t * f // tp * e  # MLP before and after GELU
    kept += 2 * t * h // tp * e  # both attentions' results
    kept += t * h // tp * e  # queries of the cross attention
    kept += 2 * text * h // tp * e  # keys and values of the text
    kept += _self_attention_saved(s, plan, load, flash)
    if flash:
        kept += 2 * t * heads * 4  # log of the softmax's denominator, twice
        if load.cpu and load.runs > 1:
            kept += 2 * t * h // tp * e  # results of the runs, before they are joined
    return kept + (VECTORS_PER_LAYER + 1) * rows * h * e


def _self_attention_saved(s: Shape, plan: Plan, load: Load, flash: bool) -> int:
    """Queries, keys and values, and what the norms of queries and keys keep."""
    h, e, tp = s.hidden_size, load.bytes_per_number, plan.tp
    t, heads = load.tokens // plan.cp, s.num_attention_heads // plan.tp
    share = t * h // tp * e
    if not s.qk_layernorm:
        kept = 3 * share
    else:  # unit vectors in float32, their scales; the values keep the joint projection alive
        kept = 2 * t * h // tp * 4 + 2 * t * heads * 4 + 2 * share + 3 * share
    if plan.cp > 1 and flash:  # gathered keys and values of the whole pack instead of local ones
        kept += 2 * load.tokens * h // tp * e - (4 if s.qk_layernorm else 2) * share
    return kept


def _outside_bytes(s: Shape, plan: Plan, load: Load, stage: int) -> int:
    """What a pack in flight keeps outside the layers: embedders, final layer, loss."""
    h, e, t, p = s.hidden_size, load.bytes_per_number, load.tokens // plan.cp, s.patch_dim
    text, rows = load.text_tokens * load.samples, load.samples + 1
    kept = (2 * h + s.text_dim) * text * e + rows * (9 * h + 2 * sizes.SINUSOID_DIM) * e + rows * text * e
    if stage == 0:
        kept += t * p * e
    if stage == plan.pp - 1:
        kept += 3 * t * h * e  # final layer's norm and modulation
        kept += 6 * t * p * 4  # latent, noise, input, output, target and difference, in float32
    return kept


def _backward_bytes(s: Shape, plan: Plan, load: Load, stage: int) -> int:
    """The most that the backward of a stage's last layer holds beyond what was kept for it: in its MLP, where tensors are widest."""
    h, f, e, t = s.hidden_size, s.ffn_hidden_size, load.bytes_per_number, load.tokens // plan.cp
    outside = t // plan.tp if plan.sp else t
    weight = h * f // plan.tp * e
    held = (
        t * f // plan.tp * e + outside * h * e + weight
    )  # gradients of the GELU's result, of the residual stream and of fc2
    if plan.recompute == "full":  # the layer's own tensors come back
        return held + layer_saved_bytes(s, replace(plan, recompute="none"), load)
    freed = 3 * t * h * e if stage == plan.pp - 1 else 0  # the final layer's tensors have gone by then
    return max(held - freed, 3 * t * h * e)


def stage_memory(s: Shape, plan: Plan, load: Load, stage: int) -> Memory:
    """Bytes on one process of a pipeline stage. Stage i holds the activations of PP - i packs (one-forward-one-backward schedule)."""
    count, e = stage_parameters(s, plan, stage), load.bytes_per_number
    shards = plan.dp * plan.cp if plan.distributed_optimizer else 1
    master = 0 if e == 4 else 4  # float32 copy of bf16 weights
    optimizer = count * (8 + master) // shards + 4 * count * load.ema_averages
    in_flight = min(plan.pp - stage, max(1, load.packs // plan.dp))
    pack = s.num_layers // plan.pp * layer_saved_bytes(s, plan, load) + _outside_bytes(s, plan, load, stage)
    activations = in_flight * pack + _backward_bytes(s, plan, load, stage)
    update = (
        4 * count if load.ema_averages and e < 4 else 0
    )  # float32 copies of the weights for the averages, after backward
    return Memory(e * count, 4 * count, optimizer, max(activations, update))


def memory(s: Shape, plan: Plan, load: Load) -> tuple[Memory, int]:
    """The fullest process's memory, and its pipeline stage."""
    stages = {stage: stage_memory(s, plan, load, stage) for stage in {0, plan.pp - 1}}
    fullest = max(sorted(stages), key=lambda stage: stages[stage].total)
    return stages[fullest], fullest


# ---- time ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Rates that turn work into time; only their ratio matters for the ranking. Defaults: data sheet of the H100 SXM (bf16 dense, NVLink one way).

    flops : operations a second of one GPU; bytes_per_s : what one GPU sends a second to its peers.
    """

    flops: float = 989e12
    bytes_per_s: float = 450e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause, at the machine's nominal rates; use them as ratios."""

    compute: float
    recompute: float
    communication: float
    bubble: float

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.communication + self.bubble


def _ring(n: int, size: float) -> float:
    """Bytes that each of n ranks sends to gather (or reduce and scatter) `size` bytes."""
    return (n - 1) / n * size


def _layer_traffic(s: Shape, plan: Plan, load: Load) -> tuple[float, float, float]:
    """Bytes a process sends for one layer and pack: (forward, backward, what recomputation sends again)."""
    e, t = load.bytes_per_number, load.tokens // plan.cp
    hidden = t * s.hidden_size * e
    text = load.text_tokens * load.samples * s.hidden_size * e
    # after attention, cross attention and MLP; an all-reduce is a reduce-scatter and an all-gather, with SP they are apart
    tp_forward = 3 * 2 * _ring(plan.tp, hidden) + (_ring(plan.tp, text) if plan.sp else 0)
    tp_backward = (3 * 2 + 3 * plan.sp) * _ring(plan.tp, hidden) + 2 * _ring(plan.tp, text)
    gathered = _ring(plan.cp, 2 * load.tokens * s.hidden_size // plan.tp * e)  # keys and values
    again = {"none": 0.0, "selective": gathered, "full": tp_forward + gathered}[plan.recompute]
    return tp_forward + gathered, tp_backward + gathered, again


def step_time(s: Shape, plan: Plan, load: Load, machine: Machine) -> StepTime:
    """Time of one optimizer step: every process's packs in a row, pipeline bubble, gradients over the data-parallel processes."""
    packs = load.packs // plan.dp
    lengths = [load.tokens // load.samples] * load.samples
    texts = [load.text_tokens] * load.samples
    share = plan.tp * plan.cp * plan.pp * machine.flops
    forward = sizes.forward_flops(s, lengths, texts) / share
    attention = 4 * s.hidden_size * s.num_layers * sum(q * (q + k) for q, k in zip(lengths, texts)) / share
    again = {"none": 0.0, "selective": attention, "full": forward}[plan.recompute]
    traffic = sum(_layer_traffic(s, plan, load)) * s.num_layers // plan.pp
    outside = load.tokens // plan.cp // (plan.tp if plan.sp else 1)
    if plan.pp > 1:  # hidden states to the next stage, their gradients back
        traffic += 2 * outside * s.hidden_size * load.bytes_per_number
    links = traffic / machine.bytes_per_s
    pack = 3 * forward + again + links
    replicas = plan.dp * plan.cp
    count = stage_parameters(s, plan, 0)
    gather = load.bytes_per_number if plan.distributed_optimizer else 4
    reduce = _ring(replicas, 4 * count) / machine.bytes_per_s  # reduce-scatter, or the first half of an all-reduce
    spread = _ring(replicas, gather * count) / machine.bytes_per_s
    hidden = 2 * forward + again if plan.dp > 1 else 0.0  # the last pack's backward covers the reduction
    exchange = max(0.0, reduce - hidden) + spread if plan.distributed_optimizer else max(0.0, reduce + spread - hidden)
    return StepTime(3 * forward * packs, again * packs, links * packs + exchange, (plan.pp - 1) * pack)


# ---- layouts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A legal layout with its memory (of `stage`, the fullest) and time."""

    plan: Plan
    memory: Memory
    stage: int
    time: StepTime
    fits: bool


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(gpus: int) -> Iterator[Plan]:
    """Every way to split `gpus` processes; SP needs TP, and a distributed optimizer something to share it over."""
    for tp in _divisors(gpus):
        for cp in _divisors(gpus // tp):
            for pp in _divisors(gpus // tp // cp):
                dp = gpus // tp // cp // pp
                flags = itertools.product((False, True)[: 1 + (tp > 1)], (False, True)[: 1 + (dp * cp > 1)], RECOMPUTE)
                yield from (Plan(tp, cp, pp, dp, *flag) for flag in flags)


def _legal(config: cfg.Config, plan: Plan) -> list[str]:
    m = config.model
    m.tensor_model_parallel_size, m.context_parallel_size, m.pipeline_model_parallel_size = plan.tp, plan.cp, plan.pp
    m.sequence_parallel = plan.sp
    return cfg.check_layout(config, plan.tp * plan.cp * plan.pp * plan.dp)


def candidates(
    config: cfg.Config, load: Load, gpus: int, limit_bytes: float, margin: float = 0.15, machine: Machine = Machine()
) -> list[Candidate]:
    """Every legal layout, the shortest step first; the less memory first where steps are equal.

    Parameters
    ----------
    config : resolved; its own parallel degrees do not matter. limit_bytes : memory of a GPU.
    margin : an estimate fits when it, plus this fraction of it, is within the limit.

    Raises
    ------
    ValueError : no layout is legal; the message has the faults of plain data parallelism.
    """
    config = copy.deepcopy(config)
    s, out = sizes.resolve_size(config.model), []
    for plan in layouts(gpus):
        if _legal(config, plan):
            continue
        needed, stage = memory(s, plan, load)
        fits = needed.total * (1 + margin) <= limit_bytes
        out.append(Candidate(plan, needed, stage, step_time(s, plan, load, machine), fits))
    if not out:
        raise ValueError(
            f"no layout of {gpus} GPUs is legal for this model and batch: {_legal(config, Plan(dp=gpus))[0]}"
        )
    return sorted(out, key=lambda c: (round(c.time.total, 9), c.memory.total))


def distance(a: Plan, b: Plan) -> int:
    """How many settings differ (data parallelism follows from the others)."""
    return sum(x != y for key, x in asdict(a).items() if key != "dp" for y in [asdict(b)[key]])


def misfits(found: list[Candidate]) -> list[tuple[Candidate, int, Candidate | None]]:
    """Layouts that do not fit, one entry per (TP, CP, PP, DP): the one that needs least, how many there are, and the nearest that fits."""
    fitting = [c for c in found if c.fits]
    groups: dict[tuple[int, ...], list[Candidate]] = {}
    for c in found:
        if not c.fits:
            groups.setdefault((c.plan.tp, c.plan.cp, c.plan.pp, c.plan.dp), []).append(c)
    out = []
    for group in groups.values():
        least = min(group, key=lambda c: c.memory.total)
        near = min(fitting, key=lambda c: (distance(c.plan, least.plan), c.time.total), default=None)
        out.append((least, len(group), near))
    return sorted(out, key=lambda row: row[0].memory.total)


# ---- command ------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None):
    p = ArgumentParser(
        prog="dfm plan", description="Layouts of a model on a number of GPUs: memory per GPU and relative step time."
    )
    p.add_argument("--model", required=True, help=f"a size: {', '.join(sizes.SIZES)}")
    p.add_argument("--seq-length", type=int, default=8192, help="tokens of a pack (dataset.task_encoder_seq_length)")
    p.add_argument("--gpus", type=int, default=8, help="processes, one per GPU")
    p.add_argument("--gpu-memory-gib", type=float, default=80.0, help="memory of one GPU")
    p.add_argument("--mixed-precision", default="bf16", choices=("bf16", "fp32"), help="arithmetic of the network")
    p.add_argument("--global-batch-size", type=int, default=32, help="packs per optimizer step over all processes")
    p.add_argument("--samples", type=int, default=1, help="samples in a pack")
    p.add_argument("--text-tokens", type=int, default=512, help="caption tokens of a sample")
    p.add_argument("--margin", type=float, default=15.0, help="percent that has to be left beside the estimate")
    p.add_argument(
        "--gpu-tflops", type=float, default=Machine.flops / 1e12, help="10^12 operations a second of one GPU"
    )
    p.add_argument(
        "--link-gb-s", type=float, default=Machine.bytes_per_s / 1e9, help="10^9 bytes a second from a GPU to its peers"
    )
    p.add_argument("--top", type=int, default=12, help="layouts shown")
    p.add_argument("--json", action="store_true", help="everything as JSON")
    p.add_argument(
        "overrides", nargs="*", metavar="group.key=value", help="as for dfm pretrain, for example model.text_dim=1024"
    )
    return p.parse_intermixed_args(argv)


def _checked(args) -> None:
    positive = (
        "seq_length",
        "gpus",
        "gpu_memory_gib",
        "global_batch_size",
        "samples",
        "text_tokens",
        "gpu_tflops",
        "link_gb_s",
        "top",
    )
    for name in positive:
        if not 0 < getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be a positive number; got {getattr(args, name):g}")
    if not 0 <= args.margin < float("inf"):
        raise ValueError(f"--margin must be 0 percent or more; got {args.margin:g}")
    if args.samples > args.seq_length:
        raise ValueError(
            f"--samples must be at most --seq-length = {args.seq_length}, a token each; got {args.samples}"
        )


def _describe(c: Candidate, best: float) -> dict:
    """One layout as plain values: settings, GiB per GPU, time relative to the best and each cause's share of that."""
    m, t = asdict(c.memory) | {"total": c.memory.total}, asdict(c.time)
    return {
        "layout": str(c.plan),
        **asdict(c.plan),
        "gib": {k: v / GIB for k, v in m.items()},
        "fullest_stage": c.stage,
        "fits": c.fits,
        "relative_time": c.time.total / best,
        "reasons": {k: v / best for k, v in t.items()},
        "overrides": c.plan.overrides(),
    }


def report(found: list[Candidate], top: int) -> str:
    """A table of the layouts that fit, best first, and a line for each split that has layouts that do not."""
    fitting = [c for c in found if c.fits]
    lines = [f"{len(fitting)} of {len(found)} layouts fit."]
    if fitting:
        best = fitting[0].time.total
        width = max(len(str(c.plan)) for c in fitting[:top])
        head = f"{'layout':<{width}}  {'param':>6} {'grad':>6} {'optim':>6} {'activ':>6} {'total':>6}  "
        lines += [
            "GiB per GPU (optim: with the averages of the weights); time relative to the first, and what it is made of",
            "",
        ]
        lines += [head + f"{'time':>5} = {'compute':>7} {'recomp':>6} {'commun':>6} {'bubble':>6}"]
        for c in fitting[:top]:
            m, t = c.memory, c.time
            gib = " ".join(f"{v / GIB:6.2f}" for v in (m.parameters, m.gradients, m.optimizer, m.activations, m.total))
            parts = (t.compute, t.recompute, t.communication, t.bubble)
            shares = " ".join(f"{v / best:{w}.2f}" for v, w in zip(parts, (7, 6, 6, 6)))
            lines.append(f"{c.plan!s:<{width}}  {gib}  {t.total / best:5.2f} = {shares}")
        if len(fitting) > top:
            lines.append(f"... and {len(fitting) - top} more that fit (--top {len(fitting)})")
        lines += ["", "The first one's settings: " + " ".join(fitting[0].plan.overrides())]
    rows = misfits(found)
    if rows:
        lines += ["", "Do not fit:"]
    for least, count, near in rows:
        split = f"TP{least.plan.tp} CP{least.plan.cp} PP{least.plan.pp} DP{least.plan.dp}"
        fix = f"nearest that fits: {near.plan} ({near.memory.total / GIB:.1f} GiB)" if near else "none fits"
        lines.append(f"  {split}: {count} layouts, from {least.memory.total / GIB:.1f} GiB ({least.plan}); {fix}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    _checked(args)
    size = sizes.find_size(args.model)
    overrides = [
        f"model.size={size.name}",
        f"mixed_precision={args.mixed_precision}",
        f"dataset.task_encoder_seq_length={args.seq_length}",
        f"train.global_batch_size={args.global_batch_size}",
        *args.overrides,
    ]
    config = cfg.resolve(None, overrides=overrides).config
    precision = 4 if config.mixed_precision == "fp32" else 2
    tokens = config.train.micro_batch_size * config.dataset.task_encoder_seq_length
    packs = config.train.global_batch_size // config.train.micro_batch_size
    load = Load(tokens, args.samples, args.text_tokens, packs, precision, len(config.ema.sigma_rels))
    machine = Machine(args.gpu_tflops * 1e12, args.link_gb_s * 1e9)
    found = candidates(config, load, args.gpus, args.gpu_memory_gib * GIB, args.margin / 100, machine)
    fitting = [c for c in found if c.fits]
    if args.json:
        best = (fitting or found)[0].time.total
        print(
            json.dumps(
                {
                    "model": size.name,
                    "parameters": sizes.parameter_count(config),
                    "load": asdict(load),
                    "gpus": args.gpus,
                    "gpu_memory_gib": args.gpu_memory_gib,
                    "margin_percent": args.margin,
                    "machine": asdict(machine),
                    "layouts": [_describe(c, best) for c in fitting],
                    "misfits": [
                        _describe(least, best) | {"count": count, "nearest": str(near.plan) if near else None}
                        for least, count, near in misfits(found)
                    ],
                },
                indent=1,
            )
        )
        return 0
    print(
        f"{size.name}, {sizes.parameter_count(config) / 1e6:,.0f} M parameters, packs of {tokens} tokens, {packs} a step, {config.mixed_precision}, "
        f"on {args.gpus} GPU{'s' * (args.gpus > 1)} of {args.gpu_memory_gib:g} GiB ({args.margin:g} % left free)"
    )
    others = sum(1 for _ in layouts(args.gpus)) - len(found)
    if others:
        print(f"{others} other layouts do not divide the model's heads or layers, the tokens or the packs of a step.")
    print(report(found, args.top))
    if not fitting:
        least = min(found, key=lambda c: c.memory.total)
        need = least.memory.total * (1 + args.margin / 100) / GIB
        print(f"The nearest: {least.plan} on GPUs of {need:.0f} GiB.")
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
