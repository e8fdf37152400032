"""The generation driver: prompts -> latents -> mp4; `dfm generate`, `Pipeline` in Python, or `torchrun ... -m dfm_nb.generate`.

Enters: a run folder, an `iter_*` folder or an exported file; prompts with their settings. Leaves: an mp4 (PNG for one frame) and a JSON
sidecar per prompt.
Guarantees: the starting noise is a function of (seed, prompt index) alone, so batch size, processes and layout do not matter (to float32
rounding); guidance is D = D_uncond + guidance * (D_cond - D_uncond), so 1 is none; finished files survive an interrupt.
Cost: network evaluations = steps (Heun: 2 steps - 1), each on conditional and unconditional samples in one packed forward.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from dfm_nb import checkpoint, parallel, plugins, samplers, video
from dfm_nb import config as cfg
from dfm_nb.argv import ArgumentParser, guard
from dfm_nb.dataset import CLEAN_SIGMA, Draw, LatentStatistics, Pack, PackSettings, pack_draws, read_empty_text
from dfm_nb.denoiser import PackDenoiser
from dfm_nb.packing import patchify, unpatchify
from dfm_nb.parallel import Layout, generator_for, mpu
from dfm_nb.trainer import build_chunks, layout_of


@dataclass(frozen=True)
class Request:
    """One prompt with its settings; `index` decides, with `seed`, its starting noise.

    height, width : px, divisible by 16; num_video_frames : 1 + 4k; guidance : 1 is none; guidance_interval : noise levels (low, high]
    where guidance acts; strength : with `init_video`, the share of the steps that is run.
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
    sampler: str = "heun"
    schedule: str = "karras"
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    seed: int = 1
    init_image: str | None = None
    init_video: str | None = None
    strength: float = 0.6

    def check(self) -> None:
        """ValueError naming the nearest legal values."""
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
        if self.fps <= 0:
            raise ValueError(f"--fps must be positive; got {self.fps}")
        if self.init_image and self.init_video:
            raise ValueError("give --init-image or --init-video, not both")

    @property
    def latent_grid(self) -> tuple[int, int, int]:
        """Latent T, H, W."""
        return 1 + (self.num_video_frames - 1) // 4, self.height // 8, self.width // 8

    def sigmas(self) -> torch.Tensor:
        extra = {"rho": self.rho} if self.schedule == "karras" else {}
        levels = samplers.SCHEDULES[self.schedule](self.num_steps, self.sigma_min, self.sigma_max, **extra)
        return samplers.tail(levels, self.strength) if self.init_video else levels


@dataclass
class Generated:
    """A finished sample: frames uint8 [T, H, W, 3], its request, and its latent float32 [C, T, H, W] (normalised)."""

    frames: np.ndarray
    request: Request
    latent: torch.Tensor = field(repr=False)

    def _repr_html_(self) -> str:
        """An inline player (a picture for one frame)."""
        return video.inline_html(self.frames, self.request.fps, self.request.prompt)


class Clips(list):
    """Generated samples; plays as a row in a notebook. `array()` gives [N, T, H, W, 3] uint8 when the sizes agree."""

    def array(self) -> np.ndarray:
        return np.stack([g.frames for g in self])

    def _repr_html_(self) -> str:
        return '<div style="display:flex;flex-wrap:wrap;gap:8px">' + "".join(g._repr_html_() for g in self) + "</div>"


