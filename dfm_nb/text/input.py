"""Where JSONL comes from: files, globs, `.gz`, `.zst`, `-`; cut into chunks of whole lines.

The parts of `partition` i of n, joined in order, are the lines of one run. Memory is one chunk (1 MiB) plus the longest
line.
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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple

import zstandard

from dfm_nb.text.indexed import bin_path, idx_path

CHUNK_BYTES = 1 << 20
STDIN = "-"
_UNPACKERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda f: gzip.GzipFile(fileobj=f),
    # files that were joined by `cat` have several frames; fsspec's reader ends after the first
    ".zst": lambda f: zstandard.ZstdDecompressor().stream_reader(f, read_across_frames=True),
}


@dataclass(frozen=True)
class Span:
    """Lines of one file that begin in [start, end) bytes; end None: to the end of the file."""

    path: str
    start: int = 0
    end: int | None = None


class Position(NamedTuple):
    """How far the input was read: `line` lines of span `span`, up to byte `offset` of its uncompressed file."""

    span: int = 0
    offset: int = 0
    line: int = 0


START = Position()


@dataclass
class LineChunk:
    """Whole lines with their newlines. The next chunk begins at `end`."""

    lines: list[bytes]
    end: Position


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
        paths += found
    return paths


def is_compressed(path: str) -> bool:
    return os.path.splitext(path)[1] in _UNPACKERS


def partition(paths: list[str], index: int, count: int) -> list[Span]:
    """The lines of part `index` of `count`: by bytes for plain files, by whole files when one is compressed.

    Files of 60 and 40 bytes in 2 parts: bytes [0, 50) of the first; bytes [50, 60) of the first and all of the second.
    """
    if not 0 <= index < count:
        raise ValueError(f"--partition i/n needs 0 <= i < n, for example 0/4 to 3/4; got {index}/{count}")
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
def open_input(path: str, start: int = 0) -> Iterator[BinaryIO]:
    """Open for reading from byte `start` of the uncompressed text; a compressed file is read up to there.

    Raises
    ------
    ValueError : while it is read, when a compressed file is not whole
    """
    if path == STDIN:
        yield sys.stdin.buffer
        return
    try:
        with open(path, "rb", buffering=0) as f:
            text = _UNPACKERS.get(os.path.splitext(path)[1], lambda f: f)(f)
            if start:  # a pipe cannot seek
                text.seek(start)
            yield io.BufferedReader(text, CHUNK_BYTES)
    except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise ValueError(f"{path} must be a whole compressed file; {error}; copy it again") from error


def _lines(span: Span, offset: int) -> Iterator[tuple[bytes, int]]:
    """The span's lines that begin at byte `offset` or after it, and where the next one begins."""
    # From one byte before: a newline there means that a line begins at `offset`.
    before = max(0, offset - 1)
    with open_input(span.path, before) as f:
        offset = before + (len(f.readline()) if offset else 0)
        while (span.end is None or offset < span.end) and (line := f.readline()):
            offset += len(line)
            yield line, offset


def lines_before(span: Span) -> int:
    """Lines of the file that lie before the span's first; reads the file up to there, so only for messages."""
    return sum(1 for _ in _lines(Span(span.path, 0, span.start), 0))


def chunks(
    spans: list[Span], chunk_documents: int, start: Position = START, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[LineChunk]:
    """Cut the spans into chunks, from `start` on.

    Lines are numbered from the span's first; `lines_before` gives what to add for a span inside a file.
    """
    for number, span in enumerate(spans[start.span :], start.span):
        at, lines, size = start, [], 0
        for text, offset in _lines(span, max(span.start, start.offset)):
            lines.append(text)
            size += len(text)
            at = Position(number, offset, at.line + 1)
            if len(lines) == chunk_documents or size >= chunk_bytes:
                yield LineChunk(lines, at)
                lines, size = [], 0
        if lines:
            yield LineChunk(lines, at)
        start = START


def fingerprint(spans: list[Span]) -> list[list[object]]:
    """What a resumed run must find unchanged: names, ranges, sizes and times of change. Standard input never is."""

    def row(span: Span) -> list[object]:
        stat = os.stat(span.path)
        return [str(Path(span.path).resolve()), span.start, span.end, stat.st_size, stat.st_mtime_ns]

    return [[STDIN, time.time_ns()] if span.path == STDIN else row(span) for span in spans]


def corpora_sha256(prefixes: list[str]) -> str:
    """What a resumed merge, or a cache, must find unchanged: the fingerprint of the corpora's files, as a hash."""
    files = [Span(str(path)) for p in prefixes for path in (bin_path(p), idx_path(p))]
    return hashlib.sha256(json.dumps(fingerprint(files)).encode()).hexdigest()
