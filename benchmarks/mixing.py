"""How well the samples of a step are mixed: lanes against one permutation of the whole data set.

    python benchmarks/mixing.py [--samples 1000000] [--steps 400] [--packs 32]

The data set is as hard as it gets: shards of 1,000, three fifths of the samples pictures and then clips of five times
the tokens. Orders: as the samples lie; one permutation (one lane); lanes, which shuffle within windows of 8,192; lanes
with the packs of 32 steps dealt by work. Of each step:

- clips: the share of its tokens that are of clips; its standard deviation over steps;
- place: the mean place of its samples in the data set, 0 to 1; its standard deviation, and its correlation with the
  next step's;
- same shard: how many pairs of its samples in a million come from one shard.

The standard deviations of one permutation are what chance gives. Writes benchmarks/results/mixing.{json,md}.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from dfm_nb.config import Config
from dfm_nb.data.pack_plan import PackPlan, StepPlan
from dfm_nb.data.stores import MockStore
from dfm_nb.packs.packs import PackSettings

SHARD, CAPACITY, BUFFER = 1000, 15_360, 100
PICTURE, CLIP = (1, 32, 32), (5, 32, 32)  # latent T, H, W: 256 and 1,280 tokens
ORDERS = {
    "as they lie": {"lanes": 1, "shuffle": False},
    "one permutation": {"lanes": 1},
    "64 lanes": {"lanes": 64},
    "256 lanes": {"lanes": 256},
    "256 lanes, balanced": {"lanes": 256, "window": 32},
}


class Sorted(MockStore):
    """Pictures, then clips."""

    def __init__(self, samples: int):
        super().__init__([CLIP], length=samples)
        self.pictures = 3 * samples // 5
        kinds = np.arange(0, samples, SHARD) >= self.pictures
        self.sizes_of_shards = np.diff(np.append(np.arange(0, samples, SHARD), samples))
        self.voxels_of_shards = self.sizes_of_shards * np.where(kinds, np.prod(CLIP), np.prod(PICTURE))

    @property
    def shard_sizes(self) -> list[int]:
        return self.sizes_of_shards.tolist()

    @property
    def shard_voxels(self) -> np.ndarray:
        return self.voxels_of_shards

    def voxels(self, samples: np.ndarray) -> np.ndarray:
        return np.where(samples < self.pictures, np.prod(PICTURE), np.prod(CLIP))


def measure(store: Sorted, steps: int, packs: int, lanes: int, shuffle: bool = True, window: int = 1) -> dict:
    settings = PackSettings.of(Config(), seed=0)
    plan = StepPlan(PackPlan(store, settings, CAPACITY, BUFFER, shuffle, lanes), packs, window)
    clips, places, pairs = [], [], []
    for _ in range(steps):
        indices = np.array([i for pack in plan.next() for _, i in pack])
        tokens = np.where(indices < store.pictures, 1, 5)
        clips.append(tokens[indices >= store.pictures].sum() / tokens.sum())
        places.append(indices.mean() / len(store))
        n = len(indices)
        pairs.append(sum(c * (c - 1) for c in Counter((indices // SHARD).tolist()).values()) / (n * (n - 1)))
    return {
        "clips": float(np.mean(clips)),
        "clips_std": float(np.std(clips)),
        "place_std": float(np.std(places)),
        "place_correlation": float(np.corrcoef(places[:-1], places[1:])[0, 1]),
        "same_shard": 1e6 * float(np.mean(pairs)),
    }


def text(result: dict) -> str:
    head = ["order", "clips' share of a step (std)", "place (std)", "correlation with the next step", "same shard, ppm"]
    rows = [
        [name, f"{r['clips']:.3f} ({r['clips_std']:.4f})", f"{r['place_std']:.4f}", f"{r['place_correlation']:.2f}",
         f"{r['same_shard']:,.0f}"] for name, r in result["orders"].items()
    ]  # fmt: skip
    about = f"{result['samples']:,} samples, {result['steps']} steps of {result['packs']} packs"
    return f"{about}. {report.sentence(result['machine'])}.\n\n{report.table(head, rows)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--packs", type=int, default=32)
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    about, store = report.machine(), Sorted(args.samples)
    orders = {name: measure(store, args.steps, args.packs, **settings) for name, settings in ORDERS.items()}
    result = {"machine": about, **{k: getattr(args, k) for k in ("samples", "steps", "packs")}, "orders": orders}
    report.save("mixing", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
