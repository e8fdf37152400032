"""Corpora from arrays, for tests of what reads them."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dfm_nb.text.indexed import Index, write_index


def write_pair(prefix: str | Path, documents: Iterable[list[np.ndarray]], dtype: np.dtype | type) -> Index:
    """Write a `.bin/.idx` pair; each document is a list of sequences of token ids."""
    dtype, docs = np.dtype(dtype), list(documents)
    lengths, counts = Path(f"{prefix}.lengths"), Path(f"{prefix}.counts")
    np.array([len(s) for d in docs for s in d], np.int32).tofile(lengths)
    np.array([len(d) for d in docs], np.int32).tofile(counts)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.asarray(s).astype(dtype).tobytes() for d in docs for s in d))
    with open(f"{prefix}.idx", "wb") as f:
        write_index(f, dtype, lengths, counts)
    return Index.open(prefix)
