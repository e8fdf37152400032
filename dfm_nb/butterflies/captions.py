"""Captions of butterfly pictures in many styles: synonyms, orders, registers, and captions that omit facts.

The words are in `captions.toml`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Sequence

import numpy as np

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SPOKEN = WORDS["spoken"]
COLOURS = SPOKEN["colours"]
ADJECTIVES = SPOKEN["adjectives"]
WINGS = SPOKEN["wings"]
PLACES = SPOKEN["places"]
POSTURES = SPOKEN["postures"]
MOTIONS = SPOKEN["motions"]
POSITIONS = SPOKEN["positions"]
KINDS = SPOKEN["kinds"]
SPECIES_SHARE = 0.6
POSTURE_SHARE = 0.5
"""Shares of the captions that name the species and the posture."""


def _one(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


def _maybe(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


def _phrase(a: dict[str, str], said: set[str], rng: np.random.Generator) -> str:
    """A noun phrase without its full stop, "a spotted blue monarch, fluttering at night"; `said` names its facts."""
    before = []
    after = []
    if "size" in said:
        before.append(_one(rng, SPOKEN["small"]))
        after.append(_one(rng, POSITIONS[a["position"]]))
    if "pattern" in said:
        if _maybe(rng, 0.5):
            before.append(_one(rng, ADJECTIVES[a["pattern"]]))
        else:
            after.append("with " + _one(rng, WINGS[a["pattern"]]))
    if "colour" in said:
        colour = a["colour"] if _maybe(rng, 1 / 3) else _one(rng, COLOURS[a["colour"]])
        if _maybe(rng, 0.75):
            before.append(colour)
        else:
            after.append(_one(rng, ("with {} wings", "that is {}", "whose wings are {}")).format(colour))
    noun = "butterfly"
    if "species" in said:
        noun = _one(rng, ("{}", "{} butterfly")).format(a["species"])
    for name, words in (("motion", MOTIONS), ("background", PLACES), ("posture", POSTURES)):
        if name in said:
            after.append(_one(rng, words[a[name]]))
    order = rng.permutation(len(after))
    comma = _one(rng, (" ", ", "))
    return comma.join([" ".join(["a", *before, noun]), *(after[i] for i in order)])


def _tags(a: dict[str, str], said: set[str], rng: np.random.Generator) -> str:
    """Keywords in any order: "night, blue butterfly, dots"."""
    words = ["butterfly"]
    if "species" in said:
        words.append(a["species"])
    if "colour" in said:
        words.append(_one(rng, COLOURS[a["colour"]]) if _maybe(rng, 2 / 3) else a["colour"])
    vocabularies = {"pattern": ADJECTIVES, "background": PLACES, "motion": MOTIONS, "posture": POSTURES}
    for name, vocabulary in vocabularies.items():
        if name in said:
            words.append(_one(rng, vocabulary[a[name]]))
    if "size" in said:
        words += [_one(rng, SPOKEN["small"]), _one(rng, POSITIONS[a["position"]])]
    return ", ".join(words[i] for i in rng.permutation(len(words)))


def _facts(a: dict[str, str], rng: np.random.Generator) -> set[str]:
    """The facts of a caption: one in eight captions has only a part of them."""
    named = {"species": SPECIES_SHARE, "posture": POSTURE_SHARE, "motion": 0.9 if a["motion"] == "flapping" else 0.2}
    said = {name for name, share in named.items() if _maybe(rng, share)}
    in_part = _maybe(rng, 1 / 8)
    for name in ("colour", "pattern", "background"):
        if not in_part or _maybe(rng, 0.5):
            said.add(name)
    if a["size"] == "small":
        said.add("size")
    return said


def spoken(attributes: dict[str, str], rng: np.random.Generator) -> str:
    """A caption of a picture with all these attributes (`synthetic.caption_for`), in one of four styles."""
    said = _facts(attributes, rng)
    way = rng.random()
    if way < 0.15:
        return _tags(attributes, said, rng)
    phrase = _phrase(attributes, said, rng)
    if way < 0.6:
        text = phrase
    elif way < 0.8:
        return _one(rng, SPOKEN["openings"]).format(phrase)
    elif "background" in said and way < 0.9:
        text = f"{_one(rng, PLACES[attributes['background']])}: {_phrase(attributes, said - {'background'}, rng)}"
    else:
        text = f"{_one(rng, KINDS[attributes['motion']])} of {phrase}"
    return text[0].upper() + text[1:] + "."
