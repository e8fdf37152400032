"""Models that come with the package, by name: `dfm_nb/pretrained/NAME.safetensors`, each with a card, `NAME.md`."""

from __future__ import annotations

import os
from pathlib import Path

from dfm_nb.base.run import written_path

FOLDER = Path(__file__).parents[1] / "pretrained"
DEFAULT = "butterflies"
"""What `dfm generate` takes without `--checkpoint-path`."""


def names() -> list[str]:
    """Names of the packaged models, sorted."""
    return sorted(p.stem for p in FOLDER.glob("*.safetensors"))


def packaged(name: object) -> Path | None:
    """The file of the packaged model of that name; None when there is none."""
    return FOLDER / f"{name}.safetensors" if str(name) in names() else None


def weights_path(path: str | os.PathLike) -> Path:
    """What a user's path of weights means: a packaged model by its name, unless the path exists and is no data set."""
    path = written_path(Path(path))
    taken = os.path.exists(path) and not os.path.exists(path / ".nv-meta")
    return path if taken else packaged(path) or path
