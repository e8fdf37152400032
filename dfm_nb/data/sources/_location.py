"""The user's folder: on this machine, in a zip, or at a URL; and `RowSource`, which reads items from it.

Names of its files come from data. They are joined to the location, so they cannot choose a driver or a server. What
fsspec's drivers have is copied to this machine, with a bound on size: transient faults (time-outs, 429, 5xx, a body
that ends early) are retried with growing pauses, others are not, and the `SampleError` has the URL.
"""

import contextlib
import hashlib
import os
import re
import tempfile
import time
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import unquote

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from dfm_nb.base.files import Json, lies_inside, sha256
from dfm_nb.base.limits import MOST_GIVEN, MOST_TEXT
from dfm_nb.base.log import log
from dfm_nb.base.records import Clip, Content, Said, SampleError, Source
from dfm_nb.base.urls import HTTP, file_in, filesystem, is_public, reported, uses_fsspec, web
from dfm_nb.data.captioning import weight_of
from dfm_nb.data.sources._media import MEDIA_SUFFIXES, MediaOptions, listing_sha256

PAUSES_S = (1.0, 2.0, 4.0)  # before each further attempt
MOST_BYTES = 512 << 20
MAY_PASS = (408, 425, 429)  # of the HTTP statuses below 500
# the last for a method that zipfile does not know
OF_ARCHIVES = (zipfile.BadZipFile, zlib.error, NotImplementedError)
COMPARED_BYTES = 4 << 20
COMPARED_FILES = 20_000
"""Larger files, and files beyond this number, get no checksum: much data would be read twice."""
OWN_MARKS = (".dfm", ".run.json")
"""In a prepared folder and in a run folder, whose contact sheets and samples are no pictures of the user's."""
HIDDEN = re.compile(
    r"\..*|@(eaDir|tmp|Recycle|Recently-Snapshot)|#recycle|\$RECYCLE\.BIN|System Volume Information|lost\+found|"
    r"__MACOSX",
    re.IGNORECASE,
)
"""Files and folders that are not shown: of Unix, and the thumbnails and bins of network storage and other systems."""


def matched(name: str) -> str:
    """The form in which names of files are compared: accents composed (NFC), suffixes of media in lower case.

    macOS lists letters and accents apart; in a Latin-1 locale the bytes of an "ö" are listed as two letters.
    """
    with contextlib.suppress(UnicodeError):
        name = os.fsencode(name).decode()
    stem, suffix = os.path.splitext(name)
    if suffix.lower() in MEDIA_SUFFIXES:
        name = stem + suffix.lower()
    return unicodedata.normalize("NFC", name)


def parent(spec: str) -> tuple[str, str]:
    """The location and the name of a file: `zip://a/t.csv::s3://b/x.zip` is t.csv in `zip://a::s3://b/x.zip`."""
    head, chain, rest = spec.partition("::")
    folder, _, name = head.rpartition("/")
    return f"{folder or '.'}{'/' if folder.endswith('/') else ''}{chain}{rest}", name


def fetch(server: Any, file: str, path: Path, url: str, most_bytes: int | None = None) -> None:
    """Copy a file of a driver to `path`.

    Parameters
    ----------
    file : as the driver names it. url : as the user knows it, for errors. most_bytes : `MOST_BYTES` if None.

    Raises
    ------
    SampleError : `missing_file`, `too_large`, `refused` (no permission, a bad URL, a redirect into this network), or
        `unreachable`. What was received of the file is left at `path`.
    """
    most_bytes = MOST_BYTES if most_bytes is None else most_bytes

    # a server may announce no size, or a wrong one
    def bounded(announced: int | None, received: int) -> None:
        if received and max(announced or 0, received) > most_bytes:
            raise SampleError("too_large", f"{url} exceeds the limit of {most_bytes / 2**20:g} MiB; use a smaller copy")

    for pause_s in (*PAUSES_S, None):
        try:
            return server.get_file(file, str(path), callback=fsspec.Callback(hooks={"bound": bounded}))
        except SampleError:
            raise
        except (FileNotFoundError, KeyError):  # KeyError: of a zip
            raise SampleError("missing_file", f"{url} does not exist; correct the name or remove it") from None
        except Exception as error:  # each driver raises types of its own
            status = getattr(error, "status", None)
            refused = isinstance(error, (ValueError, PermissionError, *OF_ARCHIVES))
            refused = refused or (isinstance(status, int) and status < 500 and status not in MAY_PASS)
            if refused or pause_s is None:
                said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                reason = "refused" if refused else "unreachable"
                raise SampleError(reason, f"{url} could not be fetched: {said}") from None
        time.sleep(pause_s)


