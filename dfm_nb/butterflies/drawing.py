"""Draws one butterfly, still or in flight, with Skia.

A random generator decides everything that a caption does not mention: place, size, tilt, shades, clouds, grass, stars.
All lengths are relative, so one generator state gives the same picture at any size. Colours and outlines are those of
`drawing.toml`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import skia

RGB = tuple[int, ...]

SHAPES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
INK: RGB = (34, 26, 34)
CREAM: RGB = (255, 246, 218)
INK_MARKED = ("orange", "yellow", "pink", "white")


def _mix(a: RGB, b: RGB, t: float) -> RGB:
    return tuple(round(x + (y - x) * t) for x, y in zip(a, b))


def _argb(rgb: RGB, alpha: float = 1.0) -> int:
    return round(255 * alpha) << 24 | rgb[0] << 16 | rgb[1] << 8 | rgb[2]


def _paint(rgb: RGB = INK, alpha: float = 1.0, width: float = 0.0) -> skia.Paint:
    """A fill, or a line of a width."""
    return skia.Paint(
        Color=_argb(rgb, alpha),
        AntiAlias=True,
        Style=skia.Paint.kStroke_Style if width else skia.Paint.kFill_Style,
        StrokeWidth=width,
        StrokeCap=skia.Paint.kRound_Cap,
        StrokeJoin=skia.Paint.kRound_Join,
    )


def _path(*contours: Sequence[Sequence[float]]) -> skia.Path:
    """Each contour has its first point, then lines, quadratic and cubic curves by their 2, 4 or 6 numbers."""
    path = skia.Path()
    for start, *curves in contours:
        path.moveTo(*start)
        for numbers in curves:
            {2: path.lineTo, 4: path.quadTo, 6: path.cubicTo}[len(numbers)](*numbers)
    return path


def _figure(canvas: skia.Canvas, name: str, **paint: Any) -> None:
    """Draw the marks of a figure of the file. paint : of marks that have none."""
    for mark in SHAPES["figures"][name]:
        painted = _paint(**mark.get("paint", paint))
        for oval in mark.get("ovals", ()):
            canvas.drawOval(skia.Rect.MakeLTRB(*oval), painted)
        canvas.drawPath(_path(*mark.get("path", ())), painted)


# ---- backgrounds: drawn in units of the short side ----------------------------------------------------------------


def _sky(canvas: skia.Canvas, w: float, h: float, rng: np.random.Generator) -> None:
    for _ in range(3):
        x = rng.uniform(0, w)
        y = rng.uniform(0.08, 0.92) * h
        s = rng.uniform(0.07, 0.12)
        cloud = skia.Path()
        for dx, dy, r in SHAPES["cloud"]:
            cloud.addCircle(x + dx * s, y + dy * s, r * s)
        cloud.addRoundRect(skia.Rect.MakeXYWH(x - 2 * s, y, 4 * s, 0.8 * s), 0.4 * s, 0.4 * s)
        canvas.drawPath(cloud, _paint((255, 255, 255), 0.85))


def _meadow(canvas: skia.Canvas, w: float, h: float, rng: np.random.Generator) -> None:
    for _ in range(5):
        x = rng.uniform(0, w)
        y = rng.uniform(0, 0.7) * h
        canvas.drawCircle(x, y, rng.uniform(0.04, 0.10), _paint((238, 246, 176), 0.35))
    for shade, lift in (((140, 184, 70), 0.34), ((96, 146, 48), 0.22)):
        blades = []
        for x in np.arange(-0.02, w, 0.075):
            x0 = x + rng.uniform(-0.02, 0.02)
            tall = lift * rng.uniform(0.5, 1.1)
            lean = rng.uniform(-0.08, 0.08)
            rise = (x0 + 0.01, h - tall * 0.6, x0 + lean, h - tall)
            blades.append([(x0, h), rise, (x0 + 0.04, h - tall * 0.5, x0 + 0.04, h)])
        canvas.drawPath(_path(*blades), _paint(shade))
    for _ in range(4):
        x = rng.uniform(0, w)
        y = h - rng.uniform(0.04, 0.24)
        r = 0.016
        petals = skia.Path()
        for angle in np.arange(5) * math.tau / 5:
            petals.addCircle(x + 1.5 * r * math.cos(angle), y + 1.5 * r * math.sin(angle), r)
        canvas.drawPath(petals, _paint((255, 252, 236)))
        canvas.drawCircle(x, y, r, _paint((240, 200, 70)))


def _sand(canvas: skia.Canvas, w: float, h: float, rng: np.random.Generator) -> None:
    for k in range(4):
        y = h * (0.22 + 0.22 * k)
        a = rng.uniform(-0.1, 0.1)
        b = rng.uniform(-0.1, 0.1)
        crest = (w * 0.3, y + a, w * 0.7, y + b, w + 0.1, y + rng.uniform(-0.04, 0.04))
        dune = _path([(-0.1, y), crest, (w + 0.1, h + 0.1), (-0.1, h + 0.1)])
        canvas.drawPath(dune, _paint((196, 156, 104), 0.16))
        dune.offset(0, 0.012)
        canvas.drawPath(dune, _paint((255, 240, 212), 0.16))
    for _ in range(14):
        x = rng.uniform(0, w)
        y = rng.uniform(0.1, 1) * h
        r = rng.uniform(0.004, 0.013)
        canvas.drawOval(skia.Rect.MakeXYWH(x, y, 2.6 * r, 1.7 * r), _paint((150, 112, 74), 0.55))


def _night(canvas: skia.Canvas, w: float, h: float, rng: np.random.Generator) -> None:
    for alpha in (0.45, 0.7, 1.0):
        stars = skia.Path()
        for x, y, size in rng.random((11, 3)).tolist():
            stars.addCircle(x * w, y * 0.95 * h, 0.004 + 0.009 * size**3)
        canvas.drawPath(stars, _paint((255, 250, 226), alpha))
    side = -1 if rng.random() < 0.5 else 1
    x = w / 2 + side * (w / 2 - 0.13)
    y = 0.13
    r = 0.075
    glow = skia.Paint(Shader=skia.GradientShader.MakeRadial((x, y), 3.2 * r, [0x50C8CEFF, 0x00C8CEFF]))
    canvas.drawCircle(x, y, 3.2 * r, glow)
    moon = skia.Path()
    moon.addCircle(x, y, r)
    bite = skia.Path()
    bite.addCircle(x - side * 0.6 * r, y - 0.25 * r, 0.85 * r)
    canvas.drawPath(skia.Op(moon, bite, skia.kDifference_PathOp), _paint((255, 246, 206)))


BACKGROUNDS = {"sky": _sky, "meadow": _meadow, "sand": _sand, "night": _night}


# ---- the butterfly ------------------------------------------------------------------------------------------------


def _outline(points: np.ndarray) -> skia.Path:
    """A smooth closed curve from the root through `points` [N, 2] and back, sharp at the root (Catmull-Rom)."""
    p = np.vstack([[0, 0], points, [0, 0]])
    slope = np.zeros_like(p)
    slope[1:-1] = (p[2:] - p[:-2]) / 6
    path = skia.Path()
    path.moveTo(0, 0)
    for a, b, sa, sb in zip(p[:-1], p[1:], slope[:-1], slope[1:]):
        path.cubicTo(*(a + sa).tolist(), *(b - sb).tolist(), *b.tolist())
    path.close()
    return path


class Wing:
    """One wing's outline, paints and marks; made once per picture, drawn once per side and frame."""

    def __init__(self, points: list[list[float]], colour: str, pattern: str, rng: np.random.Generator):
        self.points = np.array(points) * (1 + rng.normal(0, 0.02, (len(points), 2)))
        self.path = _outline(self.points)
        self.pattern = pattern
        self.ink = INK if colour in INK_MARKED else CREAM
        base = tuple((SHAPES["colour"][colour] + rng.normal(0, 5, 3)).clip(0, 255).astype(int).tolist())
        reach = float(np.hypot(*self.points.T).max())
        shades = [_mix(base, INK, 0.22), _mix(base, (255, 255, 255), 0.12), base, _mix(base, INK, 0.10)]
        shader = skia.GradientShader.MakeRadial((0, 0), reach, [_argb(c) for c in shades], [0.0, 0.28, 0.75, 1.0])
        self.paint = skia.Paint(AntiAlias=True, Shader=shader)
        dark = _mix(base, INK, 0.82)
        self.margin = _paint(dark, width=0.16)
        self.edge = _paint(dark, width=0.035)
        self.vein = _paint(dark, 0.42, 0.012)
        self.outer = self.points[1:-1]
        inside = self.outer * 0.935
        self.dots = (inside[:-1] + inside[1:]) / 2
        self.spots: list[tuple[float, float]] = []
        for x, y in np.vstack([self.dots * 0.82, self.outer[1:-1] * 0.46]).tolist():
            if all(math.hypot(x - a, y - b) > 0.2 for a, b in self.spots):  # apart, or they would merge
                self.spots.append((x, y))
        self.veins = skia.Path()
        for x, y in np.vstack([self.outer, self.dots]).tolist():
            self.veins.moveTo(0, 0)
            self.veins.quadTo(0.55 * x, 0.55 * y - 0.05, x, y)

    def draw(self, canvas: skia.Canvas, marked: bool = True) -> None:
        canvas.drawPath(self.path, self.paint)
        canvas.save()
        canvas.clipPath(self.path, doAntiAlias=True)
        canvas.drawPath(self.veins, self.vein)
        if marked and self.pattern == "stripes":
            _figure(canvas, "stripes", rgb=self.ink, width=0.12)
        canvas.drawPath(self.path, self.margin)
        if marked and self.pattern == "spots":
            for x, y in self.spots:
                canvas.drawCircle(x, y, 0.074, _paint(self.ink))
        elif marked and self.pattern == "eyespots":
            self._eyespot(canvas)
        canvas.restore()
        canvas.drawPath(self.path, self.edge)

    def _eyespot(self, canvas: skia.Canvas) -> None:
        x, y = (self.points[self.points[:, 1] < 0.75].mean(0) * 1.06).tolist()  # without the tail
        for rgb, r in ((INK, 0.30), (CREAM, 0.255), (INK, 0.15)):  # an owl butterfly's: a ring must be visible at 64 px
            canvas.drawCircle(x, y, r, _paint(rgb))
        canvas.drawCircle(x - 0.05, y - 0.05, 0.05, _paint((255, 255, 255)))


