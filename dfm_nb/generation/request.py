"""Requests for clips: `Request`, whose fields are flags, and files of prompts.

A field of `Request` defines a setting once: default, help text and limits. The command lines of `dfm generate` and
`dfm evaluate`, keywords of `pipe(...)`, lines of a `.jsonl` file and the Studio are derived from it.
"""

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import AfterValidator, BeforeValidator, model_validator

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import geometry, plugins, video
from dfm_nb.base.files import parsed, plain
from dfm_nb.base.limits import MOST_GIVEN, MOST_STEPS
from dfm_nb.base.log import log
from dfm_nb.base.options import Options, fields, option
from dfm_nb.config.samples import ALIKE, SETTINGS, Captions, Kind
from dfm_nb.config.schema import STUDENT_SAMPLING, Anchor, GenerationConfig
from dfm_nb.data.sources._media import MediaOptions
from dfm_nb.diffusion import samplers

_USUAL = GenerationConfig()
SHAPE = {"height", "width", "fps"}


@cache  # so that it is logged once
def _warn(text: str, *values: object) -> None:
    if parallel.rank() == 0:
        log.warning(text, *values)


def _codable(frames: int) -> int:
    if frames < 1 or geometry.is_frame_count(frames):
        return frames
    rounded = geometry.round_frames(frames)
    _warn("--num-video-frames %d becomes %d: the tokenizer encodes 1 and then groups of 4", frames, rounded)
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


def usual(config: cfg.Config, num_video_frames: int | None = None, prompt: str = "") -> dict:
    """The settings that a checkpoint recommends: what requests that ask for nothing else are told.

    Frames, size and rate are those of the training caption most like the prompt, if one is, else those of most training
    samples. Where a number of frames is asked for, size and rate are those of its kind, still (one frame) or clip; a
    kind that training lacked has those of the other one.
    """
    settings = config.generation.model_dump(exclude_none=True)
    kinds = _kinds(config)
    if kinds:
        settings["num_video_frames"] = kinds[0].num_video_frames
    settings |= _most_frequent(most_alike(config, prompt))
    still = (num_video_frames or settings.get("num_video_frames", 1)) == 1
    if kinds:
        settings |= trained(config, still).model_dump(include=SHAPE)
    of_kind = _most_frequent(most_alike(config, prompt, still))
    of_kind.pop("num_video_frames", None)
    return settings | of_kind


def _kinds(config: cfg.Config) -> list[Kind]:
    """The usual forms of training samples, the first one as the settings recommend it."""
    own = config.generation.of_samples()
    return [kind.model_copy(update=own if i == 0 else {}) for i, kind in enumerate(config.samples.kinds)]


def trained(config: cfg.Config, still: bool) -> Kind:
    """The usual form of stills or clips in a training with samples; of the other kind if it lacked this one."""
    kinds = _kinds(config)
    return next((kind for kind in kinds if kind.still == still), kinds[0])


def _known(config: cfg.Config, still: bool | None) -> list[Captions]:
    """Captions of stills or clips alone if this is told."""
    samples = config.samples
    if still is not None:
        return [known for known in samples.captions if known.still == still]
    # weights of fa46f34c know captions of a kind of several sizes alone, so these do not tell the kind
    tell_kind = any(known.still == samples.kinds[0].still for known in samples.captions)
    return samples.captions if tell_kind else []


def most_alike(config: cfg.Config, prompt: str, still: bool | None = None) -> list[tuple[Captions, int]]:
    """What samples with the training captions most like a prompt have, and how many have it; [] if none is like it.

    still : of stills alone, or of clips alone.
    """
    least = ALIKE
    near: list[tuple[Captions, int]] = []
    for known in _known(config, still):
        bits = known.differing_bits(prompt)
        if bits.min() < least:
            least = bits.min()
            near = []
        if bits.min() == least:
            near.append((known, int((bits == least).sum())))
    return near


