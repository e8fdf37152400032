"""Do samples show what their captions ask for? Colour, background and pattern, by the classifier of `judge`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation.judge import HEADS, AttributeClassifier, chance, wing_motion

MEASURED = tuple(HEADS)


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a share."""
    p, n = successes / trials, trials
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def unseen_attributes(count: int, motion: str) -> list[dict[str, str]]:
    """`count` distinct attribute sets whose (colour, pattern, background) training never showed."""
    triples, out = synthetic.unseen_combinations(), []
    most = len(triples) * len(synthetic.SPECIES)
    if not 0 < count <= most:
        raise ValueError(f"there are {most} unseen combinations; got {count}; use --num-prompts {most} or fewer")
    for i in range(count):
        turn, place = divmod(i, len(triples))
        species = synthetic.SPECIES[(place + turn) % len(synthetic.SPECIES)]  # another one in every turn
        posture = synthetic.POSTURES[(i // 3 + turn) % len(synthetic.POSTURES)]
        out.append({**triples[place], "species": species, "posture": posture, "motion": motion})
    return out


def score(
    videos: Sequence[np.ndarray], wanted: Sequence[dict[str, str]], classifier: AttributeClassifier
) -> dict[str, Any]:
    """Share of samples that show what was asked, with its interval, what chance gives, and what was found instead.

    Parameters
    ----------
    videos : uint8 [T, H, W, 3]; clips (T > 1) get their mean wing motion, beside that of real ones, as well.
    wanted : the attributes asked of each.
    """
    found, at_random, n = classifier.predict(videos), chance(), len(videos)
    out: dict[str, Any] = {"samples": n}
    for name in MEASURED:
        by_value: dict[str, dict[str, int]] = {}  # asked: {found: how often}
        for (asked, saw), count in sorted(Counter((w[name], f[name]) for f, w in zip(found, wanted)).items()):
            by_value.setdefault(asked, {})[saw] = count
        hits = sum(saw.get(asked, 0) for asked, saw in by_value.items())
        low, high = wilson(hits, n)
        out[name] = {"accuracy": hits / n, "low": low, "high": high, "chance": at_random[name], "found": by_value}
    frames, height, width, _ = videos[0].shape
    if frames > 1:
        real = [synthetic.render(w, i, height, width, frames) for i, w in enumerate(wanted[:16])]
        out["wing_motion"] = {
            "mean": float(np.mean([wing_motion(v) for v in videos])),
            "real_clips": float(np.mean([wing_motion(v) for v in real])),
        }
    return out


def real_accuracy(
    classifier: AttributeClassifier,
    round_trip: Callable[[np.ndarray], np.ndarray],
    kind: str,
    count: int,
    size_px: int,
    frames: int,
    seed: int,
) -> dict[str, dict[str, float]]:
    """The classifier on `count` fresh real "images" or "clips" of at most `frames`.

    `as_drawn` is what the classifier can do; `decoded`, after the tokenizer, is the upper bound for any model.

    round_trip : a video uint8 [T, H, W, 3] through the tokenizer, encoded and decoded.
    """
    images, clips = (count, 0) if kind == "images" else (0, count)
    source = synthetic.build(num_images=images, num_clips=clips, size_px=size_px, seed=seed, square=True)
    real = [next(source.read(i)) for i in range(len(source))]
    attributes = [c.attributes for c in real]
    videos = [c.video[:frames] for c in real]
    decoded = [round_trip(v) for v in tqdm(videos, desc=f"real {kind}", leave=False, disable=None)]
    return {"as_drawn": classifier.accuracy(videos, attributes), "decoded": classifier.accuracy(decoded, attributes)}
