"""`synthetic`: procedural butterflies with controlled attributes, stills and wing-beat clips; needs no download.

Every sample is a function of (seed, index). Its caption names what was drawn (colour, pattern, background, species, posture), so what a
model has learned can be measured against the caption. A fifth of the (colour, pattern, background) triples is never drawn for training:
`unseen_combinations` lists attributes with such triples.
Cost: about a millisecond a frame at 64 px.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import skia

from dfm_nb.records import Clip

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (206, 24, 32), "orange": (247, 126, 14), "yellow": (252, 216, 28), "green": (14, 140, 62), "blue": (28, 76, 214),
    "purple": (124, 38, 170), "pink": (250, 116, 182), "white": (248, 246, 240),
}  # fmt: skip
PATTERNS = ("plain", "spotted", "striped", "eyed")
BACKGROUNDS = ("sky", "meadow", "sand", "night")
SPECIES = ("swallowtail", "emperor", "ringlet", "glider")
POSTURES = ("open", "tilted left", "tilted right", "folded")

_DARK = (44, 26, 22)
_WINGS: dict[str, tuple[tuple, tuple]] = {
    # forewing and hindwing of the right side: start, then cubic segments; body at the origin, x to the wing tip, y down
    "swallowtail": (
        ((0.03, -0.10), ((0.20, -0.62), (0.62, -0.95), (0.98, -0.86)), ((0.99, -0.50), (0.86, -0.22), (0.70, 0.02)), ((0.40, 0.10), (0.15, 0.08), (0.03, 0.04))),
        ((0.03, 0.00), ((0.30, -0.04), (0.66, 0.02), (0.74, 0.20)), ((0.78, 0.40), (0.66, 0.52), (0.60, 0.60)), ((0.64, 0.80), (0.62, 0.98), (0.50, 0.98)), ((0.42, 0.92), (0.46, 0.74), (0.40, 0.66)), ((0.24, 0.62), (0.08, 0.44), (0.03, 0.22))),
    ),
    "emperor": (
        ((0.03, -0.12), ((0.26, -0.66), (0.70, -0.88), (1.04, -0.78)), ((0.96, -0.46), (0.84, -0.20), (0.80, 0.02)), ((0.50, 0.10), (0.20, 0.10), (0.03, 0.05))),
        ((0.03, 0.00), ((0.34, 0.00), (0.78, 0.00), (0.82, 0.26)), ((0.84, 0.56), (0.60, 0.78), (0.40, 0.74)), ((0.22, 0.66), (0.08, 0.46), (0.03, 0.22))),
    ),
    "ringlet": (
        ((0.03, -0.10), ((0.12, -0.66), (0.50, -0.92), (0.80, -0.70)), ((0.98, -0.50), (0.92, -0.12), (0.66, 0.02)), ((0.40, 0.10), (0.18, 0.08), (0.03, 0.05))),
        ((0.03, 0.00), ((0.36, -0.06), (0.74, 0.06), (0.74, 0.34)), ((0.72, 0.66), (0.44, 0.80), (0.26, 0.66)), ((0.12, 0.54), (0.06, 0.38), (0.03, 0.20))),
    ),
    "glider": (
        ((0.03, -0.10), ((0.30, -0.44), (0.76, -0.62), (1.12, -0.52)), ((1.14, -0.30), (0.96, -0.12), (0.74, -0.04)), ((0.44, 0.06), (0.18, 0.06), (0.03, 0.04))),
        ((0.03, 0.00), ((0.32, -0.02), (0.62, 0.02), (0.70, 0.16)), ((0.72, 0.38), (0.50, 0.54), (0.32, 0.50)), ((0.18, 0.46), (0.07, 0.34), (0.03, 0.18))),
    ),
}  # fmt: skip


# ---- what is drawn ------------------------------------------------------------------------------------------------


def is_unseen(colour: str, pattern: str, background: str) -> bool:
    """Whether a triple is held out of training; every colour, pattern and background loses about a fifth."""
    c, p, b = list(COLOURS).index(colour), PATTERNS.index(pattern), BACKGROUNDS.index(background)
    return (c + 2 * p + 3 * b) % 5 == 0


@cache
def _triples(unseen: bool) -> tuple[tuple[str, str, str], ...]:
    return tuple(t for t in product(COLOURS, PATTERNS, BACKGROUNDS) if is_unseen(*t) == unseen)


def unseen_combinations(count: int = 64) -> list[dict[str, str]]:
    """`count` distinct attribute sets whose (colour, pattern, background) never occurs in training."""
    triples = _triples(True)
    if not 0 < count <= len(triples) * len(SPECIES):
        raise ValueError(f"count must be from 1 to {len(triples) * len(SPECIES)}; got {count}")
    out = []
    for i in range(count):
        colour, pattern, background = triples[i % len(triples)]
        turn = i // len(triples)
        out.append(
            {
                "colour": colour, "pattern": pattern, "background": background, "motion": "still",
                "species": SPECIES[(i + turn) % len(SPECIES)], "posture": POSTURES[(i // 3 + turn) % len(POSTURES)],
            }
        )  # fmt: skip
    return out


_PATTERN_WORDS = {"plain": "plain", "spotted": "spotted", "striped": "striped", "eyed": "eye-spotted"}
_PLACE = {"sky": "against the sky", "meadow": "over a green meadow", "sand": "on pale sand", "night": "at night under the stars"}
_HOW = {"open": "with open wings", "tilted left": "tilted to the left", "tilted right": "tilted to the right",
        "folded": "with folded wings"}  # fmt: skip
TEMPLATES = (
    "{a} {pattern} {colour} {species} butterfly {how} {place}",
    "{place}, {a} {colour} {species} with {pattern} wings, {how}",
    "{a} {species} butterfly, {colour} and {pattern}, {how} {place}",
    "{colour} {pattern} {species} {place}, {how}",
)


def caption_for(attributes: dict[str, str], template: int = 0) -> str:
    """A caption that names every attribute; `template` picks one of `TEMPLATES`."""
    how = _HOW[attributes["posture"]]
    if attributes.get("motion") == "flapping":
        how = f"flapping its wings, {how}"
    text = TEMPLATES[template % len(TEMPLATES)].format(
        a="{a}", pattern=_PATTERN_WORDS[attributes["pattern"]], colour=attributes["colour"], species=attributes["species"],
        how=how, place=_PLACE[attributes["background"]],
    )  # fmt: skip
    before, found, after = text.partition("{a} ")
    return before + ("an " if after[:1] in "aeiou" else "a ") + after if found else text


# ---- drawing ------------------------------------------------------------------------------------------------------


def _paint(rgb, alpha=1.0, stroke=None, blur=0.0, shader=None) -> skia.Paint:
    p = skia.Paint(AntiAlias=True, Color=skia.Color(*(int(np.clip(v, 0, 255)) for v in rgb), int(255 * alpha)))
    if stroke:
        p.setStyle(skia.Paint.kStroke_Style)
        p.setStrokeWidth(stroke)
        p.setStrokeCap(skia.Paint.kRound_Cap)
    if blur:
        p.setMaskFilter(skia.MaskFilter.MakeBlur(skia.kNormal_BlurStyle, blur))
    if shader:
        p.setShader(shader)
    return p


def _mix(a, b, t: float) -> tuple[float, ...]:
    return tuple(x + (y - x) * t for x, y in zip(a, b))


def _vertical(top, bottom, h: int) -> skia.Paint:
    colours = [skia.Color(*(int(v) for v in c)) for c in (top, bottom)]
    return _paint((0, 0, 0), shader=skia.GradientShader.MakeLinear([(0, 0), (0, h)], colours))


def _background(canvas, kind: str, h: int, w: int, rng: np.random.Generator) -> None:
    s = min(h, w)
    if kind == "sky":
        canvas.drawPaint(_vertical((128, 196, 246), (206, 234, 252), h))
        for _ in range(3):
            x, y, r = rng.uniform(0, w), rng.uniform(0.02, 0.95) * h, rng.uniform(0.10, 0.17) * s
            for dx, dy, k in ((-1.1, 0.2, 0.7), (0, 0, 1.0), (1.1, 0.25, 0.75)):
                canvas.drawCircle(x + dx * r, y + dy * r, k * r, _paint((255, 255, 255), 0.75, blur=0.05 * s))
    elif kind == "meadow":
        canvas.drawPaint(_vertical((196, 224, 150), (142, 190, 92), h))
        for _ in range(26):
            x, y, length = rng.uniform(0, w), rng.uniform(0.1, 1.05) * h, rng.uniform(0.10, 0.22) * s
            path = skia.Path()
            path.moveTo(x, y)
            path.quadTo(x + rng.uniform(-0.04, 0.04) * s, y - 0.6 * length, x + rng.uniform(-0.09, 0.09) * s, y - length)
            canvas.drawPath(path, _paint((100, 156, 62), 0.55, stroke=0.018 * s))
    elif kind == "sand":
        canvas.drawPaint(_vertical((232, 214, 182), (208, 184, 146), h))
        for _ in range(7):
            y, a = rng.uniform(0, 1) * h, rng.uniform(0.02, 0.05) * s
            path = skia.Path()
            path.moveTo(-2, y)
            path.cubicTo(0.3 * w, y - a * 2, 0.6 * w, y + a * 2, w + 2, y - a)
            canvas.drawPath(path, _paint((178, 152, 112), 0.5, stroke=0.022 * s))
    else:
        canvas.drawPaint(_vertical((14, 18, 52), (38, 42, 92), h))
        canvas.drawCircle(rng.choice([0.13, 0.87]) * w, 0.14 * h, 0.075 * s, _paint((250, 246, 214), 0.95, blur=0.008 * s))
        for _ in range(22):
            canvas.drawCircle(
                rng.uniform(0, w), rng.uniform(0, h), rng.uniform(0.006, 0.014) * s, _paint((255, 255, 235), rng.uniform(0.5, 1))
            )


@cache
def _wing_path(species: str, which: int) -> skia.Path:
    start, *segments = _WINGS[species][which]
    path = skia.Path()
    path.moveTo(*start)
    for a, b, c in segments:
        path.cubicTo(*a, *b, *c)
    path.close()
    return path


_SPOTS = ((0.46, -0.46, 0.085), (0.72, -0.60, 0.075), (0.66, -0.26, 0.085), (0.36, -0.16, 0.065), (0.40, 0.26, 0.085), (0.60, 0.24, 0.065), (0.32, 0.50, 0.07))
_EYES = ((0.62, -0.46, 0.20), (0.44, 0.32, 0.17))


def _pattern(canvas, kind: str, colour) -> None:
    light = (255, 252, 235) if sum(colour) < 640 else (70, 50, 44)
    if kind == "spotted":
        for x, y, r in _SPOTS:
            canvas.drawCircle(x, y, r, _paint(light, 0.95))
    elif kind == "striped":
        for r in (0.34, 0.56, 0.78, 0.99):
            canvas.drawCircle(0.0, 0.0, r, _paint(_DARK, 0.85, stroke=0.075))
    elif kind == "eyed":
        for x, y, r in _EYES:
            canvas.drawCircle(x, y, r, _paint((255, 240, 190), 0.98))
            canvas.drawCircle(x, y, 0.72 * r, _paint(_DARK))
            canvas.drawCircle(x - 0.2 * r, y - 0.22 * r, 0.24 * r, _paint((255, 255, 255)))


def _wing(canvas, species: str, which: int, pattern: str, colour) -> None:
    path = _wing_path(species, which)
    stops = [_mix(colour, (255, 255, 255), 0.28), colour, _mix(colour, (0, 0, 0), 0.16)]
    shader = skia.GradientShader.MakeRadial(
        (0, 0), 1.15, [skia.Color(*(int(v) for v in c)) for c in stops], [0.0, 0.45, 1.0]
    )
    canvas.drawPath(path, _paint((0, 0, 0), shader=shader))
    canvas.save()
    canvas.clipPath(path, skia.ClipOp.kIntersect, True)
    for angle in (-66, -50, -36, -20, 22, 42, 62):
        x, y = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        canvas.drawLine(0.08 * x, 0.08 * y, 1.3 * x, 1.3 * y, _paint(_DARK, 0.28, stroke=0.016))
    _pattern(canvas, pattern, colour)
    canvas.drawPath(path, _paint(_DARK, 0.92, stroke=0.13))  # inner half shows: the dark margin
    canvas.restore()


def _side(canvas, attributes, colour, sign: int, opening: float) -> None:
    canvas.save()
    canvas.scale(sign * max(opening, 0.06), 1)
    _wing(canvas, attributes["species"], 1, attributes["pattern"], colour)
    _wing(canvas, attributes["species"], 0, attributes["pattern"], colour)
    canvas.restore()


def _body(canvas) -> None:
    for sign in (-1, 1):
        path = skia.Path()
        path.moveTo(0.01 * sign, -0.24)
        path.quadTo(0.05 * sign, -0.52, 0.22 * sign, -0.62)
        canvas.drawPath(path, _paint(_DARK, stroke=0.026))
        canvas.drawCircle(0.22 * sign, -0.62, 0.032, _paint(_DARK))
    canvas.drawOval(skia.Rect.MakeLTRB(-0.052, -0.08, 0.052, 0.52), _paint(_mix(_DARK, (120, 84, 60), 0.35)))
    canvas.drawOval(skia.Rect.MakeLTRB(-0.07, -0.22, 0.07, 0.10), _paint(_DARK))
    canvas.drawCircle(0, -0.24, 0.06, _paint(_DARK))
    canvas.drawOval(skia.Rect.MakeLTRB(-0.03, -0.14, 0.0, 0.36), _paint((190, 150, 120), 0.5))


def _butterfly(canvas, attributes, colour, opening: float) -> None:
    """In units of a wing's length around the origin."""
    if attributes["posture"] == "folded":
        canvas.rotate(-58)
        canvas.translate(-0.42, 0.12)
        _side(canvas, attributes, _mix(colour, (0, 0, 0), 0.14), 1, 0.84 * opening)
        _side(canvas, attributes, colour, 1, opening)
        _body(canvas)
        return
    for sign in (-1, 1):
        _side(canvas, attributes, colour, sign, opening)
    _body(canvas)


