"""One chunk of JSONL lines to token bytes: the work of a worker process, and the flags that it follows.

Nothing is dropped in silence: a line that gives no document is reported with its reason. As in Megatron-LM's tool, an
empty text writes no token (no EOD alone) and keeps its place among the documents, and a list of strings is a document
of several sequences.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Sequence

import numpy as np
import orjson

from dfm_nb.text import encode as text_encode
from dfm_nb.text.input import CHUNK_BYTES, LineChunk
from dfm_nb.text.tokenizer import TokenizerSpec


@dataclass(frozen=True)
class PreprocessConfig:
    """The flags of `dfm text preprocess`; names follow Megatron-LM's tools/preprocess_data.py.

    `workers` processes tokenize beside the one that reads and writes; with 1 all is done in this process.
    `chunk_size` documents (1 MiB at most) go to a worker at a time, and are the unit of a restart.
    `partition` is (i, n): only the lines of part i, written under `<prefix>_part<i>-of-<n>`.
    """

    input: Sequence[str]
    output_prefix: str
    tokenizer_model: str
    json_keys: Sequence[str] = ("text",)
    workers: int = 1
    chunk_size: int = 8192
    append_eod: bool = False
    dtype: str | None = None
    on_error: str = "stop"
    partition: tuple[int, int] = (0, 1)
    max_document_bytes: int = 256 << 20
    fast: bool = True
    progress: bool = True
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        for name in ("workers", "chunk_size", "max_document_bytes", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(self, name)}")
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"--on-error must be stop or skip; got {self.on_error!r}")
        if self.dtype not in (None, "uint16", "int32"):
            raise ValueError(f"--dtype must be uint16 or int32; got {self.dtype!r}")
        if not self.json_keys or len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError(f"--json-keys must name different keys; got {' '.join(self.json_keys) or 'none'}")


@dataclass
class BadLine:
    """A line that gave no document. `line` counts from the span's first line."""

    line: int
    reason: str
    excerpt: str


@dataclass
class Encoded:
    """`files` holds what to append to each part file: KEY.bin tokens, KEY.lengths int32 tokens of each sequence,
    KEY.counts int32 sequences of each document.

    Documents ["a b c"], [""] and ["a", "b c"] have lengths 3, 1, 2 and counts 1, 0, 2.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    documents: int = 0
    blank_lines: int = 0
    bad: list[BadLine] = field(default_factory=list)


class ChunkEncoder:
    """Encodes chunks: the work of a worker process. One a process, so that the words seen so far stay known."""

    def __init__(self, spec: TokenizerSpec, config: PreprocessConfig):
        self.config, self._dtype = config, np.dtype(config.dtype)
        self._text = text_encode.WordEncoder(spec.backend(), self._dtype, config.fast)
        self._eod = np.array([spec.eod_id], self._dtype).tobytes() if config.append_eod else b""

    def __call__(self, chunk: LineChunk) -> Encoded:
        """Encode a chunk; with on_error "stop" nothing is read after the first bad line."""
        out = Encoded()
        rows: list[dict[str, list[str]]] = []
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if not line.strip() and len(line) <= self.config.max_document_bytes:
                out.blank_lines += 1
                continue
            try:
                rows.append(self._row(line.removesuffix(b"\n")))
            except ValueError as error:
                out.bad.append(BadLine(number, str(error), line[:100].decode("utf-8", "backslashreplace")))
                if self.config.on_error == "stop":
                    break
        out.documents = len(rows)
        for key in self.config.json_keys:
            self._encode(key, [row[key] for row in rows], out)
        return out

    def _row(self, line: bytes) -> dict[str, list[str]]:
        """The texts of a line under each key that was asked for; a string is a list of one."""
        if len(line) > self.config.max_document_bytes:
            raise ValueError(f"the line is longer than --max-document-bytes {self.config.max_document_bytes}")
        row = _loads(line, self.config.json_keys)
        found = {}
        for key in self.config.json_keys:
            if key not in row:
                has = ", ".join(map(repr, row)) or "no keys"
                raise ValueError(f"the key {key!r} is missing; the line has {has} (--json-keys names those to read)")
            texts = [row[key]] if isinstance(row[key], str) else row[key]
            if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                raise ValueError(f"{key!r} must be a string or a list of strings; got {type(texts).__name__}")
            found[key] = texts
            if len(line) > text_encode.MAX_PLAIN_CHARS:  # it may be DocumentTooLong, which alone fails its own line
                self._text.encode_batch(texts)
        return found

    def _encode(self, key: str, documents: list[list[str]], out: Encoded) -> None:
        encoded = iter(self._text.encode_batch([text for texts in documents for text in texts]))
        tokens: list[bytes] = []  # of each sequence
        counts: list[int] = []  # sequences of each document
        for texts in documents:
            sequences = [s for s in itertools.islice(encoded, len(texts)) if s]
            if sequences and self._eod:
                sequences[-1] += self._eod
            tokens += sequences
            counts.append(len(sequences))
        lengths = [len(t) // self._dtype.itemsize for t in tokens]
        out.files[f"{key}.bin"] = b"".join(tokens)
        out.files[f"{key}.lengths"] = np.array(lengths, np.int32).tobytes()
        out.files[f"{key}.counts"] = np.array(counts, np.int32).tobytes()


def _loads(line: bytes, keys: Sequence[str]) -> dict:
    """The JSON object of a line, as Python reads it. Of what is not under `keys`, only the form must be right."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        # What Python's json reads and orjson refuses: a byte order mark, NaN, integers of any length, and half of a
        # surrogate pair, which is no character (so `encode` refuses it in a text).
        try:
            row = json.loads(line.decode("utf-8-sig"), parse_int=float)
            if isinstance(row, dict):
                json.dumps([row.get(key) for key in keys], ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a line must be JSON in UTF-8; {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object; got {type(row).__name__}")
    return row
