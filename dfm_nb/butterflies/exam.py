"""The prompts of `dfm evaluate` for a butterfly model, and the judgement of its samples (`attributes`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dfm_nb.butterflies import synthetic, wordings
from dfm_nb.butterflies.attributes import (
    FRAMES,
    MEASURED,
    MOTION,
    Attributes,
    Renders,
    Videos,
    score,
    shares,
    stored_thresholds,
    unseen_attributes,
)
from dfm_nb.butterflies.judge import AttributeClassifier
from dfm_nb.measure.distance import kernel_estimate
from dfm_nb.measure.diversity import recall, scatter
from dfm_nb.measure.features import NAME, Features

FPS = synthetic.CLIP_FPS[-1]
"""Of images and clips alike, as synthetic ones have either rate; a fixed one makes figures comparable."""
REAL_SEED = 987_654
"""Seed of the real renders, far from the seeds of data sets."""
ONE_PROMPT = 12
SEEDS = 8
"""Prompts of the scatter, and seeds of each."""


@dataclass
class Exam:
    """One evaluation's prompts, judge and real renders.

    Parameters
    ----------
    generate : prompts, a number of frames and a frame rate -> a video uint8 [T, H, W, 3] for each.
    round_trip : a video through the model's tokenizer. part : one of `synthetic.PARTS`. size_px : side of the renders.
    """

    generate: Callable[[Sequence[str], int, float], Videos]
    round_trip: Callable[[np.ndarray], np.ndarray]
    part: str
    size_px: int

    def __post_init__(self) -> None:
        self.classifier = AttributeClassifier.load()

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
                renders = Renders(self.round_trip, kind, self.size_px, self.part, REAL_SEED)
                real = {"as_drawn": renders.as_drawn, "decoded": renders.decoded}
                found[kind] = self.judged(kind, videos, wanted, real, renders.wanted)
                if network:
                    found[kind]["distances"] = {NAME: against_renders(videos, renders, network)}
                    found[kind]["scatter"] = self._scatter(kind, network)
        if num_worded:
            wanted = unseen_attributes(num_worded, "still", self.part)
            found["wordings"] = {form: self._worded(form, wanted) for form in wordings.FORMS}
        return found

    def judged(
        self,
        kind: str,
        videos: Videos,
        wanted: Attributes,
        real: Mapping[str, Videos],
        of_real: Attributes | None = None,
    ) -> dict[str, Any]:
        """The found attributes of the requested ones; empty if they are not those of a butterfly.

        real : real samples, `as_drawn` and `decoded` (through the tokenizer).
        of_real : their attributes; None: `wanted`.
        """
        if not all(set(MEASURED) <= set(w) for w in wanted):
            return {}
        sure = stored_thresholds(kind)
        renders = {}
        for name, some in real.items():
            renders[name] = shares(self.classifier.probabilities(some), of_real or wanted, sure)
        return score(videos, wanted, self.classifier, sure) | {"real_renders": renders}

    def _scatter(self, kind: str, network: Features) -> dict[str, float]:
        """How far apart samples of a prompt are with `SEEDS` seeds, and the renders of its attributes."""
        prompts = []
        renders: list[np.ndarray] = []
        for w in unseen_attributes(ONE_PROMPT, MOTION[kind], self.part):
            prompts += [synthetic.caption_for(w)] * SEEDS
            for _ in range(SEEDS):
                seed = REAL_SEED + len(renders)
                renders.append(synthetic.render(w, seed, self.size_px, self.size_px, FRAMES[kind]))
        samples = self.generate(prompts, FRAMES[kind], FPS)
        return {"mean": _scatter_of(samples, network), "real": _scatter_of(renders, network)}

    def _worded(self, form: str, wanted: Attributes) -> dict[str, Any]:
        videos = self.generate([wordings.prompt(form, self.part, w, i) for i, w in enumerate(wanted)], 1, FPS)
        found = shares(self.classifier.probabilities(videos), wanted, stored_thresholds("images"))
        return {"samples": len(videos), **found["all three"]}


def _scatter_of(videos: Videos, network: Features) -> float:
    return scatter(network(_stills(videos)).reshape(ONE_PROMPT, SEEDS, -1))


def _stills(videos: Videos) -> np.ndarray:
    """A frame of each [N, H, W, 3]: of the i-th clip frame i modulo T, so that all phases of a wing beat count."""
    return np.stack([v[i % len(v)] for i, v in enumerate(videos)])


def against_renders(videos: Videos, renders: Renders, network: Features) -> dict[str, float]:
    """Kernel distance and recall of samples to the second half of the real renders.

    Returns
    -------
    `kernel_distance` with `low` and `high`, and `recall`; the same with `_decoded` (of the first half through the
    tokenizer) and `_as_drawn` (of the first half) after the name. All sets have equal numbers.
    """
    n = min(len(videos), renders.half)
    real = network(_stills(renders.as_drawn[renders.half :][:n]), progress=True)
    of = network(_stills(videos[:n]), progress=True)
    estimate = asdict(kernel_estimate(of, real))
    row = {"kernel_distance": estimate.pop("value"), **estimate, "recall": recall(of, real)}
    for name, some in (("decoded", renders.decoded), ("as_drawn", renders.as_drawn)):
        of = network(_stills(some[:n]), progress=True)
        row[f"kernel_distance_{name}"] = kernel_estimate(of, real).value
        row[f"recall_{name}"] = recall(of, real)
    return row
