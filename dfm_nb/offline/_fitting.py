"""Tune the decoder of a tokenizer to one data set, for `dfm prepare --fit-tokenizer`.

The encoder stays, so that a model trained on its latents can still be started from. Latents get noise of up to `NOISE`
of their spread, because a sampler's latents are not exact. The loss is the root mean square error, of which the PSNR
is the logarithm, with two smaller terms: the error and its slopes divided by the local detail of the picture (noise
is visible where a picture is flat), and the error of the means of 8 x 8 pixels (colours).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dfm_nb.base.log import tqdm

if TYPE_CHECKING:
    from dfm_nb.offline.residual import ResidualTokenizer

CROP_PX = 64
CLIP_FRAMES = 9
BATCH = {"cpu": (4, 1), "cuda": (64, 16)}
"""Stills and clips of a step."""
RATE = 1e-3
WARM_UP_STEPS = 20
NOISE = 0.3


def windows(videos: list[Tensor], count: int, frames: int, generator: torch.Generator) -> Tensor:
    """Random windows of random videos uint8 [3, T, H, W], half of them mirrored: float32 [count, 3, t, h, w]."""

    def below(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    chosen = [videos[below(len(videos))] for _ in range(count)]
    size = np.minimum((frames, CROP_PX, CROP_PX), np.min([video.shape[1:] for video in chosen], 0)).tolist()
    cut = []
    for video in chosen:
        for dim, length in enumerate(size, 1):
            video = video.narrow(dim, below(video.shape[dim] - length + 1), length)
        cut.append(video.flip(3) if below(2) else video)
    return torch.stack(cut).float() / 127.5 - 1


def reconstruction_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """See the module; videos [B, 3, T, H, W] in [-1, 1]."""
    rms = ((made - wanted).square().flatten(1).mean(1) + 1e-5).sqrt().mean()
    error = (made - wanted).transpose(1, 2).flatten(0, 1)
    with torch.no_grad():
        real = wanted.transpose(1, 2).flatten(0, 1)
        mean = F.avg_pool2d(real, 5, 1, 2, count_include_pad=False)
        square = F.avg_pool2d(real.square(), 5, 1, 2, count_include_pad=False)
        spread = (square - mean.square()).clamp_min(0).sum(1, keepdim=True).sqrt()
        weight = 1 / (F.max_pool2d(spread, 3, 1, 1) + 0.05)
    slopes = [(error.diff(dim=d).abs() * weight.narrow(d, 1, weight.shape[d] - 1)).mean() for d in (2, 3)]
    masked = (error.abs() * weight).mean() + 1.5 * (slopes[0] + slopes[1])
    return rms + 0.03 * masked + 0.3 * F.avg_pool2d(error, 8).abs().mean()


def tune(tokenizer: ResidualTokenizer, videos: list[Tensor], minutes: float) -> None:
    """Train the decoder in place, on videos uint8 [3, T, H, W], T = 1 + 4k."""
    device = tokenizer.mean.device
    generator = torch.Generator().manual_seed(0)
    tokenizer.latents = tokenizer.latents or tokenizer.identity()["sha256"]
    stills_count, clips_count = BATCH[device.type]
    parts = [(stills_count, 1, videos)]
    clips = [video for video in videos if video.shape[1] > 1]
    if clips:
        parts.append((clips_count, CLIP_FRAMES, clips))
    decoder = tokenizer.decoder.requires_grad_(True)
    optimizer = torch.optim.AdamW(decoder.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    begun = time.monotonic()
    step = 0
    seconds = 0.0
    with tqdm(total=round(60 * minutes), desc="tune the tokenizer", unit="s") as bar:
        while seconds < 60 * minutes:
            optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / WARM_UP_STEPS, 1) * (1 - seconds / 60 / minutes)
            optimizer.zero_grad()
            for count, frames, source in parts:
                wanted = windows(source, count, frames, generator).to(device)
                z = tokenizer.encode(wanted)
                amount = torch.rand(count, 1, 1, 1, 1, generator=generator).to(device)
                noise = torch.randn(z.shape, generator=generator).to(device)
                noise = noise * (NOISE * z.std((0, 2, 3, 4), keepdim=True) * amount)
                reconstruction_loss(tokenizer.decode(z + noise), wanted).backward()
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), 0.5)
            optimizer.step()
            step += 1
            seconds = time.monotonic() - begun
            bar.update(min(round(seconds), bar.total) - bar.n)
    decoder.requires_grad_(False)
