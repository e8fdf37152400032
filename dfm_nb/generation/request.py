"""What is to be generated: `Request`, the flags that make one, and files of prompts.

A field of `Request` is the one place for a setting: default, help text and limits. The command lines of `dfm generate`
and `dfm evaluate`, lines of a `.jsonl` file and the checks follow from it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from dfm_nb import parallel
from dfm_nb.base import geometry
from dfm_nb.base.argv import plain, unknown_keyword
from dfm_nb.base.log import log
from dfm_nb.base.nearest import nearest
from dfm_nb.config.schema import GenerationConfig
from dfm_nb.diffusion import samplers


def setting(
    default: Any,
    help: str,
    must: str = "",
    holds: Callable[[Any], bool] | None = None,
    near: Callable[[Any], str] | None = None,
    flag: str | None = None,
    metavar: str | tuple[str, ...] | None = None,
) -> Any:
    """A field of `Request` that can be set by a flag.

    Parameters
    ----------
    must, holds : what must hold ("be positive"), and the test of it; None is always legal where the type allows it.
    near : legal values near a wrong one, for the message. flag, metavar : where they do not follow from the name.
    """
    metadata = {"help": help, "must": must, "holds": holds, "near": near, "flag": flag, "metavar": metavar}
    return field(default=default, metadata=metadata)


def _one_of(default: str, help: str, names: Iterable[str]) -> Any:
    def near(name: str) -> str:
        return nearest(name, names) or default

    words = ", ".join(names)
    return setting(default, f"{help}: {words}", f"be one of {words}", lambda name: name in names, near)


def _side() -> Any:
    return setting(64, "px, divisible by 16", "be divisible by 16", geometry.is_side, geometry.nearest_sides)


_USUAL = GenerationConfig()
RECOMMENDED = tuple(GenerationConfig.model_fields)
"""Settings that a checkpoint recommends (`generation` in its configuration) where no flag or keyword sets them."""


@cache  # so that it is said once
def _codable(frames: int) -> int:
    rounded = geometry.round_frames(frames)
    if parallel.rank() == 0:
        log.warning("--num-video-frames %d becomes %d: the tokenizer codes 1 and then groups of 4", frames, rounded)
    return rounded


@dataclass(frozen=True)
class Request:
    """One prompt with its settings; `index` decides, with `seed`, its starting noise."""

    prompt: str
    index: int = 0
    negative_prompt: str = setting("", "what to move away from; empty: the empty caption")
    height: int = _side()
    width: int = _side()
    num_video_frames: int = setting(
        1,
        "pixel frames, rounded to 1 + 4k (the tokenizer codes 1 and then groups of 4); 1 gives a PNG",
        "be positive",
        lambda frames: frames >= 1,
    )
    fps: float = setting(
        12.0,
        "frames per second of the file, which the model is told too",
        "be positive",
        lambda fps: 0 < fps < math.inf,
    )
    num_steps: int = setting(_USUAL.num_steps, "steps; each is one evaluation, with heun two")
    guidance: float = setting(
        _USUAL.guidance,
        "D = D_uncond + guidance * (D_cond - D_uncond): 1 is none, 0 ignores the prompt",
        "be a number",
        math.isfinite,
    )
    guidance_interval: tuple[float, float] | None = setting(
        None, "noise levels where guidance acts: LOW < sigma <= HIGH", metavar=("LOW", "HIGH")
    )
    guidance_rescale: float = setting(
        0.0, "0 to 1: pull the contrast back to that without guidance", "be between 0 and 1", lambda v: 0 <= v <= 1
    )
    autoguidance: float | None = setting(
        None,
        "weight of --autoguidance-checkpoint beside the unconditional estimate, which keeps --guidance",
        "be a number",
        math.isfinite,
        metavar="W",
    )
    sampler: str = _one_of(_USUAL.sampler, "how noise is removed", samplers.SAMPLERS)
    schedule: str = _one_of(_USUAL.schedule, "how steps are spread", samplers.SCHEDULES)
    sigma_min: float = setting(0.002, "last noise level before 0; of --schedule flow, what 0 stands in place of")
    sigma_max: float = setting(_USUAL.sigma_max, "first noise level")
    rho: float = setting(7.0, "of --schedule karras: larger, denser near sigma-min")
    shift: float = setting(_USUAL.shift, "of --schedule flow: larger, denser in strong noise")
    sigma_levels: tuple[float, ...] | None = setting(
        None, "noise levels instead of a schedule and --num-steps, decreasing to 0", flag="--sigmas", metavar="SIGMA"
    )
    seed: int = setting(1, "decides the starting noise, with the place in the list")
    init_image: str | None = setting(None, "first frame (models trained with dataset.condition_frames_prob)")
    init_video: str | None = setting(None, "start from this clip, noised")
    strength: float = setting(0.6, "share of the steps that is run with --init-video")
    tokenizer_window: int | None = setting(
        None,
        "cosmos_cv: decode in overlapping windows of this many frames; default whole clips where memory allows",
        "be 1 + 4k frames, 17 or more",
        lambda v: v >= 17 and geometry.is_frame_count(v),
    )

    def __post_init__(self) -> None:
        frames = self.num_video_frames
        if frames >= 1 and not geometry.is_frame_count(frames):
            object.__setattr__(self, "num_video_frames", _codable(frames))

    def check(self) -> None:
        """ValueError with what must hold and, where there are such, the nearest legal values."""
        if self.index < 0:
            raise ValueError(f"index must be 0 or more; got {self.index}")
        for f in fields(self):
            value, holds, near = getattr(self, f.name), f.metadata.get("holds"), f.metadata.get("near")
            if value is not None and holds is not None and not holds(value):
                use = f"; use {near(value)}" if near else ""
                raise ValueError(f"{_flag(f)} must {f.metadata['must']}; got {value!r}{use}")
        if self.init_image and self.init_video:
            raise ValueError("give --init-image or --init-video, not both")
        if self.negative_prompt and self.guidance == 1:
            raise ValueError("--negative-prompt has no effect at --guidance 1; raise --guidance, or leave it out")
        samplers.guidance_at(1.0, self.guidance, self.guidance_interval)
        self.sigmas()
        for flag, path in (("--init-image", self.init_image), ("--init-video", self.init_video)):
            if path and not Path(path).is_file():
                raise FileNotFoundError(f"there is no file {path} ({flag})")

    @property
    def latent_grid(self) -> tuple[int, int, int]:
        """Latent T, H, W."""
        return geometry.latent_size(self.num_video_frames, self.height, self.width)

    def weights(self, guide: bool) -> tuple[float, float]:
        """Weights of the unconditional estimate and of a weaker model (`guide`: whether there is one); 1 is none.

        ValueError where a setting would have no effect.
        """
        if self.autoguidance is not None and not guide:
            raise ValueError("--autoguidance is the weight of a weaker model; name one with --autoguidance-checkpoint")
        if self.autoguidance is not None:
            return self.guidance, self.autoguidance
        if guide and self.negative_prompt:
            raise ValueError(
                "with --autoguidance-checkpoint alone, --guidance is the weight of that model and --negative-prompt "
                "has no effect; give --autoguidance for that weight, then --guidance is the negative prompt's"
            )
        return (1.0, self.guidance) if guide else (self.guidance, 1.0)

    def sigmas(self, sigma_data: float = 0.5) -> torch.Tensor:
        """Noise levels of the run, float64 [steps + 1]. sigma_data : of the model; schedules may be centred on it."""
        if self.sigma_levels:
            levels = samplers.check_sigmas(self.sigma_levels)
        else:
            schedule = samplers.SCHEDULES[self.schedule]
            own = {name: sigma_data if name == "sigma_data" else getattr(self, name) for name in schedule.settings}
            levels = schedule(self.num_steps, self.sigma_min, self.sigma_max, **own)
        return samplers.tail(levels, self.strength) if self.init_video else levels


# ---- from the command line and from JSON ----------------------------------------------------------------------------

FLAGS = tuple(f.name for f in fields(Request) if "help" in f.metadata)
"""Fields of `Request` that are flags; every prompt of a command line shares them."""


def _flag(f: Field) -> str:
    return f.metadata["flag"] or "--" + f.name.replace("_", "-")


@cache
def _kind(name: str) -> tuple[type, int | str | None, bool]:
    """A field's type (a tuple: of its entries), argparse's `nargs` for it, and whether None is legal."""
    hint = get_type_hints(Request)[name]
    options = [t for t in get_args(hint) if t is not NoneType] if get_origin(hint) is not tuple else []
    kind = options[0] if options else hint
    if get_origin(kind) is not tuple:
        return kind, None, bool(options)
    entries = get_args(kind)
    return entries[0], "+" if Ellipsis in entries else len(entries), bool(options)


def whole_number(text: str) -> int:
    """35.0 is how NeMo DFM's script takes a number of steps."""
    return int(text.removesuffix(".0"))


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str] = FLAGS) -> None:
    """Add the flags of these fields to a command line."""
    for f in fields(Request):
        if f.name in names:
            kind, count, _ = _kind(f.name)
            parser.add_argument(
                _flag(f),
                dest=f.name,
                type=whole_number if kind is int else kind,
                nargs=count,
                default=None if f.name in RECOMMENDED else f.default,
                metavar=f.metadata["metavar"],
                help=f.metadata["help"] + "; by default as the checkpoint recommends" * (f.name in RECOMMENDED),
            )


