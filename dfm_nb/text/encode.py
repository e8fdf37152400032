"""Text to token ids: by gigatoken where its ids are known to be those of `tokenizers`, which is 20 times slower.

"Known" is a table of families (`FAMILIES`), each compared on texts of all scripts (docs/decisions/0012). The two differ
in the version of Unicode that they know, so a text with a character younger than version 14, or of another class since,
goes to `tokenizers`. A run also compares some of its own documents (`GigatokenEncoder`).

The ids are those of `Tokenizer.encode(text, add_special_tokens=False)`.
"""

import hashlib
import itertools
import json
import unicodedata
from importlib.metadata import distributions
from typing import Callable

import numpy as np
import orjson
from tokenizers.pre_tokenizers import ByteLevel

from dfm_nb.base.log import log
from dfm_nb.text.tokenizer import TokenizerSpec

MAX_CHARS = 16 << 20  # of a text for `tokenizers`, which needs over 100 bytes for some characters
SAMPLE_CHARS = 1024  # compared of a text: `tokenizers` reads about 4 MB/s
RELOAD_CHARS = 256 << 20  # gigatoken remembers each word it has seen; at most 150 MB until it is loaded again
GIGATOKEN = "0.10."
"""Versions whose ids were compared."""
FAMILIES = {
    "364964ade18a": "GPT-2",
    "28484324e7b0": "Llama 3",
    "b7c9ffcd95f3": "GPT-4 (cl100k)",
    "777f1af9d41f": "Qwen 2 and 3",
    "9bdbc55210cc": "GPT-4o (o200k)",
    "fd69bbd7f988": "gpt-oss",
    "6e360514c244": "DeepSeek V3",
    "84baf4576e76": "Llama 2",
    "ce3e79e0a101": "Mistral",
    "bb1024432e71": "Gemma",
}
"""sha256 of a tokenizer's normaliser, pre-tokenizer and the settings of its model -> models that have them."""

CHANGED = "\u0295"
"""Characters of another category in Unicode 17."""

Encode = Callable[[list[str]], list[np.ndarray]]
"""Token ids, uint32, of each text."""


class OtherIds(ValueError):
    """gigatoken gives other ids than `tokenizers`, or cannot load the tokenizer."""


def family(spec: TokenizerSpec) -> str | None:
    """The models with this kind of tokenizer whose ids were compared; None for another kind."""
    about = orjson.loads(spec.description)
    added = about["added_tokens"]
    special = any(t["lstrip"] or t["rstrip"] or t["single_word"] or t["normalized"] for t in added)
    model = {name: value for name, value in about["model"].items() if value and name not in ("vocab", "merges")}
    kind = json.dumps([about["normalizer"], about["pre_tokenizer"], model], sort_keys=True)
    kind = kind.replace('"trim_offsets": true', '"trim_offsets": false')  # of no effect on ids
    name = FAMILIES.get(hashlib.sha256(kind.encode()).hexdigest()[:12])
    if special or spec.split_special_tokens or not name:
        return None
    vocab = about["model"]["vocab"].keys()
    alphabet = set(ByteLevel.alphabet())
    # gigatoken finds such a word in a text as it is, `tokenizers` only as bytes, where "東" is "æĿ±"
    words = "".join(vocab - {t["content"] for t in added}) if "ignore_merges" in model else ""
    # `tokenizers` drops a byte that the vocabulary lacks (trained without the initial alphabet); gigatoken does not
    # load it, or gives other ids
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)} if "byte_fallback" in model else alphabet
    return name if vocab >= byte_tokens and alphabet.issuperset(words) else None