def _most_frequent(near: list[tuple[Captions, int]]) -> dict:
    """The settings that most have; of equals those of more samples, which are first."""
    counts: Counter[tuple] = Counter()
    for known, count in near:
        counts[tuple(known.model_dump(include={*SETTINGS}).items())] += count
    return dict(counts.most_common(1)[0][0]) if near else {}


def of_size(size: str) -> dict[str, int]:
    """`96x64` as width and height."""
    if not re.fullmatch(r"\d+x\d+", size):
        raise ValueError(f"--size must be WIDTHxHEIGHT in px, such as 96x64; got {size!r}")
    return dict(zip(("width", "height"), map(int, size.split("x"))))


def described(sizes: "Iterable[Request | Kind]") -> str:
    """`stills of 96x64, 64x64 px at 1 fps and clips of 17 frames of 96x64 px at 25 fps`: WIDTHxHEIGHT as `--size`."""
    counts: dict[tuple, Counter] = defaultdict(Counter)
    for each in sizes:
        kind = "stills" if each.num_video_frames == 1 else f"clips of {each.num_video_frames} frames"
        counts[kind, each.fps][f"{each.width}x{each.height}"] += 1
    kinds = []
    for (kind, fps), of_kind in counts.items():
        names = [size for size, _ in of_kind.most_common()]
        kinds.append(f"{kind} of {listed(names)} px at {fps:g} fps")
    return " and ".join(kinds)


def listed(sizes: Sequence[str]) -> str:
    """The first eight sizes, and the number of the others."""
    text = ", ".join(sizes[:8])
    if len(sizes) > 8:
        text += f" and {len(sizes) - 8} more"
    return text


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
    anchor: Anchor = recommended(
        _USUAL.anchor, "nearest: the nearest training caption comes before a prompt that is none"
    )


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
    def _fits_together(self) -> "Request":
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
        flags = dict.fromkeys(self.given, "--given")
        for name, field in Request.model_fields.items():
            path = getattr(self, name)
            if path and field.annotation == InputPath | None:
                flags[path] = fields(Request)[name].flag
        return flags

    def completed(self, config: cfg.Config) -> "Request":
        """With what the checkpoint of this configuration recommends (`usual`) for all settings that were not given.

        ValueError if it is beyond the checkpoint's training.
        """
        recommended = usual(config, self.chosen.get("num_video_frames"), self.prompt)
        if self.chosen.get("schedule") not in (None, recommended.get("schedule")):
            recommended.pop("num_steps", None)  # they are right for the recommended schedule
        flags = fields(Request)
        if config.model.student:
            for name, only in OF_STUDENTS.items():
                if self.chosen.get(name, only) != only:
                    must = f"{flags[name].flag} is beyond a few-step student, which has learned one way of sampling"
                    raise ValueError(f"{must}; use its teacher")
        for name, key, fix in (
            ("init_image", "condition_frames_prob", "use --init-video with --strength"),
            ("last_image", "condition_last_prob", "train with it, or leave it out"),
        ):
            if getattr(self, name) and not getattr(config.dataset, key):
                must = f"{flags[name].flag} needs a model trained with dataset.{key} above 0"
                raise ValueError(f"{must}; this one was not; {fix}")
        if self.chosen.get("anchor") == "nearest" and not config.samples.anchors:
            _warn("--anchor nearest has no effect: the model was not trained with generation.anchor=nearest")
        if self.given and not {"height", "width"} & self.chosen.keys():
            self.check()
            short_side = min(recommended.get(side, getattr(self, side)) for side in ("height", "width"))
            recommended["height"], recommended["width"] = self.read_given(short_side)[0].shape[1:3]
        request = Request(**(recommended | self.chosen))
        if request.latent_grid[0] <= sum(self.ends):
            raise ValueError(f"all of --num-video-frames {request.num_video_frames} are given; raise it")
        return request

    def variants(self, count: int) -> "list[Request]":
        """Itself, and with the seeds that follow its own."""
        if count < 1:
            raise ValueError(f"num_images must be 1 or more; got {count}")
        return [self, *(self.replace(seed=self.seed + more) for more in range(1, count))]

    def read_given(self, short_side: int, reading: MediaOptions | None = None) -> list[np.ndarray]:
        """The frames of `given`, uint8 [T, H, W, 3], fitted to a short side in px as preparation fits them."""
        read = (reading or MediaOptions()).beside(map(Path, self.given), "given")
        fitted = []
        for frames in read(self.fps)[0]:
            _, height, width, _ = frames.shape
            fitted.append(video.resize(frames, *video.fit_size(height, width, short_side, upscale=True)))
        return fitted

    def check(self) -> None:
        """FileNotFoundError if a file that it starts from is missing."""
        for path, flag in self.inputs.items():
            if not Path(path).is_file():
                raise FileNotFoundError(f"there is no file {path} ({flag})")

    def untrained(self, config: cfg.Config) -> str:
        """A sentence if training had samples of this kind, still or clip, but none of this size, and one if it had
        captions like this one with given pictures alone; else empty.
        """
        sentences = []
        sizes = trained(config, self.num_video_frames == 1).sizes if config.samples.kinds else []
        size = f"{self.width}x{self.height}"
        if sizes and size not in sizes:
            sentences.append(f"{size} px was not trained; trained sizes: {listed(sizes)}")
        near = [known.given for known, _ in most_alike(config, self.prompt)]
        near = near or [known.given for known in _known(config, None)]
        if near and all(near) and not self.given:
            sentences.append(
                "training had captions like this one with given pictures alone; pass one with --given FILE"
            )
        return "; ".join(sentences)

    @property
    def latent_grid(self) -> geometry.Size:
        """Latent T, H, W."""
        return geometry.latent_size(self.num_video_frames, self.height, self.width)

    @property
    def ends(self) -> tuple[int, int]:
        """Latent frames that are given at the start and at the end."""
        return int(bool(self.init_image)), int(bool(self.last_image))

    @property
    def grids(self) -> list[geometry.Size]:
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


