"""Corpora from arrays, for tests of what reads them."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dfm_nb.text.indexed import Index
from dfm_nb.text.parts import Parts


def words_of(weights: Iterable[float], prefixes: Iterable[str]) -> list[str]:
    """As a command gives a blend: each weight before its corpus."""
    return [word for weight, prefix in zip(weights, prefixes) for word in (str(weight), prefix)]


def write_pair(prefix: str | Path, documents: Iterable[list[np.ndarray]], dtype: np.dtype | type) -> Index:
    """Write a `.bin/.idx` pair; each document is a list of sequences of token ids."""
    dtype, docs = np.dtype(dtype), list(documents)
    for suffix in ("bin", "idx"):  # `Parts` replaces no pair without .meta.json
        Path(f"{prefix}.{suffix}").unlink(missing_ok=True)
    sequences = [np.asarray(s, dtype) for d in docs for s in d]
    with Parts.open(str(prefix), {"text": str(prefix)}, {}) as parts:
        counts = np.array([len(d) for d in docs], np.int32)
        parts.append(
            "text",
            np.concatenate([*sequences, np.zeros(0, dtype)]),
            np.array([len(s) for s in sequences], np.int32),
            counts,
        )
        parts.finish(dtype, None)
    return Index.open(prefix)
