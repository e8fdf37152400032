"""Files that are whole or absent: atomic writes, checksums, sync to disk."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dfm_nb.base.limits import MOST_BYTES, MOST_DEPTH
from dfm_nb.base.log import warn_once

Json = dict[str, Any]
"""A JSON object: a manifest, a plan, a record."""
StrPath = str | os.PathLike
"""A path as a user gives it."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Of a folder that is another user's or read-only."""


@contextlib.contextmanager
def replacing(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path in the same folder, renamed to `path` at the end: `with replacing(path) as temporary:`.

    Readers see the complete old or new content, also after a crash, because the bytes are on disk before the rename. If
    the block fails, `path` is unchanged and the temporary is removed. The file's mode follows the umask, whatever the
    block does. A link in its place is replaced, and its target stays. A name that was free in `check_free` must still
    be. durable : False where a power cut may lose it.
    """
    path = Path(path)
    temporary = temporary_of(path)
    # created here to get the umask's mode without setting the umask, which threads share
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode & 0o777
    try:
        with naming(path):
            yield temporary
            os.chmod(temporary, mode)  # safetensors replaces it by a file of mode 0600
            if durable:
                sync(temporary)
        fix = _free.pop(path.absolute(), "")
        try:
            if fix:
                os.link(temporary, path)  # which fails where another process was first
        except FileExistsError:
            raise FileExistsError(_TAKEN.format(path, fix)) from None
        except OSError:  # of a file system without hard links
            fix = ""
        if not fix:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_of(path: Path) -> Path:
    """A new name next to `path`, in the form that `remove_temporaries` removes."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_temporaries(folder: Path) -> None:
    """Remove a killed process's temporaries from one of our folders; only names of exactly our form."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", path.name) and path.is_file():
            path.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, or in what its byte order mark says; UnicodeDecodeError for another."""
    data = path.read_bytes()
    return data.decode(json.detect_encoding(data))


def is_url(path: object) -> bool:
    return "://" in str(path)


def local(path: StrPath) -> Path:
    """An output path, `~` expanded; ValueError for a URL, also in the form that `Path` gives it (`s3:/bucket`)."""
    if re.match(r"\w{2,}:/", os.fspath(path)):
        raise ValueError(f"output must be in a local folder; got {path}; copy it there afterwards")
    return Path(path).expanduser()


def lies_inside(name: str) -> bool:
    """Whether a relative name from an untrusted file stays inside its folder.

    It must also be short, because pathlib creates deeply nested folders by recursion, and without `::`, which chains
    places in fsspec.
    """
    if len(name) >= 512 or "\0" in name or "::" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


UNLIMITED = sys.maxsize
ANYWHERE = Path("/")
"""For `plain`: files that a person named may be links."""
CHECKSUMS = "checksums.json"
"""The listing in folders of data and checkpoints."""
_BLOB = re.compile(r".*/(models|datasets)--[^/]+/blobs/[0-9a-f]{40,64}")


def plain(path: Path, inside: Path | None = None, most_bytes: int = MOST_BYTES) -> Path:
    """The path of a file that is read from a folder that may be somebody else's.

    inside : a folder, which no link may leave, but to a file whose checksum the folder lists; by default the file's.

    Raises
    ------
    ValueError : it is a pipe, a device or a folder, is too large, or is a link out of the folder.
    FileNotFoundError : there is none.
    """
    inside = inside or path.parent
    size = path.stat().st_size
    if not path.is_file() or size > most_bytes or (leads_out(path, inside) and not _is_listed(path, inside)):
        raise ValueError(
            f"{path} must be a file of a usual size inside {inside}, or listed there (tars: dfm adopt --allow-outside)"
        )
    return path


def is_plain(path: Path, inside: Path | None = None, most_bytes: int = MOST_BYTES) -> bool:
    """Whether there is a `plain` file; another thing of its name is reported, once."""
    try:
        return bool(plain(path, inside, most_bytes))
    except ValueError as error:
        warn_once("not read: %s", str(error))
    except OSError:
        pass
    return False


def leads_out(path: Path, inside: Path) -> bool:
    """Whether a path in a folder is, or goes through, a link out of it. The hub's cache is made of links to blobs."""
    target = os.path.realpath(path)
    return not Path(target).is_relative_to(os.path.realpath(inside)) and not _BLOB.fullmatch(target)


def _is_listed(path: Path, inside: Path) -> bool:
    """Whether the folder's author knew the content; of one that is too large to be hashed at once, the size."""
    try:
        entry = read_listing(inside / CHECKSUMS)[path.relative_to(inside).as_posix()]
    except (OSError, ValueError, KeyError):
        return False
    size = path.stat().st_size
    return entry["bytes"] == size and (size > MOST_BYTES or entry["sha256"] == sha256(path))


def is_foreign(*paths: Path) -> bool:
    """Whether one of the paths that exist belongs to another user."""
    return any(os.lstat(path).st_uid != os.geteuid() for path in paths if os.path.lexists(path))


def write_atomically(path: str | Path, data: bytes, durable: bool = True) -> None:
    """Write a file atomically: readers see it whole or absent."""
    with replacing(path, durable) as temporary:
        temporary.write_bytes(data)


def write_json(path: str | Path, value: object, indent: int | None = None) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, json.dumps(value, indent=indent).encode())


