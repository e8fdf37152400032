"""What is to be drawn: `Request`, the flags that make it, and files of prompts.

Enters: `dfm generate`'s command line; a `.txt` with a prompt a line or a `.jsonl` with settings per line. Leaves: `Request`s, checked.
Guarantees: a wrong setting is one sentence with the nearest legal values, before anything is loaded; `index` is a prompt's place in the whole
list, so its noise does not depend on how the list is dealt out. Cost: nothing that counts.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from dfm_nb.base.argv import ArgumentParser
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
            if px < 16 or px % 16:
                low = max(16, px // 16 * 16)
                raise ValueError(f"--{name} must be divisible by 16; got {px}; use {low} or {low + 16}")
        n = self.num_video_frames
        if n < 1 or (n - 1) % 4:
            low = max(0, (n - 1) // 4) * 4 + 1
            raise ValueError(
                f"--num-video-frames must be 1 + 4k (pixel frames; the tokenizer codes 1 and then groups of 4); got {n}; "
                f"use {low} or {low + 4}"
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
        return 1 + (self.num_video_frames - 1) // 4, self.height // 8, self.width // 8

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
            extra = {"rho": self.rho} if self.schedule == "karras" else {}
            levels = samplers.SCHEDULES[self.schedule](self.num_steps, self.sigma_min, self.sigma_max, **extra)
        return samplers.tail(levels, self.strength) if self.init_video else levels


def parse(argv: list[str] | None):
    p = ArgumentParser(prog="dfm generate", description="Draw clips from a trained DiT.")
    p.add_argument("--checkpoint-path", required=True, help="run folder, iter_* folder or exported file")
    p.add_argument("--prompt", action="append", default=[], help="repeat for several")
    p.add_argument("--prompts-file",
                   help=".txt with a prompt a line, .jsonl with settings per line, or the .json beside a clip to draw it again")  # fmt: skip
    p.add_argument("--negative-prompt", default="", help="what to move away from; empty: the empty caption")
    p.add_argument("--height", type=int, default=64, help="px, divisible by 16")
    p.add_argument("--width", type=int, default=64, help="px, divisible by 16")
    p.add_argument("--num-video-frames", type=int, default=1, help="pixel frames, 1 + 4k; 1 gives a PNG")
    p.add_argument("--fps", type=float, default=12.0, help="frames per second of the file, which the model is told too")
    p.add_argument("--num-steps", type=int, default=35, help="steps; each is one evaluation, with heun two")
    p.add_argument("--guidance", type=float, default=7.0,
                   help="D = D_uncond + guidance * (D_cond - D_uncond): 1 is none, 0 ignores the prompt")  # fmt: skip
    p.add_argument(
        "--guidance-interval", type=float, nargs=2, metavar=("LOW", "HIGH"), help="noise levels where it acts"
    )
    p.add_argument(
        "--guidance-rescale", type=float, default=0.0, help="0 to 1: pull the contrast back to that without guidance"
    )
    p.add_argument("--autoguidance-checkpoint", help="a weaker checkpoint that replaces the unconditional estimate")
    p.add_argument("--autoguidance", type=float, metavar="W",
                   help="weight of that checkpoint beside the unconditional estimate, which keeps --guidance")  # fmt: skip
    p.add_argument("--sampler", default="heun", help=", ".join(samplers.SAMPLERS))
    p.add_argument("--schedule", default="karras", choices=sorted(samplers.SCHEDULES), help="how steps are spread")
    p.add_argument("--sigma-min", type=float, default=0.002, help="last noise level before 0")
    p.add_argument("--sigma-max", type=float, default=80.0, help="first noise level")
    p.add_argument("--rho", type=float, default=7.0, help="of --schedule karras: larger, denser near sigma-min")
    p.add_argument("--sigmas", type=float, nargs="+", dest="sigma_levels", metavar="SIGMA",
                   help="noise levels instead of a schedule and --num-steps, decreasing to 0")  # fmt: skip
    p.add_argument("--seed", type=int, default=1, help="decides the starting noise, with the place in the list")
    p.add_argument("--init-image", help="first frame (models trained with dataset.condition_frames_prob)")
    p.add_argument("--init-video", help="start from this clip, noised")
    p.add_argument("--strength", type=float, default=0.6, help="share of the steps that is run with --init-video")
    p.add_argument("--ema", default="auto", help="relative length of the weight average; auto, or none for raw weights")
    p.add_argument("--mixed-precision", choices=("bf16", "fp32"), help="arithmetic; by default that of the training")
    p.add_argument("--batch-size", type=int, default=16, help="clips drawn together; does not change the result")
    p.add_argument("--cp-size", type=int, default=1, help="processes that share each sequence")
    p.add_argument("--tp-size", type=int, default=1, help="processes that share each weight")
    p.add_argument("--pp-size", type=int, default=1, help="processes that share the layers")
    p.add_argument("--tokenizer-path", "--tokenizer-cache-dir", dest="tokenizer_path", help="tokenizer file or folder")
    p.add_argument("--text-encoder-path", "--t5-cache-dir", dest="text_encoder_path", help="text encoder folder")
    p.add_argument("--tokenizer-model", help="accepted for old commands; the checkpoint knows its tokenizer")
    p.add_argument(
        "--video-save-path", default="out.mp4", help="of one clip; several get idx=I_rank=R_ before the name"
    )
    p.add_argument("--save-latents", action="store_true", help="also write each latent as NAME.safetensors")
    p.add_argument("--overwrite", action="store_true", help="replace existing files")
    p.add_argument(
        "--skip-existing", action="store_true", help="leave out what an earlier, interrupted run has finished"
    )
    p.add_argument("--no-memory-check", action="store_true", help="draw even if the estimate says that memory is short")
    return p.parse_args(argv)


REQUEST_FLAGS = tuple(f.name for f in fields(Request) if f.name not in ("prompt", "index"))
"""Fields of `Request` that every prompt of a command line shares."""

_LISTS = ("guidance_interval", "sigma_levels")  # tuples in a `Request`, lists in JSON and on the command line


def requests_of(args) -> list[Request]:
    """Prompts of the command line, then those of the file; a line of a file may set any field of `Request`."""
    common = {k: getattr(args, k) for k in REQUEST_FLAGS}
    lines: list[tuple[str, dict]] = [("", {"prompt": p}) for p in args.prompt]
    if args.prompts_file:
        lines += read_prompts(Path(args.prompts_file))
    if not lines:
        raise ValueError("there is nothing to draw: give --prompt TEXT or --prompts-file FILE")
    requests = []
    for i, (where, line) in enumerate(lines):
        try:
            requests.append(request_of({**common, "index": i, **line}))
            requests[-1].check()
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{where}: {error}" if where else str(error)) from None
    uses = Counter(r.index for r in requests)
    if (twice := next((i for i, count in uses.items() if count > 1), None)) is not None:
        raise ValueError(f"two prompts have index {twice}, which names their files and their noise; make them differ")
    return requests


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