def _body(canvas: skia.Canvas, bend: float) -> None:
    """Abdomen, thorax, head and antennae, head up."""
    tips = (-0.24 + bend, 0.24 + bend)
    feelers = []
    for side, tip in zip((-1, 1), tips):
        feelers.append([(0.02 * side, -0.24), (0.05 * side, -0.42, 0.12 * side + bend, -0.56, tip, -0.64)])
    canvas.drawPath(_path(*feelers), _paint(width=0.022))
    for tip in tips:
        canvas.drawCircle(tip, -0.64, 0.028, _paint())
    _figure(canvas, "body")


def load_skia() -> None:
    """FileNotFoundError if Skia is missing, or does not load: it needs libGL and libEGL, which slim containers lack."""
    global skia
    try:
        import skia
    except ModuleNotFoundError:
        raise FileNotFoundError("drawing butterflies needs Skia: pip install 'dfm_nb[butterflies]'") from None
    except ImportError as error:
        fix = "apt-get install libgl1 libegl1, or conda install -c conda-forge libgl libegl"
        raise FileNotFoundError(f"drawing butterflies needs Skia, which does not load ({error}); {fix}") from None


def draw(
    attributes: dict[str, str], rng: np.random.Generator, height_px: int, width_px: int, num_frames: int
) -> np.ndarray:
    """uint8 [num_frames, height_px, width_px, 3]; one frame is a still, more are a wing beat from open wings.

    Raises
    ------
    FileNotFoundError : Skia does not load.
    """
    load_skia()
    short = min(height_px, width_px)
    w = width_px / short
    h = height_px / short
    backdrop = np.zeros((height_px, width_px, 4), np.uint8)
    scene_rng = np.random.default_rng(rng.integers(2**63))
    canvas = skia.Surface(backdrop, skia.kRGBA_8888_ColorType).getCanvas()
    canvas.scale(short, short)
    background = attributes["background"]
    wash = [_argb(rgb) for rgb in SHAPES["background"][background]["wash"]]
    canvas.drawPaint(skia.Paint(Shader=skia.GradientShader.MakeLinear([(0, 0), (0, h)], wash)))
    BACKGROUNDS[background](canvas, w, h, scene_rng)
    butterfly = _Butterfly(attributes, rng, w, h)
    beat_frames = rng.uniform(7.0, 10.0)
    droop = rng.uniform(0, 0.05)
    frames = np.empty((num_frames, height_px, width_px, 3), np.uint8)
    for t in range(num_frames):
        angle = math.tau * t / beat_frames
        middle = butterfly.middle
        spread = 1.0 - droop if num_frames == 1 else middle + (1 - middle) * math.cos(angle)
        lift = 0.02 * math.sin(angle)
        pixels = backdrop.copy()
        canvas = skia.Surface(pixels, skia.kRGBA_8888_ColorType).getCanvas()
        canvas.scale(short, short)
        butterfly.draw(canvas, spread, lift)
        frames[t] = pixels[..., :3]
    return frames


