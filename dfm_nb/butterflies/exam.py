"""The prompts of `dfm evaluate` for a butterfly model, and prompt adherence: five attributes, counted in two ways.

*Argmax* is the likeliest name, so it always finds something. *Sure* also requires the probability that 98 % of real
renders through the `residual` tokenizer reach for the right name: a blob slightly more like spots than like stripes
does not count. These thresholds are packaged (`thresholds.json`, from 2,000 stills and 2,000 clips of 9 frames by
`scripts/train_classifier.py`), for any tokenizer. Other real renders are measured like samples.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb.base.log import tqdm
from dfm_nb.butterflies import synthetic, wordings
from dfm_nb.butterflies.judge import HEADS, AttributeClassifier, wing_motion
from dfm_nb.measure.distance import kernel_estimate, share_estimate
from dfm_nb.measure.diversity import recall, scatter
from dfm_nb.measure.features import NAME, Features

MEASURED = tuple(HEADS)
CORE = ("colour", "background", "pattern")
TOGETHER = {"all three": CORE, "all five": MEASURED}
"""Attributes that must be right together."""
MOTION = {"images": "still", "clips": "flapping"}
FRAMES = {"images": 1, "clips": 9}
MOST_RENDERS = {"images": 250, "clips": 150}
"""Real renders per half: distances are from one half to the other."""
THRESHOLDS = Path(__file__).with_name("thresholds.json")
FPS = synthetic.CLIP_FPS[-1]
"""Of images and clips alike, as synthetic ones have either rate; a fixed one makes figures comparable."""
REAL_SEED = 987_654
"""Seed of the real renders, far from the seeds of data sets."""
ONE_PROMPT = 12
SEEDS = 8
"""Prompts of the scatter, and seeds of each."""

Videos = Sequence[np.ndarray]
Attributes = Sequence[dict[str, str]]
Sure = Mapping[str, Mapping[str, float]]
"""{"low", "value", "high"}: each attribute's threshold, and the ends of its 95 % interval."""