def requests_of_keywords(prompts: Sequence[str], settings: dict, num_images: int = 1) -> list[Request]:
    """`num_images` requests, with consecutive seeds, for each prompt from a call in Python.

    settings : fields of `Request` or their `aliases`; `generator`, or a list of one per prompt, gives the seed.

    Raises
    ------
    ValueError : an unknown name, with the closest known one.
    """
    plugins.trust(settings.get("sampler"))
    generators = settings.get("generator")
    if isinstance(generators, list) and len(generators) != len(prompts):
        raise ValueError(f"generators must be one for each of the {len(prompts)} prompts; got {len(generators)}")
    requests = []
    for i, prompt in enumerate(prompts):
        if isinstance(generators, list):
            settings["generator"] = generators[i]
        requests += Request(prompt, i, **settings).variants(num_images)
    return requests


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
        text = video.read_comment(path)
        if not text:
            raise ValueError(f"{path} has no settings inside; use a picture or clip of dfm generate, or its .json")
    else:
        try:
            text = plain(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8; byte {error.start} is not; save it as UTF-8") from None
    if suffix in (".png", ".mp4", ".json"):
        record = _json(text, str(path))
        return [(str(path), {name: record[name] for name in record if name in Request.model_fields})]
    prompts = []
    comments = 0
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}, line {number}"
        prompt = " ".join(line.split())
        flag = _FLAG.search(prompt)
        if not prompt:
            continue
        if suffix == ".jsonl":
            prompts.append((where, _json(line, where)))
        elif prompt.startswith("#"):
            comments += 1
        elif flag:
            fix = 'for settings or such text use a .jsonl with {"prompt": "...", "width": 64} in each line'
            raise ValueError(f"{where}: a .txt has prompts alone; got the flag {flag[1]}; {fix}")
        else:
            prompts.append((where, {"prompt": prompt}))
    if comments:
        _warn("%s: %d lines that begin with # are comments and no prompts", path, comments)
    return prompts


def _json(text: str, where: str) -> dict:
    try:
        record = parsed(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or "prompt" not in record:
        raise ValueError(f'{where}: there is no prompt; give {{"prompt": "...", ...}}')
    return record
