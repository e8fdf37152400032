"""`synthetic`: rendered butterflies, stills and clips with known attributes; nothing is downloaded.

Captions name colour, pattern, background, species and posture; `attributes` holds the same facts. Item `index` is a
pure function of (seed, index), so growing the source changes no earlier image.

A quarter of the (colour, pattern) pairs and a fifth of the other (colour, pattern, background) triples never occur
but in `synthetic:unseen`, which draws only those: they measure whether a model composes or recalls. Half of each are
for choosing settings (`development`), half for the final report (`test`).

In `synthetic:edits` the same scene with another value of one attribute is given with each item; the caption names the
change alone, and `changed` in `attributes` the attribute.
"""

import re
from dataclasses import asdict, dataclass
from itertools import product
from typing import Callable, Iterator

import numpy as np

from dfm_nb.base.options import Options, option
from dfm_nb.base.records import Clip, Said, Source
from dfm_nb.butterflies import captions, drawing

NAMES = ("colour", "pattern", "background", "species", "posture", "motion", "size", "position")
ATTRIBUTES: dict[str, tuple[str, ...]] = {name: tuple(drawing.SHAPES[name]) for name in NAMES}
"""Their values; the first one is the default."""
COLOURS, PATTERNS, BACKGROUNDS, SPECIES, POSTURES, MOTIONS, SIZES, POSITIONS = ATTRIBUTES.values()
PARTS = ("development", "test")
check = drawing.load_skia


class Flags(Options):
    num_images: int | None = option(None, "synthetic: images to draw", ge=0)
    num_clips: int | None = option(None, "synthetic: clips to draw", ge=0)
    seed: int | None = option(None, "synthetic: seed", ge=0)


TOKENIZER = "residual"  # trained on these pictures; thresholds of the exam are of them through it
DRAWING = 3  # raised when the pictures change, so that old prepared data are not used as new ones
HELD_OUT = 2  # likewise, when other combinations are held out

SMALL_SHARE = 0.2
DOUBLE_SHARE = 0.05
PLAIN_SHARE = 0.25
"""Shares of `varied` items: small butterflies, items at twice the size, and captions by `TEMPLATES`."""

# shares of numbers of frames, and of (height, width) in units of the base size
CLIP_FRAMES = {9: 0.65, 17: 0.35}
CLIP_FPS = (8.0, 12.0)
IMAGE_SHAPES = {(1, 1): 0.56, (1, 1.25): 0.11, (1.25, 1): 0.11, (1, 1.5): 0.08, (1.5, 1): 0.08, (0.75, 0.75): 0.06}
CLIP_SHAPES = {(1, 1): 0.8, (1, 1.25): 0.1, (1.25, 1): 0.1}

PLAIN = captions.WORDS["plain"]
TEMPLATES = PLAIN["templates"]
NUM_TEMPLATES = len(TEMPLATES["still"])
EDITS = captions.WORDS["edits"]


