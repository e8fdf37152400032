"""`smithsonian_butterflies`: photographs of pinned butterflies with their names, from the hub or from a local copy.

The source is the hub, or the path of the data set's parquet file or of a folder that holds it. The caption is the
column `name`. The bytes in the column `image` are used where there are any, else `image_url` is fetched.

Source of the data: https://huggingface.co/datasets/huggan/smithsonian_butterflies_subset (Smithsonian Open Access).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dfm_nb.data.sources import _fetch, table
from dfm_nb.data.sources._media import BackgroundFlag


class Flags(BackgroundFlag, table.ColumnFlags):
    pass


FETCHES = True
NAME = "smithsonian_butterflies"
FILE = "data/train-00000-of-00001.parquet"
URL = f"hf://datasets/huggan/smithsonian_butterflies_subset/{FILE}"
LIMITS = _fetch.Limits(max_bytes=64 << 20)


def build(
    spec: str | None = None, caption_column: str = "name", limits: _fetch.Limits = LIMITS, **options: Any
) -> table.Table:
    """The source.

    Parameters
    ----------
    spec : None for the hub; else the parquet file, or a folder that holds it (as `hf download --local-dir` leaves it).
    caption_column : `scientific_name` and `image_alt` are others.
    limits : of each image that has to be fetched.
    **options : `image_column`, else bytes in `image` or else `image_url`; `background`, as in `MediaOptions`.

    Raises
    ------
    FileNotFoundError : the file is not there and cannot be fetched; the message says how to get it.
    """
    path = Path(spec).expanduser() if spec else None
    if path is not None and path.is_dir():
        path = next((p for p in (path / FILE, *sorted(path.rglob("*.parquet"))) if p.is_file()), path / FILE)
    source = table.build(str(path or URL), caption_column=caption_column, limits=limits, **options)
    return replace(source, name=NAME, label=FILE)
