"""What must hold: limits on one key as pydantic found them broken, and the rules between keys, each stated once.

A rule is a function that yields a `Fault` for each thing that is wrong; nothing is raised here. `RULES` hold for every
configuration, `TRAINING_RULES` for a run that is about to start, `LAYOUT_RULES` for a number of processes.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dfm_nb.base import geometry
from dfm_nb.base.nearest import nearest
from dfm_nb.base.run import is_iteration, written_path
from dfm_nb.config import notation
from dfm_nb.config.schema import FIELDS, Config, Field
from dfm_nb.config.sizes import VARIANTS


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `origin: key must ...; got ...; fix`.

    key : the dotted key, "" when the fault is not about one.
    must, given, fix : what must hold; what was given; what to do.
    also : other keys that the fault is about.
    origin : the layer (file or command line) that the value came from, "" when unknown.
    """

    key: str
    must: str
    given: str
    fix: str
    also: tuple[str, ...] = ()
    origin: str = ""

    def __str__(self) -> str:
        where = ": ".join(p for p in (self.origin, f"{self.key} {self.must}".strip()) if p)
        return f"{where}; got {self.given}; {self.fix}"


# ---- one key: pydantic's errors in our words ----------------------------------------------------------------------

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list of texts",
    list[float]: "a list of numbers",
    list[list[int]]: "a list of lists of whole numbers",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def shown(value: Any) -> str:
    """A value for an error message, cut to a line."""
    if value is None:
        return "null"
    try:
        return _short.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits"


def value_faults(error: ValidationError, values: Mapping[str, Any], origin: Mapping[str, str]) -> list[Fault]:
    """The first fault of every key that pydantic refused, with the value and the layer it came from."""
    faults: dict[str, Fault] = {}
    for details in error.errors(include_url=False, include_input=False):
        key = ".".join(part for part in details["loc"] if isinstance(part, str))
        if key not in faults:
            must, fix = _explain(FIELDS[key], details, values[key])
            faults[key] = Fault(key, must, shown(values[key]), fix, origin=origin.get(key, ""))
    return list(faults.values())


def _explain(field: Field, details: ErrorDetails, value: Any) -> tuple[str, str]:
    """What must hold, and how to fix it."""
    kind, limits = details["type"], details.get("ctx", {})
    in_list = isinstance(details["loc"][-1], int)
    must = "entries must" if in_list else "must"
    default = f"the default is {notation.write_value(field.default)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = f"{limits[name]:.15g}"
        return f"{must} be {words} {bound}", f"the nearest legal value is {bound}" if name in ("ge", "le") else default
    if kind == "finite_number" or (kind == "float_type" and type(value) is int):  # an int beyond the floats
        return f"{must} be finite", default
    if kind == "multiple_of":
        step = limits["multiple_of"]
        return f"must be a multiple of {step}", f"nearest: {_nearest_multiples(value, step)}"
    if kind == "literal_error":
        near = nearest(value, field.limits["choices"], 0.4) if isinstance(value, str) else None
        fix = f"did you mean {near}?" if near else "choose one of them"
        return f"must be one of {', '.join(field.limits['choices'])}", fix
    if kind in ("too_short", "too_long") and in_list:
        return f"entries must have {limits.get('min_length', limits.get('max_length'))} numbers each", default
    if kind == "too_short":
        return f"must have at least {limits['min_length']} entries", default
    must = f"must be {_WORDS[field.type]}" + (" or null" if field.optional else "")
    if kind == "placeholder":
        return must, "write the value itself: ${...} and ??? are not filled in"
    if field.type not in (int, float, bool, str):
        return must, f"for example {field.key.rpartition('.')[2]}=[...], with commas between the entries"
    return must, f"leave it out: {default}" if value is None else default


# ---- nearest legal values -----------------------------------------------------------------------------------------


