"""A prepared folder on a server, read through whole files that are kept on this machine.

`https://HOST/DIR` is fetched with time limits and retries; `s3://`, `gs://` and whatever else fsspec has a driver for,
by that driver. What lies beside the shards is fetched when the data set is opened, a shard when the first of its
samples is asked for, and only once for all processes of a machine. A file counts only with the size and the checksum
that the manifest gives it. Shards that were not read for longest make room for new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dfm_nb.base.files import is_url, lies_inside, read_json, replacing, sha256
from dfm_nb.base.log import log
from dfm_nb.base.records import SampleError
from dfm_nb.data.index import is_whole
from dfm_nb.data.prepared_folder import INDEX, is_sealed, shard_digests
from dfm_nb.data.shard_plan import SPLITS
from dfm_nb.data.sources._fetch import DEFAULT_LIMITS, Limits, download

DEFAULT_CACHE = "~/.cache/dfm_nb"
CACHE_GIB = 64.0
OWN = "shards-from-servers"
"""The folder in the cache that holds data sets. Nothing outside it is ever deleted."""
LARGEST_MANIFEST, LARGEST_BESIDE = 1 << 30, 1 << 34


class RemoteFolder:
    """A prepared folder at `url`, and the local folder that stands for it.

    Parameters
    ----------
    url : without a last slash. cache_dir : for all data sets; `DEFAULT_CACHE` when None. cache_gib : how much of the
        shards of all data sets is kept; those on their way come on top.

    Attributes
    ----------
    folder : the local one; all but the shards is there. fetched_bytes : of shards, by this process.

    Raises
    ------
    ValueError : it cannot be reached, or has no manifest or index, or its files are not those of the manifest.
    """

    def __init__(
        self,
        url: str,
        cache_dir: str | os.PathLike | None = None,
        cache_gib: float = CACHE_GIB,
        limits: Limits = DEFAULT_LIMITS,
    ):
        self.url, self._limits, self._room = url.rstrip("/"), limits, int(cache_gib * 2**30)
        self._cache = Path(cache_dir or DEFAULT_CACHE).expanduser() / OWN
        self._cache.mkdir(parents=True, exist_ok=True)
        self.fetched_bytes = 0
        self._fetched: set[str] = set()
        self._warned = False
        manifest, self.folder = self._open()
        self._sizes = {s["name"]: s["bytes"] for s in manifest["shards"]}
        self._digests = shard_digests(manifest)

    def _open(self) -> tuple[dict[str, Any], Path]:
        """The manifest, and the folder with it and what else lies beside the shards: another for other content."""
        content = self._manifest()
        manifest = json.loads(content)
        if not shard_digests(manifest):
            raise ValueError(
                f"{self.url}/manifest.json lists no shards with checksums; make the data set whole where it lies "
                "(dfm adopt, dfm index) and copy it again"
            )
        name = hashlib.sha256(self.url.encode() + b"\0" + content).hexdigest()[:16]
        folder = self._cache / name
        with _locked(self._cache / f"{name}.lock"):
            if not (folder / "manifest.json").is_file():  # it comes last
                for file, whole in self._beside(manifest).items():
                    self._keep(folder, file, LARGEST_BESIDE, whole)
                with replacing(folder / "manifest.json") as temporary:
                    temporary.write_bytes(content)
        return manifest, folder

    def _manifest(self) -> bytes:
        with tempfile.TemporaryDirectory(dir=self._cache) as place:
            for _ in self._attempts():
                path = Path(place, "manifest.json")
                self._download(path.name, path, LARGEST_MANIFEST)
                if is_sealed(read_json(path)):
                    return path.read_bytes()
        raise ValueError(f"{self.url}/manifest.json is damaged or has been changed; copy it there again")

    def _attempts(self) -> Iterator[int]:
        """Numbers of attempts, with growing pauses between them."""
        for attempt in range(self._limits.retries + 1):
            if attempt:
                time.sleep(self._limits.backoff_s * 2 ** (attempt - 1))
            yield attempt

    def _beside(self, manifest: Mapping[str, Any]) -> dict[str, Callable[[Path], bool]]:
        """Files that are fetched at once, and what tells whether they are whole."""
        listed = {name: digest for name, digest in manifest["files"].items() if not name.endswith(".tar.idx")}
        del listed["manifest.json"]
        parts = {str(shard.get("split")) for shard in manifest["shards"]} & set(SPLITS)
        return {name: _has(str(digest)) for name, digest in listed.items()} | {
            f"{part}{INDEX}": functools.partial(is_whole, split=part) for part in parts
        }

    def provide(self, shard: Path) -> None:
        """Have a shard in the local folder: `shard` is the path that it gets there.

        Raises
        ------
        ValueError : it cannot be fetched, or is not what the manifest lists.
        """
        try:
            os.utime(shard)  # read last, removed last
            return
        except FileNotFoundError:
            name = shard.relative_to(self.folder).as_posix()
        size, digest = self._sizes.get(name, 0), self._digests.get(name)
        if digest is None:
            raise ValueError(f"{self.url}/manifest.json lists no {name}; copy the data set again")
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder / f"{name}.lock"):
            if not shard.is_file():
                self._make_room(size)
                self._keep(self.folder, name, size, _has(digest))
                self.fetched_bytes += size
                if name in self._fetched and not self._warned:
                    self._warned = True
                    log.warning(
                        "%s of %s had to make room and is fetched again; raise dataset.cache_gib (%g)",
                        *(name, self.url, self._room / 2**30),
                    )
                self._fetched.add(name)

    def _make_room(self, size: int) -> None:
        if size > self._room:
            raise ValueError(f"dataset.cache_gib is below {size / 2**30:.2f} GiB, a shard's of {self.url}; raise it")
        with _locked(self._cache / "room.lock"):
            held = [(path.stat(), path) for path in self._cache.rglob("*.tar") if path.is_file()]
            total = sum(stat.st_size for stat, _ in held)
            for stat, path in sorted(held, key=lambda row: row[0].st_mtime_ns):
                if total + size <= self._room:
                    break
                path.unlink(missing_ok=True)  # whoever reads it now keeps it, and fetches it again for the next sample
                total -= stat.st_size

    def _keep(self, folder: Path, name: str, size: int, whole: Callable[[Path], bool]) -> None:
        """Fetch a file of at most `size` bytes into the folder; a false one is fetched again."""
        if not lies_inside(name):
            raise ValueError(f"{self.url}/manifest.json names {name!r}, which is not inside it; copy it again")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for _ in self._attempts():
            with contextlib.suppress(_False), replacing(folder / name) as temporary:
                self._download(name, temporary, size)
                if not whole(temporary):
                    raise _False
                return
            log.warning("%s/%s came with another content than its manifest lists", self.url, name)
        raise ValueError(f"{self.url}/{name} is not the file that its manifest lists; copy it there again")

    def _download(self, name: str, path: Path, most_bytes: int) -> None:
        url = f"{self.url}/{name}"
        if self.url.startswith(("http://", "https://")):
            limits = dataclasses.replace(self._limits, max_bytes=most_bytes)
            try:
                download(f"{self.url}/{quote(name)}", path, limits)
            except SampleError as error:
                raise ValueError(f"{error.detail}; training goes on where it was when it is started again") from None
            return
        import fsspec

        for attempt in self._attempts():
            try:
                with fsspec.open(url, "rb") as source, path.open("wb") as file:
                    left = most_bytes
                    while left > 0 and (data := source.read(min(left, 1 << 20))):
                        file.write(data)
                        left -= len(data)
                return
            except (FileNotFoundError, PermissionError, ImportError, ValueError) as error:
                raise ValueError(f"{url} cannot be read: {' '.join(str(error).split())[:300]}") from None
            except Exception as error:  # each driver has errors of its own
                if attempt == self._limits.retries:
                    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    raise ValueError(f"{url} could not be fetched in {attempt + 1} attempts: {said}") from None


def _has(digest: str) -> Callable[[Path], bool]:
    return lambda path: sha256(path) == digest


class _False(Exception):
    """A file came whole and is not the one that was listed."""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes and threads of this machine."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def remote_folder(url: str, cache_dir: str | None = None, cache_gib: float = CACHE_GIB) -> RemoteFolder:
    """The one of this process."""
    return RemoteFolder(url, cache_dir, cache_gib)


def local_folder(path: str, cache_dir: str | None = None, cache_gib: float = CACHE_GIB) -> Path:
    """`path`, or the folder that stands for a server's."""
    return remote_folder(path, cache_dir, cache_gib).folder if is_url(path) else Path(path)