@contextlib.contextmanager
def fetched(url: str, suffix: str = "", server: Any = None, file: str = "") -> Iterator[Path]:
    """A copy of an http(s) URL, or of a driver's file, for the block; errors in it name the URL, not the copy."""
    with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
        path = Path(folder, "file").with_suffix(suffix)
        fetch(server or web(), file or url, path, url)
        try:
            yield path
        except ValueError as error:
            said = str(error).replace(str(path), url)
            raise SampleError(error.reason, said) if isinstance(error, SampleError) else ValueError(said) from None


@dataclass
class Location:
    """A folder and how it is read.

    spec : a path, a URL or chain that fsspec opens, or a .zip.

    Attributes
    ----------
    server : fsspec's driver; None for a folder of this machine. http : a web server, which may not give parts of files.
    """

    spec: str
    reading: MediaOptions

    def __post_init__(self) -> None:
        self.folder = Path(self.spec).expanduser()
        self.infos = dict[str, Json]()
        self.hashes = dict[str, object]()  # of small files, and of those that were fetched
        self.server: Any = None
        if uses_fsspec(self.spec) and not self.folder.is_dir():
            self.server, self.root = filesystem(self.spec)
            if isinstance(self.server, LocalFileSystem):  # where links are, too
                self.server = None
                self.folder = Path(self.root)
        self.http = self.server is not None and self.root.startswith(HTTP)

    @property
    def name(self) -> str:
        return self.folder.resolve().name if self.server is None else self.spec.rstrip("/").rpartition("/")[2]

    def names(self) -> list[str]:
        """Names of the files in it and below, with /; hidden ones are skipped."""
        if self.server is None:
            return list(_visible(self.folder))
        with reported(self.spec):
            self.server.invalidate_cache()
            listed = self.server.find(self.root, detail=True)
        for path, info in listed.items():
            name = path.removeprefix(self.root).lstrip("/")
            if self.http:  # a page's links, some of which only sort it
                name = "" if "?" in name else unquote(name)
            if name and not lies_inside(name):
                log.warning("%s has a file named %r, which could be elsewhere, and is skipped", self.spec, name)
            elif name and not any(map(HIDDEN.fullmatch, name.split("/"))):
                self.infos[name] = info
        return list(self.infos)

    def size(self, name: str | Path) -> int | None:
        """Bytes of a file, where they are known."""
        if self.server:
            return self.infos.get(str(name), {}).get("size")
        # a name of a list may be one that no file can have
        with contextlib.suppress(OSError, ValueError):
            path = self.found(name)
            return path.stat().st_size if path.is_file() else None
        return None

    def states(self, media: Iterable[Any]) -> Iterator[object]:
        """Of each file, or picture in memory, what differs when its content does; None where it cannot be read.

        On this machine a checksum, which a copy of the file shares; of a file over `COMPARED_BYTES`, and after
        `COMPARED_FILES`, its size and time of change. On a server what its listing says of size, time and version,
        which is nothing for a web server.
        """

        def state(numbered: tuple[int, Any]) -> object:
            number, media = numbered
            is_file = isinstance(media, (str, Path)) and self.server is None and number < COMPARED_FILES
            if not is_file or (self.size(media) or 0) > COMPARED_BYTES:
                return self.stamp(media)
            self.hashes[str(media)] = self.hash(media, hashed=False)
            return self.hashes[str(media)] or self.stamp(media)

        with ThreadPool() as pool:
            yield from pool.imap(state, enumerate(media), 64)

    def stamp(self, media: Any) -> object:
        """Size and time of change of a file, the hash of a picture in memory; None where nothing is known."""
        with contextlib.suppress(OSError, ValueError):  # also a name that no path can have
            if not isinstance(media, (str, Path)):
                # also of bytes; those of objects would be addresses
                array = np.ascontiguousarray(media)
                return None if array.dtype.hasobject else hashlib.sha256(array.tobytes()).hexdigest()
            if self.server:
                return sorted(map(str, self.infos.get(str(media), {}).items())) or None
            about = self.found(media).stat()
            return about.st_size, about.st_mtime_ns
        return None

    def hash(self, media: Any, hashed: bool) -> object:
        """Of a file's or picture's content; of a file on a server, and with `hashed`, if it was hashed before."""
        if not isinstance(media, (str, Path)):
            return self.stamp(media)
        if self.server or hashed or str(media) in self.hashes:
            return self.hashes.get(str(media))
        with contextlib.suppress(OSError, ValueError):
            path = self.found(media)
            return sha256(path) if path.is_file() else None  # a pipe might never end
        return None

    def found(self, name: str | Path) -> Path:
        """The path of a name on this machine, also where the disk has its accents in the other form (NFC, NFD)."""
        path = self.folder / name
        if not os.path.lexists(path):
            composed = Path(unicodedata.normalize("NFC", str(path)))
            decomposed = Path(unicodedata.normalize("NFD", str(path)))
            return next(filter(os.path.lexists, (composed, decomposed)), path)
        return path

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """A path on this machine that has the file's content within the block; errors in it have the file's own name.

        Raises
        ------
        SampleError : the name leaves the location, or the file cannot be had.
        """
        if self.server is None or (self.reading.allow_outside and os.path.isabs(name)):
            yield self.reading.inside(self.found(name), self.folder)
            return
        url = f"{self.spec}/{name}"
        if not lies_inside(name):
            raise SampleError("outside", f"{url} must be the name of a file in {self.spec}; correct it or remove it")
        with fetched(url, PurePosixPath(name).suffix, self.server, file_in(self.root, name)) as path:
            self.hashes[name] = sha256(path)
            yield path

    @contextlib.contextmanager
    def media(self, value: Any) -> Iterator[Any]:
        """What `MediaOptions.clips` reads, of a name, a path, a URL, or a picture in memory."""
        if not isinstance(value, str):
            yield value
        elif "://" in value:
            if not (self.reading.allow_outside or is_public(value)):
                raise SampleError("refused", "it is an address of this machine or its network; see --allow-outside")
            with fetched(value) as copy:
                yield copy.read_bytes()
        else:
            with self.local(value) as path:
                yield path


