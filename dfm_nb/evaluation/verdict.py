"""Which checkpoint of a run to take: figures for each, and a verdict.

Every checkpoint samples the same training and held-out captions with the same seeds. The rule:

1. Copies begin at the first checkpoint whose share of copies among the samples for training captions is significantly
   above that of new pictures: the lower end of its interval is above 1 %, or, with n < 99 held-out pictures, above
   1 / (n + 1), the chance that a new picture is below the least of n. This and later checkpoints are excluded.
2. Of the rest, the one with the smallest kernel distance to held-out pictures is taken. A checkpoint is
   indistinguishable from it if the interval of their difference (same captions, same seeds) includes zero.

Validation loss does not decide: it is lowest early, when samples are still far from pictures
(`benchmarks/results/verdict.md`). What a copy is stands in `evaluation.diversity`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb.base.plots import PALETTE, blank, plain, save
from dfm_nb.evaluation import distance
from dfm_nb.evaluation.diversity import LEVEL, copied, nearness, thumbnails
from dfm_nb.evaluation.features import Features
from dfm_nb.evaluation.results import CHECKPOINTS
from dfm_nb.evaluation.retrieval import WAYS, retrieval

FEW = 32
"""Captions of a split with which the rule was measured (`benchmarks/results/verdict.md`)."""


class Judge:
    """Real pictures, whose features are taken once, and what samples are against them.

    Parameters
    ----------
    held_out, train : pictures uint8 [1, H, W, 3] whose captions are asked for, 4 or more of each.
    all_held_out : pictures that limit what is called a copy. training : thumbnails that copies are looked for in.
    round_trip : a picture through the tokenizer, once more.
    """

    def __init__(
        self,
        held_out: Sequence[np.ndarray],
        train: Sequence[np.ndarray],
        all_held_out: Sequence[np.ndarray],
        training: np.ndarray,
        network: Features,
        round_trip: Callable[[np.ndarray], np.ndarray],
    ):
        if min(len(held_out), len(train)) < 4:
            raise ValueError(
                f"a verdict needs 4 or more captions of training and held-out ones; got {len(train)} and "
                f"{len(held_out)} whose caption and picture training has not; raise --num-prompts, or prepare with a "
                "larger --val-fraction"
            )
        self.network, self.training = network, training
        self.held_out, self.train = self.features(held_out), self.features(train)
        self.ways = min(WAYS, len(held_out), len(train))
        self.nearest = nearness(thumbnails(all_held_out), training)
        self.level = max(LEVEL, 1 / (len(self.nearest) + 1))
        coded = (self.features([round_trip(f) for f in some]) for some in (held_out, train))
        real = self.retrievals(*coded) | {
            "kernel_distance": distance.kernel_estimate(self.train, self.held_out),
            "copies": copied(self.nearest, self.nearest),
        }
        self.real = {name: asdict(one) for name, one in real.items()}
        self.influences: dict[int, tuple[float, np.ndarray]] = {}

    def features(self, frames: Sequence[np.ndarray]) -> np.ndarray:
        """Of first frames, which may differ in size: float32 [N, D]."""
        return np.concatenate([self.network(f[:1]) for f in frames])

    def retrievals(self, held_out: np.ndarray, train: np.ndarray) -> dict[str, distance.Estimate]:
        sets = {"held_out": (held_out, self.held_out), "train": (train, self.train)}
        return {f"retrieval_{name}": retrieval(*x, self.ways) for name, x in sets.items()}

    def figures(self, iteration: int, held_out: Sequence[np.ndarray], train: Sequence[np.ndarray]) -> dict[str, Any]:
        """Of one checkpoint's samples for the captions of both, uint8 [1, H, W, 3]."""
        made = self.features(held_out)
        self.influences[iteration] = distance.paired_kernel_influences(made, self.held_out)
        found = {"kernel_distance": distance.estimate(*self.influences[iteration])}
        found |= self.retrievals(made, self.features(train))
        found["copies"] = copied(nearness(thumbnails(train), self.training), self.nearest)
        return {"iteration": iteration, **{name: asdict(one) for name, one in found.items()}}

    def drift(self, base: Sequence[np.ndarray], now: Sequence[np.ndarray]) -> dict[str, float]:
        """1 - cosine of the features of two samples of each prompt and seed: 0 is none."""
        x, y = (f / np.linalg.norm(f, axis=1, keepdims=True) for f in map(self.features, (base, now)))
        return asdict(distance.mean_estimate(1 - (x * y).sum(1)))

    def verdict(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """By the rule above: `take`, `copies_begin` (an iteration or None), `alike` (iterations), `sentence`.

        rows : `figures` of checkpoints by iteration.
        """
        begin = next((i for i, r in enumerate(rows) if r["copies"]["low"] > self.level), len(rows))
        clean = rows[:begin] or rows[:1]
        best = min(clean, key=lambda r: r["kernel_distance"]["value"])
        mine = self.influences[best["iteration"]]
        alike = [
            r["iteration"]
            for r in clean
            if r is best or distance.difference(self.influences[r["iteration"]], mine).low <= 0
        ]
        said = f"take {best['iteration']:,}"
        if others := ", ".join(f"{i:,}" for i in alike if i != best["iteration"]):
            said += f" (it is nearest to held-out pictures; the figures do not tell it from {others})"
        copies = rows[begin]["iteration"] if begin < len(rows) else None
        said += f"; no copies up to {rows[-1]['iteration']:,}" if copies is None else f"; copies begin at {copies:,}"
        said += "" if begin else ", the first checkpoint"
        if (asked := min(len(self.held_out), len(self.train))) < FEW:
            said += f"; {asked} captions of each split are too few to be sure: raise --num-prompts"
            said += " or prepare's --val-fraction"
        return {
            "take": best["iteration"],
            "copies_begin": copies,
            "alike": alike,
            "threshold": float(np.quantile(self.nearest, LEVEL)),
            "level": self.level,
            "ways": self.ways,
            "training_pictures": len(self.training),
            "sentence": said,
            "real": self.real,
        }


def plot(values: Mapping[str, Any], output: str | Path) -> None:
    """The figures over checkpoints as a PNG: with intervals, real pictures dashed, and a line at the one to take."""
    rows, verdict = values["checkpoints"], values["verdict"]
    keys = [key for key in CHECKPOINTS if key in rows[0]]
    shown = [*keys, *(["val_loss"] if any(r["val_loss"] is not None for r in rows) else [])]
    drawn = blank(8.4, 0.3 + 2.1 * math.ceil(len(shown) / 3))
    drawn.suptitle(verdict["sentence"], fontsize=9, wrap=True)
    drawn.supxlabel("iteration (dashed: real pictures; shaded: 95 % intervals; vertical: the one to take)", fontsize=7)
    for i, key in enumerate(shown):
        axes = drawn.add_subplot(math.ceil(len(shown) / 3), 3, i + 1)
        title, factor, _ = CHECKPOINTS.get(key, ("validation loss", 1, ""))
        x = [r["iteration"] for r in rows if r[key] is not None]
        found = [r[key] if key in keys else {"value": r[key]} for r in rows if r[key] is not None]
        axes.plot(x, [factor * e["value"] for e in found], "o-", color=PALETTE[0], markersize=3.5, linewidth=1.4)
        if key in keys:
            low, high = ([factor * e[end] for e in found] for end in ("low", "high"))
            axes.fill_between(x, low, high, color=PALETTE[0], alpha=0.2, linewidth=0)
        if key in verdict["real"]:
            axes.axhline(factor * verdict["real"][key]["value"], color="#666666", linestyle="--", linewidth=1)
        axes.axvline(verdict["take"], color=PALETTE[1], linewidth=1)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
        plain(axes)
    save(drawn, output)