class Pipeline:
    """A trained DiT with its tokenizer and text encoder, ready to draw.

    >>> pipe = Pipeline.from_checkpoint("runs/demo/train")            # doctest: +SKIP
    >>> clips = pipe(["a blue morpho on a meadow"], num_steps=20, guidance=3.0)   # doctest: +SKIP
    """

    def __init__(
        self, config: cfg.Config, chunks, folder: Path, tokenizer_path=None, text_encoder_path=None, guide=None
    ):
        self.config, self.chunks, self.folder = config, chunks, folder
        self.device = parallel.device()
        self.manifest = checkpoint.read_manifest(folder)
        self.empty_text = read_empty_text(folder, config.model.text_dim)
        self.statistics = LatentStatistics.from_manifest(self.manifest)
        self._tokenizer_path, self._text_path = tokenizer_path, text_encoder_path
        self._tokenizer = self._text_encoder = None
        self.guide = guide
        self._texts: dict[str, torch.Tensor] = {}

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, ema: float | str | None = "auto", layout: Layout | None = None,
        tokenizer_path: str | None = None, text_encoder_path: str | None = None, guide: str | Path | None = None,
        mixed_precision: str | None = None,
    ) -> Pipeline:  # fmt: skip
        """Load a run folder (newest checkpoint), an `iter_*` folder or an exported `.safetensors` / `.pth` file.

        Parameters
        ----------
        ema : relative length of the average to use; "auto" takes the shortest stored one, None the raw weights.
        layout : parallel degrees; needs as many processes. guide : a weaker checkpoint for autoguidance.
        """
        source = checkpoint.find_weights(path)
        config = source.config
        if mixed_precision:
            config.mixed_precision = mixed_precision
        layout = layout or Layout()
        m = config.model
        m.tensor_model_parallel_size, m.pipeline_model_parallel_size = layout.tp, layout.pp
        m.context_parallel_size, m.virtual_pipeline_model_parallel_size = layout.cp, layout.vpp
        m.sequence_parallel, m.recompute_granularity = layout.sequence_parallel, None
        if not mpu.is_initialized():
            parallel.init(layout)
        _, chunks = build_chunks(m, config.mixed_precision, seed=0)
        source.load(chunks, ema)
        for chunk in chunks:
            chunk.eval().requires_grad_(False)
        guide_pipe = cls.from_checkpoint(guide, ema, layout) if guide else None
        return cls(config, chunks, source.folder, tokenizer_path, text_encoder_path, guide_pipe)

    @property
    def tokenizer(self):
        if self._tokenizer is None:
            name = self.manifest["tokenizer"]["name"]
            path = self._tokenizer_path or (self.folder if (self.folder / "tokenizer.safetensors").is_file() else None)
            self._tokenizer = plugins.load("tokenizers", name).build(path, device=str(self.device))
            saved = self.manifest["tokenizer"]
            found = self._tokenizer.identity()
            if saved.get("sha256") and found.get("sha256") != saved["sha256"]:
                raise ValueError(
                    f"the checkpoint was trained on latents of another tokenizer ({saved['name']}, sha256 "
                    f"{saved['sha256'][:12]}, not {str(found.get('sha256'))[:12]}); pass its file with --tokenizer-path"
                )
        return self._tokenizer

    @property
    def text_encoder(self):
        if self._text_encoder is None:
            name = self.manifest["text_encoder"]["name"]
            self._text_encoder = plugins.load("text_encoders", name).build(self._text_path, device=str(self.device))
        return self._text_encoder

    def encode_text(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """[L, D] per text, each distinct one encoded once; "" is the data set's stored empty caption."""
        missing = sorted({t for t in texts if t not in self._texts and t})
        if missing:
            self._texts.update(zip(missing, (e.cpu() for e in self.text_encoder.encode(missing))))
        return [self._texts[t] if t else self.empty_text for t in texts]

    def __call__(
        self, prompts: Sequence[str] | str, batch_size: int = 16, callback=None, progress=False, **settings
    ) -> Clips:
        """Generate one clip per prompt; `settings` are fields of `Request`. Returns `Clips` in the order of the prompts."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [Request(prompt=p, index=i, **settings) for i, p in enumerate(prompts)]
        done = dict(self.run(requests, batch_size, callback, progress))
        return Clips(done[i] for i in range(len(requests)))

    def run(self, requests: Sequence[Request], batch_size: int = 16, callback=None, progress: bool = False):
        """Yield (position in `requests`, `Generated`), in batches of requests that differ in prompt and seed only."""
        groups: dict[Request, list[int]] = {}
        for i, r in enumerate(requests):
            r.check()
            groups.setdefault(replace(r, prompt="", negative_prompt="", index=0, seed=0), []).append(i)
        bar = tqdm(total=len(requests), desc="generate", unit="clip", disable=not progress)
        for positions in groups.values():
            for start in range(0, len(positions), batch_size):
                batch = positions[start : start + batch_size]
                latents = self.sample_latents([requests[i] for i in batch], callback)
                for i, latent in zip(batch, latents):
                    yield i, Generated(self.decode(latent), requests[i], latent.float().cpu())
                    bar.update()
        bar.close()

    # ---- latents ----------------------------------------------------------------------------------------------

    def sample_latents(self, requests: Sequence[Request], callback: Callable | None = None) -> torch.Tensor:
        """float64 [N, C, T, H, W], normalised to sigma_data; requests share everything but prompt, negative prompt and seed."""
        first = requests[0]
        sigmas = first.sigmas()
        c, (t, h, w) = self.config.model.in_channels, first.latent_grid
        start = self._start_latents(requests)
        given = self._given_frames(requests)
        noise = torch.stack(
            [
                torch.randn(c, t, h, w, generator=generator_for("sample", r.seed, r.index), dtype=torch.float64)
                for r in requests
            ]
        )
        x = (start + sigmas[0] * noise).to(self.device)
        guided = _Guided(self, requests, given)
        options = {}
        if first.sampler in samplers.STOCHASTIC:
            options["noise"] = [generator_for("churn", r.seed, r.index) for r in requests]
        try:
            x = samplers.get_sampler(first.sampler)(
                guided, x, sigmas, callback=self._preview(callback, requests), **options
            )
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(_out_of_memory(first, len(requests))) from error
        return guided.with_given(x)

    def _preview(self, callback, requests):
        if callback is None:
            return None
        return lambda step, steps, x, D_x: callback(step, steps, D_x, requests)

    def _encode_pixels(self, frames: np.ndarray) -> torch.Tensor:
        """uint8 [T, H, W, 3] -> normalised latent float64 [C, T', H/8, W/8]."""
        pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        latent = self.tokenizer.encode(pixels.to(self.device))[0].cpu()
        return self.statistics.to_model(latent, self.config.model.sigma_data).double()

    def _start_latents(self, requests) -> torch.Tensor:
        """What the noise is added to: zero, or the latent of --init-video."""
        r = requests[0]
        c, (t, h, w) = self.config.model.in_channels, r.latent_grid
        if not r.init_video:
            return torch.zeros(len(requests), c, t, h, w, dtype=torch.float64)
        frames, _ = video.read_video(r.init_video)
        if len(frames) < r.num_video_frames:
            raise ValueError(
                f"{r.init_video} has {len(frames)} frames; --num-video-frames asks for {r.num_video_frames}"
            )
        frames = video.resize(frames[: r.num_video_frames], r.height, r.width)
        return self._encode_pixels(frames)[None].expand(len(requests), -1, -1, -1, -1)

    def _given_frames(self, requests) -> torch.Tensor | None:
        """Latent of --init-image [C, 1, H, W], kept as the clip's first latent frame."""
        r = requests[0]
        if not r.init_image:
            return None
        if self.config.dataset.condition_frames_prob <= 0:
            raise ValueError(
                "--init-image needs a model trained with dataset.condition_frames_prob above 0; this one was not; "
                "use --init-video with --strength instead"
            )
        return self._encode_pixels(video.resize(video.read_image(r.init_image), r.height, r.width))

    def decode(self, latent: torch.Tensor) -> np.ndarray:
        """Normalised latent [C, T, H, W] -> uint8 [1 + 4 (T - 1), 8 H, 8 W, 3]."""
        raw = self.statistics.from_model(latent.cpu(), self.config.model.sigma_data)
        pixels = self.tokenizer.decode(raw[None].to(self.device))[0].float().cpu()
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).contiguous().numpy()


class _Guided:
    """The guided denoiser of a batch: x [N, C, T, H, W] float64, sigma -> D; one packed forward per call."""

    def __init__(self, pipe: Pipeline, requests: Sequence[Request], given: torch.Tensor | None):
        self.pipe, self.requests, self.first, self.given = pipe, requests, requests[0], given
        self.cond = pipe.encode_text([r.prompt for r in requests])
        self.uncond = pipe.encode_text([r.negative_prompt for r in requests])
        m = pipe.config.model
        self.patch = (m.patch_spatial, m.patch_temporal)
        self._packs: dict[bool, tuple[PackDenoiser, list[int]]] = {}
        self._guide = None
        if pipe.guide is not None:
            self._guide = _Guided(pipe.guide, [replace(r, guidance=1.0) for r in requests], given)

    def _denoiser(self, both: bool) -> tuple[PackDenoiser, list[int]]:
        """For the conditional samples, or for conditional and unconditional ones; and each segment's sample number."""
        if both not in self._packs:
            texts = self.cond + self.uncond if both else self.cond
            c, grid = self.pipe.config.model.in_channels, self.first.latent_grid
            blank = torch.zeros(c, *grid)
            given = 0 if self.given is None else self.given.shape[1]
            draws = [Draw(f"{i:06d}", blank, t, self.first.fps, 1.0, blank, given) for i, t in enumerate(texts)]
            layout = layout_of(self.pipe.config.model)
            settings = PackSettings(
                0, *self.patch, sigma_data=self.pipe.config.model.sigma_data,
                token_multiple=layout.token_multiple(), text_multiple=layout.text_multiple(),
            )  # fmt: skip
            pack: Pack = pack_draws(draws, settings)
            assert abs(float(pack.sigma[0]) - (CLEAN_SIGMA if given else 1.0)) < 1e-6
            denoiser = PackDenoiser(self.pipe.chunks, pack, self.pipe.config.model.sigma_data, self.pipe.device)
            self._packs[both] = denoiser, [int(k) for k in pack.keys]
        return self._packs[both]

    def with_given(self, x: torch.Tensor) -> torch.Tensor:
        if self.given is None:
            return x
        x = x.clone()
        x[:, :, : self.given.shape[1]] = self.given.to(x)
        return x

    def _evaluate(self, x: torch.Tensor, sigma: float, both: bool) -> torch.Tensor:
        denoiser, order = self._denoiser(both)
        n = len(x)
        tokens = [patchify(x[i % n], *self.patch) for i in order]
        padding = denoiser.pack.cu_q[-1] - sum(map(len, tokens))
        packed = torch.cat([*tokens, x.new_zeros(padding, tokens[0].shape[1])])
        D = denoiser(packed, sigma)
        t, h, w = self.first.latent_grid
        grid = (t // self.patch[1], h // self.patch[0], w // self.patch[0])
        per = len(tokens[0])
        out: list = [None] * len(order)
        for segment, i in enumerate(order):
            out[i] = unpatchify(D[segment * per : (segment + 1) * per], grid, *self.patch)
        return torch.stack(out)

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        level = float(sigma)
        x = self.with_given(x)
        if self._guide is not None:
            D, D_guide = self._evaluate(x, level, both=False), self._guide._evaluate(x, level, both=False)
            weight = samplers.guidance_at(level, self.first.guidance, self.first.guidance_interval)
            return self.with_given(samplers.autoguidance(D, D_guide, weight))
        weight = samplers.guidance_at(level, self.first.guidance, self.first.guidance_interval)
        if weight == 1:
            return self.with_given(self._evaluate(x, level, both=False))
        D_cond, D_uncond = self._evaluate(x, level, both=True).chunk(2)
        D = samplers.classifier_free(D_cond, D_uncond, weight)
        if self.first.guidance_rescale:
            D = samplers.rescale(D, D_cond, self.first.guidance_rescale)
        return self.with_given(D)


def _out_of_memory(r: Request, batch: int) -> str:
    t, h, w = r.latent_grid
    return (
        f"out of GPU memory with {batch} clip(s) of {r.num_video_frames} frames at {r.height}x{r.width} "
        f"({t * h * w // 4} tokens each, twice with guidance); lower --batch-size, --num-video-frames (each 4 frames cost "
        f"{h * w // 4} tokens) or --height/--width, or raise --cp-size"
    )


# ---- command line -------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None):
    p = ArgumentParser(prog="dfm generate", description="Draw clips from a trained DiT.")
    p.add_argument("--checkpoint-path", required=True, help="run folder, iter_* folder or exported file")
    p.add_argument("--prompt", action="append", default=[], help="repeat for several")
    p.add_argument("--prompts-file", help=".txt with a prompt a line, or .jsonl with settings per line")
    p.add_argument("--negative-prompt", default="", help="what to move away from; empty: the empty caption")
    p.add_argument("--height", type=int, default=64, help="px, divisible by 16")
    p.add_argument("--width", type=int, default=64, help="px, divisible by 16")
    p.add_argument("--num-video-frames", type=int, default=1, help="pixel frames, 1 + 4k; 1 gives a PNG")
    p.add_argument("--fps", type=float, default=12.0, help="frames per second of the file, which the model is told too")
    p.add_argument("--num-steps", type=int, default=35)
    p.add_argument("--guidance", type=float, default=7.0,
                   help="D = D_uncond + guidance * (D_cond - D_uncond): 1 is none, 0 ignores the prompt")  # fmt: skip
    p.add_argument(
        "--guidance-interval", type=float, nargs=2, metavar=("LOW", "HIGH"), help="noise levels where it acts"
    )
    p.add_argument(
        "--guidance-rescale", type=float, default=0.0, help="0 to 1: pull the contrast back to that without guidance"
    )
    p.add_argument("--autoguidance-checkpoint", help="a weaker checkpoint that replaces the unconditional estimate")
    p.add_argument("--sampler", default="heun", help=", ".join(samplers.SAMPLERS))
    p.add_argument("--schedule", default="karras", choices=sorted(samplers.SCHEDULES))
    p.add_argument("--sigma-min", type=float, default=0.002)
    p.add_argument("--sigma-max", type=float, default=80.0)
    p.add_argument("--rho", type=float, default=7.0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--init-image", help="first frame (models trained with dataset.condition_frames_prob)")
    p.add_argument("--init-video", help="start from this clip, noised")
    p.add_argument("--strength", type=float, default=0.6, help="share of the steps that is run with --init-video")
    p.add_argument("--ema", default="auto", help="relative length of the weight average; auto, or none for raw weights")
    p.add_argument("--batch-size", type=int, default=16, help="clips drawn together; does not change the result")
    p.add_argument("--cp-size", type=int, default=1, help="processes that share each sequence")
    p.add_argument("--tp-size", type=int, default=1, help="processes that share each weight")
    p.add_argument("--pp-size", type=int, default=1, help="processes that share the layers")
    p.add_argument("--tokenizer-path", "--tokenizer-cache-dir", dest="tokenizer_path", help="tokenizer file or folder")
    p.add_argument("--text-encoder-path", "--t5-cache-dir", dest="text_encoder_path", help="text encoder folder")
    p.add_argument("--tokenizer-model", help="accepted for old commands; the checkpoint knows its tokenizer")
    p.add_argument("--video-save-path", default="out.mp4")
    p.add_argument("--save-latents", action="store_true", help="also write each latent as NAME.safetensors")
    p.add_argument("--overwrite", action="store_true", help="replace existing files")
    return p.parse_args(argv)


REQUEST_FLAGS = (
    "negative_prompt", "height", "width", "num_video_frames", "fps", "num_steps", "guidance", "guidance_interval",
    "guidance_rescale", "sampler", "schedule", "sigma_min", "sigma_max", "rho", "seed", "init_image", "init_video", "strength",
)  # fmt: skip


def requests_of(args) -> list[Request]:
    """Prompts of the command line, then those of the file; a JSONL line may set any field of `Request`."""
    common = {k: getattr(args, k) for k in REQUEST_FLAGS}
    if common["guidance_interval"]:
        common["guidance_interval"] = tuple(common["guidance_interval"])
    lines: list[dict] = [{"prompt": p} for p in args.prompt]
    if args.prompts_file:
        lines += _read_prompts(Path(args.prompts_file))
    if not lines:
        raise ValueError("there is nothing to draw: give --prompt TEXT or --prompts-file FILE")
    requests = [Request(**{**common, **line, "index": line.get("index", i)}) for i, line in enumerate(lines)]
    for r in requests:
        r.check()
    return requests


def _read_prompts(path: Path) -> list[dict]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompts file {path}")
    text = path.read_text(encoding="utf-8").splitlines()
    if path.suffix != ".jsonl":
        return [{"prompt": line.strip()} for line in text if line.strip()]
    known, out = set(Request.__dataclass_fields__), []
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        unknown = set(record) - known
        if unknown or "prompt" not in record:
            what = f"unknown {', '.join(sorted(unknown))}" if unknown else "no prompt"
            raise ValueError(
                f"{path}, line {number}: {what}; a line has a prompt and may set {', '.join(sorted(known))}"
            )
        if record.get("guidance_interval"):
            record["guidance_interval"] = tuple(record["guidance_interval"])
        out.append(record)
    return out


def output_path(base: Path, request: Request, many: bool) -> Path:
    """NAME.mp4 for one prompt in one process, else idx=I_rank=R_NAME.mp4; .png for one frame."""
    suffix = ".png" if request.num_video_frames == 1 else ".mp4"
    name = f"idx={request.index}_rank={parallel.rank()}_{base.stem}" if many else base.stem
    return base.with_name(name + suffix)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    requests = requests_of(args)
    ema = None if args.ema == "none" else args.ema if args.ema == "auto" else float(args.ema)
    layout = Layout(args.tp_size, args.pp_size, args.cp_size)
    checkpoint.find_weights(args.checkpoint_path)  # a wrong path is said before anything starts
    parallel.init(layout)
    pipe = Pipeline.from_checkpoint(
        args.checkpoint_path, ema, layout, args.tokenizer_path, args.text_encoder_path, args.autoguidance_checkpoint
    )
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    writes = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    writes = writes and parallel.is_last_pipeline_stage()
    base = Path(args.video_save_path).expanduser().absolute()
    base.parent.mkdir(parents=True, exist_ok=True)
    many = len(requests) > 1 or "RANK" in os.environ
    mine = requests[dp_rank::dp_size]
    paths = [output_path(base, r, many) for r in mine]
    existing = [p for p in paths if p.exists()]
    if existing and not args.overwrite:
        raise FileExistsError(f"{existing[0]} exists; pass --overwrite or choose another --video-save-path")
    digest = checkpoint.identity(args.checkpoint_path)
    started = time.monotonic()
    for i, result in pipe.run(mine, args.batch_size, progress=parallel.rank() == 0):
        if writes:
            save(result, paths[i], digest, ema, time.monotonic() - started, args.save_latents)
            print(f"[INFO] wrote {paths[i]}", flush=True)
    parallel.shutdown()
    return 0


def save(
    result: Generated, path: Path, checkpoint_identity: dict, ema, elapsed_s: float, latents: bool = False
) -> None:
    """The clip and, beside it, NAME.json with what it takes to make it again (and its latent, float32 [C, T, H, W])."""
    if latents:
        save_file({"latent": result.latent.contiguous()}, path.with_suffix(path.suffix + ".safetensors"))
    if result.request.num_video_frames == 1:
        video.write_png(path, result.frames[0])
    else:
        video.write_mp4(path, result.frames, result.request.fps)
    record = {
        **asdict(result.request), "checkpoint": checkpoint_identity, "ema": ema, "elapsed_s": round(elapsed_s, 3),
        "latent_sha256": hashlib.sha256(result.latent.numpy().tobytes()).hexdigest(),
    }  # fmt: skip
    path.with_suffix(path.suffix + ".json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    raise SystemExit(guard(main))
