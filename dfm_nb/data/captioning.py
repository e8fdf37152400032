"""A sample's captions, tags and weight, from the cells of a table; captions built from tags; and edits made by hand.

`edits.jsonl` next to the shards has one line per edited sample:

    {"key": "cat-07", "caption": "a black cat on a wall"}
    {"key": "cat-12", "left_out": true}

The next preparation of the folder applies all edits. Training skips excluded samples from its next start, and every
other sample keeps its position in the data order.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dfm_nb.base.files import Json, plain, sha256, write_atomically
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


# ---- edits ---------------------------------------------------------------------------------------

EDITS = "edits.jsonl"
LEFT_OUT = "left_out"
"""Reason in the `SampleError` of an excluded sample."""


class Edit(BaseModel):
    """The edit of one sample. caption : None if unchanged, "" for that of the source after another was encoded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    key: Annotated[str, Field(min_length=1, max_length=1000)]
    caption: Annotated[str, Field(max_length=10_000)] | None = None
    left_out: bool = False


def read_edits(folder: Path) -> dict[str, Edit]:
    """Edits by key; {} if there are none. The later of two lines for one sample counts.

    Raises
    ------
    ValueError : a line is not an edit; the message has its number.
    """
    path = folder / EDITS
    edits = dict[str, Edit]()
    if not os.path.lexists(path):
        return edits
    for number, line in enumerate(plain(path).read_bytes().splitlines(), 1):
        try:
            edit = Edit.model_validate_json(line)
        except ValidationError:
            raise ValueError(
                f'{path}, line {number} must have "key", and "caption" or "left_out"; got {line[:60]!r}; remove it'
            ) from None
        edits[edit.key] = edit
    return edits


def write_edit(folder: Path, edit: Edit) -> None:
    """Write an edit to the file, replacing the sample's earlier one; an edit without changes removes the line."""
    edits = read_edits(folder) | {edit.key: edit}
    changes = [edit for edit in edits.values() if edit.caption is not None or edit.left_out]
    lines = [edit.model_dump_json(exclude_defaults=True) + "\n" for edit in changes]
    if lines:
        write_atomically(folder / EDITS, "".join(lines).encode())
    else:
        (folder / EDITS).unlink(missing_ok=True)


def edits_sha256(folder: Path) -> str | None:
    """Checksum of the file; None if there is none."""
    path = folder / EDITS
    return sha256(plain(path)) if os.path.lexists(path) else None