def flags_of(args: argparse.Namespace, names: Iterable[str] = FLAGS) -> dict[str, Any]:
    """The fields that a command line has set, as `Request` takes them; without what is left to the checkpoint."""
    values = {name: getattr(args, name) for name in names}
    values = {name: v for name, v in values.items() if v is not None or name not in RECOMMENDED}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def changed(request: Request, recommended: dict[str, Any] | None = None) -> dict[str, Any]:
    """The settings of a request that a call without them would not have, by name; not its prompt and index.

    recommended : what the checkpoint recommends, as `requests_of_keywords` takes it.
    """
    usual = {f.name: f.default for f in fields(Request) if f.name in FLAGS} | (recommended or {})
    return {name: getattr(request, name) for name in FLAGS if getattr(request, name) != usual[name]}


def flag_words(request: Request, recommended: dict[str, Any] | None = None) -> list[str]:
    """The words of `dfm generate` that make this request, the inverse of `flags_of`."""
    words = [f"--prompt={request.prompt}"] if request.prompt.startswith("-") else ["--prompt", request.prompt]
    for name, value in changed(request, recommended).items():
        flag = _flag(Request.__dataclass_fields__[name])
        several = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
        # a value that begins with a minus would read as a flag
        words += [f"{flag}={several[0]}"] if several[0].startswith("-") else [flag, *several]
    return words


