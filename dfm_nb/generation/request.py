"""Requests for clips: `Request`, whose fields are flags, and files of prompts.

A field of `Request` defines a setting once: default, help text and limits. The command lines of `dfm generate` and
`dfm evaluate`, keywords of `pipe(...)`, lines of a `.jsonl` file and the Studio are derived from it.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import AfterValidator, BeforeValidator, model_validator

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import geometry, plugins, simhash, video
from dfm_nb.base.files import parsed, plain
from dfm_nb.base.limits import MOST_GIVEN, MOST_STEPS
from dfm_nb.base.log import log
from dfm_nb.base.options import Options, fields, option
from dfm_nb.config.schema import STUDENT_SAMPLING, GenerationConfig
from dfm_nb.data.sources._media import MediaOptions
from dfm_nb.diffusion import samplers

_USUAL = GenerationConfig()
SHAPE = {"height", "width", "fps"}


@cache  # so that it is logged once
def _codable(frames: int) -> int:
    if frames < 1 or geometry.is_frame_count(frames):
        return frames
    rounded = geometry.round_frames(frames)
    if parallel.rank() == 0:
        log.warning("--num-video-frames %d becomes %d: the tokenizer encodes 1 and then groups of 4", frames, rounded)
    return rounded


def _sampler(name: str) -> str:
    samplers.find(name)
    return name


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"must be text in UTF-8; got {text!r}") from None
    return text


def _seed(value: Any) -> Any:
    return value.initial_seed() if isinstance(value, torch.Generator) else value


def _absolute(path: str) -> str:
    """An absolute path, so that a sidecar refers to the same file from any folder."""
    return str(Path(path).expanduser().absolute())


if TYPE_CHECKING:
    Schedule = str
else:
    Schedule = Literal[tuple(samplers.SCHEDULES)]
Text = Annotated[str, AfterValidator(_utf8)]
InputPath = Annotated[str, AfterValidator(_absolute)]


class Known(NamedTuple):
    """What samples of some training captions have: fields of `Request`, and whether pictures are given with them.

    bits : SimHash of the captions, in base64.
    """

    settings: dict[str, Any]
    given: bool
    bits: str


def usual(config: cfg.Config, num_video_frames: int | None = None, prompt: str = "") -> dict[str, Any]:
    """The settings that a checkpoint recommends: what requests that ask for nothing else are told.

    Frames, size and rate are those of the training caption most like the prompt, if one is, else those of most training
    samples. Where a number of frames is asked for, size and rate are those of its kind, still (one frame) or clip; a
    kind that training lacked has those of the other one.
    """
    own, found = config.generation, config.generation.model_dump(exclude={"other", "sizes", "captions", "given"})
    found |= _most_frequent(most_alike(config, prompt))
    still = (num_video_frames or found["num_video_frames"] or 1) == 1
    if own.other.fps is not None:
        found |= trained(config, still).model_dump(include=SHAPE)
    of_kind = _most_frequent(most_alike(config, prompt, still))
    found |= {name: of_kind[name] for name in SHAPE & of_kind.keys()}
    return {name: value for name, value in found.items() if value is not None}


def trained(config: cfg.Config, still: bool) -> cfg.schema.TrainedSize:
    """What a checkpoint knows of its stills or its clips; of the other kind if training lacked this one."""
    own = config.generation
    return next((kind for kind in (own, own.other) if (kind.num_video_frames == 1) == still), own)


def _known(config: cfg.Config, still: bool | None) -> Iterator[Known]:
    """The lines of `generation.captions`, of stills or clips alone if this is told."""
    own = config.generation
    # weights of fa46f34c have captions of each kind, and of a kind of one size none, so these do not tell the kind
    for kind in (own, own.other) if own.captions or still is not None else ():
        # their lines are the bits alone, in the order of `sizes`
        for line, size in zip_longest(kind.captions or (), kind.sizes or (), fillvalue=""):
            *form, bits = line.split(" ")
            if bits:
                size, frames, fps, given = form or (size, kind.num_video_frames, kind.fps, 0)
                found = {**of_size(size), "num_video_frames": int(frames or 1), "fps": float(fps or 1)}
                if still in (None, found["num_video_frames"] == 1):
                    yield Known(found, bool(int(given)), bits)


def most_alike(config: cfg.Config, prompt: str, still: bool | None = None) -> list[tuple[Known, int]]:
    """What samples with the training captions most like a prompt have, and how many have it; [] if none is like it.

    still : of stills alone, or of clips alone.
    """
    counted = [(known, simhash.differing_bits(prompt, known.bits)) for known in _known(config, still)]
    least = min((bits.min() for _, bits in counted), default=simhash.ALIKE + 1)
    near = [(known, int((bits == least).sum())) for known, bits in counted]
    return [(known, count) for known, count in near if count] if least <= simhash.ALIKE else []


def _most_frequent(near: list[tuple[Known, int]]) -> dict[str, Any]:
    """The settings that most have; of equals those of more samples, which are first."""
    counts = Counter[tuple[tuple[str, Any], ...]]()
    for known, count in near:
        counts[tuple(known.settings.items())] += count
    return dict(counts.most_common(1)[0][0]) if near else {}


def of_size(size: str) -> dict[str, int]:
    """`96x64` as width and height."""
    if not re.fullmatch(r"\d+x\d+", size):
        raise ValueError(f"--size must be WIDTHxHEIGHT in px, such as 96x64; got {size!r}")
    return dict(zip(("width", "height"), map(int, size.split("x"))))


def described(sizes: Iterable[Request | cfg.schema.TrainedSize]) -> str:
    """`stills of 96x64, 64x64 px at 1 fps and clips of 17 frames of 96x64 px at 25 fps`: WIDTHxHEIGHT as `--size`."""
    said = defaultdict[tuple[str, float | None], Counter[str]](Counter)
    for each in sizes:
        kind = "stills" if each.num_video_frames == 1 else f"clips of {each.num_video_frames} frames"
        said[kind, each.fps][f"{each.width}x{each.height}"] += 1
    return " and ".join(
        f"{kind} of {listed([size for size, _ in found.most_common()])} px at {fps:g} fps"
        for (kind, fps), found in said.items()
    )


def listed(sizes: Sequence[str]) -> str:
    """The first eight sizes, and the number of the others."""
    return ", ".join(sizes[:8]) + (f" and {len(sizes) - 8} more" if len(sizes) > 8 else "")


def recommended(default: Any, help: str, **limits: Any) -> Any:
    """An option that a checkpoint recommends (`generation` in its configuration)."""
    return option(default, f"{help}; default: as the checkpoint recommends", unset=True, **limits)


class Sampling(Options):
    """Sampling settings, shared by `dfm evaluate` and `dfm generate`."""

    negative_prompt: Text = option("", "what to move away from; empty: the empty caption")
    num_steps: int = recommended(_USUAL.num_steps, "steps, each with one evaluation (heun: two)", ge=1, le=MOST_STEPS)
    guidance: float = recommended(
        _USUAL.guidance, "D = D_uncond + guidance * (D_cond - D_uncond): 1 is none, 0 ignores the prompt"
    )
    guidance_interval: tuple[float, float] | None = option(
        None, "noise levels where guidance acts: LOW < sigma <= HIGH", metavar=("LOW", "HIGH")
    )
    sampler: Annotated[str, AfterValidator(_sampler)] = recommended(
        _USUAL.sampler, f"the solver: {', '.join(samplers.names())}, or module:name", plugins="samplers"
    )
    schedule: Schedule = recommended(_USUAL.schedule, "spacing of the steps")
    sigma_max: float = recommended(_USUAL.sigma_max, "first noise level")
    shift: float = recommended(_USUAL.shift, "of --schedule flow: larger, denser in strong noise", gt=0)


class Request(Sampling):
    """One prompt with its settings; `index` and `seed` determine its starting noise."""

    prog = "a request"
    aliases: ClassVar[Mapping[str, str]] = {
        "num_inference_steps": "num_steps",
        "num_frames": "num_video_frames",
        "guidance_scale": "guidance",
        "generator": "seed",
    }
    """Names of settings in diffusers' pipelines."""

    prompt: Text = option(help="what the clip shows")
    index: int = option(0, "its place in the list", ge=0)
    height: int = recommended(64, "px, divisible by 16", ge=16, multiple_of=16)
    width: int = recommended(64, "px, divisible by 16", ge=16, multiple_of=16)
    num_video_frames: Annotated[int, AfterValidator(_codable)] = recommended(
        1, "pixel frames, rounded to 1 + 4k (the tokenizer encodes 1 and then groups of 4); 1 gives a PNG", ge=1
    )
    fps: float = recommended(12.0, "frames per second of the file, also an input of the model", gt=0)
    guidance_rescale: float = option(0.0, "0 to 1: pull the contrast back to that without guidance", ge=0, le=1)
    sigma_min: float = option(0.002, "last noise level before 0; --schedule flow replaces it by 0")
    rho: float = option(7.0, "of --schedule karras: larger, denser near sigma-min", gt=0)
    sigma_levels: tuple[float, ...] | None = option(
        None,
        "noise levels instead of a schedule and --num-steps, decreasing to 0",
        flag="--sigmas",
        metavar="SIGMA",
        max_length=MOST_STEPS + 1,
    )
    seed: Annotated[int, BeforeValidator(_seed)] = option(1, "sets the starting noise, with the place in the list")
    init_image: InputPath | None = option(None, "first frame (models trained with dataset.condition_frames_prob)")
    last_image: InputPath | None = option(None, "last frame (models trained with dataset.condition_last_prob)")
    given: tuple[InputPath, ...] = option(
        (),
        "picture or clip to make this one of (models trained with such); repeat for several",
        action="append",
        max_length=MOST_GIVEN,
    )
    given_guidance: float = option(1.0, "as --guidance, but of --given: 1 is none, 1.5 follows it more")
    init_video: InputPath | None = option(None, "start from this clip or picture, noised")
    strength: float = option(0.6, "share of the steps to run with --init-video; 1 keeps nothing of it", gt=0, le=1)
    mask: InputPath | None = option(None, "picture of the size of --init-video: what is black there is kept")
    tokenizer_window: Annotated[int, AfterValidator(geometry.window_frames)] | None = option(
        None, "cosmos_cv: decode in overlapping windows of this many frames; default: complete clips if memory allows"
    )

    def __init__(self, /, prompt: str, index: int = 0, **settings: Any):
        Options.__init__(self, prompt=prompt, index=index, **settings)

    @model_validator(mode="after")
    def _fits_together(self) -> Request:
        if self.init_video and sum(self.ends):
            raise ValueError("--init-video has its own first and last frame; leave --init-image and --last-image out")
        if self.given_guidance != 1 and not self.given:
            raise ValueError("--given-guidance is of --given; give a picture, or leave it out")
        if self.mask and not self.init_video:
            raise ValueError("--mask is of --init-video, which has what is kept; give both")
        if self.negative_prompt and self.guidance == 1:
            raise ValueError("--negative-prompt has no effect at --guidance 1; raise --guidance, or leave it out")
        samplers.guidance_at(1.0, self.guidance, self.guidance_interval)
        self.sigmas()
        return self

    @property
    def inputs(self) -> dict[str, str]:
        """Flags of the files that it starts from, by path: its fields of the type `InputPath`, and `given`."""
        names = (name for name, field in Request.model_fields.items() if field.annotation == InputPath | None)
        single = {path: fields(Request)[name].flag for name in names if (path := getattr(self, name))}
        return single | dict.fromkeys(self.given, "--given")

    def completed(self, config: cfg.Config) -> Request:
        """With what the checkpoint of this configuration recommends (`usual`) for all settings that were not given.

        ValueError if it is beyond the checkpoint's training.
        """
        recommended = usual(config, self.chosen.get("num_video_frames"), self.prompt)
        beyond = [name for name, only in OF_STUDENTS.items() if self.chosen.get(name, only) != only]
        if config.model.student and beyond:
            flag = fields(Request)[beyond[0]].flag
            raise ValueError(
                f"{flag} is beyond a few-step student, which has learned one way of sampling; use its teacher"
            )
        for name, key in (("init_image", "condition_frames_prob"), ("last_image", "condition_last_prob")):
            if getattr(self, name) and not getattr(config.dataset, key):
                fix = "use --init-video with --strength" if name == "init_image" else "train with it, or leave it out"
                must = f"{fields(Request)[name].flag} needs a model trained with dataset.{key} above 0"
                raise ValueError(f"{must}; this one was not; {fix}")
        if self.given and not {"height", "width"} & self.chosen.keys():
            self.check()
            short_side = min(recommended.get(side, getattr(self, side)) for side in ("height", "width"))
            recommended["height"], recommended["width"] = self.read_given(short_side)[0].shape[1:3]
        request = Request(**{**recommended, **self.chosen})
        if request.latent_grid[0] <= sum(self.ends):
            raise ValueError(f"all of --num-video-frames {request.num_video_frames} are given; raise it")
        return request

    def variants(self, count: int) -> list[Request]:
        """Itself, and with the seeds that follow its own."""
        if count < 1:
            raise ValueError(f"num_images must be 1 or more; got {count}")
        return [self, *(self.replace(seed=self.seed + more) for more in range(1, count))]

    def read_given(self, short_side: int, reading: MediaOptions | None = None) -> list[np.ndarray]:
        """The frames of `given`, uint8 [T, H, W, 3], fitted to a short side in px as preparation fits them."""
        firsts, _ = (reading or MediaOptions()).beside(map(Path, self.given), "given")(self.fps)
        sizes = (video.fit_size(frames.shape[1], frames.shape[2], short_side, upscale=True) for frames in firsts)
        return [video.resize(frames, *size) for frames, size in zip(firsts, sizes)]

    def check(self) -> None:
        """FileNotFoundError if a file that it starts from is missing."""
        for path, flag in self.inputs.items():
            if not Path(path).is_file():
                raise FileNotFoundError(f"there is no file {path} ({flag})")

    def untrained(self, config: cfg.Config) -> str:
        """A sentence if training had samples of this kind, still or clip, but none of this size, and one if it had
        captions like this one with given pictures alone; else empty.
        """
        kind, said = trained(config, self.num_video_frames == 1), list[str]()
        if kind.sizes and f"{self.width}x{self.height}" not in kind.sizes:
            said.append(f"{self.width}x{self.height} px was not trained; trained sizes: {listed(kind.sizes)}")
        near = [known for known, _ in most_alike(config, self.prompt)] or [*_known(config, None)]
        if near and not self.given and all(known.given for known in near):
            said.append("training had captions like this one with given pictures alone; pass one with --given FILE")
        return "; ".join(said)

    @property
    def latent_grid(self) -> tuple[int, int, int]:
        """Latent T, H, W."""
        return geometry.latent_size(self.num_video_frames, self.height, self.width)

    @property
    def ends(self) -> tuple[int, int]:
        """Latent frames that are given at the start and at the end."""
        return int(bool(self.init_image)), int(bool(self.last_image))

    @property
    def grids(self) -> list[tuple[int, int, int]]:
        """Latent T, H, W of the clip and of each of `given`, for estimates of memory and time."""
        given = self.read_given(min(self.height, self.width))
        return [self.latent_grid, *(geometry.latent_size(*frames.shape[:3]) for frames in given)]

    def sigmas(self, sigma_data: float = 0.5) -> torch.Tensor:
        """Noise levels of the run, float64 [steps + 1]. sigma_data : the model's; schedules may be centred on it."""
        if self.sigma_levels:
            levels = samplers.check_sigmas(self.sigma_levels)
        else:
            schedule = samplers.SCHEDULES[self.schedule]
            known = {**dict(self), "sigma_data": sigma_data}
            taken = inspect.signature(schedule).parameters.keys() & known.keys()
            levels = schedule(**{name: known[name] for name in taken})
        return samplers.tail(levels, self.strength) if self.init_video else levels