_ANGLE = {"open": 0, "tilted left": -32, "tilted right": 32, "folded": 0}


def render(attributes: dict[str, str], seed: int, height_px: int, width_px: int, num_frames: int = 1, fps: float = 12) -> np.ndarray:
    """uint8 [num_frames, height_px, width_px, 3]; a function of its arguments. More than one frame beats its wings."""
    rng = np.random.default_rng(seed)
    colour = np.clip(np.array(COLOURS[attributes["colour"]]) + rng.normal(0, 4, 3), 0, 255)
    s = min(height_px, width_px)
    size = s * rng.uniform(0.41, 0.47)
    x = width_px / 2 + rng.uniform(-0.04, 0.04) * s + rng.uniform(-0.3, 0.3) * max(width_px - s, 0)
    y = height_px / 2 + rng.uniform(-0.04, 0.04) * s + rng.uniform(-0.3, 0.3) * max(height_px - s, 0)
    angle = _ANGLE[attributes["posture"]] + rng.uniform(-7, 7)
    beat_hz, phase, bob = rng.uniform(1.4, 2.2), rng.uniform(0, 2 * math.pi), rng.uniform(0.02, 0.05) * s
    backdrop_seed = rng.integers(2**31)
    scene = skia.Surface(width_px, height_px)
    _background(scene.getCanvas(), attributes["background"], height_px, width_px, np.random.default_rng(backdrop_seed))
    backdrop = scene.makeImageSnapshot()
    frames = []
    for i in range(num_frames):
        swing = math.sin(2 * math.pi * beat_hz * i / fps + phase) if num_frames > 1 else 1.0
        opening = 0.60 + 0.40 * swing
        surface = skia.Surface(width_px, height_px)
        canvas = surface.getCanvas()
        canvas.drawImage(backdrop, 0, 0)
        shade = 0.34 if attributes["background"] == "night" else 0.22
        canvas.drawOval(
            skia.Rect.MakeXYWH(x - 0.75 * size * opening, y + 0.74 * size, 1.5 * size * opening, 0.34 * size),
            _paint((20, 16, 30), shade, blur=0.05 * s),
        )
        canvas.translate(x, y - (bob * swing if num_frames > 1 else 0))
        canvas.rotate(angle)
        canvas.scale(size, size)
        _butterfly(canvas, attributes, tuple(colour), opening)
        frames.append(surface.toarray(colorType=skia.kRGBA_8888_ColorType)[..., :3])
    return np.stack(frames)


