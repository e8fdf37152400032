"""Train the `residual` tokenizer on rendered butterflies, and compare it with the PCA that it starts from.

    python scripts/train_tokenizer.py --run-dir runs/one --output runs/one/residual_tokenizer.safetensors
    python scripts/train_tokenizer.py --run-dir runs/two --start-from runs/one --strong-noise 1.5 --strong-share 0.6 \\
        --lr 1.5e-3 --steps 2400 --output ...

Strong noise on most latents gives coherent pictures from a partially trained diffusion model, because the decoder
learns to decode inexact latents (Yang et al., "Latent Denoising Makes Good Tokenizers", arXiv:2507.15856). The shipped
encoder was trained four times, with the settings in `benchmarks/results/residual_tokenizer.json` (`train_decoder.py`
trained only the decoder, twice more). The first training had the smaller eyespots of drawing 1
(`butterflies.synthetic.DRAWING`), the next two had drawing 2, whose clips begin anywhere in the wing beat. They used
this script's former Muon, which iterated in float32; torch's Muon, used now, iterates in bfloat16. So the script trains
an equally good tokenizer, but not exactly the shipped one.

Step n draws its pictures and its noise only from (seed, n), so a stopped run resumes from its last checkpoint with the
same result (to rounding). Training sees only the attribute combinations of the training split; the figures are for the
held-out ones. A step takes 0.4 to 0.6 s on one idle core that multiplies bfloat16 in hardware.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dfm_nb.base.video import contact_sheet, write_png
from dfm_nb.butterflies import synthetic
from dfm_nb.data.encoding import to_frames, to_pixels
from dfm_nb.data.tokenizers import residual
from dfm_nb.data.tokenizers.pca import PCATokenizer
from dfm_nb.data.tokenizers.residual import ASSET, ResidualTokenizer, Shape

# Height, width in px; (images, clips) at first and from step FROM_IMAGES; share of the steps.
# All batches have about the same number of pixels.
BATCHES = (
    ((64, 64), (9, 3), (4, 5), 0.55),
    ((64, 80), (7, 3), (3, 4), 0.08),
    ((80, 64), (7, 3), (3, 4), 0.08),
    ((64, 96), (6, 2), (3, 3), 0.05),
    ((96, 64), (6, 2), (3, 3), 0.05),
    ((48, 48), (15, 5), (7, 9), 0.05),
    ((96, 96), (4, 1), (2, 2), 0.09),
    ((128, 128), (2, 1), (1, 1), 0.05),
)
FROM_IMAGES = 400
CLIP_FRAMES = (9, 9, 17)
FIT_ITEMS, CALIBRATION_BATCHES, HELD_OUT = 1500, 40, 64
RESULT = "result.json"


def draw(rng: np.random.Generator, height: int, width: int, frames: int) -> np.ndarray:
    """A butterfly of a combination that is in the training split, uint8 [T, H, W, 3]."""
    seen = synthetic.seen_combinations()
    attributes = dict(seen[rng.integers(len(seen))])
    attributes["species"] = synthetic.SPECIES[rng.integers(len(synthetic.SPECIES))]
    attributes["posture"] = synthetic.POSTURES[rng.integers(len(synthetic.POSTURES))]
    return synthetic.render(attributes, int(rng.integers(2**63)), height, width, frames)


class Batches(torch.utils.data.Dataset):
    """Item n is step n's (images, clips): uint8 [B, T, H, W, 3], a function of (seed, n).

    Each drawing is used twice, mirrored the second time.
    """

    draw = staticmethod(draw)

    def __init__(self, seed: int, steps: int):
        self.seed, self.steps = seed, steps
        self._drawn: tuple[int, tuple[Tensor, ...]] = (-1, ())

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[Tensor, ...]:
        number, mirrored = divmod(step, 2)
        if self._drawn[0] != number:
            self._drawn = (number, self._draw(number))
        return tuple(x.flip(3) for x in self._drawn[1]) if mirrored else self._drawn[1]

    def _draw(self, number: int) -> tuple[Tensor, ...]:
        rng = np.random.default_rng([self.seed, number])
        (height, width), *counts, _ = BATCHES[rng.choice(len(BATCHES), p=[b[3] for b in BATCHES])]
        images, clips = counts[2 * number >= FROM_IMAGES]
        frames = CLIP_FRAMES[rng.integers(len(CLIP_FRAMES))]
        clips = max(1, round(clips * 3 / (1 + frames // 4)))
        return tuple(
            torch.from_numpy(np.stack([self.draw(rng, height, width, t) for _ in range(count)]))
            for count, t in ((images, 1), (clips, frames))
        )


def fit_pca(seed: int) -> PCATokenizer:
    """The closed form the demo would fit: images and clips of the training split at 64 px."""
    source = synthetic.build(num_images=FIT_ITEMS * 4 // 5, num_clips=FIT_ITEMS // 5, seed=seed)
    items = tqdm(range(len(source)), desc="fit pca", unit="item", leave=False)
    return PCATokenizer.fit(to_pixels(next(source.read(i)).video) for i in items)


def initialise(model: ResidualTokenizer) -> None:
    """The start of training: every block near the identity, the decoder's heads at 0 (the PCA's picture)."""
    for block in (m for m in model.modules() if isinstance(m, residual.Block)):
        for conv, gain in ((block.inner, 1.7), (block.outer, 0.3)):
            torch.nn.init.normal_(conv.weight, std=gain / conv.weight[0].numel() ** 0.5)
            torch.nn.init.zeros_(conv.bias)
    for name, parameter in model.decoder.named_parameters():
        if "head" in name:
            torch.nn.init.zeros_(parameter)
    # PCA is a stationary point of training: an encoder that starts at 0 stays there, a small random code does not
    torch.nn.init.normal_(model.encoder.head.weight, std=0.5 / model.shape.width**0.5)


def reconstruction_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """Root mean square error of each sample, averaged: between the L2 error and its logarithm (the PSNR)."""
    return ((made - wanted).square().flatten(1).mean(1) + 1e-5).sqrt().mean()


def spread_penalty(z: Tensor) -> Tensor:
    """How far the channels' mean and variance are from 0 and 1."""
    mean, variance = z.mean((0, 3, 4)), z.var((0, 3, 4))
    return mean.square().mean() + (variance - 1).square().mean()


