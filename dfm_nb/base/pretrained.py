"""Packaged models by name: NAME.safetensors, each with a card, NAME.md.

The entry points of `dfm_nb.pretrained` are the folders that have them.
"""

import os
from pathlib import Path

from dfm_nb.base import plugins
from dfm_nb.base.files import StrPath
from dfm_nb.base.run import iteration_folders, written_path

DEFAULT = "butterflies"
"""The model of `dfm generate` without `--checkpoint-path`."""
STUDENT = "butterflies-student"
"""Its few-step student, with which the Studio begins."""
EXPORTED = "model.safetensors"
"""File name in a folder of exported or imported weights."""


def files() -> dict[str, Path]:
    """The packaged models by name, sorted."""
    models: dict[str, Path] = {}
    for folder in plugins.load_all("pretrained").values():
        models |= {path.stem: path for path in sorted(folder.glob("*.safetensors"))}
    return models


def packaged(name: object) -> Path | None:
    """The file of the packaged model of that name; None if there is none."""
    return files().get(str(name))


def weights_path(path: StrPath) -> Path:
    """Resolve a user's path of weights: a packaged model by its name, unless the path exists and is not a data set.

    For a folder with model.safetensors and no checkpoints, it is that file.
    """
    path = written_path(Path(path))
    if (path / EXPORTED).is_file() and not iteration_folders(path) and not iteration_folders(path / "checkpoints"):
        return path / EXPORTED
    taken = os.path.exists(path) and not os.path.exists(path / ".nv-meta")
    return path if taken else packaged(path) or path
