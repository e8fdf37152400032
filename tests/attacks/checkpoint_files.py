"""Checkpoints that attack: made from the stored run by the tests, with checksums that fit."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dfm_nb.base.files import seal, sha256

STORED = Path(__file__).parents[1] / "stored"
NAME = "iter_0000003"
WEIGHT = "decoder.layers.self_attention.linear_proj.weight"


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path):
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


def change_index(folder: Path, change) -> None:
    """`change(index)` changes the index in place or returns what to write instead, bytes or an object."""
    path = folder / ".metadata"
    index: Metadata = pickle.loads(path.read_bytes())
    changed = change(index)
    changed = index if changed is None else changed
    path.write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(changed))
    reseal(folder)


def as_bytes(folder: Path, mark: Path, *keys: str) -> None:
    """Declare entries as bytes, which torch's planner would unpickle: runs a shell command."""
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    file = folder / "__0_0.distcp"
    offset = file.stat().st_size
    with file.open("ab") as f:
        f.write(buffer.getvalue())

    def change(index: Metadata) -> None:
        for key in keys:
            declared = BytesStorageMetadata()
            if hasattr(index.state_dict_metadata.get(key), "size"):
                declared.size = index.state_dict_metadata[key].size  # megatron-core's check of the shape
            index.state_dict_metadata[key] = declared
            index.storage_data = {k: v for k, v in index.storage_data.items() if k.fqn != key}
            index.storage_data[MetadataIndex(key)] = _StorageInfo(file.name, offset, len(buffer.getvalue()))

    change_index(folder, change)