class _Butterfly:
    """Wings, shadow, position, size and rotation."""

    def __init__(self, attributes: dict[str, str], rng: np.random.Generator, w: float, h: float):
        posture = attributes["posture"]
        dx, dy = SHAPES["position"][attributes["position"]]
        self.folded = posture == "folded"
        self.scale = SHAPES["size"][attributes["size"]]
        self.middle = 0.74 if self.folded else 0.62  # of the wing beat; from 2 * middle - 1 to 1
        self.degrees = SHAPES["posture"][posture] + rng.uniform(-7, 7)
        outlines = SHAPES["species"][attributes["species"]].values()
        reach = max(math.hypot(x, y) for x, y in chain(*outlines))
        self.size = self.scale * rng.uniform(0.41, 0.47) / reach
        self.x = w / 2 + dx + rng.uniform(-1, 1) * (0.03 + 0.3 * (w - 1))
        self.y = h / 2 + dy + rng.uniform(-1, 1) * (0.03 + 0.3 * (h - 1)) + 0.02
        self.bend = rng.uniform(-0.03, 0.03)
        self.facing = 1.0 if rng.random() < 0.5 else -1.0
        self.fore, self.hind = (Wing(points, attributes["colour"], attributes["pattern"], rng) for points in outlines)
        self.shadow = _paint((10, 10, 24), SHAPES["background"][attributes["background"]]["shadow"])
        self.shadow.setMaskFilter(skia.MaskFilter.MakeBlur(skia.kNormal_BlurStyle, 0.05))

    def draw(self, canvas: skia.Canvas, spread: float, lift: float) -> None:
        canvas.translate(self.x, self.y - lift)
        if self.folded:
            self._side_view(canvas, spread)
        else:
            self._top_view(canvas, spread)

    def _top_view(self, canvas: skia.Canvas, spread: float) -> None:
        canvas.rotate(self.degrees)
        canvas.scale(self.size, self.size)
        cast = skia.Path()
        for side in (-1, 1):
            place = skia.Matrix.MakeAll(side * spread, 0, 0.05, 0, 1, 0.09, 0, 0, 1)
            cast.addPath(self.fore.path, place)
            cast.addPath(self.hind.path, place)
        canvas.drawPath(cast, self.shadow)
        for side in (-1, 1):
            canvas.save()
            canvas.translate(0.03 * side, 0)
            canvas.scale(side * spread, 1)
            self.hind.draw(canvas)
            self.fore.draw(canvas)
            canvas.restore()
        _body(canvas, self.bend)

    def _side_view(self, canvas: skia.Canvas, spread: float) -> None:
        """Wings closed over the back, perched on a twig, head to the left (or mirrored)."""
        canvas.translate(self.facing * -0.07 * self.scale, 0.27 * self.scale)
        canvas.scale(self.facing * self.size * 1.3, self.size * 1.3)
        canvas.rotate(self.degrees * 0.7)
        _figure(canvas, "twig")
        canvas.rotate(14)
        for dx, lean in ((0.06, 10), (0.0, 0)):  # the far pair, then the near one
            canvas.save()
            canvas.translate(dx, -0.02)
            canvas.rotate(lean)
            canvas.scale(1, spread)
            for wing, turn in ((self.fore, -72), (self.hind, -92)):
                canvas.save()
                canvas.rotate(turn)
                if dx:
                    canvas.drawPath(wing.path, self.shadow)
                wing.draw(canvas, marked=not dx)
                canvas.restore()
            canvas.restore()
        _figure(canvas, "legs")
        canvas.rotate(-90)
        _body(canvas, self.bend)
