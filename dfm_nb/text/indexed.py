"""Megatron's indexed token format: `.bin` holds the tokens, `.idx` the positions of sequences and documents.

The bytes equal those of megatron.core 0.16.1's IndexedDatasetBuilder. `Index` reads a pair without megatron or torch.

Layout of `.idx` (little endian): magic 9 bytes, version u64 = 1, dtype code u8, sequence count S u64,
document index length D u64 (documents + 1), sequence lengths int32 [S], byte pointers int64 [S], documents int64 [D].
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dfm_nb.base.files import UNLIMITED, plain, read_json

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
DTYPES = dict(enumerate(map(np.dtype, ("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2")), 1))
CODES = {dtype: code for code, dtype in DTYPES.items()}
_META = {"tokenizer": str, "tokenizer_sha256": str, "append_eod": bool, "inputs": list} | dict.fromkeys(
    ("vocab_size", "max_id", "documents", "skipped", "blank_lines", "tokens", "empty_documents"), int
)
"""What is read of the provenance, by its types; the EOD id may be missing."""


def optimal_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500, otherwise int32: the rule of megatron.core's DType.optimal_dtype."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def meta_path(prefix: str | Path) -> Path:
    """The provenance file of a pair: tokenizer, EOD id, counts, inputs. Megatron does not read it."""
    return Path(f"{prefix}.meta.json")


def read_meta(prefix: str | Path) -> dict:
    """The provenance that `preprocess` wrote for a pair; {} if there is none, it is damaged, or the pair is another."""
    meta = read_json(meta_path(prefix))
    eod = isinstance(meta.get("eod_id"), int | None)
    if not eod or any(type(meta.get(name)) is not kind for name, kind in _META.items()):
        return {}
    index = Index.open(prefix)
    has = (index.num_tokens, index.num_documents, index.dtype.name)
    return meta if has == (meta["tokens"], meta["documents"], meta.get("dtype")) else {}


@dataclass(frozen=True)
class Index:
    """A mapped pair. `lengths` int32 [S], `pointers` int64 [S] in bytes, `documents` int64 [documents + 1]."""

    prefix: Path
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray

    @classmethod
    def open(cls, prefix: str | Path) -> "Index":
        """Map an index.

        Raises
        ------
        FileNotFoundError : one file of the pair is missing
        ValueError : the file is not an index, or its size does not match its counts
        """
        path = idx_path(prefix)
        missing = [str(file) for file in (path, bin_path(prefix)) if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"a corpus is a .bin and an .idx file; {' and '.join(missing)} is missing")
        plain(bin_path(prefix), None, UNLIMITED)
        size = path.stat().st_size
        with plain(path, None, UNLIMITED).open("rb") as f:
            header = f.read(HEADER.size).ljust(HEADER.size)
        magic, version, code, sequences, bounds = HEADER.unpack(header)
        if (magic, version) != (MAGIC, VERSION) or code not in DTYPES:
            raise ValueError(f"{path} must be an index of Megatron's version {VERSION}; it begins with {header!r}")
        want = HEADER.size + 12 * sequences + 8 * bounds
        if size != want:
            raise ValueError(f"{path} must have {want} bytes by its header; it has {size}; copy it again")
        data = np.memmap(path, mode="r")[HEADER.size :]
        lengths, pointers, documents = np.split(data, (4 * sequences, 12 * sequences))
        arrays = lengths.view(np.int32), pointers.view(np.int64), documents.view(np.int64)
        return cls(Path(prefix), DTYPES[code], *arrays)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def tokens(self) -> np.ndarray:
        """All tokens, mapped read-only, shape [bytes of .bin // itemsize]."""
        path = bin_path(self.prefix)
        count = path.stat().st_size // self.dtype.itemsize
        if not count:
            return np.zeros(0, self.dtype)  # an empty file cannot be mapped
        return np.memmap(path, self.dtype, "r", shape=(count,))

    def document_tokens(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]; an empty document has 0."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return np.diff(ends[self.documents])
