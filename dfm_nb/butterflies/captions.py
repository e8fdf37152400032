"""Says what a butterfly picture shows as people would: synonyms, orders, registers, and captions that leave facts out.

No phrase of `dfm_nb/butterflies/wordings.toml` that stands there as unseen is used here; single words of it ("dots",
"clouds") are. A test holds it.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

COLOURS = {
    "red": ("crimson", "scarlet", "ruby", "brick-red", "blood-red", "cherry-coloured", "bright red"),
    "orange": ("tangerine", "amber", "pumpkin-coloured", "apricot", "bright orange", "copper"),
    "yellow": ("golden", "canary", "mustard", "sunflower-yellow", "honey-coloured", "bright yellow"),
    "green": ("emerald", "jade", "olive", "mint-green", "forest-green", "dark green"),
    "blue": ("azure", "navy", "sapphire", "indigo", "sky-blue", "deep blue"),
    "purple": ("violet", "lilac", "plum-coloured", "lavender", "deep purple", "aubergine"),
    "pink": ("rose", "magenta", "blush-pink", "candy-pink", "coral-pink", "light pink"),
    "white": ("ivory", "snow-white", "cream-coloured", "pearl-white", "milky", "pale"),
}
"""Beside the name itself, which a third of the captions take."""

ADJECTIVES = {
    "plain": ("plain", "unmarked", "single-coloured", "unpatterned"),
    "spots": ("spotted", "dotted", "speckled", "polka-dot"),
    "stripes": ("striped", "banded", "streaked", "stripy"),
    "eyespots": ("eyespotted", "owl-eyed", "eye-marked"),
}
WINGS = {
    "plain": ("plain wings", "wings without markings", "no pattern on its wings", "wings of one colour", "no spots"),
    "spots": ("spotted wings", "spots on its wings", "dots all over", "wings full of dots", "small round spots"),
    "stripes": ("striped wings", "stripes across its wings", "bands on its wings", "streaks", "bold stripes"),
    "eyespots": (
        "eyespots",
        "wings with eyespots",
        "big eyes on its wings",
        "eye-like rings",
        "a false eye on each wing",
    ),
}
PLACES = {
    "sky": ("in the sky", "against the sky", "high in the air", "up among white clouds", "on a clear day"),
    "meadow": ("over a meadow", "in the grass", "in a field of flowers", "over a lawn", "in a green pasture"),
    "sand": ("over sand", "on the beach", "in the desert", "over sand dunes", "on sandy ground"),
    "night": ("at night", "under the stars", "in the moonlight", "in the dark", "beneath a starry sky"),
}
POSTURES = {
    "open": ("seen from above", "wings spread", "from above"),
    "tilted left": ("tilted to the left", "leaning left", "turned a little to the left"),
    "tilted right": ("tilted to the right", "leaning right", "turned a little to the right"),
    "folded": ("seen from the side", "in profile", "from the side"),
}
MOTIONS = {
    "still": ("resting", "sitting still", "with its wings held still", "at rest"),
    "flapping": ("flapping its wings", "fluttering", "beating its wings", "flying", "in flight"),
}
SMALL = ("small", "little", "tiny")
POSITIONS = {
    "centre": ("in the middle", "in the centre"),
    "left": ("on the left", "at the left side"),
    "right": ("on the right", "at the right side"),
    "top": ("at the top", "in the upper half"),
    "bottom": ("at the bottom", "in the lower half"),
}
KINDS = {"still": ("Drawing", "Picture", "Image", "Illustration"), "flapping": ("Clip", "Video", "Animation", "Film")}
OPENINGS = (
    "Show me {}.",
    "I would like {}.",
    "Draw {}.",
    "Can you make {}?",
    "There is {}.",
    "Here we see {}.",
    "This is {}.",
    "Imagine {}.",
)
SPECIES_SHARE, POSTURE_SHARE = 0.6, 0.5
"""Of the captions, those that name the species and the posture."""


def _one(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


def _maybe(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


def _phrase(a: dict[str, str], said: set[str], rng: np.random.Generator) -> str:
    """A noun phrase without its full stop, "a spotted blue monarch, fluttering at night"; `said` names its facts."""
    before, after = [], []
    if "size" in said:
        before.append(_one(rng, SMALL))
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
    if "motion" in said:
        after.append(_one(rng, MOTIONS[a["motion"]]))
    if "background" in said:
        after.append(_one(rng, PLACES[a["background"]]))
    if "posture" in said:
        after.append(_one(rng, POSTURES[a["posture"]]))
    order = rng.permutation(len(after))
    comma = _one(rng, (" ", ", "))
    return comma.join([" ".join(["a", *before, noun]), *(after[i] for i in order)])


def _tags(a: dict[str, str], said: set[str], rng: np.random.Generator) -> str:
    """Keywords in any order: "night, blue butterfly, dots"."""
    words = ["butterfly", *(w for name in ("species", "colour") if name in said for w in [a[name]])]
    if "colour" in said and _maybe(rng, 2 / 3):
        words[-1] = _one(rng, COLOURS[a["colour"]])
    for name, vocabulary in (
        ("pattern", ADJECTIVES),
        ("background", PLACES),
        ("motion", MOTIONS),
        ("posture", POSTURES),
    ):
        if name in said:
            words.append(_one(rng, vocabulary[a[name]]))
    if "size" in said:
        words += [_one(rng, SMALL), _one(rng, POSITIONS[a["position"]])]
    return ", ".join(words[i] for i in rng.permutation(len(words)))


def _facts(a: dict[str, str], rng: np.random.Generator) -> set[str]:
    """What a caption tells: in one of eight a part alone."""
    named = {"species": SPECIES_SHARE, "posture": POSTURE_SHARE, "motion": 0.9 if a["motion"] == "flapping" else 0.2}
    said = {name for name, share in named.items() if _maybe(rng, share)}
    core = ["colour", "pattern", "background"]
    if _maybe(rng, 1 / 8):
        core = [name for name in core if _maybe(rng, 0.5)]
    if a["size"] == "small":
        said.add("size")
    return said | set(core)


def spoken(attributes: dict[str, str], rng: np.random.Generator) -> str:
    """A caption of a picture with all these attributes (`synthetic.caption_for`), by one of four ways of speaking."""
    said = _facts(attributes, rng)
    way = rng.random()
    if way < 0.15:
        return _tags(attributes, said, rng)
    phrase = _phrase(attributes, said, rng)
    if way < 0.6:
        text = phrase
    elif way < 0.8:
        return _one(rng, OPENINGS).format(phrase)
    elif "background" in said and way < 0.9:
        text = f"{_one(rng, PLACES[attributes['background']])}: {_phrase(attributes, said - {'background'}, rng)}"
    else:
        text = f"{_one(rng, KINDS[attributes['motion']])} of {phrase}"
    return text[0].upper() + text[1:] + "."
