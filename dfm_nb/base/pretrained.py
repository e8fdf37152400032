"""Packaged models by name: `FOLDER` has NAME.safetensors, each with a card, NAME.md."""

from __future__ import annotations

import os
from pathlib import Path

from dfm_nb.base.run import iteration_folders, written_path

FOLDER = Path(__file__).parents[1] / "butterflies" / "pretrained"
DEFAULT = "butterflies"
"""The model of `dfm generate` without `--checkpoint-path`."""
EXPORTED = "model.safetensors"
"""File name in a folder of exported or imported weights."""


def names() -> list[str]:
    """Names of the packaged models, sorted."""
    return sorted(p.stem for p in FOLDER.glob("*.safetensors"))


def packaged(name: object) -> Path | None:
    """The file of the packaged model of that name; None if there is none."""
    return FOLDER / f"{name}.safetensors" if str(name) in names() else None


def weights_path(path: str | os.PathLike) -> Path:
    """Resolve a user's path of weights: a packaged model by its name, unless the path exists and is not a data set.

    For a folder with model.safetensors and no checkpoints, it is that file.
    """
    path = written_path(Path(path))
    if (path / EXPORTED).is_file() and not any(iteration_folders(p) for p in (path, path / "checkpoints")):
        return path / EXPORTED
    taken = os.path.exists(path) and not os.path.exists(path / ".nv-meta")
    return path if taken else packaged(path) or path
