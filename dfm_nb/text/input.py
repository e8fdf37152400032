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
    """Whole lines with their newlines, from line `first_line` of the span on; the next begins at `next_offset`."""

    span: int
    first_line: int
    lines: list[bytes]
    next_offset: int  # bytes, uncompressed
    too_long: bool = False  # the one line is the head of one over the limit; the rest was not kept

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
                yield io.BufferedReader(f, CHUNK_BYTES)  # type: ignore[arg-type]
        elif path.endswith(".zst"):
            with open(path, "rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as f:
                yield io.BufferedReader(f, CHUNK_BYTES)  # type: ignore[arg-type]
        else:
            with open(path, "rb", CHUNK_BYTES) as f:
                yield f
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


def _go_to_line(f: BinaryIO, start: int) -> int:
    """Move to the first line that begins at or after `start`, and say where that is."""
    if start == 0:
        return 0
    f.seek(start - 1)  # a newline here means that a line begins at `start`
    return start - 1 + _skip_line(f)


def _go_to_offset(f: BinaryIO, offset: int, path: str) -> None:
    if not is_compressed(path):
        f.seek(offset)
        return
    while offset and (data := f.read(min(offset, CHUNK_BYTES))):
        offset -= len(data)


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
    first_span: int = 0,
    offset: int = 0,
    line: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Chunk]:
    """Cut the spans into chunks, from `offset` and `line` (lines already done) of `first_span` on.

    Lines are numbered from the span's first; `lines_before` gives what to add for a span inside a file.
    """
    for number, span in enumerate(spans[first_span:], first_span):
        with open_input(span.path) as f:
            if number == first_span and line:
                _go_to_offset(f, offset, span.path)
            else:
                offset, line = _go_to_line(f, span.start), 0
            lines: list[bytes] = []
            size = 0
            while True:
                # A line belongs to the span in which it begins. One byte over the limit shows that a line is too long.
                ended = span.end is not None and offset >= span.end
                text = b"" if ended else f.readline(max_document_bytes + 1)
                too_long = len(text) > max_document_bytes and not text.endswith(b"\n")
                if lines and (not text or too_long or len(lines) == chunk_documents or size >= chunk_bytes):
                    yield Chunk(number, line + 1, lines, offset)
                    line, lines, size = line + len(lines), [], 0
                if not text:
                    break
                offset += len(text)
                if too_long:
                    offset += _skip_line(f)
                    yield Chunk(number, line + 1, [text[:4096]], offset, too_long)
                    line += 1
                else:
                    lines.append(text)
                    size += len(text)


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
