"""Prompt adherence: five attributes, classified by `judge`, counted in two ways.

*Argmax* is the likeliest name, so it always finds something. *Sure* also requires the probability that 98 % of real
renders through the `residual` tokenizer reach for the right name: a blob slightly more like spots than like stripes
does not count. These thresholds are packaged (`thresholds.json`, from 2,000 stills and 2,000 clips of 9 frames by
`scripts/train_classifier.py`), for any tokenizer. Other real renders are measured like samples.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb.base.log import tqdm
from dfm_nb.butterflies import synthetic
from dfm_nb.butterflies.judge import HEADS, AttributeClassifier, wing_motion
from dfm_nb.measure.distance import share_estimate

MEASURED = tuple(HEADS)
CORE = ("colour", "background", "pattern")
TOGETHER = {"all three": CORE, "all five": MEASURED}
"""Attributes that must be right together."""
MOTION = {"images": "still", "clips": "flapping"}
FRAMES = {"images": 1, "clips": 9}
MOST_RENDERS = {"images": 250, "clips": 150}
"""Real renders per half: distances are from one half to the other."""
THRESHOLDS = Path(__file__).with_name("thresholds.json")

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
    pair = {name: attributes[name] for name in ("colour", "pattern")}
    return not any(pair.items() <= seen.items() for seen in synthetic.seen_combinations())


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
    asked = _asked(wanted)
    likeliest = _sure(said)
    found = _sure(said, sure["value"])
    chance = [1 / len(HEADS[n]) for n in MEASURED]
    for name, of in _sets(wanted).items():
        another = ((asked[:, None] != asked[None]) & of[:, None]).any(2)
        wrong = ((found[:, None] == asked[None]) | ~of[:, None]).all(2) & another
        out[name] = {
            "argmax": share(((likeliest == asked) | ~of).all(1)),
            "sure": _sure_share(said, wanted, sure, of),
            "wrong": float(wrong.sum() / max(1, another.sum())),
            "chance": float(np.where(of, chance, 1).prod(1).mean()),
        }
    return out


def _asked(wanted: Attributes) -> np.ndarray:
    """int [N, attributes], the index of the requested name."""
    asked = np.empty((len(wanted), len(MEASURED)), int)
    for i, w in enumerate(wanted):
        asked[i] = [HEADS[n].index(w[n]) for n in MEASURED]
    return asked


def _sure(said: Mapping[str, np.ndarray], at: Mapping[str, float] = dict.fromkeys(MEASURED, 0.0)) -> np.ndarray:
    """int [N, attributes], the index of the likeliest name; -1 where its probability is below `at`."""
    return np.stack([np.where(said[n].max(1) >= at[n], said[n].argmax(1), -1) for n in MEASURED], 1)


def _sure_share(
    said: Mapping[str, np.ndarray], wanted: Attributes, sure: Sure, of: np.ndarray, which: Any = slice(None)
) -> dict[str, float]:
    """`share` of all attributes `of` each sample right and sure; the interval includes the thresholds' uncertainty."""
    asked = _asked(wanted)
    right = {end: ((_sure(said, at) == asked) | ~of).all(1)[which] for end, at in sure.items()}
    found = share(right["value"])
    low = math.hypot(found["share"] - found["low"], found["share"] - right["high"].mean())
    high = math.hypot(found["high"] - found["share"], right["low"].mean() - found["share"])
    return found | {"low": max(0.0, found["share"] - low), "high": min(1.0, found["share"] + high)}


def share(right: np.ndarray) -> dict[str, float]:
    """{"share", "low", "high"} of bool [N]."""
    estimate = share_estimate(int(right.sum()), len(right))
    return {"share": estimate.value, "low": estimate.low, "high": estimate.high}


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
        self.as_drawn = [synthetic.render(a, seed + i, *size) for i, a in enumerate(self.wanted)]
        bar = tqdm(self.as_drawn, desc=f"real {kind}", leave=False, disable=None)
        self.decoded = list(map(round_trip, bar))


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
        by_value: dict[str, dict[str, int]] = {}  # requested: {found: count}
        pairs = [(w[name], HEADS[name][index]) for w, index in zip(wanted, said[name].argmax(1))]
        for (asked, found), count in sorted(Counter(pairs).items()):
            by_value.setdefault(asked, {})[found] = count
        out[name]["found"] = by_value
    pair = np.array([is_pair(w) for w in wanted])
    core = np.isin(MEASURED, CORE)
    if pair.any() and not pair.all():
        for name, which in (("pairs", pair), ("triples", ~pair)):
            out[name] = {"samples": int(which.sum()), **_sure_share(said, wanted, sure, core, which)}
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
