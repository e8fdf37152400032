"""Captions of butterfly pictures in many styles: synonyms, orders, registers, and captions that omit facts.

The words are in `captions.toml`.
"""

import tomllib
from pathlib import Path
from typing import Any, Sequence

import numpy as np

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SPOKEN = WORDS["spoken"]
SPECIES_SHARE = 0.6
POSTURE_SHARE = 0.5
"""Shares of the captions that name the species and the posture."""


def one(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    """One of them, each as likely."""
    return values[int(rng.integers(len(values)))]


def _word(rng: np.random.Generator, a: dict[str, str], name: str) -> str:
    """A word for the attribute of this name."""
    return one(rng, SPOKEN[name][a[name]])


def _phrase(a: dict[str, str], said: set[str], rng: np.random.Generator) -> str:
    """A noun phrase without its full stop, "a spotted blue monarch, fluttering at night"; `said` names its facts."""
    before = []
    after = []
    if "size" in said:
        before.append(one(rng, SPOKEN["small"]))
        after.append(_word(rng, a, "position"))
    if "pattern" in said:
        if rng.random() < 0.5:
            before.append(_word(rng, a, "pattern"))
        else:
            after.append("with " + one(rng, SPOKEN["wings"][a["pattern"]]))
    if "colour" in said:
        colour = a["colour"] if rng.random() < 1 / 3 else _word(rng, a, "colour")
        if rng.random() < 0.75:
            before.append(colour)
        else:
            after.append(one(rng, ("with {} wings", "that is {}", "whose wings are {}")).format(colour))
    noun = "butterfly"
    if "species" in said:
        noun = one(rng, ("{}", "{} butterfly")).format(a["species"])
    for name in ("motion", "background", "posture"):
        if name in said:
            after.append(_word(rng, a, name))
    order = rng.permutation(len(after))
    comma = one(rng, (" ", ", "))
    return comma.join([" ".join(["a", *before, noun]), *(after[i] for i in order)])


def _tags(a: dict[str, str], said: set[str], rng: np.random.Generator) -> str:
    """Keywords in any order: "night, blue butterfly, dots"."""
    words = ["butterfly"]
    if "species" in said:
        words.append(a["species"])
    if "colour" in said:
        words.append(_word(rng, a, "colour") if rng.random() < 2 / 3 else a["colour"])
    for name in ("pattern", "background", "motion", "posture"):
        if name in said:
            words.append(_word(rng, a, name))
    if "size" in said:
        words += [one(rng, SPOKEN["small"]), _word(rng, a, "position")]
    return ", ".join(words[i] for i in rng.permutation(len(words)))


def _facts(a: dict[str, str], rng: np.random.Generator) -> set[str]:
    """The facts of a caption: one in eight captions has only a part of them."""
    named = {"species": SPECIES_SHARE, "posture": POSTURE_SHARE, "motion": 0.9 if a["motion"] == "flapping" else 0.2}
    said = {name for name, share in named.items() if rng.random() < share}
    in_part = rng.random() < 1 / 8
    for name in ("colour", "pattern", "background"):
        if not in_part or rng.random() < 0.5:
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
        return one(rng, SPOKEN["openings"]).format(phrase)
    elif "background" in said and way < 0.9:
        text = f"{_word(rng, attributes, 'background')}: {_phrase(attributes, said - {'background'}, rng)}"
    else:
        text = f"{one(rng, SPOKEN['kinds'][attributes['motion']])} of {phrase}"
    return text.capitalize() + "."
