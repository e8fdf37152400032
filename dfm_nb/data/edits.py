"""`edits.jsonl` next to the shards: edited captions and excluded samples.

One line per edited sample:

    {"key": "cat-07", "caption": "a black cat on a wall"}
    {"key": "cat-12", "left_out": true}

The next preparation of the folder applies all edits. Training skips excluded samples from its next start, and every
other sample keeps its position in the data order.
"""

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dfm_nb.base.files import plain, sha256, write_atomically

EDITS = "edits.jsonl"
LEFT_OUT = "left_out"
"""Reason in the `SampleError` of an excluded sample."""


class Edit(BaseModel):
    """The edit of one sample. caption : None if unchanged, "" for that of the source after another was encoded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    key: Annotated[str, Field(min_length=1, max_length=1000)]
    caption: Annotated[str, Field(max_length=10_000)] | None = None
    left_out: bool = False


def read_edits(folder: str | Path) -> dict[str, Edit]:
    """Edits by key; {} if there are none. The later of two lines for one sample counts.

    Raises
    ------
    ValueError : a line is not an edit; the message has its number.
    """
    path = Path(folder) / EDITS
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


def write_edit(folder: str | Path, edit: Edit) -> None:
    """Write an edit to the file, replacing the sample's earlier one; an edit without changes removes the line."""
    edits = read_edits(folder) | {edit.key: edit}
    lines = [
        e.model_dump_json(exclude_defaults=True) + "\n" for e in edits.values() if e.caption is not None or e.left_out
    ]
    if lines:
        write_atomically(Path(folder) / EDITS, "".join(lines).encode())
    else:
        (Path(folder) / EDITS).unlink(missing_ok=True)


def edits_sha256(folder: str | Path) -> str | None:
    """Checksum of the file; None if there is none."""
    path = Path(folder) / EDITS
    return sha256(plain(path)) if os.path.lexists(path) else None
