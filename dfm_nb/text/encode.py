"""Text to token bytes, word by word with a cache: at least twice as fast as `encode_batch_fast` on all cores.

The measurement is benchmarks/results/text_fast_path.md. Most of the Rust path's time goes into normalised strings with
alignments and `Encoding` objects that nobody reads; here a known word costs one regex step and one lookup.

The ids are those of `Tokenizer.encode(text, add_special_tokens=False)`. The fast path runs only where that is certain:
for byte-level BPE with the pre-tokenizers of GPT-2, Llama 3, GPT-4 and Qwen, which split a text into words that are
tokenized one by one. Everything else goes through `encode_batch_fast`: other tokenizers, texts with an added token such
as <|endoftext|>, and spans with characters beyond ASCII.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Callable

import numpy as np
from tokenizers import Tokenizer

MAX_WORDS = 400_000  # about 60 MB of memory per process
BLOCK_CHARS = 1 << 20
MAX_PLAIN_CHARS = 16 << 20

# Where a text may be cut: no rule below joins a letter to a following space and letter.
_BOUNDARY = re.compile(r"[A-Za-z](?= [A-Za-z])")
_LAST_BOUNDARY = re.compile(r".*[A-Za-z](?= [A-Za-z])", re.S)
_FOREIGN = re.compile(r"[^\x00-\x7f]+")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_CL100K % "{1,3}", _CL100K % "", _GPT2}  # Llama 3 and GPT-4; Qwen 2 to 3; GPT-2 written out

# Most words match this, so it is tried first. The result is the same: a text that begins with a letter, or with a space
# and a letter, can only match the letters' alternative, because contractions begin with an apostrophe.
_FIRST = r" ?[A-Za-z]+|"
_SPACE = "\u0120"  # how byte-level pre-tokenizers write a space


class DocumentTooLong(ValueError):
    """A span that must be tokenized in one piece is longer than `MAX_PLAIN_CHARS`."""


def _ascii(pattern: str) -> re.Pattern[str]:
    r"""The pattern for ASCII text: \p{L} and \p{N} become ranges, \s is ASCII's."""
    inside = re.sub(r"\[\^[^\]]*\]", lambda m: m[0].replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9"), pattern)
    return re.compile(_FIRST + inside.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]"), re.ASCII)


def split_rule(tokenizer_json: str) -> re.Pattern[str] | None:
    """How the tokenizer splits ASCII text into words that it tokenizes one by one; None if that is unknown.

    The rule is read from the tokenizer's own description: model, normaliser, pre-tokenizer, added tokens.
    """
    spec = json.loads(tokenizer_json)
    model, normalizer, pre = spec["model"], spec["normalizer"], spec["pre_tokenizer"]
    steps = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre]
    if model["type"] != "BPE" or model.get("dropout") or not steps or not steps[-1]:
        return None
    # NFC and NFKC do not change ASCII; other normalisers do.
    if normalizer is not None and normalizer["type"] not in ("NFC", "NFKC"):
        return None
    if any(t["normalized"] and normalizer is not None for t in spec["added_tokens"]):
        return None
    *before, level = steps
    if level["type"] != "ByteLevel" or level["add_prefix_space"]:
        return None
    if level.get("use_regex", True):
        return None if before else _ascii(_GPT2)
    known = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in _SPLITS]
    return _ascii(before[0]["pattern"]["Regex"]) if len(before) == 1 and before[0] in known else None


class _Memo(dict[str, bytes]):
    """text -> token bytes, filled on first use; long texts are not kept."""

    def __init__(self, encode: Callable[[str], bytes]):
        super().__init__()
        self._encode = encode

    def __missing__(self, text: str) -> bytes:
        value = self._encode(text)
        if len(text) <= 64:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[text] = value
        return value


class WordEncoder:
    """Tokenizes documents to bytes.

    Parameters
    ----------
    tokenizer : without truncation and padding
    dtype : of the output, uint16 or int32; every id must fit
    fast : False for `encode_batch_fast` alone
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype | type, fast: bool = True):
        self._tokenizer, self.dtype = tokenizer, np.dtype(dtype)
        description = tokenizer.to_str()
        self._rule = split_rule(description) if fast else None
        self._added = [t["content"] for t in json.loads(description)["added_tokens"]]
        # Two characters of "<|...|>" and one of the rest: a cheap first test, because few texts contain any.
        self._heads = sorted({t[:2] if t[:1] == "<" else t[:1] for t in self._added})
        self._code = {2: "H", 4: "i"}[self.dtype.itemsize]
        self._words = _Memo(self._word)
        self._stretches = _Memo(lambda text: self._plain([text])[0])

    @property
    def fast(self) -> bool:
        return self._rule is not None

    def encode_batch(self, texts: list[str]) -> list[bytes]:
        """Token bytes of each text, in order.

        Raises
        ------
        DocumentTooLong : more than 16 M characters would have to be tokenized in one piece
        """
        slow = [i for i, text in enumerate(texts) if not self.fast or self._holds_added_token(text)]
        found = dict(zip(slow, self._plain([texts[i] for i in slow])))
        return [found[i] if i in found else self._document(text) for i, text in enumerate(texts)]

    def _holds_added_token(self, text: str) -> bool:
        return any(head in text for head in self._heads) and any(token in text for token in self._added)

    def _plain(self, texts: list[str]) -> list[bytes]:
        for text in texts:
            if len(text) > MAX_PLAIN_CHARS:
                raise DocumentTooLong(f"{len(text):,} characters at once, over {MAX_PLAIN_CHARS:,}; split the document")
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, self.dtype).tobytes() for e in encodings]

    def _word(self, word: str) -> bytes:
        """Token bytes of one word of ASCII text."""
        if word.isalpha():  # the byte-level alphabet maps letters to themselves
            piece = word
        elif word[:1] == " " and word[1:].isalpha():
            piece = _SPACE + word[1:]
        else:
            ((piece, _),) = self._tokenizer.pre_tokenizer.pre_tokenize_str(word)
        return array(self._code, [t.id for t in self._tokenizer.model.tokenize(piece)]).tobytes()

    def _ascii_text(self, text: str, start: int, end: int) -> bytes:
        """Token bytes of text[start:end], which is ASCII, in blocks so that few words are in memory at a time."""
        assert self._rule is not None
        parts, word_bytes = [], self._words.__getitem__
        while start < end:
            stop = end
            if end - start > BLOCK_CHARS:
                boundary = _BOUNDARY.search(text, start + BLOCK_CHARS - 1, end)
                stop = boundary.end() if boundary else end
            parts.append(b"".join(map(word_bytes, self._rule.findall(text[start:stop]))))
            start = stop
        return b"".join(parts)

    def _document(self, text: str) -> bytes:
        """ASCII by words; spans with other characters in one piece, split where no rule joins words."""
        parts, start, size = [], 0, len(text)
        while start < size:
            foreign = None if text.isascii() else _FOREIGN.search(text, start)
            if foreign is None:
                parts.append(self._ascii_text(text, start, size))
                break
            left = _LAST_BOUNDARY.match(text, start, foreign.start())
            right = _BOUNDARY.search(text, foreign.end())
            begin = left.end() if left else start
            end = right.end() if right else size
            parts.append(self._ascii_text(text, start, begin))
            parts.append(self._stretches[text[begin:end]])
            start = end
        return b"".join(parts)
