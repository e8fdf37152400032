"""Checkpoints that attack: made from the stored run by the tests, with checksums that fit."""

import os
import shutil
from pathlib import Path

from dfm_nb.base.files import seal, sha256
from tests.conftest import STORED

NAME = "iter_0000003"
WEIGHT = "decoder.layers.0.self_attention.linear_proj.weight"


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path | str):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def copy_run(target: Path) -> Path:
    """A run folder of our own with one whole checkpoint; returns its `iter_*` folder."""
    shutil.copytree(STORED / "run", target)
    return target / "checkpoints" / NAME


def reseal(folder: Path) -> None:
    """Checksums that fit the files, as anybody can write them."""
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != "checksums.json")
    listing = {n: {"bytes": (folder / n).stat().st_size, "sha256": sha256(folder / n)} for n in names}
    seal(folder / "checksums.json", listing)