def _nearest_multiples(value: int, step: int) -> str:
    down = max(value // step, 1) * step
    up = max(-(-value // step), 1) * step
    return f"{down}" if down == up else f"{down} or {up}"


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _nearest_divisors(n: int, value: int, count: int = 3) -> str:
    near = sorted(divisors(n), key=lambda d: (abs(d - value), d))[:count]
    return ", ".join(map(str, sorted(near)))


def _nearest_path(path: Path) -> str:
    """The part of a path that exists, and the entry there that looks most like the next part."""
    there = path
    missing = path.name
    while not os.path.exists(there) and there != there.parent:
        missing, there = there.name, there.parent
    try:
        near = nearest(missing, os.listdir(there))
    except OSError:
        near = None
    return f"did you mean {there / near}?" if near else f"{there} has no {shown(missing)}"


# ---- rules that hold for every configuration ----------------------------------------------------------------------

TP = "model.tensor_model_parallel_size"
PP = "model.pipeline_model_parallel_size"
VPP = "model.virtual_pipeline_model_parallel_size"
CP = "model.context_parallel_size"


def _attention_heads(config: Config) -> Iterator[Fault]:
    key, also = "model.num_attention_heads", ("model.hidden_size",)
    width, heads = config.model.hidden_size, config.model.num_attention_heads
    if width % heads:
        fix = f"heads {_nearest_divisors(width, heads)}, or hidden_size {_nearest_multiples(width, 2 * heads)}"
        yield Fault(key, f"must divide model.hidden_size = {width}", str(heads), fix, also)
    elif width // heads % 2:  # RoPE and the sine-cosine embedding turn channels in pairs
        given = f"{width} / {heads} = {width // heads}"
        fix = f"hidden_size {_nearest_multiples(width, 2 * heads)}"
        if width % 2 == 0:
            fix = f"heads {_nearest_divisors(width // 2, heads)}, or {fix}"
        yield Fault(key, "must leave an even number of channels per head", given, fix, also)


def _variant(config: Config) -> Iterator[Fault]:
    model, also = config.model, ("model.variant",)
    for key, value in VARIANTS.get(model.variant, {}).items():
        given = getattr(model, key)
        fits = given == value or (key == "layernorm_epsilon") or (key == "adaln_lora_dim" and given is not None)
        if not fits:
            must = f"must be {notation.write_value(value)} with model.variant={model.variant}"
            yield Fault(f"model.{key}", must, shown(given), "leave it out", also)
    if model.variant == "dfm" and (model.hidden_size % 16 or model.hidden_size < 256):
        must = "must be a multiple of 16, 256 or more, with model.variant=dfm"
        yield Fault("model.hidden_size", must, str(model.hidden_size), "for example 384", also)


def _learning_rate(config: Config) -> Iterator[Fault]:
    lr, min_lr = config.optimizer.lr, config.optimizer.min_lr
    if min_lr > lr:
        must = f"must be at most optimizer.lr = {lr:g}"
        yield Fault("optimizer.min_lr", must, f"{min_lr:g}", "lower it, or raise optimizer.lr", ("optimizer.lr",))


def _whole_matrices(config: Config) -> Iterator[Fault]:
    if config.optimizer.optimizer == "muon" and config.optimizer.use_distributed_optimizer:
        must = "must be false with optimizer.optimizer=muon, which needs whole matrices"
        fix = "set it to false, or optimizer.optimizer to adam"
        yield Fault("optimizer.use_distributed_optimizer", must, "true", fix, ("optimizer.optimizer",))


def _warmup(config: Config) -> Iterator[Fault]:
    warmup = config.scheduler.lr_warmup_iters or 0
    end = config.scheduler.lr_decay_iters or config.train.train_iters
    if warmup >= end:
        must = f"must be less than the {end} iterations of the schedule"
        fix = f"for example {end // 20}, or raise train.train_iters"
        also = ("train.train_iters", "scheduler.lr_decay_iters")
        yield Fault("scheduler.lr_warmup_iters", must, str(warmup), fix, also)


def _stages_need_pipeline(config: Config) -> Iterator[Fault]:
    stages = config.model.virtual_pipeline_model_parallel_size or 1
    if stages > 1 and config.model.pipeline_model_parallel_size == 1:
        fix = "set it to null, or set pipeline_model_parallel_size to 2"
        yield Fault(VPP, f"needs {PP} > 1", str(stages), fix, (PP,))


def _sequence_parallel_needs_tensor_parallel(config: Config) -> Iterator[Fault]:
    if config.model.sequence_parallel and config.model.tensor_model_parallel_size == 1:
        fix = "set it to false, or tensor_model_parallel_size to 2"
        yield Fault("model.sequence_parallel", f"needs {TP} > 1", "true with 1", fix, (TP,))


def _micro_batches(config: Config) -> Iterator[Fault]:
    whole, micro = config.train.global_batch_size, config.train.micro_batch_size
    if whole % micro:
        must = f"must be a multiple of train.micro_batch_size = {micro}"
        fix = f"nearest: {_nearest_multiples(whole, micro)}"
        yield Fault("train.global_batch_size", must, str(whole), fix, ("train.micro_batch_size",))


def _frames(config: Config) -> Iterator[Fault]:
    frames = config.validation.frames
    if frames is not None and not geometry.is_frame_count(frames):
        yield Fault("validation.frames", "must be 1 + 4 k", str(frames), f"nearest: {geometry.nearest_frames(frames)}")


def _ema_widths(config: Config) -> Iterator[Fault]:
    widths = config.ema.sigma_rels
    if len(set(widths)) < len(widths):
        yield Fault("ema.sigma_rels", "entries must differ", shown(widths), "remove the repeated one")


def _lora(config: Config) -> Iterator[Fault]:
    lora = config.model.lora
    if lora.alpha is not None and lora.rank is None:
        fix = "set model.lora.rank=16, for example, or leave it out"
        yield Fault("model.lora.alpha", "needs model.lora.rank", str(lora.alpha), fix, ("model.lora.rank",))


def _one_data_set(config: Config) -> Iterator[Fault]:
    if config.dataset.mock and config.dataset.path:
        given = f"true with {shown(config.dataset.path)}"
        yield Fault("dataset.mock", "excludes dataset.path", given, "drop one of the two", ("dataset.path",))


def _one_start(config: Config) -> Iterator[Fault]:
    if config.checkpoint.pretrained and config.checkpoint.load_checkpoint:
        fix = "load_checkpoint goes on with a run; pretrained starts a new one"
        also = ("checkpoint.load_checkpoint",)
        yield Fault("checkpoint.pretrained", "excludes checkpoint.load_checkpoint", "both", fix, also)
    if config.checkpoint.load and config.checkpoint.load_checkpoint:
        fix = "load_checkpoint names what must exist, load a folder that may be empty; drop one of the two"
        yield Fault("checkpoint.load_checkpoint", "excludes checkpoint.load", "both", fix, ("checkpoint.load",))


def _first_frame(config: Config) -> Iterator[Fault]:
    probability, frames = config.dataset.condition_frames_prob, config.model.patch_temporal
    if probability and frames > 1:
        must = f"must be 0 with model.patch_temporal = {frames}: a token holds the first latent frame and the next"
        fix = "set it to 0, or model.patch_temporal to 1"
        yield Fault("dataset.condition_frames_prob", must, f"{probability:g}", fix, ("model.patch_temporal",))


RULES: tuple[Callable[[Config], Iterator[Fault]], ...] = (
    _attention_heads,
    _variant,
    _learning_rate,
    _whole_matrices,
    _warmup,
    _stages_need_pipeline,
    _sequence_parallel_needs_tensor_parallel,
    _micro_batches,
    _frames,
    _ema_widths,
    _lora,
    _one_data_set,
    _one_start,
    _first_frame,
)


# ---- what a training run needs from outside the configuration -----------------------------------------------------


def _data(config: Config) -> Iterator[Fault]:
    if not config.dataset.mock and config.dataset.path is None:
        fix = "give --dataset-path DIR (written by dfm prepare), or --mock"
        yield Fault("dataset.path", "must name a folder of shards", "nothing", fix)


def _weights_to_adapt(config: Config) -> Iterator[Fault]:
    rank, start = config.model.lora.rank, config.checkpoint
    if rank and not (start.pretrained or start.load_checkpoint):
        fix = "give checkpoint.pretrained=PATH, or set it to null to train all weights"
        yield Fault("model.lora.rank", "needs weights to adapt", str(rank), fix)


def _paths_exist(config: Config) -> Iterator[Fault]:
    c = config.checkpoint
    paths = {
        "dataset.path": config.dataset.path,
        "checkpoint.load_checkpoint": c.load_checkpoint,
        "checkpoint.pretrained": c.pretrained,
        # A folder may be empty or absent, but who names one checkpoint means it.
        "checkpoint.load": c.load if c.load and is_iteration(c.load) else None,
    }
    for key, path in paths.items():
        if path is not None and not os.path.exists(written_path(path)):
            yield Fault(key, "must exist", shown(path), _nearest_path(Path(path)))
    if c.load and os.path.isfile(c.load):
        fix = "checkpoint.pretrained=FILE starts from exported weights"
        yield Fault("checkpoint.load", "must be a folder of checkpoints", shown(c.load), fix)


TRAINING_RULES: tuple[Callable[[Config], Iterator[Fault]], ...] = (_data, _weights_to_adapt, _paths_exist)


# ---- parallel layouts ---------------------------------------------------------------------------------------------


def _tensor_parallel(config: Config) -> Iterator[Fault]:
    m = config.model
    tp = m.tensor_model_parallel_size
    assert m.ffn_hidden_size is not None, "resolve fills it in"
    sizes = {
        "model.num_attention_heads": m.num_attention_heads,
        "model.hidden_size": m.hidden_size,
        "model.ffn_hidden_size": m.ffn_hidden_size,
    }
    undivided = [f"{key} = {size}" for key, size in sizes.items() if size % tp]
    if undivided:
        fix = f"nearest: {_nearest_divisors(math.gcd(*sizes.values()), tp)}"
        yield Fault(TP, f"must divide {' and '.join(undivided)}", str(tp), fix, tuple(sizes))


def _pipeline(config: Config) -> Iterator[Fault]:
    layers, pp = config.model.num_layers, config.model.pipeline_model_parallel_size
    stages = config.model.virtual_pipeline_model_parallel_size or 1
    if layers % pp:
        fix = f"nearest: {_nearest_divisors(layers, pp)}"
        yield Fault(PP, f"must divide model.num_layers = {layers}", str(pp), fix, ("model.num_layers",))
    elif pp > 1 and layers // pp % stages:
        must = f"must divide the {layers // pp} layers of each pipeline process"
        fix = f"nearest: {_nearest_divisors(layers // pp, stages)}"
        yield Fault(VPP, must, str(stages), fix, (PP, "model.num_layers"))


def _sequence_shards(config: Config) -> Iterator[Fault]:
    micro, length = config.train.micro_batch_size, config.dataset.task_encoder_seq_length
    step, words = config.model.context_parallel_size, "CP"
    if config.model.sequence_parallel:
        step, words = step * config.model.tensor_model_parallel_size, "CP * TP"
    if micro * length % step:
        must = f"times train.micro_batch_size must be a multiple of {words} = {step}"
        also = ("train.micro_batch_size", CP, TP)
        fix = f"nearest: {_nearest_multiples(length, step)}"
        yield Fault("dataset.task_encoder_seq_length", must, f"{micro} * {length} = {micro * length}", fix, also)


def _processes(config: Config, world_size: int) -> Iterator[Fault]:
    m, t = config.model, config.train
    tp, pp, cp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
    model = tp * pp * cp
    if world_size % model:
        must = f"TP * PP * CP must divide the number of processes = {world_size}"
        counts = _nearest_multiples(world_size, model)
        fix = f"start {counts} processes, or make TP * PP * CP one of {_nearest_divisors(world_size, model)}"
        yield Fault("", must, f"{tp} * {pp} * {cp} = {model}", fix, (TP, PP, CP))
        return
    dp = world_size // model
    step = t.micro_batch_size * dp
    also = ("train.micro_batch_size", TP, PP, CP)
    if t.global_batch_size % step:
        if t.global_batch_size % t.micro_batch_size == 0:  # else `_micro_batches` says it
            must = f"must be a multiple of micro_batch_size * DP = {t.micro_batch_size} * {dp} = {step}"
            fix = f"nearest: {_nearest_multiples(t.global_batch_size, step)}"
            yield Fault("train.global_batch_size", must, str(t.global_batch_size), fix, also)
    elif (m.virtual_pipeline_model_parallel_size or 1) > 1 and t.global_batch_size // step % pp:
        must = f"must give a number of micro-batches that is a multiple of PP = {pp} with interleaved stages"
        fix = f"nearest: {_nearest_multiples(t.global_batch_size, step * pp)}"
        yield Fault("train.global_batch_size", must, str(t.global_batch_size // step), fix, (*also, VPP))


LAYOUT_RULES: tuple[Callable[[Config], Iterator[Fault]], ...] = (
    _stages_need_pipeline,
    _sequence_parallel_needs_tensor_parallel,
    _micro_batches,
    _tensor_parallel,
    _pipeline,
    _sequence_shards,
)
"""The first three are `RULES` too: a layout may be checked alone. They say the same there, and are counted once."""


def faults_of(config: Config, training: bool = False, world_size: int | None = None) -> list[Fault]:
    """Every broken rule, once: those of all configurations, and on request those of a run and of a layout."""
    rules = (*RULES, *(TRAINING_RULES if training else ()))
    found = [fault for rule in rules for fault in rule(config)]
    if world_size is not None:
        found += layout_faults(config, world_size)
    return list(dict.fromkeys(found))


def layout_faults(config: Config, world_size: int) -> list[Fault]:
    """Every reason why the parallel layout does not fit the model, the batch or the number of processes."""
    return [fault for rule in LAYOUT_RULES for fault in rule(config)] + list(_processes(config, world_size))
