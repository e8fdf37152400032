"""What the samples of a training have. It is found in the data, so it is no setting: checkpoints carry it in a file of
its own, and requests that ask for nothing else get it.
"""

import base64
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationInfo, field_validator

FILE = "training_samples.json"
SAME = 0.999
"""Cosine above which a prompt is a caption, written in other letters."""
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


# ---- captions as 128 bits, of which similar ones share most: SimHash (Charikar 2002, Section 3) of their words ------
# Each word has 128 random signs, and a bit of the caption is the majority of its words' signs. So two captions differ
# in the share angle / 180 degrees of their bits, where the angle is that between their sets of words:
#
#     a red fox in snow | A red fox in snow.            0 bits, as case and punctuation do not count
#     a red fox in snow | a red fox in the forest      37 bits
#     a red fox in snow | two robots play chess        64 bits, half of all, as for any captions without a common word

BYTES = 16
ALIKE = 36
"""Captions without a common word differ in 64 +- 5.7 bits (binomial): 1 of 2 million pairs by no more than these."""


def _bits(text: str) -> np.ndarray:
    words = {word.encode() for word in re.findall(r"\w+", text.lower())}
    hashed = b"".join(hashlib.shake_128(word).digest(BYTES) for word in words)
    signs = np.unpackbits(np.frombuffer(hashed, np.uint8)).reshape(-1, 8 * BYTES) * 2.0 - 1
    return np.packbits(signs.sum(0) > 0)


def simhash(texts: Iterable[str]) -> str:
    """The bits of texts, in base64."""
    return base64.b64encode(b"".join(_bits(text).tobytes() for text in texts)).decode()


class Captions(Form, frozen=True):
    """Captions whose samples have one form. given : whether pictures are given with them. simhash : their bits."""

    given: bool
    simhash: str

    def differing_bits(self, text: str) -> np.ndarray:
        """In how many bits a text differs from each of them."""
        known = np.frombuffer(base64.b64decode(self.simhash), np.uint8).reshape(-1, BYTES)
        return np.unpackbits(known ^ _bits(text), axis=1).sum(1)


class Anchors(BaseModel, strict=True, extra="forbid"):
    """Training captions that are put before prompts.

    texts : N captions. means : for each the mean of its text states, float16 [N, D] in base64, N times as long as one.
    """

    texts: list[str] = Field(min_length=1)
    means: str

    @field_validator("means")
    @classmethod
    def _whole(cls, means: str, info: ValidationInfo) -> str:
        _rows(means, len(info.data.get("texts", [""])))
        return means

    @classmethod
    def of(cls, means: Mapping[str, np.ndarray]) -> "Anchors":
        """Of mean states [D] by caption."""
        rows = np.stack([*means.values()]).astype(np.float16)
        return cls(texts=[*means], means=base64.b64encode(rows.tobytes()).decode())

    def nearest(self, prompt: str, mean: np.ndarray) -> str:
        """The caption whose mean state is nearest to that of a prompt [D], float32; "" if the prompt is one itself.

        Nearness is the cosine about the mean of all captions, which they share and which tells nothing.
        """
        if prompt in self.texts:
            return ""
        rows = _rows(self.means, len(self.texts))
        centre = rows.mean(0)
        rows = rows - centre
        mean = mean - centre
        cosines = rows @ mean / np.maximum(np.linalg.norm(rows, axis=1) * np.linalg.norm(mean), 1e-12)
        near = int(cosines.argmax())
        return "" if cosines[near] > SAME else self.texts[near]


@functools.lru_cache(1)  # asked for with each prompt
def _rows(means: str, number: int) -> np.ndarray:
    """float32 [number, D]; ValueError if they are no such bytes."""
    return np.frombuffer(base64.b64decode(means, validate=True), np.float16).reshape(number, -1).astype(np.float32)


class TrainingSamples(BaseModel, strict=True, extra="forbid"):
    """kinds : that of more samples first; one if all are stills, or clips. captions : [] if all samples have one form.

    given : whether pictures are given with some. anchors : None if no prompt gets one.
    """

    kinds: list[Kind] = []
    captions: list[Captions] = []
    given: bool = False
    anchors: Anchors | None = None

    @property
    def file(self) -> bytes:
        """The content of `FILE`."""
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> "TrainingSamples":
        """From a configuration of fa46f34c, which kept them as settings.

        Its captions were bits alone, in the order of their kind's sizes; older kinds of one size had none.
        """
        kinds: list[Kind] = []
        captions = []
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