def step_loss(model: ResidualTokenizer, batch: tuple[Tensor, Tensor], args, step: int) -> tuple[Tensor, list[float]]:
    """The loss of a step and the PSNR in dB of its images and clips."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    total, psnr = torch.zeros(()), []
    for frames, weight in zip(batch, (1.0, args.clips_weight)):
        video = to_pixels(frames)
        z = model.encode(video)
        most = torch.where(
            torch.rand(len(z), generator=generator) < args.strong_share, args.strong_noise, 2 * args.noise
        )
        amount = most[:, None, None, None, None] * torch.rand(len(z), 1, 1, 1, 1, generator=generator)
        made = model.decode(z + amount * torch.randn(z.shape, generator=generator))
        added = (z - model.pca.encode(video)).square().mean()
        loss = reconstruction_loss(made, video)
        total = total + weight * loss + args.spread * spread_penalty(z) + args.stay * added
        psnr.append(-20 * math.log10(loss.item() / 2))
    return total, psnr


def learning_rate(step: int, args) -> float:
    """Linear warm-up over 50 steps, constant for a fifth of all, down to 45 % at three sevenths, slowly to 0."""
    corners = [share * args.steps for share in (806 / 4200, 3 / 7, 1)]
    return args.lr * min((step + 1) / 50, float(np.interp(step, corners, (1.0, 0.446, 0.0))))


class Training:
    """The model, its optimizer and its step; `save` and `load` are exact."""

    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.args, self.step, self.seconds = args, 0, 0.0
        self.file = args.run_dir / "checkpoint.pt"
        begun_from = residual.build(args.start_from) if args.start_from else None
        self.shape = begun_from.shape if begun_from else Shape(**json.loads(args.shape))
        settings = {"lr", "noise", "strong_noise", "strong_share", "clips_weight", "spread", "stay", "seed"}
        self.settings = {k: v for k, v in vars(args).items() if k in settings} | {
            "start_from": begun_from.identity()["sha256"] if begun_from else None,
            "shape": asdict(self.shape),
        }
        saved = self.saved()
        if begun_from:
            self.model = begun_from.requires_grad_(True).train()
        else:
            self.model = ResidualTokenizer(PCATokenizer(saved["pca"]) if saved else fit_pca(args.seed), self.shape)
            initialise(self.model)
        named = dict(self.model.named_parameters())
        self.begin(named, {n: x for n, x in named.items() if x.ndim == 4 and ("coarse" in n or "fine" in n)}, saved)

    def saved(self) -> dict | None:
        """The state in the run's folder; None if there is none."""
        found = torch.load(self.file, weights_only=True) if self.file.exists() else None
        if found and found["settings"] != self.settings:
            raise SystemExit(f"{self.file} is of another training ({found['settings']}); choose another --run-dir")
        return found

    def begin(self, named: dict[str, torch.nn.Parameter], kernels: dict[str, torch.nn.Parameter], saved: dict | None):
        """Optimizers of `named`, with Muon for the convolutions `kernels`; resume from `saved`."""
        args, self.kernels = self.args, kernels
        # torch's Muon needs matrices: these are the convolutions' weights [out, in * kh * kw], in the same memory.
        self.matrices = {n: torch.nn.Parameter(x.detach().flatten(1)) for n, x in self.kernels.items()}
        muon = torch.optim.Muon(self.matrices.values(), args.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        others = [x for n, x in named.items() if n not in self.kernels]
        self.optimizers = [muon, torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98))]
        if saved:
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"]):
                optimizer.load_state_dict(state)
            self.step, self.seconds = saved["step"], saved["seconds"]

    def state(self) -> dict:
        return {
            "settings": self.settings,
            "pca": self.model.pca.tensors,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }

    def save(self) -> None:
        temporary = self.file.with_name(self.file.name + ".tmp")
        torch.save(self.state(), temporary)
        temporary.replace(self.file)

    def batches(self) -> Batches:
        return Batches(self.args.seed, self.args.steps)

    def run(self) -> None:
        """Train to `--steps`, or for `--max-minutes`, and save the last state."""
        args = self.args
        loader = torch.utils.data.DataLoader(
            self.batches(), batch_size=None, sampler=range(self.step, args.steps), num_workers=1, prefetch_factor=4
        )
        recent, begun = [], time.monotonic() - self.seconds
        stop = time.monotonic() + args.max_minutes * 60
        with (
            tqdm(total=args.steps, initial=self.step, desc="train", unit="step") as bar,
            (args.run_dir / "metrics.jsonl").open("a") as log,
        ):
            for batch in loader:
                recent.append(self.train_step(batch))
                self.seconds = time.monotonic() - begun
                bar.update()
                if self.step % args.log_every == 0:
                    row = {k: round(float(np.mean([r[k] for r in recent])), 4) for k in recent[0]}
                    recent.clear()
                    log.write(json.dumps({"step": self.step, **row, "elapsed_s": round(self.seconds)}) + "\n")
                    log.flush()
                    bar.set_postfix(row)
                out_of_time = time.monotonic() > stop
                if self.step % args.save_every == 0 or self.step == args.steps or out_of_time:
                    self.save()
                if out_of_time:
                    break

    def train_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        """One step of the optimizers; returns the loss and the PSNR in dB of images and clips."""
        loss, psnr = step_loss(self.model, batch, self.args, self.step)
        self.model.zero_grad()
        loss.backward()
        self.update(learning_rate(self.step, self.args), self.model.parameters(), 0.5)
        return {"loss": loss.item()} | dict(zip(("images_db", "clips_db"), psnr))

    def update(self, rate: float, parameters: Iterable[torch.nn.Parameter], most: float) -> None:
        """The optimizers' step with the gradients of `parameters` clipped to the norm `most`."""
        torch.nn.utils.clip_grad_norm_(parameters, most)
        for name, matrix in self.matrices.items():
            matrix.grad = self.kernels[name].grad.flatten(1)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.step += 1


