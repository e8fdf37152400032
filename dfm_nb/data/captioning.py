"""A sample's captions, tags and weight, from the cells of a table, and captions built from tags."""

import contextlib
import re
from typing import Any

import numpy as np
import torch

from dfm_nb.base.files import Json
from dfm_nb.base.limits import MOST_TEXT
from dfm_nb.base.records import Clip, SampleError
from dfm_nb.base.seeds import generator_for

TAG_COLUMNS = ("tags", "keywords")
TAG_DROPPED = 0.3
"""Share of the tags that a caption omits: training then sees each tag with and without the others."""

WEIGHT_COLUMNS = ("weight", "repeats")
LEAST_WEIGHT = 0.001
MOST_WEIGHT = 1000

MIRRORED = "-flip"
"""Ends the key of a mirrored sample."""
SIDE = re.compile(
    r"\b(left|right)(most|wards?)?\b|\b(links|rechts|gauche|droite?|izquierd[ao]|derech[ao]|sinistr[ao]|destr[ao]|"
    r"esquerd[ao]|direit[ao]|linker|linken|rechter|rechten)\b|\b(лев|прав)(ый|ая|ое|ой|ом|ую|о|а)\b|слева|справа|"
    r"влево|вправо|[左右]",
    re.IGNORECASE,
)
"""Words that would be wrong for the mirrored picture."""


def captions_of(meta: Json) -> list[Any]:
    """All captions of a sample, by its .json; those of other writers may have none, which is None."""
    return [meta.get("caption"), *(meta.get("more_captions") or ())]


def caption_keys(clip: Clip) -> Json:
    """The captions of a clip, as its `.json` has them."""
    more = {"more_captions": clip.more_captions} if clip.more_captions else {}
    return {"caption": clip.caption, **more}


def texts_of(value: Any, where: object) -> list[str]:
    """The captions of a cell: a text, a number, or a list of texts; empty ones are skipped.

    Raises
    ------
    SampleError : the cell has something else; `where` names the cell.
    """
    values = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
    if isinstance(value, (int, float)):
        values = [str(value)]
    for text in values:
        if not isinstance(text, str | None):
            said = f"{where} must be text or a list of texts; it holds a {type(text).__name__}"
            raise SampleError("no_caption", f"{said}; write text there")
    return [text.strip() for text in values if text and text.strip()]


def tags_of(value: Any) -> list[str]:
    """The tags of a cell: a text with commas between them, or a list; [] for anything else."""
    values = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
    tags = ",".join(text for text in values if isinstance(text, str)).split(",")
    return [tag.strip() for tag in tags if tag.strip()]


def weight_of(value: Any, where: object) -> float:
    """How often an epoch uses a sample, from a cell; 1 for an empty one.

    Raises
    ------
    SampleError : the cell holds no number within the limits; `where` names it.
    """
    with contextlib.suppress(TypeError, ValueError):
        weight = float(1 if value is None else value)
        if LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            return weight
    said = f"the weight of {where} must be a number from {LEAST_WEIGHT} to {MOST_WEIGHT}; it is {str(value)[:80]!r}"
    raise SampleError("bad_weight", f"{said}; correct it, or remove the row to leave it out")


def check_length(texts: list[str], where: object) -> None:
    """SampleError if a sample's captions and tags are too long together."""
    size = sum(map(len, texts))
    if size > MOST_TEXT:
        said = f"{where} must have at most {MOST_TEXT} characters of captions; it has {size}; shorten them"
        raise SampleError("too_large", said)


def tag_captions(tags: list[str], count: int, key: str) -> list[str]:
    """`count` captions of a sample's tags, in random order and each without some of them; a function of `key`.

    Each tag is dropped with probability `TAG_DROPPED`; at least one stays.

    >>> tag_captions(["fruit", "apple", "red"], 2, "apple-7")
    ['apple, red, fruit', 'fruit, red']
    """
    captions = []
    for number in range(count if tags else 0):
        g = generator_for("tags", key, number)
        order = torch.randperm(len(tags), generator=g)
        kept = torch.rand(len(tags), generator=g) >= TAG_DROPPED
        chosen = [tags[i] for i in order if kept[i]] or [tags[order[0]]]
        captions.append(", ".join(chosen))
    return captions
