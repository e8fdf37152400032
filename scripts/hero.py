"""The clips at the top of the README and of notebook 00: notebooks/images/butterflies.webp.

    python scripts/hero.py

Each was chosen from 64 samples (the first from 32), by the judge and then by eye.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from dfm_nb import Pipeline
from dfm_nb.generation.request import Request

CHOSEN = (  # prompt, place among the prompts that it was drawn with, and seed: both determine the noise
    ("A spotted orange monarch flapping its wings over a meadow.", 0, 16),
    ("A striped blue monarch flapping its wings over sand, seen from above.", 0, 18),
    ("A plain yellow swallowtail flapping its wings in the sky.", 1, 11),
    ("A plain red morpho flapping its wings over sand, wings wide open.", 4, 6),
    ("A plain pink monarch flapping its wings in the sky, seen from above.", 2, 48),
    ("A plain white monarch flapping its wings at night, seen from above.", 5, 47),
)
SIDE = 160  # px on the page
GAP = 6
FPS = 12
PLACE = Path(__file__).parents[1] / "notebooks/images/butterflies.webp"


def main() -> None:
    size = {"height": 64, "width": 64, "num_video_frames": 9, "fps": float(FPS), "num_steps": 14, "guidance": 2.0}
    requests = [Request(prompt, index, seed=seed, **size) for prompt, index, seed in CHOSEN]
    clips = dict(Pipeline.from_pretrained("butterflies").run(requests))
    rows = []
    for frame in [*range(9), *range(7, 0, -1)]:  # and back, so that the loop has no jump
        row = np.full((SIDE, SIDE * len(CHOSEN) + GAP * (len(CHOSEN) - 1), 3), 255, np.uint8)
        for i in range(len(CHOSEN)):
            picture = Image.fromarray(clips[i].frames[frame]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            row[:, i * (SIDE + GAP) : i * (SIDE + GAP) + SIDE] = np.asarray(picture)
        rows.append(Image.fromarray(row))
    rows[0].save(PLACE, save_all=True, append_images=rows[1:], duration=1000 // FPS, loop=0, quality=50, method=6)
    print(f"{PLACE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
