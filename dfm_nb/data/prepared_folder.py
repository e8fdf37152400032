"""The folder that a preparation writes: whose it is, whether it is finished, and who may write now.

A folder that holds anything else is never written into, and two preparations of one folder take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb.base.files import (
    DISK_FULL,
    lies_inside,
    local,
    older,
    read_json,
    remove_temporaries,
    sha256,
    write_atomically,
)
from dfm_nb.base.log import log
from dfm_nb.data import shards
from dfm_nb.data.shard_plan import SPLITS

TOKENIZER = "tokenizer.safetensors"
INDEX = ".index.arrow"
"""Ends the name of a split's index (`dfm_nb.data.index`), which has checksums of its own."""

_INDEXES = [f"{split}{INDEX}" for split in SPLITS]
OWN_FILES = ("manifest.json", TOKENIZER, "text_empty.safetensors", *_INDEXES, *shards.NV_META)
"""What a preparation makes beside the shards; the manifest comes first, as without it the folder is unfinished."""

LARGEST_FILE = 1 << 30  # bytes of one of `BESIDE`; without a bound, a sparse file would be hashed for minutes

STATISTICS: dict[str, Any] = {"latent_mean": [float], "latent_std": [float]}
MANIFEST: dict[str, Any] = {
    **STATISTICS,
    "source": {"name": str},
    "tokenizer": {"name": str},
    "text_encoder": {"name": str},
    "counts": {"train": int, "val": int, "test": int, "dropped": int, "dropped_by_reason": {}},
    "psnr_db": {},
    "drops": [{"key": str, "reason": str, "detail": str}],
    "shards": [{"name": str, "bytes": int, "sha256": str}],
}
"""What is read of a manifest, by its types."""

_SHARD = re.compile(r"(\d{4}/)?rank\d+-\d{6,}\.tar")

