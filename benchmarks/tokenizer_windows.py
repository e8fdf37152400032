"""What coding a clip in windows or tiles changes, with NVIDIA's Cosmos CV4x8x8 architecture and random weights.

    python benchmarks/tokenizer_windows.py [--widths 4 16 128] [--frames 121] [--size 32]

The network is diffusers' `AutoencoderKLCosmos`; 128 channels are the published width. Differences are the root mean
square after the first window (for tiles: everywhere) as a share of the standard deviation of what the whole clip gives.
The published weights may do better or worse: they were not at hand.

Prints a table and writes benchmarks/results/tokenizer_windows.{json,md}. Takes ten minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import report
from dfm_nb.data.tokenizers import cosmos_cv
from tests.data import encoder_files

WINDOWS = (17, 49, 81)
TILE_PX = 128


def difference(a: torch.Tensor, whole: torch.Tensor, start: int) -> float:
    """See the module; `start` is the first frame or latent that counts."""
    return ((a - whole)[:, :, start:].square().mean().sqrt() / whole.std()).item()


def measure(width: int, frames: int, size: int) -> list[list]:
    """[width, clip, pieces, share in latents, share in pixels] of each case."""
    generator = torch.Generator().manual_seed(0)
    smooth = torch.rand(1, 3, 2 + frames // 8, 4, 4, generator=generator) * 2 - 1
    clips = {
        "noise": torch.rand(1, 3, frames, size, size, generator=generator) * 2 - 1,
        "smooth": torch.nn.functional.interpolate(smooth, (frames, size, size), mode="trilinear"),
    }
    large = torch.nn.functional.interpolate(smooth[:, :, :5], (5, 2 * TILE_PX, 2 * TILE_PX), mode="trilinear")
    rows: list[list] = []
    with tempfile.TemporaryDirectory() as folder:
        encoder_files.save_cosmos(Path(folder), width=width)
        tokenizer = cosmos_cv.build(folder, tokenizer_window=1 + 4 * frames)
        tiled = cosmos_cv.build(folder, tokenizer_window=1 + 4 * frames, tile_px=TILE_PX)
        for name, clip in clips.items():
            z = tokenizer.encode(clip)
            made = tokenizer.decode(z)
            for window in WINDOWS:
                latents = difference(tokenizer.encode(clip, window), z, 1 + (window - 1) // 4)
                rows.append([width, name, f"windows of {window} frames", latents])
                rows[-1].append(difference(tokenizer.decode(z, window), made, window))
        z = tokenizer.encode(large)
        latents, pixels = difference(tiled.encode(large), z, 0), difference(tiled.decode(z), tokenizer.decode(z), 0)
        rows.append([width, f"smooth, {2 * TILE_PX} px", f"tiles of {TILE_PX} px", latents, pixels])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 16, 128])
    parser.add_argument("--frames", type=int, default=121)
    parser.add_argument("--size", type=int, default=32, help="px")
    args = parser.parse_args()
    about = report.machine()
    rows = [row for width in args.widths for row in measure(width, args.frames, args.size)]
    head = ["channels", "clip", "coded in", "latents differ, %", "decoded pixels differ, %"]
    shown = report.table(head, [[*r[:3], f"{100 * r[3]:.2g}", f"{100 * r[4]:.2g}"] for r in rows])
    intro = (
        f"Random weights, {args.frames} frames of {args.size}x{args.size} px; root mean square, share of the spread."
    )
    report.save("tokenizer_windows", {"machine": about, "rows": rows}, f"{intro}\n{report.sentence(about)}\n\n{shown}")


if __name__ == "__main__":
    main()
