"""Do samples show what their captions ask for? Five attributes, by the classifier of `judge`, counted in two ways.

*Argmax* takes the likeliest name, so that something is always found. *Sure* asks for the probability of the right name
that 98 % of real renders through the tokenizer reach: a blob that looks a little more like spots than like stripes is
not counted. Real renders are measured alike, on others than those that set the thresholds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dfm_nb.base.progress import tqdm
from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation.judge import HEADS, AttributeClassifier, wing_motion

MEASURED = tuple(HEADS)
CORE = ("colour", "background", "pattern")
TOGETHER = {"all three": CORE, "all five": MEASURED}
"""Attributes that must be right at once."""
UNSURE_SHARE = 0.02
"""Of the real renders through the tokenizer, those that fall below a threshold."""
MOST_RENDERS = {"images": 250, "clips": 150}
"""Real renders that set the thresholds, and as many others that are measured."""

Videos = Sequence[np.ndarray]
Attributes = Sequence[dict[str, str]]


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a share."""
    p, n = successes / trials, trials
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def unseen_attributes(count: int, motion: str, part: str = "development") -> list[dict[str, str]]:
    """`count` distinct attribute sets that training never showed, by turns of unseen pairs and of unseen triples.

    part : `development`, to choose settings with, or `test` (`synthetic.unseen_combinations`).
    """
    by = [synthetic.unseen_combinations(part, how) for how in ("pairs", "triples")]
    species, postures = synthetic.SPECIES, synthetic.POSTURES
    most = 2 * min(map(len, by)) * len(species) * len(postures)
    if not 0 < count <= most:
        raise ValueError(f"there are {most} unseen combinations; got {count}; use --num-prompts {most} or fewer")
    out = []
    for i in range(count):
        number, which = divmod(i, 2)
        turn, place = divmod(number, len(by[which]))
        own = {
            "species": species[(place + turn) % len(species)],  # each turn has other pairs of species and posture
            "posture": postures[(place // 2 + turn // len(species) + turn) % len(postures)],
        }
        out.append({**by[which][place], **own, "motion": motion})
    return out


def is_pair(attributes: Mapping[str, str]) -> bool:
    """Whether training never showed this colour with this pattern."""
    wanted = (attributes["colour"], attributes["pattern"])
    return wanted not in {(a["colour"], a["pattern"]) for a in synthetic.seen_combinations()}


def _of_asked(said: Mapping[str, np.ndarray], wanted: Attributes) -> dict[str, np.ndarray]:
    """Of each attribute, the probability of the asked value, float [N]. said : `AttributeClassifier.probabilities`."""
    return {name: np.array([p[HEADS[name].index(w[name])] for p, w in zip(said[name], wanted)]) for name in MEASURED}


def thresholds(classifier: AttributeClassifier, videos: Videos, wanted: Attributes) -> dict[str, float]:
    """The probability of the right value that 98 % of these reach, of each attribute."""
    found = _of_asked(classifier.probabilities(videos), wanted)
    return {name: float(np.quantile(p, UNSURE_SHARE)) for name, p in found.items()}


def shares(
    classifier: AttributeClassifier, videos: Videos, wanted: Attributes, sure: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Of each attribute, and of those of `TOGETHER`: {"argmax", "sure"}, each {"share", "low", "high"}.

    sure : `thresholds`. The intervals are Wilson's.
    """
    return _shares(classifier.probabilities(videos), wanted, sure)


def _shares(said: Mapping[str, np.ndarray], wanted: Attributes, sure: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    asked = {n: np.array([HEADS[n].index(w[n]) for w in wanted]) for n in MEASURED}
    by_argmax = {n: said[n].argmax(1) == asked[n] for n in MEASURED}
    surely = {n: p >= sure[n] for n, p in _of_asked(said, wanted).items()}
    out: dict[str, dict[str, Any]] = {}
    for name, parts in {**{n: (n,) for n in MEASURED}, **TOGETHER}.items():
        out[name] = {
            how: share(np.all([right[n] for n in parts], 0)) for how, right in (("argmax", by_argmax), ("sure", surely))
        }
    return out


def share(right: np.ndarray) -> dict[str, float]:
    """Of bool [N]: {"share", "low", "high"}."""
    low, high = wilson(int(right.sum()), len(right))
    return {"share": float(right.mean()), "low": low, "high": high}


class Renders:
    """Fresh real renders of a part, and what the tokenizer leaves of them: what a perfect model would be measured as.

    Parameters
    ----------
    round_trip : a video uint8 [T, H, W, 3] through the tokenizer, encoded and decoded.
    kind : "images" or "clips" of `frames`.
    """

    def __init__(
        self,
        round_trip: Callable[[np.ndarray], np.ndarray],
        kind: str,
        size_px: int,
        frames: int,
        part: str,
        seed: int,
        count: int | None = None,
    ):
        n = count or MOST_RENDERS[kind]
        wanted = unseen_attributes(n, "still" if kind == "images" else "flapping", part)
        self.wanted = wanted * 2
        self.as_drawn = [
            synthetic.render(a, seed + i, size_px, size_px, 1 if kind == "images" else frames)
            for i, a in enumerate(self.wanted)
        ]
        bar = tqdm(self.as_drawn, desc=f"real {kind}", leave=False, disable=None)
        self.decoded = [round_trip(v) for v in bar]
        self.half = n

    def thresholds(self, classifier: AttributeClassifier) -> dict[str, float]:
        """From the first half."""
        return thresholds(classifier, self.decoded[: self.half], self.wanted[: self.half])

    def shares(self, classifier: AttributeClassifier, sure: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """`shares` of the second half, `as_drawn` and `decoded`."""
        wanted = self.wanted[self.half :]
        return {
            name: shares(classifier, videos[self.half :], wanted, sure)
            for name, videos in (("as_drawn", self.as_drawn), ("decoded", self.decoded))
        }


def score(
    videos: Videos, wanted: Attributes, classifier: AttributeClassifier, sure: Mapping[str, float]
) -> dict[str, Any]:
    """`shares` of samples, what was found instead of what was asked, and the wing motion of clips.

    Where combinations are unseen, `pairs` and `triples` are the shares of samples with all three right and sure, of
    unseen pairs of colour and pattern and of unseen triples.

    Parameters
    ----------
    videos : uint8 [T, H, W, 3]; clips (T > 1) get their mean wing motion, beside that of real ones, as well.
    wanted : the attributes asked of each. sure : `thresholds`.
    """
    said = classifier.probabilities(videos)
    out: dict[str, Any] = {"samples": len(videos), "thresholds": dict(sure), **_shares(said, wanted, sure)}
    for name in MEASURED:
        by_value: dict[str, dict[str, int]] = {}  # asked: {found: how often}
        found = [HEADS[name][i] for i in said[name].argmax(1)]
        for (asked, saw), count in sorted(Counter((w[name], f) for f, w in zip(found, wanted)).items()):
            by_value.setdefault(asked, {})[saw] = count
        out[name] |= {"chance": 1 / len(HEADS[name]), "found": by_value}
    for name, parts in TOGETHER.items():
        out[name]["chance"] = float(np.prod([1 / len(HEADS[p]) for p in parts]))
    pair = np.array([is_pair(w) for w in wanted])
    of_asked = _of_asked(said, wanted)
    right = np.all([of_asked[name] >= sure[name] for name in CORE], 0)
    for name, which in (("pairs", pair), ("triples", ~pair)):
        if pair.any() and which.any():
            out[name] = {"samples": int(which.sum()), **share(right[which])}
    frames, height, width, _ = videos[0].shape
    if frames > 1:
        real = [synthetic.render(w, i, height, width, frames) for i, w in enumerate(wanted[:16])]
        out["wing_motion"] = {
            "mean": float(np.mean([wing_motion(v) for v in videos])),
            "real_clips": float(np.mean([wing_motion(v) for v in real])),
        }
    return out
