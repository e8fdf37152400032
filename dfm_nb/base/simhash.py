"""Captions as 128 bits, of which similar captions share most: SimHash (Charikar 2002, Section 3) of their words.

Each word has 128 random signs, and a bit of the caption is the majority of its words' signs. So two captions differ in
the share angle / 180 degrees of their bits, where the angle is that between their sets of words:

    a red fox in snow | A red fox in snow.            0 bits, as case and punctuation do not count
    a red fox in snow | a red fox in the forest      37 bits
    a red fox in snow | two robots play chess        64 bits, half of all, as for any two captions without a common word
"""

import base64
import hashlib
import re
from collections.abc import Iterable

import numpy as np

BYTES = 16
ALIKE = 36
"""Captions without a common word differ in 64 +- 5.7 bits (binomial): 1 of 2 million pairs by no more than these."""


def _bits(text: str) -> np.ndarray:
    words = {word.encode() for word in re.findall(r"\w+", text.lower())}
    hashed = b"".join(hashlib.shake_128(word).digest(BYTES) for word in words)
    signs = np.unpackbits(np.frombuffer(hashed, np.uint8)).reshape(-1, 8 * BYTES) * 2.0 - 1
    return np.packbits(signs.sum(0) > 0)


def encoded(texts: Iterable[str]) -> str:
    """The bits of texts, in base64."""
    return base64.b64encode(b"".join(_bits(text).tobytes() for text in texts)).decode()


def differing_bits(text: str, others: str) -> np.ndarray:
    """In how many bits a text differs from each of `encoded` ones."""
    known = np.frombuffer(base64.b64decode(others), np.uint8).reshape(-1, BYTES)
    return np.unpackbits(known ^ _bits(text), axis=1).sum(1)