BESIDE = (TOKENIZER, "text_empty.safetensors", "*.tar.idx", ".nv-meta/.info.json", ".nv-meta/split.yaml")
"""Small files beside the shards that training reads; the manifest has their checksums and its own.

Energon's indices of shards in folders below (`shard_plan`) are not among them: they would be thousands.
"""


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """`manifest.json` with checksums of the files `BESIDE`, which must be there, and of itself."""
    found = sorted(path for pattern in BESIDE for path in folder.glob(pattern))
    manifest = manifest | {"files": {path.relative_to(folder).as_posix(): sha256(path) for path in found}}
    # the name of a folder may be no UTF-8: JSON then has its bytes as \udcXX
    text = json.dumps(_sealed(manifest), indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")
    path = folder / "manifest.json"
    if not path.is_file() or path.read_bytes() != text:
        write_atomically(path, text)


def _sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """With its checksum among those of the files."""
    files = {name: digest for name, digest in manifest["files"].items() if name != "manifest.json"}
    manifest = manifest | {"files": files}
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return manifest | {"files": files | {"manifest.json": own}}


def is_sealed(manifest: dict[str, Any] | None) -> bool:
    """Whether its own checksum fits."""
    return manifest is not None and isinstance(manifest.get("files"), dict) and manifest == _sealed(manifest)


def _check_files(folder: Path, manifest: dict[str, Any], unread: str | None) -> None:
    """ValueError when one has changed since it was written."""
    for name, digest in manifest["files"].items():
        if unread and name.endswith(unread):
            continue
        path = folder / name
        if name == TOKENIZER and not path.exists():
            log.warning("%s is gone; training goes on, but its checkpoints' samples cannot be decoded", path)
            continue
        whole = path.is_file() and path.stat().st_size <= LARGEST_FILE and sha256(path) == digest
        if not (is_sealed(manifest) if name == "manifest.json" else whole):
            raise ValueError(
                f"{path} is missing or has changed since it was written, says {folder / 'manifest.json'}; restore it, "
                'or, where the change is meant, set "files" to {} in that manifest'
            )


def read_manifest(folder: Path, wanted: dict[str, Any] = MANIFEST, unread: str | None = None) -> dict[str, Any] | None:
    """`manifest.json`, None when there is none.

    Parameters
    ----------
    unread : the end of the names of files that the caller does not read, and that need no check.

    Raises
    ------
    ValueError : it has not what is wanted, no finite statistics, or a file that it lists has changed.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    manifest = read_json(path) or {}
    missing = lacking(manifest, wanted)
    if missing:
        raise ValueError(
            f"{path} is damaged ({', '.join(missing[:3])}); restore it or run dfm prepare with --resume after removing "
            "it (for shards of another writer: dfm adopt)"
        )
    if "files" not in manifest:
        raise ValueError(older(path, "run dfm prepare again"))
    if not isinstance(manifest["files"], dict):
        raise ValueError(f"{path} is damaged (files); restore it")
    if odd := [name for name in (*manifest["files"], *shard_digests(manifest)) if not lies_inside(name)]:
        raise ValueError(f"{path} must list files inside its folder; it lists {odd[0]!r:.80}; do not use this data set")
    _check_files(folder, manifest, unread)
    return manifest


def lacking(value: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The keys of `wanted` that an object has not, or of another type; statistics must be finite and of one length."""
    missing = [name for name, kind in wanted.items() if not fits(value.get(name), kind)]
    if not missing and STATISTICS.keys() <= wanted.keys():
        mean, std = value["latent_mean"], value["latent_std"]
        if len(mean) != len(std) or not mean or not np.isfinite([mean, std]).all() or min(std) < 0:
            return list(STATISTICS)
    return missing


def shard_digests(manifest: dict[str, Any] | None) -> dict[str, str]:
    """sha256 by shard; empty where they are not known."""
    listed = (manifest or {}).get("shards") or []
    return {shard["name"]: shard["sha256"] for shard in listed} if fits(listed, MANIFEST["shards"]) else {}


def is_adopted(manifest: dict[str, Any] | None) -> bool:
    """Whether `dfm adopt` has measured the samples into its records."""
    return (manifest or {}).get("source") == {"name": "adopted"}


def fits(value: object, kind: Any) -> bool:
    """Whether a value is of a type; or a list of such, or an object with such values."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(fits(value.get(k), v) for k, v in kind.items())
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(v, kind[0]) for v in value)
    return type(value) is kind or (kind is float and type(value) is int)


class PreparedFolder:
    """See the module. A `plan` is what must be equal for a folder to be this preparation's."""

    def __init__(self, path: str | Path):
        self.path = local(path)
        self.records = self.path / shards.RECORDS
        self.manifest = self.path / "manifest.json"
        self.tokenizer = self.path / TOKENIZER

    def held_plan(self) -> dict[str, Any] | None:
        """The plan of the preparation that the folder holds, finished or not."""
        return read_json(self.records / "plan.json") or (read_json(self.manifest) or {}).get("plan")

    def check(self, plan: dict[str, Any], resume: bool, overwrite: bool) -> bool:
        """True when the folder already holds all of this preparation; an error when it may not be written into."""
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"--output-dir {self.path} is a file; name a folder")
        held = self.held_plan()
        if held is None:
            # a notebook's launcher may log into the folder; with --overwrite it may not be the folder that is meant
            there = {p.name for p in self.path.glob("*")} - {shards.RECORDS, "launch.json", "launch.log"}
            made = {n for n in there if n in (".nv-meta", *OWN_FILES) or n.endswith((".tar", INDEX))}
            if taken := there if overwrite else made:
                raise FileExistsError(
                    f"{self.path} holds {min(taken)}, which dfm prepare did not make; choose another --output-dir or "
                    "move it away (to train on shards as they are: dfm adopt)"
                )
            return False
        if overwrite:
            return False
        differ = [k for k in sorted(plan.keys() | held.keys()) if plan.get(k) != held.get(k)]
        if differ:
            listed = "; ".join(f"{k}: {_brief(held.get(k))} there, {_brief(plan.get(k))} now" for k in differ[:4])
            raise FileExistsError(
                f"{self.path} already holds another data set ({listed}); "
                "choose another --output-dir or pass --overwrite"
            )
        if self.manifest.is_file():
            return True
        if not resume:
            raise FileExistsError(f"{self.path} is unfinished; pass --resume to continue or --overwrite to start again")
        return False

    def claim(self, plan: dict[str, Any], resume: bool, overwrite: bool) -> bool:
        """`check`, then make the folder ours; True when there is nothing left to do. The caller holds its `turn`."""
        if self.check(plan, resume, overwrite):
            return True
        if overwrite:
            self._clear()
        for place in (*_places(self.path), *_places(self.records)):
            remove_temporaries(place)
        write_atomically(self.records / "plan.json", json.dumps(plan).encode())
        return False

    def _clear(self) -> None:
        """Delete what the records name, and then these; the lock stays, as we hold it."""
        records = [path for place in _places(self.records) for path in place.glob("*.json")]
        listed = {path.relative_to(self.records).as_posix().removesuffix(".json") for path in records}
        listed |= shard_digests(read_json(self.manifest)).keys()  # of a folder that was copied without its records
        names = [name for name in listed if _SHARD.fullmatch(name) and (self.path / name).parent in _places(self.path)]
        for name in (*OWN_FILES, *names, *(f"{name}.idx" for name in names)):
            (self.path / name).unlink(missing_ok=True)
        for path in records:
            path.unlink()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the folder, after another preparation of it has ended; nothing where the file system has no locks."""
        self.records.mkdir(parents=True, exist_ok=True)
        with (self.records / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("another process is at work in %s; waiting for it to end", self.path)
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass
            yield

    def agree_on_encoders(self, identities: dict[str, dict]) -> None:
        """The encoders of a resumed preparation must be those it began with; `identities` are by kind."""
        path = self.records / "encoders.json"
        now = json.loads(json.dumps(identities))
        held = read_json(path)
        if held is None:
            write_atomically(path, json.dumps(now).encode())
            return
        for kind, value in now.items():
            if held.get(kind) != value:
                raise ValueError(
                    f"{self.path} was begun with another {kind.replace('_', ' ')} ({_brief(held.get(kind))} there, "
                    f"{_brief(value)} now); pass the same one or --overwrite"
                )

    @contextlib.contextmanager
    def full_disk_explained(self) -> Iterator[None]:
        """A full disk becomes one sentence."""
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:  # Energon's index is a database
            if getattr(error, "errno", None) not in DISK_FULL and "disk is full" not in str(error):
                raise
            raise ValueError(
                f"there is no space left for {self.path}; make room and give the command again, "
                "dfm prepare with --resume"
            ) from None


def _places(folder: Path) -> list[Path]:
    """The folder, and those below it that many shards are put into (`shard_plan`); links lead away."""
    return [folder, *(p for p in folder.glob("[0-9][0-9][0-9][0-9]") if not p.is_symlink())]


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."
