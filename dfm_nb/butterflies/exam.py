"""The prompts of `dfm evaluate` for a butterfly model, and the judgement of its samples (`attributes`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dfm_nb.butterflies import synthetic, wordings
from dfm_nb.butterflies.attributes import MEASURED, Renders, score, shares, stored_thresholds, unseen_attributes
from dfm_nb.butterflies.judge import AttributeClassifier
from dfm_nb.measure.distance import kernel_distance, kernel_estimate
from dfm_nb.measure.diversity import recall, scatter
from dfm_nb.measure.features import NAME, Features

FRAMES = {"images": 1, "clips": 9}
FPS = synthetic.CLIP_FPS[-1]
"""Of images and clips alike, as synthetic ones have either rate; a fixed one makes figures comparable."""
MOTION = {"images": "still", "clips": "flapping"}
REAL_SEED = 987_654
"""Seed of the real renders, far from the seeds of data sets."""
ONE_PROMPT = 12
SEEDS = 8
"""Prompts of the scatter, and seeds of each."""

Videos = list[np.ndarray]
Asked = Sequence[dict[str, str]]


class Exam:
    """One evaluation's prompts, judge and real renders.

    Parameters
    ----------
    generate : prompts, a number of frames and a frame rate -> a video uint8 [T, H, W, 3] for each.
    round_trip : a video through the model's tokenizer. part : one of `synthetic.PARTS`. size_px : side of the renders.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[str], int, float], Videos],
        round_trip: Callable[[np.ndarray], np.ndarray],
        part: str,
        size_px: int,
    ):
        self.generate = generate
        self.part = part
        self.size_px = size_px
        self.classifier = AttributeClassifier.load()
        self.renders = functools.cache(lambda kind, frames: Renders(round_trip, kind, size_px, frames, part, REAL_SEED))

    def unseen(self, counts: Mapping[str, int], num_worded: int, network: Features | None) -> dict[str, Any]:
        """Attribute combinations that training never showed, in the words of training and in others.

        Parameters
        ----------
        counts : numbers of "images" and "clips". num_worded : images per form of `wordings`.
        network : for the distances to real renders, if they are wanted.
        """
        found: dict[str, Any] = {}
        for kind, count in counts.items():
            if count:
                wanted = unseen_attributes(count, MOTION[kind], self.part)
                prompts = [synthetic.caption_for(w, template=i) for i, w in enumerate(wanted)]
                videos = self.generate(prompts, FRAMES[kind], FPS)
                renders = self.renders(kind, FRAMES[kind])
                real = {"as_drawn": renders.as_drawn, "decoded": renders.decoded}
                found[kind] = self.judged(kind, videos, wanted, real, renders.wanted)
                if network:
                    found[kind]["distances"] = against_renders(self._sets(kind, videos), network)
                    found[kind]["scatter"] = self._scatter(kind, network)
        if num_worded:
            wanted = unseen_attributes(num_worded, "still", self.part)
            found["wordings"] = {form: self._worded(form, wanted) for form in wordings.forms()}
        return found

    def judged(
        self, kind: str, videos: Videos, wanted: Asked, real: Mapping[str, Videos], of_real: Asked | None = None
    ) -> dict[str, Any]:
        """The found attributes of the requested ones; empty if they are not those of a butterfly.

        real : real samples, `as_drawn` and `decoded` (through the tokenizer).
        of_real : their attributes; None: `wanted`.
        """
        if not all(set(MEASURED) <= set(w) for w in wanted):
            return {}
        sure = stored_thresholds(kind)
        renders = {name: shares(self.classifier, some, of_real or wanted, sure) for name, some in real.items()}
        return score(videos, wanted, self.classifier, sure) | {"real_renders": renders}

    def _scatter(self, kind: str, network: Features) -> dict[str, float]:
        """How far apart samples of a prompt are with `SEEDS` seeds, and the renders of its attributes."""
        prompts = []
        renders: Videos = []
        for w in unseen_attributes(ONE_PROMPT, MOTION[kind], self.part):
            prompts += [synthetic.caption_for(w)] * SEEDS
            for _ in range(SEEDS):
                seed = REAL_SEED + len(renders)
                renders.append(synthetic.render(w, seed, self.size_px, self.size_px, FRAMES[kind]))
        samples = self.generate(prompts, FRAMES[kind], FPS)
        return {"mean": _scatter_of(samples, network), "real": _scatter_of(renders, network)}

    def _worded(self, form: str, wanted: Asked) -> dict[str, Any]:
        videos = self.generate([wordings.prompt(form, self.part, w, i) for i, w in enumerate(wanted)], 1, FPS)
        found = shares(self.classifier, videos, wanted, stored_thresholds("images"))
        return {"samples": len(videos), **found["all three"]}

    def _sets(self, kind: str, videos: Videos) -> dict[str, Videos]:
        """Equal numbers of samples and real renders; the real renders for comparison are separate."""
        renders = self.renders(kind, max(map(len, videos)))
        n = min(len(videos), renders.half)
        real = renders.as_drawn[renders.half :]
        return {
            "samples": videos[:n],
            "decoded": renders.decoded[:n],
            "as_drawn": renders.as_drawn[:n],
            "real": real[:n],
        }


def _scatter_of(videos: Videos, network: Features) -> float:
    return scatter(network(_stills(videos)).reshape(ONE_PROMPT, SEEDS, -1))


def _stills(videos: Sequence[np.ndarray]) -> np.ndarray:
    """A frame of each [N, H, W, 3]: of the i-th clip frame i modulo T, so that all phases of a wing beat count."""
    return np.stack([v[i % len(v)] for i, v in enumerate(videos)])


def against_renders(sets: Mapping[str, Sequence[np.ndarray]], network: Features) -> dict[str, dict[str, float]]:
    """Kernel distance and recall of samples to real renders.

    Parameters
    ----------
    sets : "samples", "decoded" (real renders through the tokenizer), "as_drawn" (real renders) and "real" (others, to
        which all three are compared), of equal numbers, uint8 [T, H, W, 3]; of a clip `_stills` takes a frame.

    Returns
    -------
    By network: `kernel_distance` with `low` and `high`, and `recall`; the same with `_decoded` and `_as_drawn` after
    the name.
    """
    of = {name: network(_stills(videos), progress=True) for name, videos in sets.items()}
    estimate = asdict(kernel_estimate(of["samples"], of["real"]))
    row = {"kernel_distance": estimate.pop("value"), **estimate, "recall": recall(of["samples"], of["real"])}
    for name in ("decoded", "as_drawn"):
        row[f"kernel_distance_{name}"] = kernel_distance(of[name], of["real"])
        row[f"recall_{name}"] = recall(of[name], of["real"])
    return {NAME: row}
