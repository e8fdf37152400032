"""A folder of mixed sizes and lengths: what packs use of it, and what the rules of two trainers with buckets leave out.

    python benchmarks/buckets.py

The rules are those that the projects document: diffusion-pipe's examples/dataset.toml (5145971: seven aspect ratios
from 0.5 to 2, evenly spaced in log space; a clip goes to the longest of its frame buckets, [1, 33], that it fills, and
a shorter one is dropped; a picture is cropped to its bucket), and OneTrainer's issue 573 (of each bucket, what does
not fill a batch is dropped). Their programs are not run.
"""

from __future__ import annotations

import collections
import math
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from dfm_nb import prepare_dataset
from dfm_nb.base import video

SIZES = [(64, 64), (64, 96), (96, 64), (64, 128), (128, 64), (80, 112), (112, 80), (64, 144), (96, 160), (176, 64)]
SIZES += [(128, 96), (64, 208)]  # height, width in px
FRAMES = {"picture": 1, "short clip": 17, "long clip": 45}
PICTURES, CLIPS = 300, 10  # clips of each length
RATIOS = np.geomspace(0.5, 2, 7)
BATCH = 4


def main() -> None:
    rng = np.random.default_rng(0)
    kinds = ["picture"] * PICTURES + ["short clip"] * CLIPS + ["long clip"] * CLIPS
    items = [(SIZES[rng.integers(len(SIZES))], FRAMES[kind]) for kind in kinds]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as shards:
        for i, ((height, width), frames) in enumerate(items):
            path, pixels = Path(folder) / f"{i:03d}", rng.integers(0, 256, (frames, height, width, 3), np.uint8)
            if frames == 1:
                video.write_png(path.with_suffix(".png"), pixels[0])
            else:
                video.write_mp4(path.with_suffix(".mp4"), pixels, 24)
        counts = prepare_dataset(source=f"folder:{folder}", output_dir=shards)["counts"]
    nearest = [RATIOS[np.abs(np.log(RATIOS) - math.log(w / h)).argmin()] for (h, w), _ in items]
    lost = [1 - min(r / (w / h), (w / h) / r) for r, ((h, w), _) in zip(nearest, items)]
    short = sum(1 < frames < 33 for _, frames in items)
    buckets = collections.Counter((r, frames) for r, (_, frames) in zip(nearest, items) if not 1 < frames < 33)
    unfilled = sum(count % BATCH for count in buckets.values())
    cropped = {
        "cropped_by_over_1_percent": int(np.sum(np.array(lost) > 0.01)),
        "pixels_cropped": round(float(np.mean(lost)), 3),
    }
    found = {
        "packs": {"dropped": len(items) - counts["samples"], "cropped_by_over_1_percent": 0, "pixels_cropped": 0.0},
        "buckets": {"dropped": short, **cropped},
        f"buckets, batches of {BATCH} filled": {"dropped": short + unfilled, **cropped},
    }
    rows = [[name, *row.values()] for name, row in found.items()]
    about = f"{PICTURES} pictures and {2 * CLIPS} clips of {len(SIZES)} sizes and {len(FRAMES)} lengths."
    head = ["rule", "dropped", "cropped by over 1 %", "share of the pixels that is cropped"]
    report.save("buckets", found, f"{about}\n\n{report.table(head, rows)}\n")


if __name__ == "__main__":
    main()