def _combinations() -> Iterator[tuple[str | None, str | None, dict[str, str]]]:
    """(by, part, attributes) of every (colour, pattern, background); `by` and `part` are None where training shows it.

    Every colour lacks one pattern, every pattern two colours; both parts have all patterns and half of the colours.
    """
    held_triples = 0
    for (i, colour), (j, pattern), (k, place) in product(*map(enumerate, (COLOURS, PATTERNS, BACKGROUNDS))):
        by = part = None
        if j == (i + i // 4) % 4:
            by = "pairs"
            part = PARTS[i % 2]
        elif (i + 2 * j + 3 * k) % 5 == 0:
            by = "triples"
            part = PARTS[held_triples % 2]
            held_triples += 1
        yield by, part, {"colour": colour, "pattern": pattern, "background": place}


def unseen_combinations(part: str | None = None, by: str | None = None) -> list[dict[str, str]]:
    """The (colour, pattern, background) triples that training data never show, as attribute dicts.

    Parameters
    ----------
    part : `development`, for choosing settings, or `test`, for reporting; None for both.
    by : `pairs`, whose colour never had that pattern, or `triples`, whose pairs all occur; None for both.
    """
    return [a for how, where, a in _combinations() if how and part in (None, where) and by in (None, how)]


def seen_combinations() -> list[dict[str, str]]:
    """The triples that training data are drawn from."""
    return [a for by, _, a in _combinations() if by is None]


def _checked(attributes: dict[str, str]) -> dict[str, str]:
    """All attributes with defaults for missing ones; each must be a known name."""
    for name, value in attributes.items():
        if value not in ATTRIBUTES.get(name, ()):
            options = ", ".join(ATTRIBUTES.get(name, ATTRIBUTES))
            raise ValueError(f"{name}={value!r} is not an attribute of a synthetic butterfly; available: {options}")
    return {name: values[0] for name, values in ATTRIBUTES.items()} | attributes


def words_of(attributes: dict[str, str]) -> dict[str, str]:
    """The words for the fields of templates."""
    a = _checked(attributes)
    wings, adjective = PLAIN["wings"][a["pattern"]]
    place = PLAIN["places"][a["background"]]
    return {
        "colour": a["colour"],
        "species": a["species"],
        "pattern": adjective,
        "wings": wings,
        "posture": PLAIN["postures"][a["motion"]][a["posture"]],
        "place": place,
        "Place": place.capitalize(),
    }


def caption_for(attributes: dict[str, str], template: int = 0) -> str:
    """The caption of a picture with these attributes.

    Parameters
    ----------
    attributes : colour, pattern, background, and optionally species, posture and motion (`still` or `flapping`); size
        and position are not mentioned.
    template : index of the wording, modulo `NUM_TEMPLATES`.
    """
    templates = TEMPLATES[_checked(attributes)["motion"]]
    return with_articles(templates[template % len(templates)].format(**words_of(attributes)))


def with_articles(text: str) -> str:
    """`text` with "an" for "a" before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def render(attributes: dict[str, str], seed: int, height_px: int, width_px: int, num_frames: int = 1) -> np.ndarray:
    """Draw one picture (`num_frames=1`) or a wing beat; it begins with open wings, like a still.

    Parameters
    ----------
    attributes : as for `caption_for`, and `size` and `position`; `motion` is ignored, because `num_frames` decides.
    seed : for everything that the attributes leave open; the same at every size.

    Returns
    -------
    uint8 [num_frames, height_px, width_px, 3].
    """
    return drawing.draw(_checked(attributes), np.random.default_rng(seed), height_px, width_px, num_frames)


def _pick(rng: np.random.Generator, shares):
    return list(shares)[rng.choice(len(shares), p=list(shares.values()))]


def image_size(rng: np.random.Generator, size_px: int, shapes=IMAGE_SHAPES) -> tuple[int, int]:
    """Draw (height, width) in px from the mix of shapes: multiples of 16, mostly `size_px` square."""
    height, width = (max(16, round(side * size_px / 16) * 16) for side in _pick(rng, shapes))
    return height, width


@dataclass(eq=False)
class Synthetic(Source):
    """Items 0 .. num_images - 1 are images, followed by `num_clips` clips; the fields are the parameters of `build`."""

    num_images: int
    num_clips: int
    size_px: int
    seed: int
    unseen: bool
    square: bool
    varied: bool
    edits: bool
    name = "synthetic"

    def __post_init__(self) -> None:
        if self.size_px < 32 or self.size_px % 16:
            raise ValueError(f"the synthetic source draws at multiples of 16 px from 32 px up; got {self.size_px}")
        self._combinations = unseen_combinations() if self.unseen else seen_combinations()

    def __len__(self) -> int:
        return self.num_images + self.num_clips

    def item_key(self, index: int) -> str:
        key = f"image-{index:06d}"
        if index >= self.num_images:
            key = f"clip-{index - self.num_images:06d}"
        return f"unseen-{key}" if self.unseen else key

    def read(self, index: int) -> Iterator[Clip]:
        yield self._item(index, render)

    def captions(self, index: int) -> Said:
        clip = self._item(index, lambda *_scene: np.zeros((1, 1, 1, 3), np.uint8))
        return [clip.caption], clip.tags

    def _item(self, index: int, draw: Callable[..., np.ndarray]) -> Clip:
        moving = index >= self.num_images
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, index]))
        attributes = dict(captions.one(rng, self._combinations))
        attributes["species"] = captions.one(rng, SPECIES)
        attributes["posture"] = captions.one(rng, POSTURES)
        attributes["motion"] = MOTIONS[moving]
        size_px = self.size_px
        if self.varied:
            size_px *= 2 if rng.random() < DOUBLE_SHARE else 1
            if rng.random() < SMALL_SHARE:
                attributes |= {"size": "small", "position": captions.one(rng, POSITIONS)}
        height, width = image_size(rng, size_px, CLIP_SHAPES if moving else IMAGE_SHAPES)
        if self.square:  # after the draw, so that the rest of the item is unchanged
            height = width = size_px
        frames = _pick(rng, CLIP_FRAMES) if moving else 1
        fps = captions.one(rng, CLIP_FPS)
        caption = caption_for(attributes, int(rng.integers(NUM_TEMPLATES)))
        if self.varied and (rng.random() >= PLAIN_SHARE or attributes.get("size") == "small"):
            caption = with_articles(captions.spoken(_checked(attributes), rng))
        scene = (int(rng.integers(2**63)), height, width, frames)
        pixels = draw(attributes, *scene)
        given = []
        if self.edits:
            changed = str(rng.choice(list(EDITS)))
            others = []
            for value in ATTRIBUTES[changed]:
                other = attributes | {changed: value}
                triple = {name: other[name] for name in ("colour", "pattern", "background")}
                # training may show the given one, too
                if value != attributes[changed] and (self.unseen or triple in self._combinations):
                    others.append(other)
            given = [draw(captions.one(rng, others), *scene)]
            caption = with_articles(str(rng.choice(EDITS[changed])).format(**words_of(attributes)))
            attributes["changed"] = changed
        return Clip(self.item_key(index), pixels, caption, fps, self.name, attributes, given=given)

    def identity(self) -> dict:
        own = asdict(self) | {"varied": self.varied and DOUBLE_SHARE}  # a folder of another share is not resumed
        if not self.edits:  # so that the same pictures keep the identity that stored data have
            del own["edits"]
        return {"name": self.name, **own, "drawing": DRAWING, "held_out": HELD_OUT}


def build(
    spec: str | None = None, num_images: int = 1200, num_clips: int = 300, size_px: int = 64, seed: int = 0
) -> Synthetic:
    """The source.

    Parameters
    ----------
    spec : None, or a comma-separated list of
        unseen : draw only the combinations held out of training.
        square : every side is `size_px`; the rest of an item is the same as without.
        varied : captions in many wordings, a fifth of the butterflies small and anywhere in the picture, and 5 % of
            the items at twice the size, which are then a fifth of the latents.
        edits : pairs: with each item the same scene is given, with one attribute changed (module docstring).
    num_images, num_clips : items; clips have 9 or 17 frames at 8 or 12 fps.
    size_px : base size, a multiple of 16; sides are 0.75 to 1.5 times it, rounded to multiples of 16.
    """
    known = ("unseen", "square", "varied", "edits")
    words = spec.split(",") if spec else []
    if not set(words) <= set(known):
        raise ValueError(f"--source synthetic accepts unseen, square, varied and edits, with commas; got {spec!r}")
    return Synthetic(num_images, num_clips, size_px, seed, **{name: name in words for name in known})
