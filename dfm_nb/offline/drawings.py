"""`drawings`: the package's 240 captioned drawings of 96 px, of fruit, animals, houses, clocks and more.

200 are for training; the 40 of the split `test` are by other authors. They are a folder as Hugging Face's datasets have
it, so your own pictures, prepared with `folder:DIR`, take the same path. The columns next to `text` are
`tags` (for `--tag-captions`), `kind` (one of 20), and title, author and file in the Open Clip Art Library 0.18 (public
domain).
"""

from pathlib import Path
from typing import Any

from dfm_nb.data.sources import folder, table
from dfm_nb.data.sources._media import MediaOptions

Flags = MediaOptions
FOLDER = Path(__file__).with_name("drawings")


def build(spec: str | None = None, **options: Any) -> folder.Folder | table.Table:
    """The source of `drawings`.

    Parameters
    ----------
    spec : None; ValueError for another.
    **options : see `MediaOptions`.
    """
    if spec:
        raise ValueError(f"--source drawings takes nothing after a colon; got {spec!r}; use folder:DIR for your own")
    return folder.build(str(FOLDER), **options)
