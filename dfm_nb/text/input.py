"""JSONL input: files, globs, `.gz`, `.zst`, `-`, URLs; split into chunks of complete lines.

A URL, a chain (`zip://*.jsonl::s3://b/all.zip`) or one with `*` is read by fsspec's driver, of a .zip every file. A
file of a web server is copied first (`simplecache`), because a run that resumes starts inside it.

The parts of `partition` i of n, joined in order, are the lines of one run. Memory is one chunk (1 MiB) plus the longest
line.
"""

import contextlib
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple

from dfm_nb.base.files import UNLIMITED, is_plain
from dfm_nb.base.limits import MOST_BYTES
from dfm_nb.base.log import log
from dfm_nb.base.urls import HTTP, filesystem, reported, uses_fsspec
from dfm_nb.text.indexed import bin_path, idx_path

CHUNK_BYTES = 1 << 20
STDIN = "-"


def _unzstd(f: BinaryIO) -> Any:
    import pyarrow  # 50 ms; the package zstandard takes a cut file for whole

    return pyarrow.CompressedInputStream(f, "zstd")


_UNPACKERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": lambda f: gzip.GzipFile(fileobj=f), ".zst": _unzstd}
_FOREIGN = {b"\x1f\x8b": "gzip", b"\x28\xb5": "Zstandard", b"BZ": "bzip2", b"\xfd7": "xz", b"PA": "Parquet"}
"""By the first two bytes: what is not JSONL."""


class _Lines(io.RawIOBase):
    """Unpacked text, read on; ValueError for a line that is longer than `MOST_BYTES`: a few bytes may mean many."""

    def __init__(self, text: Any):
        self._text = text
        self._line_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._text.read(len(buffer))
        buffer[: len(read)] = read
        if b"\n" in read:
            self._line_bytes = 0
        self._line_bytes += len(read.rpartition(b"\n")[2])
        if self._line_bytes > MOST_BYTES:
            raise ValueError(f"a line must have at most {MOST_BYTES >> 20} MiB unpacked; split it")
        return len(read)


@dataclass(frozen=True)
class Span:
    """Lines of one file that begin in [start, end) bytes; end None: to the end of the file."""

    path: str
    start: int = 0
    end: int | None = None


class Position(NamedTuple):
    """The position in the input: `line` lines of span `span`, up to byte `offset` of its uncompressed file."""

    span: int = 0
    offset: int = 0
    line: int = 0


START = Position()


@dataclass
class LineChunk:
    """Complete lines with their newlines. The next chunk begins at `end`."""

    lines: list[bytes]
    end: Position


def expand_inputs(patterns: list[str], output_prefix: str = "") -> list[str]:
    """Names and globs to files, each glob sorted, without the files of a run with this output prefix.

    Raises
    ------
    FileNotFoundError : a name or glob that matches nothing
    """
    paths: list[str] = []
    names = r"(_part\d{5}-of-\d{5})?(\.skipped\.jsonl|\.unfinished/.+|_.+_document\.[^/]+)"
    own = re.compile(re.escape(os.path.abspath(output_prefix)) + names)
    for pattern in patterns:
        if uses_fsspec(pattern):
            files = sorted(_expand_url(pattern))
        elif pattern == STDIN or os.path.exists(pattern):
            paths.append(pattern)
            continue
        else:  # found in a folder, where a pipe never ends; one may still name it
            folder = Path(re.split(r"[*?[]", pattern)[0] + "_").parent
            matching = sorted(glob.glob(pattern, recursive=True))
            files = [path for path in matching if is_plain(Path(path), folder, UNLIMITED)]
        files = [path for path in files if not own.fullmatch(os.path.abspath(path))]
        if not files:
            raise FileNotFoundError(f"--input must name JSONL files; {pattern} matches nothing")
        paths += files
    again = len(paths) - len({path if uses_fsspec(path) else os.path.realpath(path) for path in paths})
    if again:
        log.warning("--input names %d files more than once, and their documents are written as often", again)
    return paths


def _expand_url(pattern: str) -> list[str]:
    """The files that a URL with `*` means; ValueError for a name that would be a chain itself."""
    archive = "::" not in pattern and pattern.lower().endswith(".zip")
    head, *chain = (f"zip://**::{pattern}" if archive else pattern).split("::")
    if "*" not in head:
        return [pattern]
    server, path = filesystem("::".join((head, *chain)))
    with reported(pattern):
        server.invalidate_cache()
        names = [name for name, info in server.glob(path, detail=True).items() if info["type"] == "file"]
    for name in names:
        if "::" in name:
            raise ValueError(f"{pattern} has a file named {name!r}, which would lead elsewhere; rename it")
    return ["::".join((server.unstrip_protocol(name), *chain)) for name in names]


def _driver(path: str) -> tuple[Any, str]:
    return filesystem(f"simplecache::{path}" if path.startswith(HTTP) else path)


def _suffix(path: str) -> str:
    return os.path.splitext(re.split(r"::|\?", path)[0] if uses_fsspec(path) else path)[1]


def is_compressed(path: str) -> bool:
    return _suffix(path) in _UNPACKERS


def size(path: str) -> int:
    """Bytes of a file as it is stored."""
    if not uses_fsspec(path):
        return os.path.getsize(path)
    with reported(path):
        server, name = _driver(path)
        return int(server.size(name))


