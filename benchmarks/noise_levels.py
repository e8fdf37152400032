"""Noise levels where the neighbourhood tells a denoiser something, by size of picture and clip: for P_mean and P_std.

    python benchmarks/noise_levels.py [--photos FOLDER] [--samples 1.0]

Latents of the `residual` tokenizer are taken as a Gaussian process with their own power spectrum S(k) (cosine
transform, averaged over samples and over rings of equal spatial frequency). The best denoiser of such data is Wiener's,
with a mean squared error of mean_k S sigma^2 / (S + sigma^2). A denoiser that sees one latent alone has
sigma_data^2 sigma^2 / (sigma_data^2 + sigma^2), which is EDM's c_out^2. The gain, 1 - Wiener / alone, is the share of
the network's target that its neighbourhood explains: near 0 in weak noise (nothing is hidden) and in strong noise
(nothing is left), and between the two is the band that training is for. Its mean and deviation in ln(sigma) are in the
units of P_mean and P_std. Data are more than their spectrum, so this says how the band moves with size.

Clips and stills are of the synthetic source; with `--photos`, stills of a folder too (the committed ones come with
scikit-image 0.26 and scikit-learn 1.9). A few minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from dfm_nb.base import geometry, video
from dfm_nb.data.encoding import to_pixels
from dfm_nb.data.sources import synthetic
from dfm_nb.data.tokenizers import residual

SIGMA_DATA = 0.5
LN_SIGMA = torch.linspace(math.log(5e-4), math.log(500), 600, dtype=torch.float64)
CASES = ((64, 1, 64), (128, 1, 48), (256, 1, 32), (512, 1, 16), (64, 17, 48), (128, 17, 32), (256, 17, 12))
"""(side in px, frames, samples)."""


def cosine_power(x: Tensor) -> Tensor:
    """Squares of the orthonormal cosine transform over T, H and W; x : float64 [N, C, T, H, W]."""
    for dim in (2, 3, 4):
        n = x.shape[dim]
        k = torch.arange(n, dtype=torch.float64)
        basis = torch.cos(math.pi * (k + 0.5) * k[:, None] / n) * math.sqrt(2 / n)
        basis[0] /= math.sqrt(2)
        x = torch.tensordot(x, basis, ([dim], [1])).movedim(-1, dim)
    return x.square()


def spectrum(x: Tensor) -> tuple[Tensor, Tensor]:
    """S [C, T, rings], averaged over samples and rings of a quarter octave, and how many frequencies [rings] each has.

    x : latents [N, C, T, H, W] of one size; every channel is scaled to `SIGMA_DATA`.
    """
    over = (0, 2, 3, 4)
    x = x.double()
    x = (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True) * SIGMA_DATA
    _, channels, frames, height, width = x.shape
    radius = torch.hypot(torch.arange(height)[:, None] / height, torch.arange(width) / width) * max(height, width)
    ring = torch.where(radius > 0, 1 + (4 * torch.log2(radius.clamp_min(1))).floor(), 0).long().flatten()
    count = torch.bincount(ring).double()
    power = cosine_power(x).mean(0).reshape(channels, frames, -1)
    total = power.new_zeros(channels, frames, len(count)).index_add_(2, ring, power)
    return total / count.clamp_min(1), count


def gain(S: Tensor, count: Tensor) -> Tensor:
    """1 - Wiener / alone at `LN_SIGMA`, float64."""
    weight = count / (count.sum() * S.shape[0] * S.shape[1])
    sigma2 = torch.exp(2 * LN_SIGMA)
    wiener = torch.stack([(weight * S * s / (S + s)).sum() for s in sigma2])
    variance = (weight * S).sum()
    return 1 - wiener * (variance + sigma2) / (variance * sigma2)


def band(latents: Tensor) -> dict[str, float]:
    """Mean, deviation and 95 % bounds of the gain as a density over ln(sigma), and its greatest value."""
    g = gain(*spectrum(latents))
    density, below = g / g.sum(), (g / g.sum()).cumsum(0)
    mean = float((density * LN_SIGMA).sum())
    std = float((density * (LN_SIGMA - mean).square()).sum().sqrt())
    low, high = (float(LN_SIGMA[(below < q).sum()]) for q in (0.025, 0.975))
    return {"mean": mean, "std": std, "low": low, "high": high, "greatest": float(g.max())}


def butterflies(px: int, frames: int, samples: int):
    """Videos uint8 [frames, px, px, 3]."""
    images, clips = (samples, 0) if frames == 1 else (0, 8 * samples)  # a third of the clips have 17 frames
    source = synthetic.build(num_images=images, num_clips=clips, size_px=px, square=True)
    videos = (clip.video for i in range(len(source)) for clip in source.read(i))
    fitting = (v for v in videos if len(v) == frames)
    return (next(fitting) for _ in range(samples))


def photos(paths: list[Path], px: int):
    """The middle square of each picture, uint8 [1, px, px, 3]."""
    return (video.resize(video.read_image(path), px, px) for path in paths)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--samples", type=float, default=1.0, help="share of the samples to take")
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    about, tokenizer, rows = report.machine(), residual.build(None), []
    work = [("butterflies", px, t, butterflies(px, t, max(2, round(n * args.samples)))) for px, t, n in CASES]
    pictures = sorted(p for p in args.photos.iterdir() if p.suffix in (".jpg", ".png")) if args.photos else []
    if pictures:
        work += [("photographs", px, 1, photos(pictures, px)) for px in (64, 128, 256, 512)]
    for name, px, frames, videos in tqdm(work, unit="case"):
        with torch.no_grad():
            latents = torch.cat([tokenizer.encode(to_pixels(v)[None]).float() for v in videos])
        t, h, w = geometry.latent_size(frames, px, px)
        rows.append({"data": name, "px": px, "latent": [t, h, w], "samples": len(latents), **band(latents)})
    cells = [
        [
            f"{r['data']}, {r['px']} px",
            " x ".join(map(str, r["latent"])),
            r["samples"],
            *(f"{r[k]:.2f}" for k in ("mean", "std", "low", "high", "greatest")),
        ]
        for r in rows
    ]
    head = ["data", "latent", "samples", "mean", "std", "2.5 %", "97.5 %", "greatest gain"]
    text = (
        "ln(sigma) where the neighbourhood tells a denoiser something (mean, deviation and bounds of the gain; "
        f"sigma_data 0.5). {report.sentence(about)}.\n\n{report.table(head, cells)}"
    )
    names = [p.name for p in pictures]
    if names:
        text += f"\n\nPhotographs: {', '.join(names)}."
    report.save("noise_levels", {"machine": about, "photographs": names, "rows": rows}, text, args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
