"""Which checkpoint of a run to take: figures for each, and a verdict.

Every checkpoint samples the same training and held-out captions with the same seeds. The rule:

1. Copies begin at the first checkpoint whose share of copies among the samples for training captions is significantly
   above that of new pictures: the lower end of its interval is above 1 %, or, with n < 99 held-out pictures, above
   1 / (n + 1), the chance that a new picture is below the least of n. This and later checkpoints are excluded, unless
   it is the first: then all are compared.
2. Of the rest, the one with the smallest kernel distance to held-out pictures is taken. A checkpoint is
   indistinguishable from it if the interval of their difference (same captions, same seeds) includes zero.

Validation loss does not decide: it is lowest early, when samples are still far from pictures
(`benchmarks/results/verdict.md`). What a copy is stands in `measure.diversity`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb.display.plots import PALETTE, blank, plain, save
from dfm_nb.measure import distance
from dfm_nb.measure.diversity import LEVEL, copied, nearness, thumbnails
from dfm_nb.measure.features import Features
from dfm_nb.measure.results import CHECKPOINTS

FEW = 32
"""Captions of a split with which the rule was measured (`benchmarks/results/verdict.md`)."""

Pictures = Sequence[np.ndarray]
"""uint8 [1, H, W, 3] each."""


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
        held_out: Pictures,
        train: Pictures,
        all_held_out: Pictures,
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
        self.network = network
        self.training = training
        self.held_out = self.features(held_out)
        self.train = self.features(train)
        self.ways = min(distance.WAYS, len(held_out), len(train))
        self.nearest = nearness(thumbnails(all_held_out), training)
        self.level = max(LEVEL, 1 / (len(self.nearest) + 1))
        coded = self.features(map(round_trip, held_out))
        self.real = self.retrievals(coded, self.features(map(round_trip, train)))
        self.real["kernel_distance"] = distance.kernel_estimate(self.train, self.held_out)
        self.real["copies"] = copied(self.nearest, self.nearest)
        self.influences: dict[int, tuple] = {}

    def features(self, frames: Iterable[np.ndarray]) -> np.ndarray:
        """Of first frames, which may differ in size: float32 [N, D]."""
        return np.concatenate([self.network(f[:1]) for f in frames])

    def retrievals(self, held_out: np.ndarray, train: np.ndarray) -> dict[str, dict[str, float]]:
        return {
            "retrieval_held_out": distance.retrieval(held_out, self.held_out, self.ways),
            "retrieval_train": distance.retrieval(train, self.train, self.ways),
        }

    def figures(self, iteration: int, held_out: Pictures, train: Pictures) -> dict[str, Any]:
        """Of one checkpoint's samples for the captions of both, uint8 [1, H, W, 3]."""
        made = self.features(held_out)
        self.influences[iteration] = distance.paired_kernel_influences(made, self.held_out)
        return {
            "iteration": iteration,
            "kernel_distance": distance.estimate(*self.influences[iteration]),
            **self.retrievals(made, self.features(train)),
            "copies": copied(nearness(thumbnails(train), self.training), self.nearest),
        }

    def drift(self, base: Pictures, now: Pictures) -> dict[str, float]:
        """1 - cosine of the features of two samples of each prompt and seed: 0 is none."""
        x = self.features(base)
        y = self.features(now)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        y /= np.linalg.norm(y, axis=1, keepdims=True)
        return distance.mean_estimate(1 - (x * y).sum(1))

    def verdict(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """By the rule above: `take`, `copies_begin` (an iteration or None), `alike` (iterations), `sentence`.

        rows : `figures` of checkpoints by iteration.
        """
        begin = 0
        while begin < len(rows) and rows[begin]["copies"]["low"] <= self.level:
            begin += 1
        clean = rows[:begin] or rows
        best = min(clean, key=lambda row: row["kernel_distance"]["value"])
        take = best["iteration"]
        alike = []
        for row in clean:
            iteration = row["iteration"]
            difference = distance.difference(self.influences[iteration], self.influences[take])
            if iteration == take or difference["low"] <= 0:
                alike.append(iteration)
        sentence = f"take {take:,}"
        others = ", ".join(f"{iteration:,}" for iteration in alike if iteration != take)
        if others:
            sentence += f" (it is nearest to held-out pictures; the figures do not tell it from {others})"
        copies_begin = None
        if begin == len(rows):
            sentence += f"; no copies up to {rows[-1]['iteration']:,}"
        else:
            copies_begin = rows[begin]["iteration"]
            sentence += f"; copies begin at {copies_begin:,}"
        if not begin:
            sentence += ", the first checkpoint"
        captions = min(len(self.held_out), len(self.train))
        if captions < FEW:
            sentence += f"; {captions} captions of each split are too few to be sure: raise --num-prompts"
            sentence += " or prepare's --val-fraction"
        return {
            "take": take,
            "copies_begin": copies_begin,
            "alike": alike,
            "ways": self.ways,
            "sentence": sentence,
            "real": self.real,
        }


def plot(values: Mapping[str, Any], output: str | Path) -> None:
    """The figures over checkpoints as a PNG: with intervals, real pictures dashed, and a line at the one to take."""
    rows = values["checkpoints"]
    verdict = values["verdict"]
    shown = [key for key in CHECKPOINTS if key in rows[0]]
    if any(row["val_loss"] is not None for row in rows):
        shown.append("val_loss")
    lines = math.ceil(len(shown) / 3)
    figure = blank(8.4, 0.3 + 2.1 * lines)
    figure.suptitle(verdict["sentence"], fontsize=9, wrap=True)
    figure.supxlabel("iteration (dashed: real pictures; shaded: 95 % intervals; vertical: the one to take)", fontsize=7)
    for i, key in enumerate(shown):
        axes = figure.add_subplot(lines, 3, i + 1)
        title, factor, _ = CHECKPOINTS.get(key, ("validation loss", 1, ""))
        measured = {row["iteration"]: row[key] for row in rows if row[key] is not None}
        x = list(measured)
        y = list(measured.values())
        if key in CHECKPOINTS:
            low = [factor * e["low"] for e in y]
            high = [factor * e["high"] for e in y]
            axes.fill_between(x, low, high, color=PALETTE[0], alpha=0.2, linewidth=0)
            y = [factor * e["value"] for e in y]
        axes.plot(x, y, "o-", color=PALETTE[0], markersize=3.5, linewidth=1.4)
        if key in verdict["real"]:
            axes.axhline(factor * verdict["real"][key]["value"], color="#666666", linestyle="--", linewidth=1)
        axes.axvline(verdict["take"], color=PALETTE[1], linewidth=1)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
        plain(axes)
    save(figure, output)
