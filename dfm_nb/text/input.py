"""Where JSONL comes from: files, globs, `.gz`, `.zst`, `-`; cut into chunks of whole lines.

The parts of `partition` i of n, joined in order, are the lines of one run. Memory is one chunk (1 MiB) plus the longest
line, which is bounded by `max_document_bytes`.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Iterator

import zstandard

CHUNK_BYTES = 1 << 20
STDIN = "-"


@dataclass(frozen=True)
class Span:
    """Lines of one file that begin in [start, end) bytes; end None: to the end of the file."""

    path: str
    start: int = 0
    end: int | None = None


@dataclass
class Chunk:
    """Whole lines. `next_offset` (bytes, uncompressed) and `next_line` are where the following chunk begins."""

    span: int
    path: str
    first_line: int
    data: bytes
    next_offset: int
    next_line: int
    too_long: bool = False  # data is the head of one line over the limit; the rest was not kept


def expand_inputs(patterns: list[str]) -> list[str]:
    """Names and globs to files, each glob sorted.

    Raises
    ------
    FileNotFoundError : a name or glob that matches nothing
    """
    paths: list[str] = []
    for pattern in patterns:
        if pattern == STDIN or os.path.exists(pattern):
            found = [pattern]
        else:
            found = sorted(glob.glob(pattern, recursive=True))
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
    return path.endswith((".gz", ".zst"))


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
    try:
        if path == STDIN:
            yield sys.stdin.buffer
        elif path.endswith(".gz"):
            with gzip.open(path, "rb") as f:
                yield io.BufferedReader(f, 1 << 20)  # type: ignore[arg-type]
        elif path.endswith(".zst"):
            with open(path, "rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as f:
                yield io.BufferedReader(f, 1 << 20)  # type: ignore[arg-type]
        else:
            with open(path, "rb", buffering=0) as f:
                yield f  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
        kind = "zstd" if path.endswith(".zst") else "gzip"
        raise ValueError(f"{path} must be a whole {kind} file; {error}; copy it again") from error


def _skip(f: BinaryIO, n: int, path: str) -> None:
    if not is_compressed(path) and path != STDIN:
        f.seek(n)
        return
    while n > 0:
        data = f.read(min(n, 1 << 20))
        if not data:
            raise ValueError(f"{path} is shorter than when the run began; delete the .part files and start again")
        n -= len(data)


def _start_of_line(path: str, start: int) -> int:
    """Offset of the first line that begins at or after `start`."""
    if start == 0:
        return 0
    offset = start - 1  # a newline here means that a line begins at `start`
    with open(path, "rb") as f:
        f.seek(offset)
        while data := f.read(1 << 16):
            at = data.find(b"\n")
            if at >= 0:
                return offset + at + 1
            offset += len(data)
    return offset


def lines_before(span: Span) -> int:
    """Lines of the file that lie before the span's first; reads the file up to there, so only for messages."""
    if span.start == 0:
        return 0
    left, lines = _start_of_line(span.path, span.start), 0
    with open(span.path, "rb") as f:
        while left and (data := f.read(min(CHUNK_BYTES, left))):
            lines, left = lines + data.count(b"\n"), left - len(data)
    return lines


def chunks(
    spans: list[Span],
    chunk_documents: int,
    max_document_bytes: int,
    first_span: int = 0,
    offset: int = 0,
    line: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Chunk]:
    """Cut the spans into chunks, from `offset` and `line` (lines already done) of `first_span` on.

    Lines are numbered from the span's first; `lines_before` gives what to add for a span inside a file.
    """
    for number in range(first_span, len(spans)):
        span = spans[number]
        if number != first_span or (offset == 0 and line == 0):
            offset, line = _start_of_line(span.path, span.start), 0
        with open_input(span.path) as f:
            _skip(f, offset, span.path)
            for data, taken, too_long in _cut(f, offset, span.end, chunk_documents, max_document_bytes, chunk_bytes):
                lines = data.count(b"\n") or 1  # the last line of a file may lack its newline
                yield Chunk(number, span.path, line + 1, data, offset + taken, line + lines, too_long)
                offset, line = offset + taken, line + lines


def _cut(
    f: BinaryIO, offset: int, end: int | None, documents: int, limit: int, size: int
) -> Iterator[tuple[bytes, int, bool]]:
    """Yields (data, bytes taken from the file, too long); stops before a line that begins at or after `end`."""
    rest = b""
    while end is None or offset < end:
        if cut := _end_of_lines(rest, documents, end, offset):
            yield rest[:cut], cut, False
            rest, offset = rest[cut:], offset + cut
        elif more := f.read(size):
            rest += more
            if len(rest) > limit and b"\n" not in rest:
                head, taken, rest = _drop_line(f, rest)
                yield head, taken, True
                offset += taken
        else:  # the end of the file: what is left is its last line
            if rest:
                yield rest, len(rest), len(rest) > limit
            return


def _drop_line(f: BinaryIO, rest: bytes) -> tuple[bytes, int, bytes]:
    """Read to the end of an over-long line: (its head, its bytes, what follows it)."""
    head, taken = rest[:4096], len(rest)
    while data := f.read(1 << 20):
        at = data.find(b"\n")
        if at >= 0:
            return head, taken + at + 1, data[at + 1 :]
        taken += len(data)
    return head, taken, b""


def _end_of_lines(data: bytes, documents: int, end: int | None, offset: int) -> int:
    """Bytes of the whole lines at the head of `data`: `documents` at most, none that begins at or after `end`."""
    cut = data.rfind(b"\n") + 1
    if end is not None and cut and offset + cut > end:
        # The line that holds byte end - 1 began before `end`: it is the last one.
        cut = data.find(b"\n", max(0, end - 1 - offset)) + 1 or cut
    if cut and data.count(b"\n", 0, cut) > documents:
        at = 0
        for _ in range(documents):
            at = data.find(b"\n", at) + 1
        cut = min(cut, at)
    return cut


def fingerprint(spans: list[Span]) -> list[list[object]]:
    """What a resumed run must find unchanged: names, ranges, sizes and times of change."""
    rows: list[list[object]] = []
    for span in spans:
        if span.path == STDIN:
            rows.append([STDIN])
            continue
        stat = os.stat(span.path)
        rows.append([str(Path(span.path).resolve()), span.start, span.end, stat.st_size, stat.st_mtime_ns])
    return rows
