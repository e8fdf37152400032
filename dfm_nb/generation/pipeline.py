"""Prompts to clips in one or many processes."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import geometry, plugins, pretrained, video
from dfm_nb.base.argv import quietly
from dfm_nb.base.files import StrPath
from dfm_nb.base.log import log, tqdm
from dfm_nb.base.machine import GIB, available_bytes, fast_bf16
from dfm_nb.base.options import Options, option
from dfm_nb.base.records import TextEncoder, Tokenizer
from dfm_nb.base.seeds import generator_for
from dfm_nb.base.version import __version__
from dfm_nb.checkpoints import folders, loading
from dfm_nb.config import counts
from dfm_nb.data.encoding import lost_text, to_frames, to_pixels
from dfm_nb.data.prepared_folder import EMPTY_TEXT, read_empty_text
from dfm_nb.data.sources._media import MediaOptions
from dfm_nb.diffusion import samplers
from dfm_nb.generation.clip_files import Clips, Generated
from dfm_nb.generation.guided import BatchDenoiser, GuidedDenoiser
from dfm_nb.generation.request import Request, requests_of_keywords, usual
from dfm_nb.model.build import build_chunks
from dfm_nb.model.inference_memory import TEXT_TOKENS, clip_tokens, sampling_bytes
from dfm_nb.packs.packs import LatentStatistics
from dfm_nb.parallel.groups import Layout, layout_of, mpu

Requests = Sequence[Request]
StepCallback = Callable[[int, int, "Clips"], None]
"""callback(step, num_steps, clips) with the batch's denoised estimates, decoded on first access."""


