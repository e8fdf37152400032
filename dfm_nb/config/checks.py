"""What must hold: limits on one key as pydantic found them broken, and the rules between keys, each stated once.

The rules yield a `Fault` for each thing that is wrong; nothing is raised here. There are rules for every
configuration, for a run that is about to start, and for a number of processes.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dfm_nb.base import geometry
from dfm_nb.base.files import is_url
from dfm_nb.base.nearest import nearest
from dfm_nb.base.options import Field, must
from dfm_nb.base.pretrained import names, packaged
from dfm_nb.base.run import is_iteration, written_path
from dfm_nb.config import notation
from dfm_nb.config.schema import FIELDS, Config
from dfm_nb.config.sizes import SUGGESTED, VARIANTS


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


# ---- one key ------------------------------------------------------------------------------------------------------


def value_faults(error: ValidationError, values: Mapping[str, Any], origin: Mapping[str, str]) -> list[Fault]:
    """The first fault of every key that pydantic refused, in its words, with the value and the layer it came from."""
    faults: dict[str, Fault] = {}
    for details in error.errors(include_url=False, include_input=False):
        *_, last = where = details["loc"]
        key = ".".join(part for part in where if isinstance(part, str))
        # "Input should be ...", "List should have ..."; the number is an entry's place in a list
        entry = "" if isinstance(last, str) else f"entry {last + 1} "
        given = shown(values[key])
        faults.setdefault(
            key, Fault(key, entry + must(details["msg"]), given, _fix(FIELDS[key], values[key]), (), origin[key])
        )
    return list(faults.values())


def _fix(field: Field, value: Any) -> str:
    near = nearest(value, field.limits.get("choices", ()), 0.4) if isinstance(value, str) else None
    return f"did you mean {near}?" if near else f"the default is {notation.write_value(field.default)}"


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


def _network(config: Config) -> Iterator[Fault]:
    model = config.model
    width, heads = model.hidden_size, model.num_attention_heads
    if width % (2 * heads):  # RoPE and the sine-cosine embedding turn channels in pairs
        must = f"must divide model.hidden_size = {width} into an even number of channels per head"
        fix = f"hidden_size {_nearest_multiples(width, 2 * heads)}"
        if width % 2 == 0:
            fix = f"heads {_nearest_divisors(width // 2, heads)}, or {fix}"
        yield Fault("model.num_attention_heads", must, str(heads), fix, ("model.hidden_size",))
    for key, value in VARIANTS.get(model.variant, {}).items():
        given = getattr(model, key)
        fits = given == value or key in SUGGESTED or (key == "adaln_lora_dim" and given is not None)
        if not fits:
            must = f"must be {notation.write_value(value)} with model.variant={model.variant}"
            yield Fault(f"model.{key}", must, shown(given), "leave it out", ("model.variant",))
    if model.variant == "wan" and model.adaln_lora_dim is not None:
        given = str(model.adaln_lora_dim)
        yield Fault("model.adaln_lora_dim", "must be null with model.variant=wan", given, "leave it out")
    if model.variant == "dfm" and (width % 16 or width < 256):
        must = "must be a multiple of 16, 256 or more, with model.variant=dfm"
        yield Fault("model.hidden_size", must, str(width), "for example 384", ("model.variant",))
    if model.lora.alpha is not None and model.lora.rank is None:
        fix = "set model.lora.rank=16, for example, or leave it out"
        yield Fault("model.lora.alpha", "needs model.lora.rank", str(model.lora.alpha), fix, ("model.lora.rank",))


def _optimization(config: Config) -> Iterator[Fault]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        must, fix = f"must be at most optimizer.lr = {optimizer.lr:g}", "lower it, or raise optimizer.lr"
        yield Fault("optimizer.min_lr", must, f"{optimizer.min_lr:g}", fix, ("optimizer.lr",))
    if optimizer.optimizer == "muon" and optimizer.use_distributed_optimizer:
        must = "must be false with optimizer.optimizer=muon, which needs whole matrices"
        fix = "set it to false, or optimizer.optimizer to adam"
        yield Fault("optimizer.use_distributed_optimizer", must, "true", fix, ("optimizer.optimizer",))
    warmup = config.scheduler.lr_warmup_iters or 0
    end = config.scheduler.lr_decay_iters or config.train.train_iters
    if warmup >= end:
        must = f"must be less than the {end} iterations of the schedule"
        fix = f"for example {end // 20}, or raise train.train_iters"
        also = ("train.train_iters", "scheduler.lr_decay_iters")
        yield Fault("scheduler.lr_warmup_iters", must, str(warmup), fix, also)
    widths = config.ema.sigma_rels
    if len(set(widths)) < len(widths):
        yield Fault("ema.sigma_rels", "entries must differ", shown(widths), "remove the repeated one")


def _data_and_start(config: Config) -> Iterator[Fault]:
    data, start, frames = config.dataset, config.checkpoint, config.validation.frames
    if data.mock and data.path:
        given = f"true with {shown(data.path)}"
        yield Fault("dataset.mock", "excludes dataset.path", given, "drop one of the two", ("dataset.path",))
    patch = config.model.patch_temporal
    if data.condition_frames_prob and patch > 1:
        must = f"must be 0 with model.patch_temporal = {patch}: a token holds the first latent frame and the next"
        fix, given = "set it to 0, or model.patch_temporal to 1", f"{data.condition_frames_prob:g}"
        yield Fault("dataset.condition_frames_prob", must, given, fix, ("model.patch_temporal",))
    if start.pretrained and start.load_checkpoint:
        fix = "load_checkpoint goes on with a run; pretrained starts a new one"
        also = ("checkpoint.load_checkpoint",)
        yield Fault("checkpoint.pretrained", "excludes checkpoint.load_checkpoint", "both", fix, also)
    if start.load and start.load_checkpoint:
        fix = "load_checkpoint names what must exist, load a folder that may be empty; drop one of the two"
        yield Fault("checkpoint.load_checkpoint", "excludes checkpoint.load", "both", fix, ("checkpoint.load",))
    if frames is not None and not geometry.is_frame_count(frames):
        yield Fault("validation.frames", "must be 1 + 4 k", str(frames), f"nearest: {geometry.nearest_frames(frames)}")


def _degrees(config: Config) -> Iterator[Fault]:
    """Of a layout, whatever the number of processes."""
    model, train = config.model, config.train
    stages = model.virtual_pipeline_model_parallel_size or 1
    if stages > 1 and model.pipeline_model_parallel_size == 1:
        fix = "set it to null, or set pipeline_model_parallel_size to 2"
        yield Fault(VPP, f"needs {PP} > 1", str(stages), fix, (PP,))
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        fix = "set it to false, or tensor_model_parallel_size to 2"
        yield Fault("model.sequence_parallel", f"needs {TP} > 1", "true with 1", fix, (TP,))
    whole, micro = train.global_batch_size, train.micro_batch_size
    if whole % micro:
        must = f"must be a multiple of train.micro_batch_size = {micro}"
        fix = f"nearest: {_nearest_multiples(whole, micro)}"
        yield Fault("train.global_batch_size", must, str(whole), fix, ("train.micro_batch_size",))


# ---- what a training run needs from outside the configuration -----------------------------------------------------


def _start_of_training(config: Config) -> Iterator[Fault]:
    rank, start = config.model.lora.rank, config.checkpoint
    if not config.dataset.mock and config.dataset.path is None:
        fix = "give --dataset-path DIR (written by dfm prepare), or --mock"
        yield Fault("dataset.path", "must name a folder of shards", "nothing", fix)
    if rank and not (start.pretrained or start.load_checkpoint):
        fix = "give checkpoint.pretrained=PATH, or set it to null to train all weights"
        yield Fault("model.lora.rank", "needs weights to adapt", str(rank), fix)
    paths = {
        "dataset.path": config.dataset.path,
        "checkpoint.load_checkpoint": start.load_checkpoint,
        "checkpoint.pretrained": None if packaged(start.pretrained) else start.pretrained,
        # A folder may be empty or absent, but who names one checkpoint means it.
        "checkpoint.load": start.load if start.load and is_iteration(start.load) else None,
    }
    for key, path in paths.items():
        elsewhere = key == "dataset.path" and is_url(path)
        if path is not None and not elsewhere and not os.path.exists(written_path(path)):
            near = nearest(path, names()) if key == "checkpoint.pretrained" else None
            fix = f"did you mean {near}, which comes with the package?" if near else _nearest_path(Path(path))
            yield Fault(key, "must exist", shown(path), fix)
    outputs = {"checkpoint.checkpoint_dir": start.checkpoint_dir, "checkpoint.load": start.load}
    for key, path in {**outputs, "dataset.cache_dir": config.dataset.cache_dir}.items():
        if is_url(path):
            yield Fault(key, "must be a local folder", shown(path), "copy what lies there, or is written there")
    if start.load and os.path.isfile(start.load):
        fix = "checkpoint.pretrained=FILE starts from exported weights"
        yield Fault("checkpoint.load", "must be a folder of checkpoints", shown(start.load), fix)


# ---- parallel layouts ---------------------------------------------------------------------------------------------


def _splits(config: Config) -> Iterator[Fault]:
    """What each axis divides."""
    m = config.model
    tp, pp, cp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
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
    layers, stages = m.num_layers, m.virtual_pipeline_model_parallel_size or 1
    if layers % pp:
        fix = f"nearest: {_nearest_divisors(layers, pp)}"
        yield Fault(PP, f"must divide model.num_layers = {layers}", str(pp), fix, ("model.num_layers",))
    elif pp > 1 and layers // pp % stages:
        must = f"must divide the {layers // pp} layers of each pipeline process"
        fix = f"nearest: {_nearest_divisors(layers // pp, stages)}"
        yield Fault(VPP, must, str(stages), fix, (PP, "model.num_layers"))
    micro, length = config.train.micro_batch_size, config.dataset.task_encoder_seq_length
    step, words = (cp * tp, "CP * TP") if m.sequence_parallel else (cp, "CP")
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
        if t.global_batch_size % t.micro_batch_size == 0:  # else `_degrees` says it
            must = f"must be a multiple of micro_batch_size * DP = {t.micro_batch_size} * {dp} = {step}"
            fix = f"nearest: {_nearest_multiples(t.global_batch_size, step)}"
            yield Fault("train.global_batch_size", must, str(t.global_batch_size), fix, also)
    elif (m.virtual_pipeline_model_parallel_size or 1) > 1 and t.global_batch_size // step % pp:
        must = f"must give a number of micro-batches that is a multiple of PP = {pp} with interleaved stages"
        fix = f"nearest: {_nearest_multiples(t.global_batch_size, step * pp)}"
        yield Fault("train.global_batch_size", must, str(t.global_batch_size // step), fix, (*also, VPP))


def layout_faults(config: Config, world_size: int) -> list[Fault]:
    """Every reason why the parallel layout does not fit the model, the batch or the number of processes."""
    return [*_degrees(config), *_splits(config), *_processes(config, world_size)]


def faults_of(config: Config, training: bool = False, world_size: int | None = None) -> list[Fault]:
    """Every broken rule, once: those of all configurations, and on request those of a run and of a layout."""
    found = [*_network(config), *_optimization(config), *_data_and_start(config)]
    found += _degrees(config) if world_size is None else layout_faults(config, world_size)
    return [*found, *(_start_of_training(config) if training else ())]