def choose(spec: TokenizerSpec, backend: str = "auto") -> str:
    """The back end for `--tokenizer-backend`.

    Raises
    ------
    ValueError : gigatoken is asked for and is missing, or not known to give the same ids
    """
    installed = next((d.version for d in distributions(name="gigatoken")), "")
    younger = unicodedata.unidata_version >= "17"  # so that it cannot tell which characters are new in 17
    fits = installed.startswith(GIGATOKEN) and not younger and family(spec) is not None
    if backend == "gigatoken" and not fits:
        got = f"got {installed or 'none'} and {spec.name}; use --tokenizer-backend tokenizers"
        raise ValueError(f"gigatoken must be {GIGATOKEN}* and the tokenizer of a family that was compared; {got}")
    if backend == "auto" and not installed:
        log.warning("text is encoded by tokenizers, which is slower: pip install 'dfm_nb[text]' adds gigatoken")
    return "gigatoken" if fits and backend != "tokenizers" else "tokenizers"


def encoder(spec: TokenizerSpec, backend: str) -> Encode:
    return GigatokenEncoder(spec) if backend == "gigatoken" else _tokenizers(spec)


def _tokenizers(spec: TokenizerSpec) -> Encode:
    encode = spec.backend().encode_batch_fast
    return lambda texts: [np.array(e.ids, np.uint32) for e in encode(texts, add_special_tokens=False)]


def too_long(encode: Encode, text: str) -> bool:
    """Whether the text is left to `tokenizers`, and too long for it."""
    return len(text) > MAX_CHARS and not (isinstance(encode, GigatokenEncoder) and encode.takes(text))


class GigatokenEncoder:
    """`Encode` by gigatoken, and by `tokenizers` for texts with characters that they may see differently.

    Raises OtherIds if it cannot load the tokenizer, or the two differ in a sample: 256 texts of the first batch, then
    one of each, beyond ASCII first.
    """

    def __init__(self, spec: TokenizerSpec):
        self._spec = spec
        self._reference = _tokenizers(spec)
        self._normalizes = orjson.loads(spec.description)["normalizer"] == {"type": "NFC"}
        self._known: set[str] = set()
        self._chars = RELOAD_CHARS  # so that the first call loads it
        self._samples = 256

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        if self._chars >= RELOAD_CHARS:
            from gigatoken.gigatoken_rs import load_hf_json

            try:
                self._encode = load_hf_json(self._spec.description).encode
            except Exception as error:
                why = str(error).split("\n")[0]
                raise OtherIds(f"gigatoken cannot load {self._spec.name} ({why})") from error
            self._chars = 0
        self._chars += sum(map(len, texts))
        mine = list(map(self.takes, texts))
        rows = [self._encode(t) if known else self._reference([t])[0] for t, known in zip(texts, mine)]
        beyond_ascii_first = sorted(itertools.compress(texts, mine), key=str.isascii)
        samples = [text[:SAMPLE_CHARS] for text in beyond_ascii_first[: self._samples]]
        self._samples = 1
        for text, expected in zip(samples, self._reference(samples)):
            for i, (ours, theirs) in enumerate(itertools.zip_longest(self._encode(text), expected)):
                if ours != theirs:
                    where = f"token {i} of the text that begins {text[:60]!r}"
                    raise OtherIds(f"gigatoken and tokenizers differ in {where}")
        return rows

    def takes(self, text: str) -> bool:
        """Whether gigatoken encodes the text."""
        if text.isascii():
            return True
        new = set(text) - self._known
        self._known |= {c for c in new if _is_settled(c, self._normalizes)}
        return self._known.issuperset(new)


def _is_settled(character: str, normalizes: bool) -> bool:
    """Whether Unicode 16 (`tokenizers`), 17 (gigatoken) and, for NFC, 9 (`tokenizers`' normaliser) see it alike.

    Unicode 3.2 stands in for 9: Python has both it and the newest. Signs, such as emoji, have no NFC.
    """
    kind = unicodedata.category(character)
    older = normalizes and unicodedata.ucd_3_2_0.category(character) == "Cn"
    return kind != "Cn" and character not in CHANGED and (not older or kind[0] in "NPS")
