"""Checks of settings: limits on one key, found by pydantic, and rules between keys, each defined once.

The rules yield each error; nothing is raised here. There are rules for every configuration, for a run that is about to
start, and for a number of processes.
"""

import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dfm_nb.base import geometry
from dfm_nb.base.argv import meant, nearest
from dfm_nb.base.files import is_url
from dfm_nb.base.options import Field, must
from dfm_nb.base.pretrained import files, packaged
from dfm_nb.base.run import is_iteration, written_path
from dfm_nb.config import notation
from dfm_nb.config.schema import FIELDS, STUDENT_SAMPLING, Config


@dataclass(frozen=True)
class Fault:
    """One error: `origin: key must ...; got ...; fix`.

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
        where = f"{self.origin}: " if self.origin else ""
        must = f"{self.key} {self.must}".strip()
        return f"{where}{must}; got {self.given}; {self.fix}"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def shown(value: Any) -> str:
    """A value for an error message, truncated to a line."""
    if value is None:
        return "null"
    try:
        return _short.repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        return "a number of thousands of digits"


# ---- one key ------------------------------------------------------------------------------------------------------


def value_faults(error: ValidationError, values: Mapping[str, Any], origin: Mapping[str, str]) -> list[Fault]:
    """The first fault of every key that pydantic rejected, in its words, with the value and its layer."""
    faults = {}
    for details in error.errors(include_url=False, include_input=False):
        where = details["loc"]
        key = ".".join(part for part in where if isinstance(part, str))
        if key in faults:
            continue
        # "Input should be ...", "List should have ..."; the number is an entry's place in a list
        entry = "" if isinstance(where[-1], str) else f"entry {where[-1] + 1} "
        fix = _fix(FIELDS[key], values[key])
        faults[key] = Fault(key, entry + must(details["msg"]), shown(values[key]), fix, origin=origin[key])
    return list(faults.values())


def _fix(field: Field, value: Any) -> str:
    if field is FIELDS["model.variant"]:
        return "install the package that adds this network, or choose one of those"
    default = f"the default is {notation.write_value(field.default)}"
    if isinstance(value, str):
        return meant(value, field.limits.get("choices", ()), default, 0.4)
    return default


# ---- nearest legal values -----------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    found = set()
    for d in range(1, math.isqrt(n) + 1):
        if n % d == 0:
            found |= {d, n // d}
    return sorted(found)


def _nearest_divisors(n: int, value: int) -> str:
    near = sorted(divisors(n), key=lambda d: (abs(d - value), d))[:3]
    return ", ".join(map(str, sorted(near)))


def _nearest_path(path: Path) -> str:
    """The entry of its folder with the most similar name."""
    near = nearest(path.name, os.listdir(path.parent)) if path.parent.is_dir() else None
    return f"did you mean {path.parent / near}?" if near else f"{path.parent} has no {shown(path.name)}"


# ---- rules for every configuration --------------------------------------------------------------------------------

TP = "model.tensor_model_parallel_size"
PP = "model.pipeline_model_parallel_size"
VPP = "model.virtual_pipeline_model_parallel_size"
CP = "model.context_parallel_size"
MICRO = "train.micro_batch_size"


Broken = Iterator[tuple[str, ...]]
"""Of each broken rule the key, what must hold of it, the fix, and further keys; no key if it is about their product."""


def _network(config: Config) -> Broken:
    model = config.model
    width = model.hidden_size
    heads = model.num_attention_heads
    if width % (2 * heads):  # RoPE and the sine-cosine embedding use pairs of channels
        must = f"must divide model.hidden_size = {width} into an even number of channels per head"
        fix = f"hidden_size {geometry.nearest_multiples(width, 2 * heads)}"
        if width % 2 == 0:
            fix = f"heads {_nearest_divisors(width // 2, heads)}, or {fix}"
        yield "model.num_attention_heads", must, fix, "model.hidden_size"
    for name, must, fix in model.network.broken():
        yield f"model.{name}", f"{must} with model.variant={model.variant}", fix, "model.variant"
    if model.lora.alpha is not None and model.lora.rank is None:
        yield "model.lora.alpha", "needs model.lora.rank", "set that to 16, for example", "model.lora.rank"


def _optimization(config: Config) -> Broken:
    optimizer = config.optimizer
    scheduler = config.scheduler
    if optimizer.min_lr > optimizer.lr:
        must = f"must be at most optimizer.lr = {optimizer.lr:g}"
        yield "optimizer.min_lr", must, "lower it, or raise optimizer.lr", "optimizer.lr"
    if optimizer.optimizer == "muon" and optimizer.use_distributed_optimizer:
        must = "must be false with optimizer.optimizer=muon, which needs complete matrices"
        fix = "set it to false, or optimizer.optimizer to adam"
        yield "optimizer.use_distributed_optimizer", must, fix, "optimizer.optimizer"
    end = scheduler.lr_decay_iters or config.train.train_iters
    if (scheduler.lr_warmup_iters or 0) >= end:
        must = f"must be less than the {end} iterations of the schedule"
        also = "train.train_iters", "scheduler.lr_decay_iters"
        yield "scheduler.lr_warmup_iters", must, f"for example {end // 20}", *also
    if len(set(config.ema.sigma_rels)) < len(config.ema.sigma_rels):
        yield "ema.sigma_rels", "entries must differ", "remove the repeated one"


def _data_and_start(config: Config) -> Broken:
    data = config.dataset
    start = config.checkpoint
    frames = config.validation.frames
    patch = config.model.patch_temporal
    if data.mock and data.path:
        yield "dataset.path", "excludes dataset.mock", "drop one of the two", "dataset.mock"
    for key in ("condition_frames_prob", "condition_last_prob"):
        if getattr(data, key) and patch > 1:
            must = f"must be 0 with model.patch_temporal = {patch}: a token holds the given latent frame and the next"
            fix = "set it to 0, or model.patch_temporal to 1"
            yield f"dataset.{key}", must, fix, "model.patch_temporal"
    if start.pretrained and start.load_checkpoint:
        fix = "load_checkpoint resumes a run; pretrained starts a new one"
        yield "checkpoint.pretrained", "excludes checkpoint.load_checkpoint", fix, "checkpoint.load_checkpoint"
    if config.model.student:
        for name, only in STUDENT_SAMPLING.items():
            if getattr(config.generation, name) != only:
                yield f"generation.{name}", f"must be {only} with model.student", "leave it out", "model.student"
    if start.load and start.load_checkpoint:
        fix = "load_checkpoint must exist, load may be an empty folder; drop one of the two"
        yield "checkpoint.load_checkpoint", "excludes checkpoint.load", fix, "checkpoint.load"
    if frames is not None and not geometry.is_frame_count(frames):
        yield "validation.frames", "must be 1 + 4 k", f"nearest: {geometry.nearest_frames(frames)}"


def _degrees(config: Config) -> Broken:
    """Rules for a layout, for any number of processes."""
    model = config.model
    train = config.train
    if (model.virtual_pipeline_model_parallel_size or 1) > 1 and model.pipeline_model_parallel_size == 1:
        yield VPP, f"needs {PP} > 1", "set it to null, or pipeline_model_parallel_size to 2", PP
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        fix = "set it to false, or tensor_model_parallel_size to 2"
        yield "model.sequence_parallel", f"needs {TP} > 1", fix, TP
    micro = train.micro_batch_size
    if train.global_batch_size % micro:
        fix = f"nearest: {geometry.nearest_multiples(train.global_batch_size, micro)}"
        yield "train.global_batch_size", f"must be a multiple of {MICRO} = {micro}", fix, MICRO


# ---- inputs of a training run outside of the configuration --------------------------------------------------------


def _start_of_training(config: Config, begun: bool) -> Broken:
    """begun : the run has a checkpoint, which holds the weights that it began with."""
    data = config.dataset
    start = config.checkpoint
    if not data.mock and data.path is None:
        fix = "give --dataset-path DIR (written by dfm prepare), or --mock"
        yield "dataset.path", "must name a folder of shards", fix
    if config.model.lora.rank and not (start.pretrained or start.load_checkpoint or begun):
        fix = "give checkpoint.pretrained=PATH, or set it to null to train all weights"
        yield "model.lora.rank", "needs weights to adapt", fix
    paths = {
        "dataset.path": None if is_url(data.path) else data.path,
        "checkpoint.load_checkpoint": start.load_checkpoint,
        "checkpoint.pretrained": None if begun or packaged(start.pretrained) else start.pretrained,
        # A folder may be empty or absent, but one checkpoint must exist.
        "checkpoint.load": start.load if start.load and is_iteration(start.load) else None,
    }
    for key, path in paths.items():
        if path is not None and not os.path.exists(written_path(path)):
            near = nearest(path, files()) if key == "checkpoint.pretrained" else None
            fix = f"did you mean {near}, which comes with the package?" if near else _nearest_path(Path(path))
            yield key, "must exist", fix
    for key in ("checkpoint.checkpoint_dir", "checkpoint.load", "dataset.cache_dir"):
        if is_url(attrgetter(key)(config)):
            yield key, "must be a local folder", "copy the files to or from the server"
    if start.load and os.path.isfile(start.load):
        fix = "checkpoint.pretrained=FILE starts from exported weights"
        yield "checkpoint.load", "must be a folder of checkpoints", fix


# ---- parallel layouts ---------------------------------------------------------------------------------------------


def _splits(config: Config) -> Broken:
    """The sizes that each axis must divide."""
    m = config.model
    tp = m.tensor_model_parallel_size
    pp = m.pipeline_model_parallel_size
    cp = m.context_parallel_size
    split = "num_attention_heads", "hidden_size", "ffn_hidden_size"
    sizes = {f"model.{name}": getattr(m, name) for name in split}
    undivided = [f"{key} = {size}" for key, size in sizes.items() if size % tp]
    if undivided:
        fix = f"nearest: {_nearest_divisors(math.gcd(*sizes.values()), tp)}"
        yield TP, f"must divide {' and '.join(undivided)}", fix, *sizes
    layers = m.num_layers
    stages = m.virtual_pipeline_model_parallel_size or 1
    if layers % pp:
        fix = f"nearest: {_nearest_divisors(layers, pp)}"
        yield PP, f"must divide model.num_layers = {layers}", fix, "model.num_layers"
    elif pp > 1 and layers // pp % stages:
        must = f"must divide the {layers // pp} layers of each pipeline process"
        yield VPP, must, f"nearest: {_nearest_divisors(layers // pp, stages)}", PP, "model.num_layers"
    micro = config.train.micro_batch_size
    length = config.dataset.task_encoder_seq_length
    step, words = (cp * tp, "CP * TP") if m.sequence_parallel else (cp, "CP")
    if micro * length % step:
        must = f"times {MICRO} = {micro} must be a multiple of {words} = {step}"
        fix = f"nearest: {geometry.nearest_multiples(length, step)}"
        yield "dataset.task_encoder_seq_length", must, fix, MICRO, CP, TP


def _processes(config: Config, world_size: int) -> Broken:
    m = config.model
    t = config.train
    tp = m.tensor_model_parallel_size
    pp = m.pipeline_model_parallel_size
    cp = m.context_parallel_size
    model = tp * pp * cp
    if world_size % model:
        must = f"TP * PP * CP must divide the number of processes = {world_size}"
        counts = geometry.nearest_multiples(world_size, model)
        fix = f"start {counts} processes, or make TP * PP * CP one of {_nearest_divisors(world_size, model)}"
        yield "", must, fix, TP, PP, CP
        return
    key = "train.global_batch_size"
    batch = t.global_batch_size
    dp = world_size // model
    step = t.micro_batch_size * dp
    if batch % step and batch % t.micro_batch_size == 0:  # otherwise `_degrees` reports it
        must = f"must be a multiple of micro_batch_size * DP = {t.micro_batch_size} * {dp} = {step}"
        yield key, must, f"nearest: {geometry.nearest_multiples(batch, step)}", MICRO, TP, PP, CP
    # megatron-core's interleaved schedule runs the micro-batches in groups of PP
    if batch % step == 0 and (m.virtual_pipeline_model_parallel_size or 1) > 1 and batch // step % pp:
        must = f"must give a number of micro-batches that is a multiple of PP = {pp} with interleaved stages"
        yield key, must, f"nearest: {geometry.nearest_multiples(batch, step * pp)}", MICRO, TP, PP, CP, VPP


def _faults(config: Config, *rules: Broken) -> list[Fault]:
    faults = []
    for key, rule, fix, *also in chain(*rules):
        given = [shown(attrgetter(name)(config)) for name in ([key] if key else also)]
        faults.append(Fault(key, rule, " * ".join(given), fix, tuple(also)))
    return faults


def layout_faults(config: Config, world_size: int) -> list[Fault]:
    """All faults of the parallel layout with this model, batch and number of processes."""
    return _faults(config, _degrees(config), _splits(config), _processes(config, world_size))


def faults_of(
    config: Config, training: bool = False, world_size: int | None = None, begun: bool = False
) -> list[Fault]:
    """Every broken rule, once: rules for all configurations, and on request for a run and a layout.

    begun : the run has a checkpoint.
    """
    faults = _faults(config, _network(config), _optimization(config), _data_and_start(config))
    faults += _faults(config, _degrees(config)) if world_size is None else layout_faults(config, world_size)
    if training:
        faults += _faults(config, _start_of_training(config, begun))
    return faults
