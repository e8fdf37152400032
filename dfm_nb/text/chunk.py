"""One chunk of JSONL lines to token bytes: the work of a worker process, and its flags.

A line without a document is reported with its reason. As in Megatron-LM's tool, an empty text is an empty document (not
an EOD alone), and a list of strings is a document of several sequences.
"""

import itertools
import json
from typing import Literal, NamedTuple, Sequence

import numpy as np
import orjson

from dfm_nb.base.options import Options, option
from dfm_nb.text import encode as text_encode
from dfm_nb.text.input import CHUNK_BYTES, LineChunk
from dfm_nb.text.tokenizer import TokenizerSpec

COUNTS = ("documents", "blank_lines", "skipped")
"""What happens to a line."""


class PreprocessConfig(Options):
    """JSONL -> PREFIX_KEY_document.bin and .idx. The names of the flags are Megatron-LM's."""

    prog = "dfm text preprocess"

    input: tuple[str, ...] = option(help="JSONL files, globs or URLs, also .gz, .zst and .zip; - is stdin")
    output_prefix: str = option(help="path of the output without _KEY_document.bin", output=True)
    tokenizer_type: Literal["HuggingFaceTokenizer"] = option("HuggingFaceTokenizer", "for others see docs/text.md")
    tokenizer_model: str = option(help="hub id, folder, or tokenizer.json")
    json_keys: tuple[str, ...] = option(("text",), "keys to tokenize, one corpus each", min_length=1)
    workers: int = option(1, "processes that tokenize; 1: this process", ge=1)
    chunk_size: int = option(8192, "documents per chunk (1 MiB at most), the unit of work and of resuming", ge=1)
    append_eod: bool = option(False, "end each document with the end-of-document token")
    dtype: Literal["uint16", "int32"] | None = option(None, "of the tokens; by default Megatron's choice")
    on_error: Literal["stop", "skip"] = option("stop", "at a bad line: stop, or skip and report it")
    tokenizer_backend: Literal["auto", "gigatoken", "tokenizers"] = option(
        "auto", "library that encodes; auto: gigatoken for tokenizers whose ids were compared"
    )
    partition: str | None = option(None, "i/n (from 0): only that part of the lines; auto: what torchrun or a Job sets")
    progress: bool = option(True, "show a bar", python_only=True)
    chunk_bytes: int = option(CHUNK_BYTES, "of text in a chunk, about", ge=1, python_only=True)


class Encoded(NamedTuple):
    """`corpora` has what `Parts.append` takes, by key: tokens, lengths and counts. `bad` has line (counted from the
    span's first), reason and excerpt of each line without a document.
    """

    corpora: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    counts: dict[str, int]
    bad: list[dict]


class ChunkEncoder:
    """Encodes chunks in a worker process. One per process, as gigatoken remembers words."""

    def __init__(self, spec: TokenizerSpec, config: PreprocessConfig):
        self.config = config
        self._dtype = np.dtype(config.dtype)
        self._eod = spec.eod_id
        self._text = text_encode.encoder(spec, config.tokenizer_backend)

    def __call__(self, chunk: LineChunk) -> Encoded:
        """Encode a chunk; with on_error "stop" it ends at the first bad line."""
        rows: list[list[list[str]]] = []  # of each document, the texts under each key
        bad: list[dict] = []
        blank_lines = 0
        for number, line in enumerate(chunk.lines, chunk.end.line - len(chunk.lines) + 1):
            if line.isspace():
                blank_lines += 1
                continue
            try:
                rows.append(self._row(line))
            except ValueError as error:
                excerpt = line[:100].decode("utf-8", "backslashreplace").removesuffix("\n")
                bad.append({"line": number, "reason": str(error), "excerpt": excerpt})
                if self.config.on_error == "stop":
                    break
        corpora = {}
        for column, key in enumerate(self.config.json_keys):
            corpora[key] = self._encode([row[column] for row in rows])
        return Encoded(corpora, {"documents": len(rows), "blank_lines": blank_lines, "skipped": len(bad)}, bad)

    def _row(self, line: bytes) -> list[list[str]]:
        """The texts of a line under each requested key; a string becomes a list of one."""
        row = _loads(line, self.config.json_keys)
        texts_of_keys: list[list[str]] = []
        for key in self.config.json_keys:
            if key not in row:
                has = ", ".join(map(repr, row)) or "no keys"
                raise ValueError(f"the key {key!r} is missing; the line has {has} (--json-keys selects the keys)")
            texts = [row[key]] if isinstance(row[key], str) else row[key]
            if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                raise ValueError(f"{key!r} must be a string or a list of strings; got {type(texts).__name__}")
            if any(text_encode.too_long(self._text, t) for t in texts):
                raise ValueError(f"{key!r} must have {text_encode.MAX_CHARS:,} characters at most; split the document")
            texts_of_keys.append(texts)
        return texts_of_keys

    def _encode(self, documents: list[list[str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = self._text(list(itertools.chain.from_iterable(documents)))
        ids = np.concatenate([*rows, np.zeros(0, np.uint32)])
        lengths = np.fromiter(map(len, rows), np.int32, len(rows))
        owners = np.repeat(np.arange(len(documents)), list(map(len, documents)))  # the document of each sequence
        owners = owners[lengths > 0]
        lengths = lengths[lengths > 0]
        if self.config.append_eod:
            assert self._eod is not None
            last = np.flatnonzero(np.diff(owners, append=-1))  # sequence of each document that is not empty
            ids = np.insert(ids, np.cumsum(lengths)[last], self._eod)
            lengths[last] += 1
        return ids.astype(self._dtype), lengths, np.bincount(owners, minlength=len(documents)).astype(np.int32)


def _loads(line: bytes, keys: Sequence[str]) -> dict:
    """The JSON object of a line, as Python reads it. Values outside of `keys` must only be well-formed."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        # Python's json reads what orjson refuses: a byte order mark, NaN, integers of any length, and half of a
        # surrogate pair, which is not a character (so `encode` refuses it in a text).
        try:
            row = json.loads(line.decode("utf-8-sig"), parse_int=float)
            if isinstance(row, dict):
                json.dumps([row.get(key) for key in keys], ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a line must be JSON in UTF-8; {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object; got {type(row).__name__}")
    return row