def request_of(values: dict[str, Any]) -> Request:
    """A `Request` from JSON values; ValueError names a field of a wrong type."""
    given = {f.name: _from_json(f, values[f.name]) for f in fields(Request) if f.name in values}
    for name in ("init_image", "init_video"):  # absolute: a sidecar means the same file wherever it is replayed
        if given.get(name):
            given[name] = str(Path(given[name]).expanduser().absolute())
    return Request(**given)


DIFFUSERS = {"num_inference_steps": "num_steps", "num_frames": "num_video_frames", "guidance_scale": "guidance"}
"""Settings as diffusers' pipelines call them; their `generator` is a seed."""


def requests_of_keywords(
    prompts: Sequence[str], settings: dict[str, Any], recommended: dict[str, Any] | None = None
) -> list[Request]:
    """A `Request` for each prompt from a call in Python; ValueError has the name that is nearest to an unknown one.

    settings : fields of `Request` or names of `DIFFUSERS`; `generator`, or a list of one per prompt, gives the seed.
    recommended : what the checkpoint recommends, for what `settings` leave out.
    """
    own = [f.name for f in fields(Request) if f.name not in ("prompt", "index")]
    known = [*own, *DIFFUSERS, "prompt", "generator"]
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            raise unknown_keyword("pipe(...)", name, known)
        if (field_name := DIFFUSERS.get(name, "seed" if name == "generator" else name)) in values:
            raise ValueError(f"{name} is another name of {field_name}; give one of the two")
        values[field_name] = _plain(value)
    values = {**(recommended or {}), **values}
    seeds = values.pop("seed", Request.seed)
    seeds = list(map(_plain, seeds)) if isinstance(seeds, list) else [seeds] * len(prompts)
    if len(seeds) != len(prompts):
        raise ValueError(f"a list of generators needs one for each of the {len(prompts)} prompts; got {len(seeds)}")
    return [request_of({**values, "prompt": p, "index": i, "seed": s}) for i, (p, s) in enumerate(zip(prompts, seeds))]


def _plain(value: Any) -> Any:
    return value.initial_seed() if isinstance(value, torch.Generator) else plain(value)


def _from_json(f: Field, value: Any) -> Any:
    kind, count, optional = _kind(f.name)
    if value is None and optional:
        return None
    numbers = (int, float) if kind is float else kind
    entries = value if count and isinstance(value, (list, tuple)) else [value]
    if (count and entries is not value) or any(isinstance(v, bool) or not isinstance(v, numbers) for v in entries):
        raise ValueError(f"{f.name} must be {str(f.type).removesuffix(' | None')}; got {value!r}")
    if count:
        return tuple(map(kind, value)) or None
    return kind(value)


def read_prompts(path: Path) -> list[tuple[str, dict]]:
    """(where it stands, settings) per prompt, of a `.txt`, `.jsonl` or a clip's own `.json`; errors name the line."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompts file {path}")
    text = path.read_text(encoding="utf-8")
    known = set(Request.__dataclass_fields__)
    if path.suffix == ".json":
        record = _json(text, str(path))
        return [(str(path), {k: v for k, v in record.items() if k in known})]
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [(where, {"prompt": line.strip()}) for where, line in lines]
    out = []
    for where, line in lines:
        record = _json(line, where)
        if unknown := set(record) - known:
            raise ValueError(
                f"{where}: unknown {', '.join(sorted(unknown))}; a line may set {', '.join(sorted(known))}"
            )
        out.append((where, record))
    return out


def _json(text: str, where: str) -> dict:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or "prompt" not in record:
        raise ValueError(f'{where}: there is no prompt; give {{"prompt": "...", ...}}')
    return record