def appending(path: Path, mode: str = "ab", **how: Any) -> IO[Any]:
    """`path` opened to append to, created if missing; ValueError for a link, a pipe or a device."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} must be a regular file and no link, because it is appended to; move it away")
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **how)


def subfolder(folder: Path, *names: str) -> Path:
    """A folder below one that a person named, created if missing; ValueError for a link on the way."""
    for name in names:
        folder = unlinked(folder / name)
        folder.mkdir(exist_ok=True)
    return folder


def unlinked(path: Path) -> Path:
    """The path; ValueError if it is a link."""
    if path.is_symlink():
        raise ValueError(f"{path} must be no link, because files are written there; remove it, or name its target")
    return path


MARK = "<!--made by dfm_nb-->"
"""In a view that can be drawn again: the comment of a sheet, the end of a page, the first line of a blend."""


_TAKEN = "{} exists; {}"
_free: dict[Path, str] = {}
"""The advice about each name that was free and is to be written: two processes that write one at once both found it so,
and `replacing` then lets one of them. Folders have a lock.
"""


def check_free(path: Path, ours: bool, fix: str = "pass --overwrite or another name", mark: str = "") -> None:
    """FileExistsError for a name that is taken, unless a record of ours names it (`ours`) or the file has the mark.

    mark : `MARK` of a view; other files are replaced by their record alone.
    """
    _free.pop(path.absolute(), None)
    if ours:
        return
    if not os.path.lexists(path):
        if "--overwrite" in fix:
            _free[path.absolute()] = fix
    elif not (mark and is_plain(path) and mark.encode() in path.read_bytes()):
        raise FileExistsError(_TAKEN.format(path, fix))


def sync(path: Path) -> None:
    """Make a file's content, or the renames in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """The error of a full disk names this path: one of writing to an open file has no name of its own."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            error.filename = error.filename or str(path)
        raise
    except RuntimeError as error:
        if "unexpected pos" in str(error):  # torch's words for a write that failed
            raise OSError(errno.ENOSPC, str(error), str(path)) from None
        raise


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# ---- integrity: one listing of files with their checksums, and one of itself --------------------------------------


def listed_as(path: Path) -> Json:
    """A listing's entry of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def seal(path: Path, files: Mapping[str, Json]) -> None:
    """Write a listing: by file name the entry of `listed_as`, and an entry of the listing itself.

    {"a.tar": {"bytes": 10240, "sha256": "5f..."}, "checksums.json": {"bytes": 97, "sha256": "0c..."}}
    """
    write_atomically(path, _listing(path.name, files))


def _listing(name: str, files: Mapping[str, Json]) -> bytes:
    listed = json.dumps(files, indent=1).encode()
    own = {"bytes": len(listed), "sha256": hashlib.sha256(listed).hexdigest()}
    return json.dumps({**files, name: own}, indent=1).encode()


def read_listing(path: Path) -> dict[str, Json]:
    """The listing that `seal` wrote; ValueError if it is damaged or names files outside of its folder."""
    files = read_json(path, ANYWHERE)
    files.pop(path.name, None)
    # The form is unique, so that a flipped byte is detected even where JSON would ignore it.
    if path.read_bytes() != _listing(path.name, files):
        raise ValueError(f"{path} is damaged: its content does not match its own checksum; restore it")
    for name, entry in files.items():
        types = {key: type(value) for key, value in entry.items()} if isinstance(entry, dict) else None
        if not lies_inside(name) or types != {"bytes": int, "sha256": str}:
            raise ValueError(f"{path} must list files inside its folder; it lists {name!r:.80}; do not use this folder")
    return files


def check(folder: Path, listing: Mapping[str, Json], names: Iterable[str], fix: str) -> None:
    """ValueError for the first of the names whose file differs from the listing, with the `fix`."""
    for name in names:
        path = folder / name
        listed = listing.get(name)
        same_size = listed and path.is_file() and path.stat().st_size == listed["bytes"]
        # the size first: a sparse file would be hashed for minutes
        if not (listed and same_size and sha256(path) == listed["sha256"]):
            raise ValueError(f"{path} is missing or has changed since its checksum was taken; {fix}")


PIECES = 64
PIECE_BYTES = 1 << 16
"""Parts of each weight file that are hashed: T5-11B's files have 45 GB."""


def weights_sha256(config: Path, weights: Iterable[Path]) -> str:
    """Hash of a configuration and of evenly spaced pieces of its weights: it distinguishes models in a second."""
    digest = hashlib.sha256(config.read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for piece in range(PIECES):
                file.seek(piece * size // PIECES)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def read_json(path: Path, inside: Path | None = None) -> Json:
    """The JSON object in a file; {} if there is none, or it is not `plain` (a pipe might never end)."""
    try:
        value = parsed(path.read_bytes()) if is_plain(path, inside) else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError if it is none, or one of more than `MOST_DEPTH` levels."""
    with contextlib.suppress(RecursionError):
        value = json.loads(text)
        level = [value]
        for _ in range(MOST_DEPTH):
            deeper = [each for each in level if isinstance(each, (dict, list))]
            if not deeper:
                return value
            level = []
            for each in deeper:
                level += each.values() if isinstance(each, dict) else each
    raise ValueError(f"JSON must have at most {MOST_DEPTH} levels")