def unseen_attributes(count: int, motion: str, part: str = "development") -> list[dict[str, str]]:
    """`count` distinct attribute sets that training never showed, alternately of unseen pairs and unseen triples.

    part : `development`, for choosing settings, or `test` (`synthetic.unseen_combinations`).
    """
    by = [synthetic.unseen_combinations(part, how) for how in ("pairs", "triples")]
    species = synthetic.SPECIES
    postures = synthetic.POSTURES
    most = 2 * min(map(len, by)) * len(species) * len(postures)
    if not 0 < count <= most:
        raise ValueError(f"there are {most} unseen combinations; got {count}; use --num-prompts {most} or fewer")
    out = []
    for i in range(count):
        number, which = divmod(i, 2)
        turn, place = divmod(number, len(by[which]))
        out.append(
            {
                **by[which][place],
                "species": species[(place + turn) % len(species)],  # each round has other pairs of species and posture
                "posture": postures[(place // 2 + turn // len(species) + turn) % len(postures)],
                "motion": motion,
            }
        )
    return out


def is_pair(attributes: Mapping[str, str]) -> bool:
    """Whether training never showed this colour with this pattern."""
    return {name: attributes[name] for name in CORE} in synthetic.unseen_combinations(by="pairs")


def stored_thresholds(kind: str) -> Sure:
    """The packaged thresholds for "images" or "clips"."""
    return json.loads(THRESHOLDS.read_text())[kind]


def _sets(wanted: Attributes) -> dict[str, np.ndarray]:
    """bool [N, attributes] by measure, those that must be right: each one, and `TOGETHER`.

    For edits, instead of `TOGETHER`: `change` (the attribute that the prompt names), `rest` (the others), and both.
    """
    names = np.array(MEASURED)
    sets = {name: names == name for name in MEASURED}
    if all("changed" in w for w in wanted):
        change = names == np.array([[w["changed"]] for w in wanted])
        sets |= {"change": change, "rest": ~change, "change and rest": names == names}
    else:
        sets |= {name: np.isin(names, parts) for name, parts in TOGETHER.items()}
    return {name: np.broadcast_to(of, (len(wanted), len(names))) for name, of in sets.items()}


def shares(said: Mapping[str, np.ndarray], wanted: Attributes, sure: Sure) -> dict[str, Any]:
    """For each of `_sets`: {"argmax", "sure"}, each {"share", "low", "high"}, "wrong", and the "chance" of a guess.

    "wrong" is how often a wrong name passes: each sample is compared with the names requested of another sample, and
    "wrong" is the share that would count as sure.

    said : `AttributeClassifier.probabilities` of the samples.
    """
    out: dict[str, Any] = {}
    asked = np.empty((len(wanted), len(MEASURED)), int)  # the index of the requested name
    for i, w in enumerate(wanted):
        asked[i] = [HEADS[n].index(w[n]) for n in MEASURED]
    likeliest = np.stack([said[n].argmax(1) for n in MEASURED], 1)
    best = np.stack([said[n].max(1) for n in MEASURED], 1)
    reached = {end: best >= np.array(list(map(at.get, MEASURED)), best.dtype) for end, at in sure.items()}
    found = np.where(reached["value"], likeliest, -1)
    chance = [1 / len(HEADS[n]) for n in MEASURED]
    for name, of in _sets(wanted).items():
        another = ((asked[:, None] != asked[None]) & of[:, None]).any(2)
        wrong = ((found[:, None] == asked[None]) | ~of[:, None]).all(2) & another
        right = {end: ((likeliest == asked) & enough | ~of).all(1) for end, enough in reached.items()}
        surely = share(right["value"])
        # the interval includes the thresholds' uncertainty
        low = math.hypot(surely["share"] - surely["low"], surely["share"] - right["high"].mean())
        high = math.hypot(surely["high"] - surely["share"], right["low"].mean() - surely["share"])
        interval = {"low": max(0.0, surely["share"] - low), "high": min(1.0, surely["share"] + high)}
        out[name] = {
            "argmax": share(((likeliest == asked) | ~of).all(1)),
            "sure": surely | interval,
            "wrong": float(wrong.sum() / max(1, another.sum())),
            "chance": float(np.where(of, chance, 1).prod(1).mean()),
        }
    return out


def share(right: np.ndarray) -> dict[str, float]:
    """{"share", "low", "high"} of bool [N]."""
    estimate = share_estimate(int(right.sum()), len(right))
    return {"share": estimate.pop("value"), **estimate}


class Renders:
    """New real renders of a part, raw and through the tokenizer: the measurement of a perfect model.

    Parameters
    ----------
    round_trip : a video uint8 [T, H, W, 3] through the tokenizer, encoded and decoded.
    kind : "images" or "clips".
    """

    def __init__(
        self,
        round_trip: Callable[[np.ndarray], np.ndarray],
        kind: str,
        size_px: int,
        part: str,
        seed: int,
        count: int | None = None,
    ):
        self.half = count or MOST_RENDERS[kind]
        self.wanted = unseen_attributes(self.half, MOTION[kind], part) * 2
        size = (size_px, size_px, FRAMES[kind])
        drawn = [synthetic.render(a, seed + i, *size) for i, a in enumerate(self.wanted)]
        bar = tqdm(drawn, desc=f"real {kind}", leave=False, disable=None)
        self.real = {"as_drawn": drawn, "decoded": list(map(round_trip, bar))}


def score(videos: Videos, wanted: Attributes, classifier: AttributeClassifier, sure: Sure) -> dict[str, Any]:
    """`shares` of samples, a table of requested and found names, and the wing motion of clips.

    For unseen combinations, `pairs` and `triples` are the shares of samples with all three right and sure, for unseen
    pairs of colour and pattern and for unseen triples.

    Parameters
    ----------
    videos : uint8 [T, H, W, 3]; for clips (T > 1) also the mean wing motion, compared with real ones.
    wanted : the requested attributes of each.
    """
    said = classifier.probabilities(videos)
    out: dict[str, Any] = {"samples": len(videos), **shares(said, wanted, sure)}
    for name in MEASURED:
        by_value = defaultdict[str, Counter[str]](Counter)  # requested: {found: count}
        for w, index in zip(wanted, said[name].argmax(1)):
            by_value[w[name]][HEADS[name][index]] += 1
        out[name]["found"] = dict(sorted(by_value.items()))
    pair = np.array([is_pair(w) for w in wanted])
    if pair.any() and not pair.all():
        of_still = [dict(zip(MEASURED, map(w.__getitem__, MEASURED))) for w in wanted]  # also of edits
        for name, which in (("pairs", pair), ("triples", ~pair)):
            some = {n: p[which] for n, p in said.items()}
            of_some = shares(some, list(itertools.compress(of_still, which)), sure)
            out[name] = {"samples": int(which.sum()), **of_some["all three"]["sure"]}
    frames, height, width, _ = videos[0].shape
    if min(map(len, videos)) > 1:  # of captions alone, some samples may be stills
        real = []
        for i, w in enumerate(wanted[:16]):
            drawn = {name: w[name] for name in synthetic.ATTRIBUTES if name in w}
            real.append(synthetic.render(drawn, i, height, width, frames))
        out["wing_motion"] = {
            "mean": float(np.mean(list(map(wing_motion, videos)))),
            "real_clips": float(np.mean(list(map(wing_motion, real)))),
        }
    return out


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
    classifier: AttributeClassifier = field(default_factory=AttributeClassifier.load)

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
                found[kind] = self.judged(kind, videos, wanted, renders.real, renders.wanted)
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
    real = network(_stills(renders.real["as_drawn"][renders.half :][:n]), progress=True)
    of = network(_stills(videos[:n]), progress=True)
    estimate = kernel_estimate(of, real)
    row = {"kernel_distance": estimate.pop("value"), **estimate, "recall": recall(of, real)}
    for name, some in renders.real.items():
        of = network(_stills(some[:n]), progress=True)
        row[f"kernel_distance_{name}"] = kernel_estimate(of, real)["value"]
        row[f"recall_{name}"] = recall(of, real)
    return row