# ---- the source ---------------------------------------------------------------------------------------------------

_IMAGE_SIZES = ((1, 1, 0.70), (1, 1.25, 0.10), (1.25, 1, 0.10), (1, 1.5, 0.05), (1.5, 1, 0.05))
_CLIP_SIZES = ((1, 1, 0.80), (1, 1.25, 0.10), (1.25, 1, 0.10))
CLIP_FPS = 12.0


class Synthetic:
    """`num_images` stills, then `num_clips` clips of 9 or 17 frames at 12 fps."""

    name = "synthetic"

    def __init__(self, num_images: int, num_clips: int, size_px: int, seed: int, unseen: bool):
        self.num_images, self.num_clips, self.size_px, self.seed, self.unseen = num_images, num_clips, size_px, seed, unseen

    def __len__(self) -> int:
        return self.num_images + self.num_clips

    def item_key(self, index: int) -> str:
        return f"butterfly-{self.seed}-{index:07d}"

    def identity(self) -> dict:
        return {
            "name": self.name, "version": 1, "num_images": self.num_images, "num_clips": self.num_clips,
            "size_px": self.size_px, "seed": self.seed, "unseen": self.unseen,
        }  # fmt: skip

    def read(self, index: int) -> Iterator[Clip]:
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, index]))
        clip = index >= self.num_images
        triples = _triples(self.unseen)
        colour, pattern, background = triples[rng.integers(len(triples))]
        attributes = {
            "colour": colour, "pattern": pattern, "background": background,
            "species": SPECIES[rng.integers(len(SPECIES))], "posture": POSTURES[rng.integers(len(POSTURES))],
            "motion": "flapping" if clip else "still",
        }  # fmt: skip
        sizes = _CLIP_SIZES if clip else _IMAGE_SIZES
        fy, fx, _ = sizes[rng.choice(len(sizes), p=[p for *_, p in sizes])]
        height, width = (int(f * self.size_px) // 16 * 16 for f in (fy, fx))
        frames = int(rng.choice([9, 17], p=[0.7, 0.3])) if clip else 1
        template = int(rng.integers(len(TEMPLATES)))
        video = render(attributes, int(rng.integers(2**62)), height, width, frames, CLIP_FPS)
        yield Clip(self.item_key(index), video, caption_for(attributes, template), CLIP_FPS, self.name, attributes)


def build(
    spec: str | None = None, num_images: int = 4000, num_clips: int = 600, size_px: int = 64, seed: int = 0, unseen: bool = False
) -> Synthetic:
    """The source; `size_px` (divisible by 16) is the short side. `unseen` draws only held-out combinations."""
    if spec:
        raise ValueError(f"the synthetic source takes no name after the colon; got {spec!r}")
    if size_px % 16 or size_px < 32:
        raise ValueError(f"--short-side must be divisible by 16 and at least 32 for the synthetic source; got {size_px}")
    if num_images < 0 or num_clips < 0:
        raise ValueError(f"--num-images and --num-clips must not be negative; got {num_images} and {num_clips}")
    return Synthetic(num_images, num_clips, size_px, seed, unseen)
