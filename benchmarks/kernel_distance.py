"""What the kernel distance of `dfm evaluate --distances` sees: real renders against others, changed in one way each.

    python benchmarks/kernel_distance.py

Writes benchmarks/results/kernel_distance.{json,md}. Takes a minute on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from dfm_nb.butterflies import attributes, synthetic
from dfm_nb.evaluation import distance, features


def main() -> None:
    args = report.arguments(__doc__, pictures=250, seed=5).parse_args()
    n, rng, network = args.pictures, np.random.default_rng(args.seed), features.Features()
    wanted = attributes.unseen_attributes(n, "still", "test") * 2
    drawn = np.stack([synthetic.render(w, args.seed + i, 64, 64, 1)[0] for i, w in enumerate(wanted)])
    ours, real = drawn[:n], network(drawn[n:])
    halves = np.concatenate([ours[:, :, :32], np.roll(ours, 1, 0)[:, :, 32:]], 2)
    noisy = (ours + rng.normal(0, 2, ours.shape)).round().clip(0, 255).astype(np.uint8)
    arms = {"as drawn": ours, "noise of 2 of 255, which nobody sees": noisy, "the right half of another one": halves}
    found = {name: 1000 * distance.kernel_distance(network(x), real) for name, x in arms.items()}
    text = report.table(("real renders", "kernel distance x 1000"), [(k, f"{v:.0f}") for k, v in found.items()])
    report.save("kernel_distance", {"machine": report.machine(), "distances": found}, text, args.output_dir)


if __name__ == "__main__":
    main()
