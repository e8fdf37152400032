"""Where JSONL comes from: files, globs, `.gz`, `.zst`, `-`; cut into chunks of whole lines.

The parts of `partition` i of n, joined in order, are the lines of one run. Memory is one chunk (1 MiB) plus the longest
line, which is bounded by `max_document_bytes`.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator

import zstandard

from dfm_nb.text.indexed import bin_path, idx_path

CHUNK_BYTES = 1 << 20
STDIN = "-"
_UNPACKERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda f: gzip.GzipFile(fileobj=f),
    ".zst": lambda f: zstandard.ZstdDecompressor().stream_reader(f, read_across_frames=True),
}


@dataclass(frozen=True)
class Span:
    """Lines of one file that begin in [start, end) bytes; end None: to the end of the file."""

    path: str
    start: int = 0
    end: int | None = None


class TooLong(bytes):
    """The head of a line over the limit; the rest was not kept."""


@dataclass
class LineChunk:
    """Whole lines with their newlines, from line `first_line` of the span on; the next begins at `next_offset`."""

    span: int
    first_line: int
    lines: list[bytes]
    next_offset: int  # bytes, uncompressed

    @property
    def next_line(self) -> int:
        """Lines of the span up to the end of this chunk."""
        return self.first_line - 1 + len(self.lines)


def expand_inputs(patterns: list[str]) -> list[str]:
    """Names and globs to files, each glob sorted.

    Raises
    ------
    FileNotFoundError : a name or glob that matches nothing
    """
    paths: list[str] = []
    for pattern in patterns:
        exists = pattern == STDIN or os.path.exists(pattern)
        found = [pattern] if exists else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise FileNotFoundError(f"--input must name JSONL files; nothing is at {pattern}")
        for path in found:
            if os.path.isdir(path):
                raise IsADirectoryError(f"--input must name files; {path} is a folder; give '{path}/*.jsonl'")
        paths += found
    if paths.count(STDIN) and len(paths) > 1:
        raise ValueError("--input - reads standard input and stands alone; got it together with files")
    return paths


def is_compressed(path: str) -> bool:
    return os.path.splitext(path)[1] in _UNPACKERS


def partition(paths: list[str], index: int, count: int) -> list[Span]:
    """The lines of part `index` of `count`: by bytes for plain files, by whole files when one is compressed."""
    if not 0 <= index < count:
        raise ValueError(f"--partition i/n needs 0 <= i < n; got {index}/{count}")
    if count == 1:
        return [Span(p) for p in paths]
    if STDIN in paths:
        raise ValueError("--partition needs files; standard input cannot be split; write it to a file first")
    sizes = [os.path.getsize(p) for p in paths]
    total = sum(sizes)
    low, high = total * index // count, total * (index + 1) // count  # this part's bytes of all files laid end to end
    whole_files = any(map(is_compressed, paths))
    spans, base = [], 0
    for path, size in zip(paths, sizes):
        if whole_files:
            if low <= base + size // 2 < high:
                spans.append(Span(path))
        elif base + size > low and base < high:
            spans.append(Span(path, max(0, low - base), min(size, high - base)))
        base += size
    return spans


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open for reading, uncompressed.

    Raises
    ------
    ValueError : while it is read, when a compressed file is not whole
    """
    if path == STDIN:
        yield sys.stdin.buffer
        return
    unpack = _UNPACKERS.get(os.path.splitext(path)[1])
    try:
        with open(path, "rb", CHUNK_BYTES) as f:
            yield io.BufferedReader(unpack(f), CHUNK_BYTES) if unpack else f
    except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
        kind = "zstd" if path.endswith(".zst") else "gzip"
        raise ValueError(f"{path} must be a whole {kind} file; {error}; copy it again") from error


def _skip_line(f: BinaryIO) -> int:
    """Read past the end of the line, however long it is; the bytes that were read."""
    taken = 0
    while piece := f.readline(CHUNK_BYTES):
        taken += len(piece)
        if piece.endswith(b"\n"):
            break
    return taken


def _go_to(f: BinaryIO, path: str, offset: int, line: int) -> int:
    """Move to the first line that begins at byte `offset` or after it, and say where that is.

    It is line `line`, which is how it is found where a file can only be read from its start.
    """
    if is_compressed(path):
        for _ in range(line):
            _skip_line(f)
    elif offset:
        f.seek(offset - 1)  # a newline here means that a line begins at `offset`
        offset += _skip_line(f) - 1
    return offset


def _lines(f: BinaryIO, offset: int, end: int | None, limit: int) -> Iterator[tuple[bytes, int]]:
    """The lines from `offset` on that begin before `end`, and where the next one begins."""
    # One byte over the limit shows that a line is too long.
    while (end is None or offset < end) and (line := f.readline(limit + 1)):
        offset += len(line)
        if len(line) > limit and not line.endswith(b"\n"):
            offset += _skip_line(f)
            line = TooLong(line[:4096])
        yield line, offset


def lines_before(span: Span) -> int:
    """Lines of the file that lie before the span's first; reads the file up to there, so only for messages."""
    at = lines = 0
    with open_input(span.path) as f:
        while at < span.start and (size := _skip_line(f)):
            at, lines = at + size, lines + 1
    return lines


def chunks(
    spans: list[Span],
    chunk_documents: int,
    max_document_bytes: int,
    done: tuple[int, int, int] = (0, 0, 0),
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[LineChunk]:
    """Cut the spans into chunks, after what is `done`: whole spans, then bytes of the file and lines of the next span.

    Lines are numbered from the span's first; `lines_before` gives what to add for a span inside a file.
    """
    first, offset, line = done
    for number, span in enumerate(spans[first:], first):
        with open_input(span.path) as f:
            start = _go_to(f, span.path, offset if line else span.start, line)
            lines: list[bytes] = []
            size = 0
            for text, offset in _lines(f, start, span.end, max_document_bytes):
                lines.append(text)
                size += len(text)
                if len(lines) == chunk_documents or size >= chunk_bytes:
                    yield LineChunk(number, line + 1, lines, offset)
                    line, lines, size = line + len(lines), [], 0
            if lines:
                yield LineChunk(number, line + 1, lines, offset)
        line = 0


def fingerprint(spans: list[Span]) -> list[list[object]]:
    """What a resumed run must find unchanged: names, ranges, sizes and times of change."""

    def row(span: Span) -> list[object]:
        stat = os.stat(span.path)
        return [str(Path(span.path).resolve()), span.start, span.end, stat.st_size, stat.st_mtime_ns]

    return [[STDIN] if span.path == STDIN else row(span) for span in spans]


def corpora_sha256(prefixes: list[str]) -> str:
    """What a resumed merge, or a cache, must find unchanged: the fingerprint of the corpora's files, as a hash."""
    files = [Span(str(path)) for p in prefixes for path in (bin_path(p), idx_path(p))]
    return hashlib.sha256(json.dumps(fingerprint(files)).encode()).hexdigest()