OF_STUDENTS = STUDENT_SAMPLING | {
    "given_guidance": 1.0,
    "negative_prompt": "",
    "guidance_interval": None,
    "guidance_rescale": 0.0,
}
"""The only values of these settings that a few-step student can be asked for."""

FLAGS = tuple(name for name in Request.model_fields if name not in ("prompt", "index"))
"""Settings that every prompt of a command line shares."""


# ---- from Python and from files -------------------------------------------------------------------------------------


def requests_of_keywords(prompts: Sequence[str], settings: dict[str, Any], num_images: int = 1) -> list[Request]:
    """`num_images` requests, with consecutive seeds, for each prompt from a call in Python.

    settings : fields of `Request` or their `aliases`; `generator`, or a list of one per prompt, gives the seed.

    Raises
    ------
    ValueError : an unknown name, with the closest known one.
    """
    plugins.trust(settings.get("sampler"))
    own: list[dict[str, Any]] = [{}] * len(prompts)
    if isinstance(generators := settings.get("generator"), list):
        if len(generators) != len(prompts):
            raise ValueError(f"generators must be one for each of the {len(prompts)} prompts; got {len(generators)}")
        own = [{"generator": g} for g in generators]
    first = [Request(prompt, i, **(settings | each)) for i, (prompt, each) in enumerate(zip(prompts, own))]
    return [request for each in first for request in each.variants(num_images)]


