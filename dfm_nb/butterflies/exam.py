"""The prompts of `dfm evaluate` for a butterfly model, and the judgement of its samples (`attributes`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dfm_nb.butterflies import synthetic, wordings
from dfm_nb.butterflies.attributes import MEASURED, Renders, score, shares, stored_thresholds, unseen_attributes
from dfm_nb.butterflies.judge import AttributeClassifier

FRAMES = {"images": 1, "clips": 9}
EXAM_FPS = synthetic.CLIP_FPS[-1]
"""Of images and clips alike, as synthetic ones have either rate; a fixed one makes figures comparable."""
MOTION = {"images": "still", "clips": "flapping"}
REAL_SEED = 987_654
"""Seed of the real renders, far from the seeds of data sets."""

Videos = list[np.ndarray]


class Exam:
    """One evaluation's prompts, judge and real renders.

    Parameters
    ----------
    generate : prompts and a number of frames -> a video uint8 [T, H, W, 3] for each.
    round_trip : a video through the model's tokenizer. part : one of `synthetic.PARTS`. size_px : side of the renders.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[str], int], Videos],
        round_trip: Callable[[np.ndarray], np.ndarray],
        part: str,
        size_px: int,
    ):
        self.generate, self.round_trip, self.part, self.size_px = generate, round_trip, part, size_px
        self.classifier = AttributeClassifier.load()
        self.renders = functools.cache(self._renders)

    def unseen(
        self, counts: Mapping[str, int], num_worded: int, distances: Callable[[dict[str, Videos]], Any] | None
    ) -> dict[str, Any]:
        """Attribute combinations that training never showed, in the words of training and in others.

        Parameters
        ----------
        counts : numbers of "images" and "clips". num_worded : images per form of `wordings`.
        distances : measures sets of videos, as `evaluation.diversity.against_renders`.
        """
        found: dict[str, Any] = {}
        for kind, count in counts.items():
            if count:
                wanted = unseen_attributes(count, MOTION[kind], self.part)
                prompts = [synthetic.caption_for(w, template=i) for i, w in enumerate(wanted)]
                videos = self.generate(prompts, FRAMES[kind])
                found[kind] = self.judged(kind, videos, wanted)
                if distances:
                    found[kind]["distances"] = distances(self._sets(kind, videos))
        if num_worded:
            wanted = unseen_attributes(num_worded, "still", self.part)
            found["wordings"] = {form: self._worded(form, wanted) for form in wordings.forms()}
        return found

    def judged(self, kind: str, videos: Videos, wanted: Sequence[dict[str, str]]) -> dict[str, Any]:
        """The found attributes of the requested ones; empty if they are not those of a butterfly."""
        if not all(set(MEASURED) <= set(w) for w in wanted):
            return {}
        real, sure = self.renders(kind, max(map(len, videos))), stored_thresholds(kind)
        return score(videos, wanted, self.classifier, sure) | {"real_renders": real.shares(self.classifier, sure)}

    def _worded(self, form: str, wanted: Sequence[dict[str, str]]) -> dict[str, Any]:
        videos = self.generate([wordings.prompt(form, self.part, w, i) for i, w in enumerate(wanted)], 1)
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

    def _renders(self, kind: str, frames: int) -> Renders:
        return Renders(self.round_trip, kind, self.size_px, frames, self.part, REAL_SEED)