@torch.no_grad()
def calibrate(model: ResidualTokenizer, seed: int) -> None:
    """Normalise every channel to mean 0 and variance 1 over batches that follow the training's."""
    found: list[list[Tensor]] = [[], []]
    for n in range(CALIBRATION_BATCHES):
        for frames in Batches(seed, 0)[2**31 + n]:
            z = model.encode(to_pixels(frames))
            for kind, part in enumerate((z[:, :, :1], z[:, :, 1:])):
                found[kind].append(part.transpose(0, 1).flatten(1))
    rows = [torch.cat(f, 1) for f in found]
    model.mean += torch.stack([r.mean(1) for r in rows]) * model.scale  # measured in latents of the old normalisation
    model.scale *= torch.stack([r.std(1) for r in rows])


@torch.no_grad()
def measure(tokenizer, size_px: int, noise: float, count: int, seed: int = 99) -> dict[str, float]:
    """Mean PSNR in dB over held-out images and clips, with noise of that standard deviation added to the latents."""
    source = synthetic.build("unseen", num_images=count, num_clips=count // 2, size_px=size_px, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {"images": [], "clips": []}
    for i in range(len(source)):
        video = to_pixels(next(source.read(i)).video)[None]
        z = tokenizer.encode(video)
        made = tokenizer.decode(z + noise * torch.randn(z.shape, generator=generator)).clamp(-1, 1)
        found["images" if i < count else "clips"].append(-10 * math.log10((made - video).square().mean().item() / 4))
    return {k: round(sum(v) / len(v), 2) for k, v in found.items()}


def table(model: ResidualTokenizer) -> list[dict]:
    """PCA and residual at several sizes and noise levels."""
    rows = []
    for size, noise in ((64, 0.0), (64, 0.05), (64, 0.1), (64, 0.2), (96, 0.0), (128, 0.0)):
        for tokenizer in (model.pca, model):
            rows.append(
                {
                    "tokenizer": tokenizer.name,
                    "size_px": size,
                    "noise": noise,
                    **measure(tokenizer, size, noise, HELD_OUT),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.no_grad()
def picture(model: ResidualTokenizer, path: Path, seed: int = 7) -> None:
    """Held-out images and frames 1, 3, 5 and 7 of a clip: original, PCA, residual; PSNR in the captions."""
    source = synthetic.build("unseen", num_images=12, num_clips=8, seed=seed)
    drawn = [to_pixels(next(source.read(i)).video)[None] for i in range(len(source))]
    images = [v for v in drawn[:12] if v.shape[3:] == (64, 64)][:4]
    clip = next(v for v in drawn[12:] if v.shape[3:] == (64, 64))
    cells, captions = [], []
    for name, coder in (("original", None), ("pca", model.pca), ("residual", model)):
        made = [v if coder is None else coder.decode(coder.encode(v)).clamp(-1, 1) for v in (*images, clip)]
        errors = [(a - b).square().mean().item() for a, b in zip(made, (*images, clip))]
        frames = [v[0, :, 0] for v in made[:-1]] + list(made[-1][0].unbind(1)[1:9:2])
        cells += [to_frames(f[:, None]) for f in frames]
        said = [f"{name} {-10 * math.log10(e / 4):.1f} dB" if e else name for e in errors]
        captions += said + said[-1:] * (len(frames) - len(said))
    write_png(path, contact_sheet(cells, captions, columns=len(frames)))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, default=ASSET)
    p.add_argument("--run-dir", type=Path, default=Path("runs/tokenizer"), help="checkpoint, metrics, result")
    p.add_argument("--picture", type=Path, help="write original | PCA | residual here, PNG")
    p.add_argument("--steps", type=int, default=4200)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument(
        "--noise", type=float, default=0.05, help="mean standard deviation of the noise on latents in training"
    )
    p.add_argument("--strong-noise", type=float, default=1.0, help="largest standard deviation of strong noise")
    p.add_argument("--strong-share", type=float, default=0.0, help="share of the samples whose noise is strong")
    p.add_argument("--clips-weight", type=float, default=1.0, help="weight of the clips' loss; the images' weight is 1")
    p.add_argument("--start-from", type=Path, help="a tokenizer's file to start from instead of the PCA")
    p.add_argument("--spread", type=float, default=0.01, help="weight of the penalty that keeps latents white")
    p.add_argument("--stay", type=float, default=0.0, help="weight of the squared distance from the PCA's latents")
    p.add_argument("--shape", default="{}", help="JSON: fields of residual.Shape that differ from the default")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-every", type=int, default=200)
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--max-minutes", type=float, default=math.inf, help="stop after this time; run again to resume")
    args = p.parse_args()
    args.run_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    training = Training(args)
    count = sum(x.numel() for x in training.model.parameters())
    print(
        f"{count / 1e6:.2f} M parameters, {2 * count / 1e6:.2f} MB; from step {training.step} to {args.steps}",
        flush=True,
    )
    training.run()
    model = training.model.eval()
    if training.step < args.steps:
        print(f"stopped at step {training.step}; run the same command again to resume", flush=True)
        return
    calibrate(model, args.seed)
    rows = table(model)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    model.save(args.output)
    if args.picture:
        picture(model, args.picture)
    result = {"settings": training.settings, "parameters": count, "seconds": round(training.seconds), "rows": rows}
    (args.run_dir / RESULT).write_text(json.dumps(result | {"identity": model.identity()}, indent=2) + "\n")
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.2f} MB after {training.seconds:.0f} s of training")


if __name__ == "__main__":
    main()
