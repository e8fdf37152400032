"""`smithsonian_butterflies`: photographs of pinned butterflies with their names, from the hub or from a local copy.

Enters: nothing, or the path of the data set's parquet file or of a folder that holds it. Leaves: `Clip`s of one frame;
the caption is the column `name`. The bytes in the column `image` are used where there are any, else `image_url` is
fetched. Guarantees and cost: as `table`. The file stays in the hub's cache.

Source of the data: https://huggingface.co/datasets/huggan/smithsonian_butterflies_subset (Smithsonian Open Access).
"""

from __future__ import annotations

from pathlib import Path

from dfm_nb.base import video
from dfm_nb.data.sources import _fetch
from dfm_nb.data.sources._media import BACKGROUND_FLAG, ClipOptions
from dfm_nb.data.sources._rows import open_rows
from dfm_nb.data.sources.table import COLUMN_FLAGS, Table, pick_columns

FLAGS = (*COLUMN_FLAGS, BACKGROUND_FLAG)
NAME = "smithsonian_butterflies"
REPOSITORY = "huggan/smithsonian_butterflies_subset"
FILE = "data/train-00000-of-00001.parquet"
URL = f"hf://datasets/{REPOSITORY}/{FILE}"
IMAGE_COLUMNS = ("image", "image_url")


def _local_file(spec: str) -> Path:
    path = Path(spec).expanduser()
    if not path.is_dir():
        return path
    inside = [path / FILE, *sorted(path.glob("*.parquet")), *sorted(path.glob("data/*.parquet"))]
    found = next((p for p in inside if p.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{path} holds no parquet file; {_how_to_fetch()}")
    return found


def _how_to_fetch() -> str:
    return (
        f"where there is a network, run: hf download {REPOSITORY} {FILE} --repo-type dataset --local-dir DIR, "
        f"then pass --source {NAME}:DIR"
    )


def build(
    spec: str | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    background: str = "white",
    timeout_s: float = 20.0,
    retries: int = 3,
    backoff_s: float = 1.0,
    max_bytes: int = 64 << 20,
) -> Table:
    """The source.

    Parameters
    ----------
    spec : None for the hub; else the parquet file, or a folder that holds it (as `hf download --local-dir` leaves it).
    image_column : default: bytes in `image`, else `image_url`.
    caption_column : default `name`; `scientific_name` and `image_alt` are others.
    timeout_s, retries, backoff_s, max_bytes : of each image that has to be fetched.

    Raises
    ------
    FileNotFoundError : the file is not there and cannot be fetched; the message says how to get it.
    """
    limits = _fetch.Limits(timeout_s=timeout_s, retries=retries, backoff_s=backoff_s, max_bytes=max_bytes)
    try:
        path = _local_file(spec) if spec else _fetch.hub_file(URL)
    except FileNotFoundError as error:
        raise error if spec else FileNotFoundError(f"{error}; {_how_to_fetch()}") from None
    rows = open_rows(path)
    media, caption = pick_columns(rows, path.name, image_column, caption_column or "name")
    media = [c for c in media if image_column or c in IMAGE_COLUMNS] or media
    return Table(NAME, rows, FILE, path.parent, media, caption, video.parse_colour(background), ClipOptions(), limits)