@dataclass(eq=False)
class Preview:
    """An unfinished clip: the denoised estimate after a step, a latent [C, T, H, W]."""

    pipe: "Pipeline"
    request: Request
    latent: Tensor

    @functools.cached_property
    def frames(self) -> np.ndarray:
        """uint8 [T, H, W, 3], decoded on first access."""
        return self.pipe.decode(self.latent, self.request.tokenizer_window)

    @functools.cached_property
    def middle(self) -> np.ndarray:
        """The middle frame alone, uint8 [H, W, 3]: tokenizers are causal, so later latent frames are not decoded."""
        steps = self.latent.shape[1]  # of 9 frames: 0, 1-4 and 5-8; frame 4 needs the first two
        return self.pipe.decode(self.latent[:, : 1 + steps // 2], self.request.tokenizer_window)[2 * (steps - 1)]

    _repr_html_ = Generated._repr_html_


class ModelOptions(Options):
    """What loads a model in `dfm generate` and `dfm evaluate`."""

    ema: str = option("auto", "relative length of the weight average; auto, or none for raw weights")
    mixed_precision: Literal["fp32", "bf16"] | None = option(None, "arithmetic; default: as in training")
    tokenizer_path: str | None = option(None, "tokenizer file or folder", flags=("--tokenizer-cache-dir",))
    text_encoder_path: str | None = option(None, "text encoder folder", flags=("--t5-cache-dir",))

    @property
    def average(self) -> float | str | None:
        """`ema` as `Pipeline.from_checkpoint` takes it."""
        if self.ema == "none":
            return None
        return "auto" if self.ema == "auto" else float(self.ema)

    def open(self, path: StrPath | loading.Weights, layout: Layout | None = None) -> "Pipeline":
        """The pipeline of these weights."""
        return Pipeline.from_checkpoint(
            path, self.average, layout, self.tokenizer_path, self.text_encoder_path, self.mixed_precision
        )


@dataclass(eq=False, repr=False)
class Pipeline:
    """A trained DiT with its tokenizer and text encoder, ready to generate.

    >>> pipe = Pipeline.from_checkpoint("runs/demo/train")            # doctest: +SKIP
    >>> clips = pipe(["a blue morpho on a meadow"], num_steps=20, guidance=3.0)   # doctest: +SKIP
    >>> clips.save("clips")                                           # doctest: +SKIP
    """

    config: cfg.Config
    chunks: Sequence[torch.nn.Module]
    folder: Path
    tokenizer_path: str | None = None
    text_encoder_path: str | None = None
    source: loading.Weights | None = None
    ema: float | str | None = None
    statistics: LatentStatistics | None = None
    memory_check: bool = True

    def __post_init__(self) -> None:
        m = self.config.model
        assert m.in_channels and m.text_dim and m.sigma_data, "the configuration of a trained model has all three"
        self.channels = m.in_channels
        self.sigma_data = m.sigma_data
        self.device = parallel.device()
        self.manifest = folders.read_manifest(self.folder)
        # pictures to start from are read as those of training were
        ground = folders.source_of(self.manifest).get("background", video.WHITE)
        try:
            self.reading = MediaOptions(background=f"#{bytes([*ground]).hex()}")
        except (TypeError, ValueError):
            raise folders.CheckpointError(
                f"{self.folder / folders.MANIFEST} is damaged (source.background); use another checkpoint"
            ) from None
        self._texts: dict[str, Tensor] = {}
        if (self.folder / EMPTY_TEXT).is_file() or not m.network.encodes_empty_caption:
            self._texts[""] = read_empty_text(self.folder, m.text_dim)
        self.scale = self.statistics or folders.read_statistics(self.folder).used_by(m.network)
        self.finished = Clips()

    @classmethod
    @quietly()
    def from_checkpoint(
        cls,
        path: StrPath | loading.Weights,
        ema: float | str | None = "auto",
        layout: Layout | None = None,
        tokenizer_path: str | None = None,
        text_encoder_path: str | None = None,
        mixed_precision: Literal["fp32", "bf16"] | None = None,
    ) -> "Pipeline":
        """Load a run folder (newest checkpoint), an `iter_*` folder or an exported `.safetensors` / `.pth` file.

        Parameters
        ----------
        ema : relative length of the EMA to use, stored or to be rebuilt from stored ones; "auto" is the shortest stored
            one, or what an exported file has; None the raw weights.
        layout : parallel degrees; needs as many processes.
        mixed_precision : arithmetic; None: as in training, or float32 on a CPU without fast bfloat16.
        """
        source = loading.find_weights(path)
        config = source.config
        if mixed_precision:
            config.mixed_precision = mixed_precision
        elif parallel.device().type == "cpu" and not fast_bf16():
            config.mixed_precision = "fp32"  # faster there
        layout = layout or Layout()
        config.model = config.model.model_copy(update={**layout.settings, "recompute_granularity": None})
        if not mpu.is_initialized():
            parallel.init(layout)
        _, chunks = build_chunks(config.model, config.mixed_precision, seed=0)
        source.load(chunks, ema)
        for chunk in chunks:
            chunk.eval().requires_grad_(False)
        return cls(config, chunks, source.folder, tokenizer_path, text_encoder_path, source, ema)

    @classmethod
    def from_pretrained(cls, name: StrPath = pretrained.DEFAULT, **settings: Any) -> "Pipeline":
        """Load a packaged model, or anything that `from_checkpoint` loads, with its keywords.

        Raises
        ------
        FileNotFoundError : neither a packaged model nor an existing path; the message lists the models.

        >>> pipe = Pipeline.from_pretrained("butterflies")            # doctest: +SKIP
        """
        return cls.from_checkpoint(pretrained.packaged(name) or name, **settings)

    @property
    def recommended(self) -> dict:
        """The checkpoint's default `num_steps`, `guidance`, `sampler`, `height`, ... of a call; see `usual`."""
        return usual(self.config)

    @functools.cached_property
    def made_by(self) -> dict:
        """Entries of its clips' sidecars: weights, arithmetic and versions; {} without a checkpoint."""
        if self.source is None:
            return {}
        return {
            "checkpoint": self.source.identity,
            "ema": self.ema,
            "layout": str(layout_of(self.config.model)),
            "mixed_precision": self.config.mixed_precision,
            "tokenizer": self.manifest["tokenizer"],
            "text_encoder": self.manifest["text_encoder"],
            "dfm_nb": __version__,
            "torch": torch.__version__,
        }

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training data, loaded when first needed."""
        name = self.manifest["tokenizer"]["name"]
        return self._load("tokenizer", self.tokenizer_path or plugins.carried(name, self.folder))

    @functools.cached_property
    def text_encoder(self) -> TextEncoder:
        """The text encoder of the training data, loaded when first needed."""
        # a prompt is truncated at the length of training captions
        cut = {k: v for k, v in self.manifest["text_encoder"].items() if k == "max_tokens"}
        return self._load("text_encoder", self.text_encoder_path, **cut)

    def _load(self, kind: str, path: str | Path | None, **settings: Any) -> Any:
        """The manifest's "tokenizer" or "text_encoder" from `path`; ValueError if `path` has another one."""
        saved = self.manifest[kind]
        module, path = plugins.load_saved(f"{kind}s", saved["name"], path)
        plugin = module.build(path, device=str(self.device), **settings)
        wanted = saved.get("sha256")
        sha256 = plugin.identity().get("sha256")
        if wanted and sha256 != wanted:
            must = f"--{kind.replace('_', '-')}-path must be the {saved['name']} of the training"
            raise ValueError(f"{must}, sha256 {wanted[:12]}; got {str(sha256)[:12]}")
        return plugin

    def encode_text(self, texts: Sequence[str]) -> list[Tensor]:
        """[L, D] per text, each distinct one encoded once; "" is the stored empty caption, if there is one."""
        missing = sorted(set(texts) - self._texts.keys())
        if missing:
            for text, embedding in zip(missing, self.text_encoder.encode(missing)):
                self._texts[text] = embedding.cpu()
                for loss in lost_text(self.text_encoder, text).values():
                    log.warning("prompt %r: %s", text[:80], loss)
        return [self._texts[text] for text in texts]

    def anchors(self, requests: Requests) -> list[str]:
        """The training caption that is put before each prompt; "" if there is none, or if the prompt is one itself."""
        known = self.config.samples.anchors
        texts = []
        # all in one call, as without anchors
        for r, states in zip(requests, self.encode_text([r.prompt for r in requests])):
            text = ""
            if known and r.anchor == "nearest" and r.prompt:
                text = known.nearest(r.prompt, states.float().mean(0).numpy())
            texts.append(text)
        return texts

    def remember_text(self, text: str, embedding: Tensor) -> None:
        """Use `embedding` [L, D] for this text, without the text encoder."""
        self._texts[text] = embedding

    def __call__(
        self,
        prompts: Sequence[str] | str | None = None,
        batch_size: int = 16,
        callback: StepCallback | None = None,
        progress: bool = False,
        preview_every: int = 1,
        num_images: int = 1,
        **settings: Any,
    ) -> Clips:
        """Generate `num_images` clips per prompt, in the order of the prompts.

        After an interrupt, `finished` holds the completed clips.

        Parameters
        ----------
        num_images : the first has the seed, the others have those that follow.
        callback, preview_every : see `run`.
        **settings : fields of `Request`, which are the flags of `dfm generate` (`height`, `num_video_frames`,
            `guidance`, `seed`, ...), and diffusers' `prompt`, `num_inference_steps`, `num_frames`, `guidance_scale` and
            `generator`. Of a generator, or of a list of one per prompt, the `initial_seed()` is the seed.

        Raises
        ------
        ValueError, FileNotFoundError : a wrong setting, before anything is sampled.
        """
        prompts = settings.pop("prompt", prompts)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts or [])
        requests = requests_of_keywords(prompts, settings, num_images)
        done = dict(self.run(requests, batch_size, callback, progress, preview_every))
        return Clips(done[i] for i in sorted(done))

    def run(
        self,
        requests: Requests,
        batch_size: int = 16,
        callback: StepCallback | None = None,
        progress: bool = False,
        preview_every: int = 1,
    ) -> Iterator[tuple[int, Generated]]:
        """Yield (position in `requests`, `Generated`), in batches that share all but prompts, seeds, index and files.

        Parameters
        ----------
        requests : what they leave out is as the checkpoint recommends.
        callback : called with (step, num_steps, clips) after every `preview_every`-th step of a batch and after its
            last; `clips` are the batch's `Preview`s. An exception in it ends the run.

        Raises
        ------
        ValueError : a wrong setting, another tokenizer than the checkpoint's, or too little memory; before sampling
            where possible.
        """
        if batch_size < 1 or preview_every < 1:
            raise ValueError(f"--batch-size and preview_every must be 1 or more; got {batch_size} and {preview_every}")
        if not mpu.is_initialized():  # a training run in this process has ended its groups
            parallel.init(layout_of(self.config.model))
        requests = [r.completed(self.config) for r in requests]
        groups: dict[Request, list[int]] = {}
        for i, r in enumerate(requests):
            r.check()
            same = r.replace(
                prompt="",
                negative_prompt="",
                index=0,
                seed=0,
                given=("-",) * len(r.given),
                init_image=r.init_image and "-",
                last_image=r.last_image and "-",
            )
            groups.setdefault(same, []).append(i)
        batches = []
        for group in groups.values():
            batches += [group[start : start + batch_size] for start in range(0, len(group), batch_size)]
        self.finished = Clips()
        _ = self.tokenizer  # a missing or wrong one is reported now, not after minutes of sampling
        if any(r.tokenizer_window for r in requests):
            own = plugins.is_module_name(self.tokenizer_path)
            name = str(self.tokenizer_path if own else self.manifest["tokenizer"]["name"])
            plugins.options_of("tokenizers", name, {"tokenizer_window": ...})
        for batch in batches:
            self.check_memory([requests[i] for i in batch])
        started = time.monotonic()
        # miniters: a step is shown though no clip is done
        with tqdm(total=len(requests), desc="generate", unit="clip", miniters=0, disable=not progress) as bar:
            for batch in batches:
                chosen = [requests[i] for i in batch]
                anchors = dict(zip(batch, self.anchors(chosen)))

                def on_step(step: int, num_steps: int, _x: Tensor, D_x: Tensor) -> None:
                    bar.set_postfix_str(f"step {step}/{num_steps}", refresh=False)
                    bar.update(0)  # which redraws it as often as the other bars
                    if callback and (step % preview_every == 0 or step == num_steps):
                        clips = map(functools.partial(Preview, self), chosen, D_x)  # noqa: B023 - of this batch alone
                        callback(step, num_steps, Clips(clips))

                for i, latent in zip(batch, self.sample_latents(chosen, on_step)):
                    frames = self.decode(latent, requests[i].tokenizer_window)
                    elapsed_s = time.monotonic() - started
                    made_by = self.made_by
                    if anchors[i]:
                        made_by = {**made_by, "anchor_caption": anchors[i]}
                    clip = Generated(frames, requests[i], latent.float().cpu(), made_by, elapsed_s)
                    self.finished.append(clip)
                    bar.update()
                    yield i, clip

    # ---- memory -----------------------------------------------------------------------------------------------

    def _halves(self, request: Request) -> int:
        """Forwards of the network for one estimate: with and without the prompt, unless guidance is 1; and without
        what is given, unless its guidance is 1."""
        if request.given_guidance != 1:
            return 3
        return 1 if request.guidance == 1 else 2

    def flops(self, request: Request) -> int:
        """FLOPs of the network for one clip; text encoder and decoding are not counted."""
        m = self.config.model
        halves = self._halves(request)
        each = counts.forward_flops(m, [clip_tokens(m, *request.grids)] * halves, [TEXT_TOKENS] * halves)
        steps = len(request.sigmas(self.sigma_data)) - 1
        return each * samplers.evaluations(request.sampler, steps)

    def needed_bytes(self, requests: Requests) -> int:
        """Estimated memory of a batch on this process, without the weights."""
        m = self.config.model
        largest = max((r.grids for r in requests), key=lambda grids: clip_tokens(m, *grids))
        number = 4 if self.config.mixed_precision == "fp32" else 2
        halves = self._halves(requests[0])
        return sum(sampling_bytes(m, len(requests), largest, halves, bytes_per_number=number).values())

    def check_memory(self, requests: Requests) -> None:
        """ValueError if a batch would not fit, with the settings to lower."""
        free = available_bytes(self.device)
        if self.memory_check and self.needed_bytes(requests) > free:
            raise ValueError(f"{self._too_large(requests)}, with {free / GIB:.3g} free; --no-memory-check tries it")

    def _too_large(self, requests: Requests) -> str:
        r = requests[0]
        return (
            f"{len(requests)} clip(s) of {r.num_video_frames} frames of {r.height}x{r.width} px do not fit in memory; "
            "lower --batch-size, --num-video-frames, or --height and --width, or raise --cp-size with "
            f"--nproc-per-node; estimated: {self.needed_bytes(requests) / GIB:.3g} GiB a process without the weights"
        )

    # ---- latents ----------------------------------------------------------------------------------------------

    def sample_latents(self, requests: Requests, on_step: samplers.Callback | None = None) -> Tensor:
        """float64 [N, C, T, H, W], normalised to sigma_data; requests differ in prompt, index, seed and pictures."""
        first = requests[0]
        sampler = samplers.find(first.sampler)
        sigmas = first.sigmas(self.sigma_data)

        def generators(purpose: str) -> list[torch.Generator]:
            """Of (seed, index) alone, so that batch and layout do not matter."""
            return [generator_for(purpose, r.seed, r.index) for r in requests]

        churn = {"noise": generators("churn")} if sampler.stochastic else {}
        try:
            denoiser = self.denoiser(requests)
            shape = denoiser.start.shape[1:]
            drawn = [torch.randn(shape, generator=g, dtype=torch.float64) for g in generators("sample")]
            x = denoiser.start + sigmas[0] * torch.stack(drawn).to(self.device)
            return sampler(denoiser, x, sigmas, callback=on_step, **churn)
        except (MemoryError, RuntimeError) as error:
            if type(error) is RuntimeError and "DefaultCPUAllocator" not in str(error):
                raise  # not a lack of memory
            raise ValueError(self._too_large(requests)) from error

    def denoiser(self, requests: Requests) -> GuidedDenoiser:
        """The denoiser that samplers call for these requests."""
        first = requests[0]
        heard = []
        for r, anchor in zip(requests, self.anchors(requests)):
            heard.append(f"{anchor} {r.prompt}" if anchor else r.prompt)
        cond = self.encode_text(heard)
        encoded: dict[Request, tuple] = {}  # samples of one picture encode it once
        starts = []
        given = []
        for r in requests:
            same = r.replace(prompt="", negative_prompt="", index=0, seed=0)
            if same not in encoded:
                encoded[same] = (*self._start(r), self._given(r))
            start, free, latents = encoded[same]  # all of a batch are free in the same places
            starts.append(start)
            given.append(latents)

        def batch(texts: list[Tensor], without: int = 0) -> BatchDenoiser:
            return BatchDenoiser(
                self.chunks, self.config.model, self.device, texts, starts, first.fps, first.ends, given, without
            )

        both = None
        parts = self._halves(first)
        if parts > 1:
            negative = self.encode_text([r.negative_prompt for r in requests])
            both = batch(cond + negative * (parts - 1), len(requests) * (parts - 2))
        if free is not None:
            free = free.to(self.device)
        return GuidedDenoiser(first, torch.stack(starts).to(self.device), batch(cond), both, free)

    def _start(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """The start without noise, float64 [C, T, H, W]: zero, or what is given; and where it changes.

        None: everywhere. Else bool: [T, 1, 1], false for given frames; or [H, W], true for latent pixels of which
        --mask has a pixel nearer to white than to black.
        """
        if not request.init_video:
            start = torch.zeros(self.channels, *request.latent_grid, dtype=torch.float64)
            kept = torch.zeros(len(start[0]), 1, 1, dtype=torch.bool)
            # A first latent frame holds one frame, every later one four: in these the last image stands still.
            for path, at, still in (
                (request.init_image, 0, 1),
                (request.last_image, -1, 1 + geometry.FRAMES_PER_LATENT),
            ):
                if path:
                    picture = video.read_image(path, self.reading.colour)
                    frames = video.resize(picture, request.height, request.width).repeat(still, 0)
                    start[:, at] = self.encode_pixels(frames)[:, at]
                    kept[at] = True
            return start, ~kept if kept.any() else None
        ((_, frames, rate, lost),) = self.reading.clips(Path(request.init_video), "init")
        wanted = request.num_video_frames
        if len(frames) == 1:  # a picture stands still
            frames = frames.repeat(wanted, 0)
        elif wanted > 1 and abs(rate / request.fps - 1) > 0.05:
            lost["re_timed"] = f"it has {rate:g} frames a second and gets {request.fps:g}; keep them: --fps {rate:g}"
        for loss in lost.values():
            log.warning("%s: %s", request.init_video, loss)
        if len(frames) < wanted:
            raise ValueError(f"{request.init_video} has {len(frames)} frames; --num-video-frames needs {wanted}")
        free = self._mask(request.mask, request, frames) if request.mask else None
        frames = video.resize(frames[:wanted], request.height, request.width)
        return self.encode_pixels(frames), free

    @staticmethod
    def _mask(path: str, request: Request, frames: np.ndarray) -> Tensor:
        """bool [H, W] of the latent. frames : those of --init-video, whose size in px the mask must have."""
        mask, _ = video.read_still_or_animation(path, video.WHITE, {})
        if mask.shape != frames[:1].shape:
            count, h, w, _ = mask.shape
            raise ValueError(
                f"--mask must be one picture of the size of --init-video, {frames.shape[2]}x{frames.shape[1]} px; "
                f"got {w}x{h} px and {count} frames; save one of that size"
            )
        white = torch.from_numpy(video.resize(mask, request.height, request.width)[0].mean(-1) > 127).float()
        free = F.max_pool2d(white[None], geometry.PX_PER_LATENT)[0].bool()
        if free.all() or not free.any():
            colour = "white, so that nothing is kept" if free.all() else "black, so that nothing changes"
            raise ValueError(f"--mask is all {colour}; paint what is to change white, and the rest black")
        return free

    def _given(self, request: Request) -> list[Tensor]:
        """Latents of --given, [C, t, h, w] each."""
        if request.given and not self.config.samples.given:
            raise ValueError(
                "--given needs a model trained with given pictures, and this one was not; use --init-video with "
                "--strength instead, or train on pairs (docs/prepare.md)"
            )
        short_side = min(request.height, request.width)
        return [self.encode_pixels(frames) for frames in request.read_given(short_side, self.reading)]

    # ---- pixels and latents -----------------------------------------------------------------------------------

    def encode_pixels(self, frames: np.ndarray) -> Tensor:
        """uint8 [T, H, W, 3] -> normalised latent float64 [C, T', H/8, W/8]."""
        latent = self.tokenizer.encode(to_pixels(frames)[None].to(self.device))[0].cpu()
        return self.scale.to_model(latent, self.sigma_data).double()

    def decode(self, latent: Tensor, window: int | None = None) -> np.ndarray:
        """Normalised latent [C, T, H, W] -> uint8 [1 + 4 (T - 1), 8 H, 8 W, 3]. window : `Request.tokenizer_window`."""
        return self.decode_stored(self.scale.from_model(latent.cpu(), self.sigma_data), window)

    def round_trip(self, frames: np.ndarray) -> np.ndarray:
        """A clip through the tokenizer, uint8 [T, H, W, 3]."""
        return self.decode(self.encode_pixels(frames))

    def decode_stored(self, latent: Tensor, window: int | None = None) -> np.ndarray:
        """A latent as in shards (not normalised) [C, T, H, W] -> uint8 [1 + 4 (T - 1), 8 H, 8 W, 3].

        Tokenizers with `decode_windows` may decode a long clip in pieces, so that only its bytes are kept complete.
        """
        size = geometry.pixel_size(*latent.shape[1:])
        latent = latent[None].float().to(self.device)
        frames = np.empty((*size, 3), np.uint8)
        done = 0
        windows = {"window": window} if window else {}
        decode_windows = getattr(self.tokenizer, "decode_windows", None)
        try:
            pieces = decode_windows(latent, **windows) if decode_windows else [self.tokenizer.decode(latent)]
            for pixels in pieces:
                piece = to_frames(pixels[0])
                frames[done : done + len(piece)] = piece
                done += len(piece)
        except torch.OutOfMemoryError:
            raise ValueError(
                "the tokenizer runs out of memory on a clip of {} frames of {}x{} px; set or lower --tokenizer-window, "
                "or lower --num-video-frames".format(*size)
            ) from None
        assert done == len(frames), (done, len(frames))
        return frames
