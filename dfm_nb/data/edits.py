"""`edits.jsonl` beside the shards: captions that were changed by hand, and samples that were set aside.

A line for each sample that was touched:

    {"key": "cat-07", "caption": "a black cat on a wall"}
    {"key": "cat-12", "left_out": true}

The next preparation of the folder follows all of it. Training leaves out what is set aside from its next start on, and
every other sample keeps its place in the order of the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dfm_nb.base.files import sha256, write_atomically

EDITS = "edits.jsonl"
LEFT_OUT = "left_out"
"""Reason of a `SampleError` of a sample that was set aside."""
MOST_BYTES = 1 << 28
"""A million long captions."""


class Edit(BaseModel):
    """What was changed of one sample. caption : None, as it was."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    key: Annotated[str, Field(min_length=1, max_length=1000)]
    caption: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    left_out: bool = False


def read_edits(folder: str | Path) -> dict[str, Edit]:
    """By key; {} where there are none. Of two lines for one sample the later counts.

    Raises
    ------
    ValueError : a line that is no edit, with its number.
    """
    path, found = Path(folder) / EDITS, dict[str, Edit]()
    if not path.is_file():
        return found
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} must have at most {MOST_BYTES >> 20} MiB; it has {size >> 20}; remove lines")
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            edit = Edit.model_validate_json(line)
        except ValidationError:
            raise ValueError(
                f'{path}, line {number} must be an object with "key", and "caption" (text) or "left_out" (true); '
                f"got {line[:60]!r}; mend or remove the line"
            ) from None
        found[edit.key] = edit
    return found


def write_edit(folder: str | Path, edit: Edit) -> None:
    """Put one into the file, in place of what it said of that sample; one that changes nothing takes its line away."""
    edits = read_edits(folder) | {edit.key: edit}
    lines = [e.model_dump_json(exclude_defaults=True) + "\n" for e in edits.values() if e.caption or e.left_out]
    if lines:
        write_atomically(Path(folder) / EDITS, "".join(lines).encode())
    else:
        (Path(folder) / EDITS).unlink(missing_ok=True)


def edits_sha256(folder: str | Path) -> str | None:
    """Of the file; None where there is none."""
    path = Path(folder) / EDITS
    return sha256(path) if path.is_file() else None