def partition(paths: list[str], index: int, count: int) -> list[Span]:
    """The lines of part `index` of `count`: by bytes for plain files, by whole files when one is compressed.

    Files of 60 and 40 bytes in 2 parts: bytes [0, 50) of the first; bytes [50, 60) of the first and all of the second.
    """
    if not 0 <= index < count:
        raise ValueError(f"--partition i/n needs 0 <= i < n, for example 0/4 to 3/4; got {index}/{count}")
    if count == 1:
        return [Span(p) for p in paths]
    if STDIN in paths:
        raise ValueError("--partition needs files, because standard input cannot be split; write it to a file first")
    sizes = list(map(size, paths))
    total = sum(sizes)
    low = total * index // count  # this part's bytes of all files laid end to end
    high = total * (index + 1) // count
    whole_files = any(map(is_compressed, paths))
    spans = []
    base = 0
    for path, length in zip(paths, sizes):
        if whole_files:
            if low <= base + length // 2 < high:
                spans.append(Span(path))
        elif base + length > low and base < high:
            spans.append(Span(path, max(0, low - base), min(length, high - base)))
        base += length
    return spans


@contextlib.contextmanager
def open_input(path: str, start: int = 0) -> Iterator[BinaryIO]:
    """Open for reading from byte `start` of the uncompressed text; a compressed file is read up to there.

    Raises
    ------
    ValueError : while reading, if a compressed file is truncated or damaged
    """
    if path == STDIN:
        yield sys.stdin.buffer
        return
    if uses_fsspec(path):
        with reported(path):
            server, name = _driver(path)  # kept until the file is read, as a zip is closed with its driver
            opened = server.open(name, "rb")
    else:
        opened = open(path, "rb", buffering=0)
    unpack = _UNPACKERS.get(_suffix(path))
    try:
        with opened as f:
            if start and not unpack:  # a pipe cannot seek
                f.seek(start)
            text = io.BufferedReader(_Lines(unpack(f)) if unpack else f, CHUNK_BYTES)
            kind = None if unpack or start else _FOREIGN.get(text.peek(2)[:2])
            if kind:
                raise ValueError(f"--input must be JSONL, .gz or .zst; {path} is {kind}; rename or convert it")
            while unpack and start:
                start -= len(text.read(min(start, CHUNK_BYTES))) or start
            yield text
    except (EOFError, OSError) as error:
        if not unpack:
            raise
        fix = "copy it again, or unpack it (zstd -d --long=31)"
        raise ValueError(f"{path} must be a complete compressed file; {error}; {fix}") from error


def _lines(span: Span, offset: int, most: int = CHUNK_BYTES) -> Iterator[tuple[list[bytes], int]]:
    """The span's lines that begin at byte `offset` or later, in lists of about `most` bytes, and each list's start."""
    # From one byte before: a newline there means that a line begins at `offset`.
    before = max(0, offset - 1)
    with open_input(span.path, before) as f:
        offset = before + (len(f.readline()) if offset else 0)
        while span.end is None or offset < span.end:
            # `readlines` ends with the line that takes it over its limit, which it must have
            limit = min(most, most if span.end is None else span.end - offset) - 1
            lines = f.readlines(limit) if limit > 0 else list(itertools.islice(f, 1))
            if not lines:
                return
            yield lines, offset
            offset += sum(map(len, lines))


def lines_before(span: Span) -> int:
    """Number of lines in the file before the span's first; reads the file up to there, so only for messages."""
    return sum(len(lines) for lines, _ in _lines(Span(span.path, 0, span.start), 0)) if span.start else 0


def chunks(spans: list[Span], chunk_documents: int, start: Position, chunk_bytes: int) -> Iterator[LineChunk]:
    """Split the spans into chunks, beginning at `start`.

    Lines are numbered from the span's first; `lines_before` returns the offset for a span inside a file.
    """
    for number, span in enumerate(spans[start.span :], start.span):
        line = start.line
        for lines, offset in _lines(span, max(span.start, start.offset), chunk_bytes):
            for first in range(0, len(lines), chunk_documents):
                some = lines[first : first + chunk_documents]
                offset += sum(map(len, some))
                line += len(some)
                yield LineChunk(some, Position(number, offset, line))
        start = START


def fingerprint(spans: list[Span]) -> list[list[object]]:
    """Identity of the input for resuming: names, ranges, sizes and modification times. Standard input never matches."""

    def row(span: Span) -> list[object]:
        if uses_fsspec(span.path):
            with reported(span.path):  # size, and what the driver has of time, checksum or version
                server, name = _driver(span.path)
                return [span.path, span.start, span.end, sorted(map(str, server.info(name).items()))]
        stat = os.stat(span.path)
        return [str(Path(span.path).resolve()), span.start, span.end, stat.st_size, stat.st_mtime_ns]

    return [[STDIN, time.time_ns()] if span.path == STDIN else row(span) for span in spans]


def listing_sha256(paths: list[str]) -> str:
    """Identity of a list of files for its parts, which may be made on several machines: names and sizes."""
    rows = [[path if uses_fsspec(path) else os.path.abspath(path), size(path)] for path in paths]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def corpora_sha256(prefixes: list[str]) -> str:
    """Identity of the corpora for a resumed merge or a cache: a hash of the fingerprint of their files."""
    files = []
    for prefix in prefixes:
        files += [Span(str(bin_path(prefix))), Span(str(idx_path(prefix)))]
    return hashlib.sha256(json.dumps(fingerprint(files)).encode()).hexdigest()
