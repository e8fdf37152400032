"""The first frame of generated clips beside the later ones, for the captions of a run's training clips.

    python benchmarks/clip_frames.py runs/mine my-data sheet.png

Captions are asked for as `dfm generate` does by default. Printed are PSNRs to the training clip through the tokenizer,
of frame 0, 1 to 4, and the rest, and the mesh of frame 0 and of frames 1 to 4. The sheet has frames 0, 1, 2, 5 and the
last, and the training clip's frames 0 and 2.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image

from dfm_nb.data.stores import ShardStore
from dfm_nb.generation.pipeline import Pipeline

PARTS = (slice(0, 1), slice(1, 5), slice(5, None))
PATCH_PX = 16


def psnr_db(made: np.ndarray, real: np.ndarray) -> float:
    squares = np.square(made.astype(float) - real).mean((1, 2, 3))
    return float(np.mean(10 * np.log10(255**2 / squares.clip(1e-3))))


def mesh(frames: np.ndarray) -> float:
    """Mean step from pixel to pixel at the edges of the network's patches, over that inside them."""
    ratios = []
    for dim in (1, 2):
        steps = np.abs(np.diff(frames.astype(float), axis=dim)).mean((0, 3 - dim, 3))
        edge = np.arange(1, len(steps) + 1) % PATCH_PX == 0
        ratios.append(steps[edge].mean() / steps[~edge].mean())
    return float(np.mean(ratios))


def main(run: str, data: str, sheet: str) -> None:
    store = ShardStore(data, "train")
    pipe = Pipeline.from_checkpoint(run)
    figures = []
    rows = []
    for clip in map(store.read, store.of_kind(still=False).tolist()):
        real = pipe.decode_stored(clip.latent[0])
        made = pipe(clip.meta["caption"])[0].frames
        if made.shape != real.shape:
            print(f"{clip.key}: the request has another size")
            continue
        figures.append([psnr_db(made[part], real[part]) for part in PARTS] + [mesh(made[part]) for part in PARTS[:2]])
        print(clip.key, np.round(figures[-1], 2))
        rows.append(np.concatenate([*made[[0, 1, 2, 5, -1]], *real[[0, 2]]], 1))
    print("mean", np.mean(figures, 0).round(2))
    width = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, 2), (0, width - row.shape[1]), (0, 0))) for row in rows]
    Image.fromarray(np.concatenate(padded)).save(sheet)


if __name__ == "__main__":
    main(*sys.argv[1:])
