"""Models that come with the package, by name: `FOLDER` has NAME.safetensors, each with a card, NAME.md."""

from __future__ import annotations

import os
from pathlib import Path

from dfm_nb.base.run import iteration_folders, written_path

FOLDER = Path(__file__).parents[1] / "butterflies" / "pretrained"
DEFAULT = "butterflies"
"""What `dfm generate` takes without `--checkpoint-path`."""
EXPORTED = "model.safetensors"
"""What a folder of exported or imported weights holds."""


def names() -> list[str]:
    """Names of the packaged models, sorted."""
    return sorted(p.stem for p in FOLDER.glob("*.safetensors"))


def packaged(name: object) -> Path | None:
    """The file of the packaged model of that name; None when there is none."""
    return FOLDER / f"{name}.safetensors" if str(name) in names() else None


def weights_path(path: str | os.PathLike) -> Path:
    """What a user's path of weights means: a packaged model by its name, unless the path exists and is no data set.

    Of a folder with model.safetensors and no checkpoints, that file.
    """
    path = written_path(Path(path))
    if (path / EXPORTED).is_file() and not any(iteration_folders(p) for p in (path, path / "checkpoints")):
        return path / EXPORTED
    taken = os.path.exists(path) and not os.path.exists(path / ".nv-meta")
    return path if taken else packaged(path) or path
