"""What must hold between settings: limits on one key, settings that need one another, layouts that fit the processes.

What enters: a `Config` (and the origin of its keys). What leaves: lists of `Fault`, empty when all is well; nothing is
raised here and nothing depends on a process group, a device or the network. Every fault names the nearest legal values.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

from dfm_nb.base import geometry
from dfm_nb.config.schema import Config


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `origin: key must ...; got ...; fix`.

    key : the dotted key, "" when the fault is not about one.
    origin : the layer (file or command line) that the value came from, "" when unknown.
    must, given, fix : what must hold; what was given; what to do.
    also : other keys that the fault is about.
    """

    key: str
    origin: str
    must: str
    given: str
    fix: str
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = ": ".join(p for p in (self.origin, f"{self.key} {self.must}".strip()) if p)
        return f"{where}; got {self.given}; {self.fix}"


_BOUNDS = {
    "ge": (lambda v, b: v >= b, "at least"),
    "gt": (lambda v, b: v > b, "greater than"),
    "le": (lambda v, b: v <= b, "at most"),
    "lt": (lambda v, b: v < b, "less than"),
}


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _numbers(entry)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def check_fields(values: Mapping[str, Any], fields: Mapping[str, Any], origin: Mapping[str, str]) -> list[Fault]:
    """Faults of single keys against the limits in their metadata; null is legal here (its type allowed it)."""
    faults = []
    for key, value in values.items():
        if value is None:
            continue
        limits, layer = fields[key].limits, origin.get(key, "")
        numbers = list(_numbers(value))
        what = "entries must" if isinstance(value, list) else "must"
        if not all(math.isfinite(n) for n in numbers):
            faults.append(
                Fault(key, layer, f"{what} be finite", repr(value), f"the default is {fields[key].default!r}")
            )
            continue
        for name, (holds, words) in _BOUNDS.items():
            if name in limits and not all(holds(n, limits[name]) for n in numbers):
                fix = (
                    f"the nearest legal value is {limits[name]}"
                    if name in ("ge", "le")
                    else f"the default is {fields[key].default}"
                )
                faults.append(Fault(key, layer, f"{what} be {words} {limits[name]}", repr(value), fix))
                break
        faults += _check_shape(key, value, limits, layer)
    return faults


def _check_shape(key: str, value: Any, limits: Mapping[str, Any], layer: str) -> list[Fault]:
    if "choices" in limits and value not in limits["choices"]:
        near = difflib.get_close_matches(str(value).lower(), limits["choices"], 1, cutoff=0.4)
        fix = f"did you mean {near[0]}?" if near else "choose one of them"
        return [Fault(key, layer, f"must be one of {', '.join(limits['choices'])}", repr(value), fix)]
    step = limits.get("multiple_of")
    if step and value % step:
        return [
            Fault(
                key, layer, f"must be a multiple of {step}", repr(value), f"nearest: {_nearest_multiples(value, step)}"
            )
        ]
    if "min_items" in limits and len(value) < limits["min_items"]:
        return [Fault(key, layer, f"must have at least {limits['min_items']} entries", repr(value), "add an entry")]
    length = limits.get("entry_len")
    if length and any(len(entry) != length for entry in value):
        return [
            Fault(key, layer, f"entries must have {length} numbers each", repr(value), "for example [[1,8,8],[3,8,8]]")
        ]
    return []


