"""`smithsonian_butterflies`: photographs of pinned butterflies with their names, from the hub or from a local copy.

The source is the hub, or the path of the data set's parquet file or of a folder that holds it. The caption is the
column `name`. The bytes in the column `image` are used where there are any, else `image_url` is fetched.

Source of the data: https://huggingface.co/datasets/huggan/smithsonian_butterflies_subset (Smithsonian Open Access).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dfm_nb.data.sources import table

Flags = table.Flags
FETCHES = True
NAME = "smithsonian_butterflies"
FILE = "data/train-00000-of-00001.parquet"
HUB_ID = "huggan/smithsonian_butterflies_subset"
URL = f"hf://datasets/{HUB_ID}/{FILE}"
HOW_TO_FETCH = (
    f"with internet access, run `hf download {HUB_ID} --repo-type dataset --local-dir DIR`, "
    "then pass --source smithsonian_butterflies:DIR"
)


def build(spec: str | None = None, caption_column: str = "name", **options: Any) -> table.Table:
    """The source.

    Parameters
    ----------
    spec : None for the hub; else the parquet file, or a folder that holds it (as `hf download --local-dir` leaves it).
    caption_column : `scientific_name` and `image_alt` are others.
    **options : `image_column`, else bytes in `image` or else `image_url`; others as in `MediaOptions`.

    Raises
    ------
    ValueError, FileNotFoundError : the file is not there or cannot be fetched; the message says how to get it.
    """
    path = Path(spec).expanduser() if spec else None
    if path is not None and path.is_dir():
        path = next((p for p in (path / FILE, *sorted(path.rglob("*.parquet"))) if p.is_file()), path / FILE)
    try:
        source = table.build(str(path or URL), caption_column=caption_column, **options)
    except ValueError as error:
        raise error if path else ValueError(f"{error}; {HOW_TO_FETCH}") from None
    return replace(source, name=NAME, label=FILE)