_FLAG = re.compile(r"(?:^|\s)(--[a-zA-Z][\w-]*)")
"""As trainers write settings behind a prompt: `a fox --n ugly --w 64`."""
PROMPT_SUFFIXES = (".txt", ".jsonl", ".json", ".png", ".mp4")


def read_prompts(path: Path) -> list[tuple[str, dict]]:
    """(file and line, settings) per prompt of a `.txt`, `.jsonl`, or of a clip: its `.json`, `.png` or `.mp4`.

    Errors name the line. Read as captions are: UTF-8, with or without a byte order mark; \\n, \\r and \\r\\n end a
    line, all else is space. In a .txt lines that begin with # are comments, and flags behind a prompt are refused.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompt file {path}")
    suffix = path.suffix.lower()
    if suffix not in ("", *PROMPT_SUFFIXES):
        raise ValueError(f"a prompt file must end in {', '.join(PROMPT_SUFFIXES)}; got {path}; rename or convert it")
    if suffix in (".png", ".mp4"):
        if not (text := video.read_comment(path)):
            raise ValueError(f"{path} has no settings inside; use a picture or clip of dfm generate, or its .json")
        return [(str(path), {k: v for k, v in _json(text, str(path)).items() if k in Request.model_fields})]
    try:
        text = plain(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8; byte {error.start} is not; save it as UTF-8") from None
    if suffix == ".json":
        record = _json(text, str(path))
        return [(str(path), {k: v for k, v in record.items() if k in Request.model_fields})]
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if suffix == ".jsonl":
        return [(where, _json(line, where)) for where, line in lines]
    texts = [(where, " ".join(line.split())) for where, line in lines]
    prompts = [(where, text) for where, text in texts if not text.startswith("#")]
    if len(prompts) < len(texts):
        _tell_comments(path, len(texts) - len(prompts))
    for where, text in prompts:
        if flag := _FLAG.search(text):
            fix = 'for settings or such text use a .jsonl with {"prompt": "...", "width": 64} in each line'
            raise ValueError(f"{where}: a .txt has prompts alone; got the flag {flag[1]}; {fix}")
    return [(where, {"prompt": text}) for where, text in prompts]


@cache  # so that it is logged once
def _tell_comments(path: Path, count: int) -> None:
    if parallel.rank() == 0:
        log.warning("%s: %d lines that begin with # are comments and no prompts", path, count)


def _json(text: str, where: str) -> dict:
    try:
        record = parsed(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or "prompt" not in record:
        raise ValueError(f'{where}: there is no prompt; give {{"prompt": "...", ...}}')
    return record