class RowSource(Source, Protocol):
    """Items are rows, those of a table or the files of a folder: each says what it is read from, and how it is used.

    splits : of each row; empty if none is held out.
    """

    location: Location
    splits: Sequence[str | None] = ()

    def media(self, index: int) -> list[Any]:
        """The row's picture or clip and what is given with it, as `Location.media` opens them; SampleError for none."""

    def weight(self, index: int) -> Any:
        """How often an epoch uses it; None: once."""

    def said(self, index: int) -> Said:
        """Its captions and tags; SampleError if it has neither, or what should hold them does not."""

    def captions(self, index: int) -> Said:
        texts, tags = self.said(index)
        size = sum(map(len, (*texts, *tags)))
        if size > MOST_TEXT:
            key = self.item_key(index)
            said = f"{key} must have at most {MOST_TEXT} characters of captions; it has {size}; shorten them"
            raise SampleError("too_large", said)
        return texts or [", ".join(tags)], tags

    def item_split(self, index: int) -> str | None:
        return self.splits[index] if self.splits else None

    def content(self, index: int, held: Content | None = None, hashed: bool = False) -> Content | None:
        try:
            media = self.media(index)
        except SampleError:  # `read` reports it
            return None
        location = self.location
        weight = str(self.weight(index))
        # a web server's listing says neither time nor version
        stamps = [None if location.http else location.stamp(one) for one in media]
        same = held is not None and held.stamp == repr(stamps) and None not in stamps
        hashes = [location.hash(one, hashed or same) for one in media]
        if None not in hashes:
            return Content(listing_sha256(hashes), repr(stamps), weight)
        return held._replace(weight=weight) if held and same else None

    def read(self, index: int) -> Iterator[Clip]:
        (caption, *more), tags = self.captions(index)
        key = self.item_key(index)
        reading = self.location.reading
        media = self.media(index)
        if len(media) > 1 + MOST_GIVEN:
            said = f"{key} has {len(media) - 1} given pictures or clips; {MOST_GIVEN} are the most: remove some"
            raise SampleError("too_many_given", said)
        weight = weight_of(self.weight(index), key)
        with contextlib.ExitStack() as stack:
            try:
                opened, *given = [stack.enter_context(self.location.media(one)) for one in media]
            except (ValueError, OSError) as error:  # a name may be anything, and is this row's fault alone
                reason = error.reason if isinstance(error, SampleError) else "no_media"
                raise SampleError(reason, str(error)) from None
            beside = reading.beside(given, key)
            for clip_key, frames, fps, lost in reading.clips(opened, key):
                pictures, faults = beside(fps)
                yield Clip(
                    clip_key,
                    frames,
                    caption,
                    fps,
                    self.name,
                    lost=faults | lost,
                    more_captions=more,
                    tags=tags,
                    weight=weight,
                    given=pictures,
                )


def _visible(root: Path) -> Iterator[str]:
    """Files of the folder and those below by their relative names with /; hidden ones, and what dfm wrote, are skipped.

    Includes pipes, devices and broken links: reading them reports what they are.
    """

    def left_out(error: OSError) -> None:
        log.warning("%s may not be read and is skipped", error.filename)

    for place, folders, files in os.walk(root, onerror=left_out):
        folders[:] = [name for name in folders if not HIDDEN.fullmatch(name)]
        for name in list(folders):
            folder = os.path.join(place, name)
            if any(os.path.exists(os.path.join(folder, mark)) for mark in OWN_MARKS):
                log.info("%s is a data set or run of dfm and is skipped", folder)
                folders.remove(name)
            elif os.path.islink(folder):
                log.warning("%s is a link to a folder and is skipped", folder)
        yield from (Path(place, name).relative_to(root).as_posix() for name in files if not HIDDEN.fullmatch(name))
