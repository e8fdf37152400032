"""A prepared folder on a server, read through whole files that are kept on this machine.

`https://HOST/DIR` is fetched with time limits and retries; `s3://`, `gs://` and whatever else fsspec has a driver for,
by that driver. What lies beside the shards is fetched when the data set is opened, a shard when the first of its
samples is asked for, and only once for all processes of a machine. A file counts only with the size and the checksum
that the manifest gives it; fsspec's own caches know no checksums and no bound. Shards that were not read for longest
make room for new ones.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import fsspec
from filelock import FileLock

from dfm_nb.base.files import is_url, lies_inside, read_json, replacing, sha256
from dfm_nb.base.log import log
from dfm_nb.base.records import SampleError
from dfm_nb.data.index import is_whole
from dfm_nb.data.prepared_folder import INDEX, is_sealed, shard_digests
from dfm_nb.data.shard_plan import SPLITS
from dfm_nb.data.sources._fetch import DEFAULT_LIMITS, download

DEFAULT_CACHE = "~/.cache/dfm_nb"
CACHE_GIB = 64.0
OWN = "shards-from-servers"
"""The folder in the cache that holds data sets. Nothing outside it is ever deleted."""
LARGEST_MANIFEST, LARGEST_BESIDE = 1 << 30, 1 << 34
"""Bytes that a server may send before there is a size to hold it to; the index of 100 million samples has 7 GB."""


class RemoteFolder:
    """A prepared folder at `url`, and the local folder that stands for it.

    Parameters
    ----------
    url : without a last slash. cache_dir : for all data sets; `DEFAULT_CACHE` when None. cache_gib : how much of the
        shards of all data sets is kept; those on their way come on top.

    Attributes
    ----------
    folder : the local one; all but the shards is there.

    Raises
    ------
    ValueError : it cannot be reached, or has no manifest or index, or its files are not those of the manifest.
    """

    def __init__(self, url: str, cache_dir: str | os.PathLike | None = None, cache_gib: float = CACHE_GIB):
        self.url, self._room = url.rstrip("/"), int(cache_gib * 2**30)
        self._cache = Path(cache_dir or DEFAULT_CACHE).expanduser() / OWN
        self._cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._cache) as place:
            path = Path(place, "manifest.json")
            self._download(path.name, path, LARGEST_MANIFEST)
            content, manifest = path.read_bytes(), read_json(path) or {}
        self._digests = shard_digests(manifest)
        if not is_sealed(manifest) or not self._digests:
            raise ValueError(
                f"{self.url}/manifest.json must be as it was written and list shards with checksums; make the data set "
                "whole where it lies (dfm adopt, dfm index) and copy it again"
            )
        self._sizes = {shard["name"]: shard["bytes"] for shard in manifest["shards"]}
        if (total := sum(self._sizes.values())) > self._room:
            if max(self._sizes.values()) > self._room:
                raise ValueError(f"dataset.cache_gib must hold the largest shard of {self.url}; raise it")
            need = total / 2**30
            log.warning("%s has %.3g GiB, so shards are fetched again each epoch; raise dataset.cache_gib", url, need)
        # another folder for other content
        self.folder = self._cache / hashlib.sha256(self.url.encode() + b"\0" + content).hexdigest()[:16]
        for name, digest in manifest["files"].items():
            if name != "manifest.json" and not name.endswith(".tar.idx"):
                self._fetch(name, LARGEST_BESIDE, _has(digest))
        for split in {str(shard.get("split")) for shard in manifest["shards"]} & set(SPLITS):
            self._fetch(f"{split}{INDEX}", LARGEST_BESIDE, functools.partial(is_whole, split=split))
        with replacing(self.folder / "manifest.json") as temporary:
            temporary.write_bytes(content)

    def provide(self, shard: Path) -> None:
        """Have a shard in the local folder: `shard` is the path that it gets there.

        Raises
        ------
        ValueError : it cannot be fetched, or is not what the manifest lists.
        """
        try:
            os.utime(shard)  # read last, removed last
        except FileNotFoundError:
            name = shard.relative_to(self.folder).as_posix()
            if name not in self._digests:
                raise ValueError(f"{self.url}/manifest.json lists no {name}; copy the data set again") from None
            self._make_room(self._sizes[name])
            self._fetch(name, self._sizes[name], _has(self._digests[name]))

    def _make_room(self, size: int) -> None:
        with FileLock(self._cache / "room.lock"):
            held = [(path.stat(), path) for path in self._cache.rglob("*.tar") if path.is_file()]
            total = sum(stat.st_size for stat, _ in held)
            for stat, path in sorted(held, key=lambda row: row[0].st_mtime_ns):
                if total + size <= self._room:
                    break
                path.unlink(missing_ok=True)  # whoever reads it now keeps it, and fetches it again for the next sample
                total -= stat.st_size

    def _fetch(self, name: str, most_bytes: int, is_right: Callable[[Path], bool]) -> None:
        """Have a file of the local folder; among the processes and threads of this machine, one fetches it."""
        if not lies_inside(name):
            raise ValueError(f"{self.url}/manifest.json names {name!r}, which is not inside it; copy it again")
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{path.name}.lock")):
            if path.is_file():
                return
            with replacing(path) as temporary:
                self._download(name, temporary, most_bytes)
                if not is_right(temporary):
                    raise ValueError(f"{self.url}/{name} is not the file that its manifest lists; copy it there again")

    def _download(self, name: str, path: Path, most_bytes: int) -> None:
        url = f"{self.url}/{name}"
        try:
            if url.startswith(("http://", "https://")):
                limits = dataclasses.replace(DEFAULT_LIMITS, max_bytes=most_bytes)
                download(f"{self.url}/{quote(name)}", path, limits)
                return
            server, place = fsspec.url_to_fs(url)
            if server.size(place) > most_bytes:
                raise ValueError(f"it has more than {most_bytes} bytes")
            server.get_file(place, str(path))
        except SampleError as error:
            raise ValueError(f"{error.detail}; training goes on where it was when it is started again") from None
        except Exception as error:  # each driver has errors of its own, and tries again by itself
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(f"{url} could not be fetched: {said}") from None


def _has(digest: str) -> Callable[[Path], bool]:
    return lambda path: sha256(path) == digest


@functools.cache
def remote_folder(url: str, cache_dir: str | None = None, cache_gib: float = CACHE_GIB) -> RemoteFolder:
    """The one of this process."""
    return RemoteFolder(url, cache_dir, cache_gib)


def local_folder(path: str, cache_dir: str | None = None, cache_gib: float = CACHE_GIB) -> Path:
    """`path`, or the folder that stands for a server's."""
    return remote_folder(path, cache_dir, cache_gib).folder if is_url(path) else Path(path)