def _nearest_multiples(value: int, step: int, lowest: int = 1) -> str:
    down = max(value // step, lowest) * step
    up = max(-(-value // step), lowest) * step
    return f"{down}" if down == up else f"{down} or {up}"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _nearest_divisors(n: int, value: int, count: int = 3) -> str:
    near = sorted(sorted(_divisors(n), key=lambda d: (abs(d - value), d))[:count])
    return ", ".join(map(str, near))


def check_values(config: Config, origin: Mapping[str, str]) -> list[Fault]:
    """Settings that contradict one another, whatever the number of processes."""
    m, t, o, s = config.model, config.train, config.optimizer, config.scheduler
    faults: list[Fault] = []

    def need(holds: bool, key: str, must: str, given: str, fix: str, also: tuple[str, ...] = ()) -> None:
        if not holds:
            faults.append(Fault(key, _last_touched((key, *also), origin), must, given, fix, also))

    h, heads = m.hidden_size, m.num_attention_heads
    if h % heads:
        widths = _nearest_multiples(h, 2 * heads)
        need(
            False,
            "model.num_attention_heads",
            f"must divide model.hidden_size = {h}",
            str(heads),
            f"heads {_nearest_divisors(h, heads)}, or hidden_size {widths}",
            ("model.hidden_size",),
        )
    else:
        need(
            (h // heads) % 2 == 0,
            "model.num_attention_heads",
            "must leave an even number of channels per head",
            f"{h} / {heads} = {h // heads}",
            f"heads {_nearest_divisors(h // 2, heads)}",
            ("model.hidden_size",),
        )
    need(
        o.min_lr <= o.lr,
        "optimizer.min_lr",
        f"must be at most optimizer.lr = {o.lr:g}",
        f"{o.min_lr:g}",
        "lower it, or raise optimizer.lr",
        ("optimizer.lr",),
    )
    need(
        o.optimizer != "muon" or not o.use_distributed_optimizer,
        "optimizer.use_distributed_optimizer",
        "must be false with optimizer.optimizer=muon, which needs whole matrices",
        str(o.use_distributed_optimizer).lower(),
        "set it to false, or optimizer.optimizer to adam",
        ("optimizer.optimizer",),
    )
    end = s.lr_decay_iters or t.train_iters
    need(
        (s.lr_warmup_iters or 0) < end,
        "scheduler.lr_warmup_iters",
        f"must be less than the {end} iterations of the schedule",
        str(s.lr_warmup_iters),
        f"for example {max(0, end // 20)}, or raise train.train_iters",
        ("train.train_iters", "scheduler.lr_decay_iters"),
    )
    need(
        m.pipeline_model_parallel_size > 1 or m.virtual_pipeline_model_parallel_size in (None, 1),
        "model.virtual_pipeline_model_parallel_size",
        "needs model.pipeline_model_parallel_size > 1",
        str(m.virtual_pipeline_model_parallel_size),
        "set it to null, or set pipeline_model_parallel_size to 2",
        ("model.pipeline_model_parallel_size",),
    )
    need(
        not m.sequence_parallel or m.tensor_model_parallel_size > 1,
        "model.sequence_parallel",
        "needs model.tensor_model_parallel_size > 1",
        "true with 1",
        "set it to false, or tensor_model_parallel_size to 2",
        ("model.tensor_model_parallel_size",),
    )
    need(
        t.global_batch_size % t.micro_batch_size == 0,
        "train.global_batch_size",
        f"must be a multiple of train.micro_batch_size = {t.micro_batch_size}",
        str(t.global_batch_size),
        f"nearest: {_nearest_multiples(t.global_batch_size, t.micro_batch_size)}",
        ("train.micro_batch_size",),
    )
    need(
        geometry.is_frame_count(config.validation.frames),
        "validation.frames",
        "must be 1 + 4 k",
        str(config.validation.frames),
        f"nearest: {geometry.nearest_frames(config.validation.frames)}",
    )
    need(
        len(set(config.ema.sigma_rels)) == len(config.ema.sigma_rels),
        "ema.sigma_rels",
        "entries must differ",
        str(config.ema.sigma_rels),
        "remove the repeated one",
    )
    need(
        m.lora.alpha is None or m.lora.rank is not None,
        "model.lora.alpha",
        "needs model.lora.rank",
        str(m.lora.alpha),
        "set model.lora.rank=16, for example, or leave it out",
        ("model.lora.rank",),
    )
    need(
        not (config.dataset.mock and config.dataset.path),
        "dataset.mock",
        "excludes dataset.path",
        f"true with {config.dataset.path!r}",
        "drop one of the two",
        ("dataset.path",),
    )
    need(
        not (config.checkpoint.pretrained and config.checkpoint.load_checkpoint),
        "checkpoint.pretrained",
        "excludes checkpoint.load_checkpoint",
        "both",
        "load_checkpoint goes on with a run; pretrained starts a new one",
    )
    return faults


def _last_touched(keys: Iterable[str], origin: Mapping[str, str]) -> str:
    """The highest layer among the keys of a contradiction: the user's own setting rather than the recipe's."""

    def rank(layer: str) -> int:
        if layer in ("", "default") or layer.startswith("derived"):
            return 0
        return 1 if "recipe" in layer else 3 if "command line" in layer else 2

    return max((origin.get(key, "") for key in keys), key=rank, default="")


def check_training(config: Config, origin: Mapping[str, str]) -> list[Fault]:
    """What a training run needs from outside the configuration: a data set, and weights that are there."""
    faults = []
    d, c = config.dataset, config.checkpoint
    if not d.mock and d.path is None:
        faults.append(
            Fault(
                "dataset.path",
                "",
                "must name a folder of shards",
                "nothing",
                "give --dataset-path DIR (written by dfm prepare), or --mock",
            )
        )
    if config.model.lora.rank and not (c.pretrained or c.load_checkpoint):
        faults.append(
            Fault(
                "model.lora.rank",
                origin.get("model.lora.rank", ""),
                "needs weights to adapt",
                str(config.model.lora.rank),
                "give checkpoint.pretrained=PATH, or set it to null to train all weights",
            )
        )
    paths = {
        "dataset.path": d.path,
        "checkpoint.load_checkpoint": c.load_checkpoint,
        "checkpoint.pretrained": c.pretrained,
    }
    for key, path in paths.items():
        if path is not None and not Path(path).exists():
            faults.append(Fault(key, origin.get(key, ""), "must exist", repr(path), _nearest_path(Path(path))))
    return faults


def _nearest_path(path: Path) -> str:
    """The part of a path that exists, and the entry there that looks most like the next part."""
    there = path
    while not there.exists() and there != there.parent:
        missing, there = there.name, there.parent
    entries = [p.name for p in there.iterdir()] if there.is_dir() else []
    near = difflib.get_close_matches(missing, entries, 1)
    return f"did you mean {there / near[0]}?" if near else f"{there} has no {missing!r}"


def layout_faults(config: Config, world_size: int, origin: Mapping[str, str] | None = None) -> list[Fault]:
    """Every reason why the parallel layout does not fit the model, the batch or the number of processes.

    Parameters
    ----------
    world_size : processes of the job; TP * PP * CP must divide it, the quotient is DP.

    Returns
    -------
    list of Fault, empty when the layout fits; `str(fault)` is one line with the nearest legal values.
    """
    m, t, layer = config.model, config.train, origin or {}
    tp, pp, cp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
    vpp = m.virtual_pipeline_model_parallel_size or 1
    faults: list[Fault] = []

    def need(holds: bool, key: str, must: str, given: Any, fix: str) -> None:
        if not holds:
            faults.append(Fault(key, layer.get(key, ""), must, str(given), fix))

    tp_key = "model.tensor_model_parallel_size"
    ffn = m.ffn_hidden_size or 4 * m.hidden_size
    for name, size in (
        ("num_attention_heads", m.num_attention_heads),
        ("hidden_size", m.hidden_size),
        ("ffn_hidden_size", ffn),
    ):
        need(
            size % tp == 0, tp_key, f"must divide model.{name} = {size}", tp, f"nearest: {_nearest_divisors(size, tp)}"
        )
    need(
        not m.sequence_parallel or tp > 1,
        "model.sequence_parallel",
        "needs model.tensor_model_parallel_size > 1",
        f"true with {tp}",
        "set it to false, or tensor_model_parallel_size to 2",
    )
    pp_key = "model.pipeline_model_parallel_size"
    if m.num_layers % pp:
        need(
            False,
            pp_key,
            f"must divide model.num_layers = {m.num_layers}",
            pp,
            f"nearest: {_nearest_divisors(m.num_layers, pp)}",
        )
    else:
        need(
            m.num_layers % (pp * vpp) == 0,
            "model.virtual_pipeline_model_parallel_size",
            f"must divide the {m.num_layers // pp} layers of each pipeline process",
            vpp,
            f"nearest: {_nearest_divisors(m.num_layers // pp, vpp)}",
        )
    need(
        vpp == 1 or pp > 1,
        "model.virtual_pipeline_model_parallel_size",
        "needs model.pipeline_model_parallel_size > 1",
        vpp,
        "set it to null, or set pipeline_model_parallel_size to 2",
    )
    step = cp * (tp if m.sequence_parallel else 1)
    tokens = t.micro_batch_size * config.dataset.task_encoder_seq_length
    need(
        tokens % step == 0,
        "dataset.task_encoder_seq_length",
        f"times train.micro_batch_size must be a multiple of CP{' * TP' if m.sequence_parallel else ''} = {step}",
        f"{t.micro_batch_size} * {config.dataset.task_encoder_seq_length} = {tokens}",
        f"nearest: {_nearest_multiples(config.dataset.task_encoder_seq_length, step)}",
    )
    return faults + _check_processes(config, world_size, tp, pp, cp, vpp, layer)


def _check_processes(
    config: Config, world_size: int, tp: int, pp: int, cp: int, vpp: int, origin: Mapping[str, str]
) -> list[Fault]:
    model, t = tp * pp * cp, config.train
    if world_size % model:
        fix = (
            f"start {_nearest_multiples(world_size, model)} processes, "
            f"or make TP * PP * CP one of {_nearest_divisors(world_size, model)}"
        )
        return [
            Fault(
                "",
                "",
                f"TP * PP * CP must divide the number of processes = {world_size}",
                f"{tp} * {pp} * {cp} = {model}",
                fix,
            )
        ]
    dp = world_size // model
    key, step = "train.global_batch_size", t.micro_batch_size * dp
    if t.global_batch_size % step:
        return [
            Fault(
                key,
                origin.get(key, ""),
                f"must be a multiple of micro_batch_size * DP = {t.micro_batch_size} * {dp} = {step}",
                str(t.global_batch_size),
                f"nearest: {_nearest_multiples(t.global_batch_size, step)}",
            )
        ]
    micro = t.global_batch_size // step
    if vpp > 1 and micro % pp:
        return [
            Fault(
                key,
                origin.get(key, ""),
                f"must give a number of micro-batches that is a multiple of PP = {pp} with interleaved stages",
                f"{micro}",
                f"nearest: {_nearest_multiples(t.global_batch_size, step * pp)}",
            )
        ]
    return []
