"""What is to be drawn: `Request`, the flags that make it, and files of prompts.

Enters: `dfm generate`'s command line; a `.txt` with a prompt a line or a `.jsonl` with settings per line. Leaves: `Request`s, checked.
Guarantees: a wrong setting is one sentence with the nearest legal values, before anything is loaded; `index` is a prompt's place in the whole
list, so its noise does not depend on how the list is dealt out. Cost: nothing that counts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from dfm_nb.base import geometry
from dfm_nb.diffusion import samplers


@dataclass(frozen=True)
class Request:
    """One prompt with its settings; `index` decides, with `seed`, its starting noise.

    height, width : px, divisible by 16; num_video_frames : 1 + 4k; guidance : 1 is none; guidance_interval : noise levels (low, high]
    where guidance acts; autoguidance : weight of the weaker model beside `guidance`, None: there is none, or it takes the place of the
    unconditional estimate; sigma_levels : noise levels instead of a schedule, ending at 0; strength : with `init_video`, the share of
    the steps that is run.
    """

    prompt: str
    index: int = 0
    negative_prompt: str = ""
    height: int = 64
    width: int = 64
    num_video_frames: int = 1
    fps: float = 12.0
    num_steps: int = 35
    guidance: float = 7.0
    guidance_interval: tuple[float, float] | None = None
    guidance_rescale: float = 0.0
    autoguidance: float | None = None
    sampler: str = "heun"
    schedule: str = "karras"
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    sigma_levels: tuple[float, ...] | None = None
    seed: int = 1
    init_image: str | None = None
    init_video: str | None = None
    strength: float = 0.6

    def check(self) -> None:
        """ValueError with what must hold and, where there are such, the nearest legal values."""
        for name in ("height", "width"):
            px = getattr(self, name)
            if not geometry.is_side(px):
                raise ValueError(f"--{name} must be divisible by 16; got {px}; use {geometry.nearest_sides(px)}")
        n = self.num_video_frames
        if not geometry.is_frame_count(n):
            raise ValueError(
                f"--num-video-frames must be 1 + 4k (pixel frames; the tokenizer codes 1 and then groups of 4); got {n}; "
                f"use {geometry.nearest_frames(n)}"
            )
        samplers.get_sampler(self.sampler)
        if self.schedule not in samplers.SCHEDULES:
            raise ValueError(f"--schedule must be one of {', '.join(samplers.SCHEDULES)}; got {self.schedule!r}")
        if not 0 < self.fps < math.inf:
            raise ValueError(f"--fps must be positive; got {self.fps}")
        for flag, weight in (("--guidance", self.guidance), ("--autoguidance", self.autoguidance or 0.0)):
            if not math.isfinite(weight):
                raise ValueError(f"{flag} must be a number; got {weight}")
        if self.index < 0:
            raise ValueError(f"index must be 0 or more; got {self.index}")
        if self.init_image and self.init_video:
            raise ValueError("give --init-image or --init-video, not both")
        if self.negative_prompt and self.guidance == 1:
            raise ValueError("--negative-prompt has no effect at --guidance 1; raise --guidance, or leave it out")
        if not 0 <= self.guidance_rescale <= 1:
            raise ValueError(f"--guidance-rescale must be between 0 and 1; got {self.guidance_rescale}")
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
                "with --autoguidance-checkpoint alone, --guidance is the weight of that model and --negative-prompt has no effect; give "
                "--autoguidance for that weight, then --guidance is the negative prompt's"
            )
        return (1.0, self.guidance) if guide else (self.guidance, 1.0)

    def sigmas(self) -> torch.Tensor:
        """Noise levels of the run, float64 [steps + 1]."""
        if self.sigma_levels:
            levels = samplers.check_sigmas(self.sigma_levels)
        else:
            schedule = samplers.SCHEDULES[self.schedule]
            own = {name: getattr(self, name) for name in schedule.settings}
            levels = schedule(self.num_steps, self.sigma_min, self.sigma_max, **own)
        return samplers.tail(levels, self.strength) if self.init_video else levels


REQUEST_FLAGS = tuple(f.name for f in fields(Request) if f.name not in ("prompt", "index"))
"""Fields of `Request` that every prompt of a command line shares."""

_LISTS = ("guidance_interval", "sigma_levels")  # tuples in a `Request`, lists in JSON and on the command line


def request_of(values: dict) -> Request:
    """A `Request` from JSON values; ValueError names a field of a wrong type."""
    for f in fields(Request):
        if f.name not in values:
            continue
        value = values[f.name]
        if f.name in _LISTS:
            fits = value is None or (isinstance(value, (list, tuple)) and all(_is_number(v) for v in value))
        elif f.type.startswith("float"):
            fits = _is_number(value) or (value is None and "None" in f.type)
        elif f.type == "int":
            fits = isinstance(value, int) and not isinstance(value, bool)
        else:
            fits = isinstance(value, str) or (value is None and "None" in f.type)
        if not fits:
            raise ValueError(f"{f.name} must be {f.type.removesuffix(' | None')}; got {value!r}")
    cast = {f.name: _cast(f.name, f.type, values[f.name]) for f in fields(Request) if f.name in values}
    for name in ("init_image", "init_video"):  # absolute, so that a sidecar means the same file wherever it is replayed
        if cast.get(name):
            cast[name] = str(Path(cast[name]).expanduser().absolute())
    return Request(**cast)


def _cast(name: str, kind: str, value):
    if name in _LISTS:
        return tuple(map(float, value)) if value else None
    return float(value) if kind.startswith("float") and value is not None else value


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
