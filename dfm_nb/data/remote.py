"""A prepared folder on a server, read through complete files that are cached on this machine.

The folder is at `https://HOST/DIR`, or at a URL of another driver of fsspec (`s3://`, `gs://`). The files next to the
shards are fetched when the data set is opened, and a shard when its first sample is needed, once for all processes of a
machine. A file must have the size and checksum in `checksums.json`; fsspec's own caches have no checksums and no limit.
The least recently used shards are evicted.
"""

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from filelock import FileLock

from dfm_nb.base.files import is_url, listed_as, read_listing, replacing, write_atomically
from dfm_nb.base.log import log
from dfm_nb.base.records import SampleError
from dfm_nb.base.urls import file_in, filesystem
from dfm_nb.data.prepared_folder import CHECKSUMS
from dfm_nb.data.sources._location import fetch

DEFAULT_CACHE = "~/.cache/dfm_nb"
OWN = "shards-from-servers"
"""The folder in the cache that holds data sets. Nothing outside it is ever deleted."""


class RemoteFolder:
    """A prepared folder at `url` and its local mirror.

    Parameters
    ----------
    url : without a last slash. cache_dir : for all data sets; `DEFAULT_CACHE` when None. cache_gib : limit for
        the shards of all data sets; those being fetched come on top.

    Attributes
    ----------
    folder : the local mirror; all files except shards are complete.

    Raises
    ------
    ValueError : it cannot be reached, or has no checksums, or a file does not match them.
    """

    def __init__(self, url: str, cache_dir: str | os.PathLike | None, cache_gib: float):
        self.url = url.rstrip("/")
        self._room = int(cache_gib * 2**30)
        self._server, self._root = filesystem(self.url)
        self._cache = Path(cache_dir or DEFAULT_CACHE).expanduser() / OWN
        self._cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._cache) as place:
            listing = Path(place, CHECKSUMS)
            self._download(CHECKSUMS, listing)
            try:
                self._listed = read_listing(listing)
                content = listing.read_bytes()
            except ValueError:
                raise ValueError(f"{self.url}/{CHECKSUMS} is damaged or has changed; copy it there again") from None
        shards = [entry["bytes"] for name, entry in self._listed.items() if name.endswith(".tar")]
        total = sum(shards)
        if total > self._room:
            if max(shards) > self._room:
                raise ValueError(f"dataset.cache_gib must hold the largest shard of {self.url}; raise it")
            need = total / 2**30
            log.warning("%s has %.3g GiB, so shards are fetched again each epoch; raise dataset.cache_gib", url, need)
        # another folder for other content
        self.folder = self._cache / hashlib.sha256(self.url.encode() + b"\0" + content).hexdigest()[:16]
        for name in self._listed:
            if not name.endswith(".tar"):
                self._fetch(name)
        write_atomically(self.folder / CHECKSUMS, content)

    def provide(self, shard: Path) -> None:
        """Make sure that a shard is in the local folder. shard : its local path.

        Raises
        ------
        ValueError : it cannot be fetched, or does not match `checksums.json`.
        """
        try:
            os.utime(shard)  # read last, removed last
        except FileNotFoundError:
            name = shard.relative_to(self.folder).as_posix()
            self._make_room(self._listed[name]["bytes"])
            self._fetch(name)

    def _make_room(self, size: int) -> None:
        with FileLock(self._cache / "room.lock"):
            held = [(path.stat(), path) for path in self._cache.rglob("*.tar") if path.is_file()]
            total = sum(stat.st_size for stat, _ in held)
            for stat, path in sorted(held, key=lambda row: row[0].st_mtime_ns):
                if total + size <= self._room:
                    break
                # an open reader can finish, and fetches it again for its next sample
                path.unlink(missing_ok=True)
                total -= stat.st_size

    def _fetch(self, name: str) -> None:
        """Make sure that a file is in the local folder; one process or thread of this machine fetches it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{path.name}.lock")):
            if path.is_file():
                return
            with replacing(path) as temporary:
                self._download(name, temporary, self._listed[name]["bytes"])
                if listed_as(temporary) != self._listed[name]:
                    raise ValueError(f"{self.url}/{name} is not the file that {CHECKSUMS} lists; copy it there again")

    def _download(self, name: str, path: Path, most_bytes: int | None = None) -> None:
        try:
            fetch(self._server, file_in(self._root, name), path, f"{self.url}/{name}", most_bytes)
        except SampleError as error:
            raise ValueError(f"{error.detail}; run the same command again to resume") from None


remote_folder = functools.cache(RemoteFolder)
"""This process's folder for these arguments."""


def local_folder(path: str, cache_dir: str | None, cache_gib: float) -> Path:
    """`path`, or the folder that mirrors a server's."""
    return remote_folder(path, cache_dir, cache_gib).folder if is_url(path) else Path(path)
