"""One chunk of JSONL lines to token bytes: the work of a worker process.

Enters: a `Chunk` of whole lines. Leaves: `Encoded`: for each key the token bytes, the length of each sequence and the
number of sequences of each document, and the lines that are wrong with the reason.
Guarantees: nothing is dropped in silence; an empty text writes no token (no EOD alone) and keeps its place among the
documents, as Megatron-LM's tool does; a list of strings is a document of several sequences.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, field

import numpy as np
import orjson

from dfm_nb.text.encode import DocumentTooLong, TextEncoder
from dfm_nb.text.input import Chunk
from dfm_nb.text.tokenizer import TokenizerSpec

Row = dict[str, "str | list[str]"]


@dataclass(frozen=True)
class ChunkSettings:
    """What decides the bytes, besides the tokenizer."""

    keys: tuple[str, ...]
    dtype: str
    append_eod: bool
    max_document_bytes: int
    stop_at_error: bool
    fast: bool = True


@dataclass
class BadLine:
    """A line that gave no document. `line` counts from the span's first line."""

    line: int
    reason: str
    excerpt: str


@dataclass
class Encoded:
    """Per key: `tokens` bytes, `lengths` int32 bytes [sequences], `counts` int32 bytes [documents]."""

    tokens: dict[str, bytes] = field(default_factory=dict)
    lengths: dict[str, bytes] = field(default_factory=dict)
    counts: dict[str, bytes] = field(default_factory=dict)
    documents: int = 0
    empty_documents: dict[str, int] = field(default_factory=dict)
    blank_lines: int = 0
    bad: list[BadLine] = field(default_factory=list)


class ChunkEncoder:
    """Encodes chunks; one a process, so that the words seen so far stay known."""

    def __init__(self, spec: TokenizerSpec, settings: ChunkSettings):
        self.settings = settings
        self._text = TextEncoder(spec.backend(), np.dtype(settings.dtype), settings.fast)
        dtype = np.dtype(settings.dtype)
        self._eod = np.array([spec.require_eod()], dtype).tobytes() if settings.append_eod else b""
        self._itemsize = dtype.itemsize

    def encode(self, chunk: Chunk) -> Encoded:
        """Encode a chunk; after the first bad line nothing more is read when `stop_at_error`."""
        out = Encoded()
        if chunk.too_long:
            reason = f"the line is longer than --max-document-bytes {self.settings.max_document_bytes}"
            out.bad.append(BadLine(chunk.first_line, reason, _excerpt(chunk.data)))
            return out
        rows = self._parse(chunk, out)
        try:
            self._encode_keys([row for _, row in rows], out)
        except DocumentTooLong:
            rows = [r for r in rows if self._fits(*r, out)]
            self._encode_keys([row for _, row in rows], out)
        out.documents = len(rows)
        return out

    def _fits(self, line: int, row: Row, out: Encoded) -> bool:
        try:
            self._encode_keys([row], Encoded())
        except DocumentTooLong as error:
            out.bad.append(BadLine(line, str(error), _excerpt(str(row)[:100].encode("utf-8", "replace"))))
            return False
        return True

    def _encode_keys(self, rows: list[Row], out: Encoded) -> None:
        for key in self.settings.keys:
            self._encode_key(key, [row[key] for row in rows], out)

    def _parse(self, chunk: Chunk, out: Encoded) -> list[tuple[int, Row]]:
        rows, keys = [], self.settings.keys
        lines = chunk.data.split(b"\n")
        if lines and not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines, chunk.first_line):
            if not line.strip():
                out.blank_lines += 1
                continue
            try:
                row = _loads(line)
                rows.append((number, self._check(row, line, keys)))
            except ValueError as error:
                out.bad.append(BadLine(number, str(error), _excerpt(line)))
                if self.settings.stop_at_error:
                    break
        return rows

    def _check(self, row: object, line: bytes, keys: tuple[str, ...]) -> Row:
        if not isinstance(row, dict):
            raise ValueError(f"a line must be a JSON object; got {type(row).__name__}")
        for key in keys:
            if key not in row:
                raise ValueError(f"the key {key!r} is missing; the line has {', '.join(map(repr, row)) or 'no keys'}")
            text = row[key]
            if not isinstance(text, str) and not (isinstance(text, list) and all(isinstance(t, str) for t in text)):
                raise ValueError(f"{key!r} must be a string or a list of strings; got {type(text).__name__}")
        if len(line) > self.settings.max_document_bytes:
            limit = self.settings.max_document_bytes
            raise ValueError(f"the line has {len(line)} bytes; --max-document-bytes is {limit}")
        return row

    def _encode_key(self, key: str, texts: list[str | list[str]], out: Encoded) -> None:
        if any(isinstance(t, list) for t in texts):
            documents = [t if isinstance(t, list) else [t] for t in texts]
            flat = self._text.encode_batch([s for d in documents for s in d])
            pieces = iter(flat)
            sequences = [[s for s in itertools.islice(pieces, len(d)) if s] for d in documents]
        else:
            sequences = [[s] if s else [] for s in self._text.encode_batch(texts)]
        tokens: list[bytes] = []
        for document in sequences:
            if document and self._eod:
                document[-1] += self._eod
            tokens += document
        counts = np.fromiter(map(len, sequences), np.int32, len(sequences))
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens)) // self._itemsize
        out.tokens[key] = b"".join(tokens)
        out.counts[key] = counts.tobytes()
        out.lengths[key] = lengths.astype(np.int32).tobytes()
        out.empty_documents[key] = int((counts == 0).sum())


def _loads(line: bytes) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            text = line.decode("utf-8-sig")  # a byte order mark before the first line is no fault of the text
        except UnicodeDecodeError as bad:
            byte = f"byte 0x{line[bad.start]:02x} at {bad.start}"
            raise ValueError(f"a line must be valid UTF-8; {byte} is not; convert the file to UTF-8") from None
        try:
            row = json.loads(text)  # NaN and Infinity, which Python's json writes and orjson refuses
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a string holds half of a surrogate pair, which is no character") from None
        except (ValueError, RecursionError):
            raise ValueError(f"a line must be JSON; {error}") from None
        return row


def _excerpt(line: bytes) -> str:
    text = line[:100].decode("utf-8", "backslashreplace")
    return text + ("..." if len(line) > 100 else "")


_ENCODER: ChunkEncoder | None = None


def start_worker(spec: TokenizerSpec, settings: ChunkSettings) -> None:
    """Set up a worker process: one encoder, one thread."""
    global _ENCODER
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _ENCODER = ChunkEncoder(spec, settings)


def encode_in_worker(chunk: Chunk) -> Encoded:
    assert _ENCODER is not None
    return _ENCODER.encode(chunk)
