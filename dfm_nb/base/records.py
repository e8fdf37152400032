"""The types passed between stages, and the error that means "this sample cannot be used".

A source yields `Clip`; preparation turns it into an `EncodedClip` and writes it to a shard; the data set reads it back.
Nothing else is passed between stages.
"""

import re
from dataclasses import dataclass, field
from typing import Iterator, NamedTuple, Protocol

import numpy as np
from torch import Tensor

KEY_PATTERN = re.compile(r"[\w\-]+")
"""A key names a sample in tars and metrics; a dot would start the extension in a WebDataset member name."""

UNKNOWN_FPS = 24.0
"""Rate of a stored sample that says none."""


LONGEST_DETAIL = 1000
"""Characters: a cell of a table may hold a megabyte, and a manifest names thousands of drops."""


class SampleError(ValueError):
    """One sample cannot be used; it is dropped, counted under `reason` and reported with `key`, and the run continues.

    Parameters
    ----------
    reason : short slug, the same for every sample with this fault (`unreadable_image`, `no_caption`, `too_small`, ...).
    detail : one sentence for the user: the file, the error and the fix.
    """

    def __init__(self, reason: str, detail: str):
        self.reason = reason
        detail = " ".join(detail.encode("utf-8", "backslashreplace").decode().splitlines())  # a name may be anything
        if len(detail) > LONGEST_DETAIL:
            detail = f"{detail[:400]} [...] {detail[-400:]}"
        self.detail = detail
        super().__init__(self.detail)


@dataclass(slots=True)
class Clip:
    """Pixels and a caption from a source.

    video : uint8 [T, H, W, 3], RGB; T = 1 for an image.
    caption : text that UTF-8 can encode; otherwise a SampleError, as encoders and shards refuse it.
    more_captions : further ones, which training takes in turns with the first.
    tags : single words and phrases, of which `--tag-captions` makes further captions.
    lost : what its file shows and `video` does not, as a sentence by reason; counted and reported as drops are.
    fps : frames per second of `video` (any positive number for an image; it is kept as metadata).
    attributes : known facts about the picture (used to measure models on synthetic data).
    original_size : height and width before it was resized, if it was.
    weight : how often an epoch uses it.
    given : as `video`, each of its own size: the pictures and clips that a model is given to make this one of.
    """

    key: str
    video: np.ndarray
    caption: str
    fps: float
    source: str
    attributes: dict[str, str] = field(default_factory=dict)
    original_size: tuple[int, int] | None = None
    more_captions: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0
    given: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not KEY_PATTERN.fullmatch(self.key):
            raise ValueError(f"a sample key must match {KEY_PATTERN.pattern}; got {self.key!r}")
        v = self.video
        if v.dtype != np.uint8 or v.ndim != 4 or v.shape[-1] != 3:
            raise ValueError(f"Clip.video must be uint8 [T, H, W, 3]; got {v.dtype} {list(v.shape)} for {self.key}")
        try:
            for text in (self.caption, *self.more_captions, *self.tags):
                text.encode()
        except UnicodeEncodeError as error:  # half of a pair in JSON, or a file's name in another encoding
            fault = f"the caption of {self.key} must be text in UTF-8; it is {text[:80]!a} ({error.reason})"
            raise SampleError("caption_not_utf8", f"{fault}; write the caption beside it as UTF-8") from None


@dataclass(slots=True)
class EncodedClip:
    """One training sample.

    latent : bfloat16 [1, C, T, H, W], the tokenizer's output (not normalised by the manifest's mean and std).
    text_emb : bfloat16 [1, L, D], L the caption's true number of tokens.
    meta : image_height, image_width, num_frames (pixels), fps, caption, more_captions, key, source, ...
    more_text : the same as `text_emb` of each further caption.
    given : as `latent`, each of its own size, of the pictures and clips that are given beside it.
    """

    key: str
    latent: Tensor
    text_emb: Tensor
    meta: dict
    more_text: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)

    @property
    def fps(self) -> float:
        """Frames per second that the network is told."""
        return float(self.meta.get("fps") or UNKNOWN_FPS)


class Content(NamedTuple):
    """What an item is read from, by which it is known again.

    sha256 : of its files, whole, and of what is given beside them; a copy has the same.
    stamp : their sizes and times of change. Where it is the same, nothing is hashed again.
    weight : see `Clip`.
    """

    sha256: str
    stamp: str
    weight: str

    @property
    def sample(self) -> tuple[str, str]:
        """What gives the same samples, but for captions."""
        return self.sha256, self.weight


Said = tuple[list[str], list[str]]
"""Captions and tags."""


class Source(Protocol):
    """A list of items (an image, a video file, a table row); an item yields zero, one or many clips.

    Inherit from it: then what has a default here can be left out.

    tagged : whether some clips have tags, as `--tag-captions` requires.
    captions_from : {where captions come from: how many, with examples}, where the source can tell.
    """

    name: str
    tagged: bool = False
    captions_from: dict[str, str] = {}

    def __len__(self) -> int: ...

    def item_key(self, index: int) -> str:
        """Stable and unique within the source; the keys of the item's clips start with it."""
        ...

    def read(self, index: int) -> Iterator[Clip]:
        """Raises SampleError if the item cannot be used."""
        ...

    def item_split(self, index: int) -> str | None:
        """`train`, `val`, `test`, or None to use the fractions."""
        return None

    def captions(self, index: int) -> Said | None:
        """Captions and tags of an item without its pixels, for `--texts-only`; None: they come from `read`."""
        return None

    def content(self, index: int, held: Content | None = None, hashed: bool = False) -> Content | None:
        """What an item is read from; None: unknown, so that it is encoded again when the source grows.

        held : of an earlier preparation. hashed : read no file that was not hashed before.
        """
        return None

    def identity(self) -> dict:
        """JSON-serialisable description of the input (paths, counts, seeds); equal identities mean equal samples."""
        ...


class Tokenizer(Protocol):
    """A causal video autoencoder with 4x temporal and 8x8 spatial compression.

    `encode` maps video [B, 3, T, H, W] in [-1, 1], T = 1 + 4k, H and W divisible by 8, to latents
    [B, 16, 1 + (T - 1) / 4, H / 8, W / 8]; `decode` maps back.
    """

    name: str

    def encode(self, video: Tensor) -> Tensor: ...

    def decode(self, latents: Tensor) -> Tensor: ...

    def identity(self) -> dict: ...


class TextEncoder(Protocol):
    """`encode` returns, for each caption, bfloat16 [L, D] with L its true number of tokens; "" is a valid caption.

    It may also have `lost(caption)`: what the embedding of a caption lacks, as a sentence by reason.
    """

    name: str
    dim: int

    def encode(self, captions: list[str]) -> list[Tensor]: ...

    def identity(self) -> dict: ...
