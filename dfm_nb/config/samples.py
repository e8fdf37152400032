"""What the samples of a training have. It is found in the data, so it is no setting: checkpoints carry it in a file of
its own, and requests that ask for nothing else get it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import BaseModel, Field

FILE = "training_samples.json"
Side = Annotated[int, Field(ge=16, multiple_of=16, lt=1 << 20)]
Frames = Annotated[int, Field(ge=1, lt=1 << 20)]
Rate = Annotated[float, Field(gt=0, lt=1e6)]
SETTINGS = ("num_video_frames", "height", "width", "fps")
"""Those of `generation` that a sample has, in the order of `geometry.pixel_size`."""


class Form(BaseModel, frozen=True):
    """Size in px, frames and rate of samples."""

    height: Side
    width: Side
    num_video_frames: Frames
    fps: Rate

    @property
    def still(self) -> bool:
        return self.num_video_frames == 1


class Kind(Form, frozen=True):
    """The usual form of stills or of clips. sizes : of all, as `WIDTHxHEIGHT`, the most frequent first."""

    sizes: list[str] = []


class Captions(Form, frozen=True):
    """Captions whose samples have one form. given : whether pictures are given with them. simhash : `base.simhash`."""

    given: bool
    simhash: str


class TrainingSamples(BaseModel, strict=True, extra="forbid"):
    """kinds : that of more samples first; one if all are stills, or clips. captions : [] if all samples have one form.

    given : whether pictures are given with some.
    """

    kinds: list[Kind] = []
    captions: list[Captions] = []
    given: bool = False

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> TrainingSamples:
        """From a configuration of fa46f34c, which kept them as settings.

        Its captions were bits alone, in the order of their kind's sizes; older kinds of one size had none.
        """
        kinds: list[Kind] = []
        captions: list[Captions] = []
        for group in ("generation.", "generation.other."):
            form = {name: settings.get(group + name) for name in SETTINGS}
            sizes = settings.get(f"{group}sizes") or []
            if None in form.values() or any(kind.model_dump(include={*SETTINGS}) == form for kind in kinds):
                continue
            kinds.append(Kind.model_validate({**form, "sizes": sizes}))
            for line, size in zip_longest(settings.get(f"{group}captions") or [], sizes, fillvalue=""):
                width, _, height = size.partition("x")
                if line:
                    own = {**form, "width": int(width), "height": int(height), "given": False, "simhash": line}
                    captions.append(Captions.model_validate(own))
        return cls(kinds=kinds, captions=captions, given=bool(settings.get("generation.given")))
