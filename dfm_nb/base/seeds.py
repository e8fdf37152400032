"""Random numbers that depend on their purpose, not on process, order or layout."""

import hashlib

import torch


def generator_for(*key: object) -> torch.Generator:
    """A CPU generator that depends only on `key` (SHA-256 of its text), the same on every rank and in every layout."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
