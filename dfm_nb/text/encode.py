"""Text to token bytes, fast: words are tokenized once, then looked up.

Enters: documents as str. Leaves: their token ids as the bytes of the output dtype, ready to be appended to `.bin`.
Guarantees: the ids of `Tokenizer.encode(text, add_special_tokens=False)`. The fast path runs only where that can be
shown: the pre-tokenizer is one that `split_rule` knows, so a text is tokenized word by word, each word alone; ASCII
text is cut by the same rule in `re`; a word that the tokenizer itself would cut again sends its document to the plain
path; and a stretch with other characters is cut out between "letter" and "space letter", where no rule joins words.
Everything else (other pre-tokenizers, added tokens in the text) goes through `encode_batch_fast`.
Cost: one dictionary of at most 400,000 words (about 60 MB) a process.

Why it is faster: the Rust path spends most of its time on normalised strings with alignments and on `Encoding` objects
that nobody reads; here a word costs one regex step and one lookup, and a document one `bytes.join`.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Callable

import numpy as np

MAX_WORDS = 400_000
BLOCK_CHARS = 1 << 20
MAX_PLAIN_CHARS = 16 << 20
_BOUNDARY = re.compile(r"[A-Za-z](?= [A-Za-z])")
_LAST_BOUNDARY = re.compile(r".*[A-Za-z](?= [A-Za-z])", re.S)
_FOREIGN = re.compile(r"[^\x00-\x7f]+")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_CL100K % "{1,3}", _CL100K % "", _GPT2}  # Llama 3 and GPT-4; Qwen 2 to 3; GPT-2 written out
_WHITESPACE = r"\w+|[^\w\s]+"
# BertNormalizer deletes control characters (vertical tab and form feed too): they must reach `_word`, so no \s here.
_CLEANED_WHITESPACE = r"\w+|[^\w \t\n\r]+"
_CLEANED_BERT = r"[A-Za-z0-9]+|[^ \t\n\rA-Za-z0-9]"


# What most words match, tried first. It changes nothing: in these patterns a text that begins with a letter, or with a
# space and a letter, can only match the letters' alternative, since contractions begin with an apostrophe.
_FIRST = r" ?[A-Za-z]+|"
_SPACE = "\u0120"  # how byte-level pre-tokenizers write a space


class Fallback(Exception):
    """This document needs the plain path."""


class DocumentTooLong(ValueError):
    """A stretch that has to be tokenized as a whole is over `MAX_PLAIN_CHARS`."""


def _ascii(pattern: str) -> re.Pattern[str]:
    r"""The pattern restricted to ASCII text: \p{L} and \p{N} become ranges, \s and \w are ASCII's."""
    inside = re.sub(r"\[\^[^\]]*\]", lambda m: m[0].replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9"), pattern)
    body = inside.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    return re.compile(_FIRST + body if "A-Za-z" in inside and " ?" in inside else body, re.ASCII)


def split_rule(tokenizer_json: str) -> re.Pattern[str] | None:
    """How the tokenizer cuts ASCII text into words that it tokenizes one by one; None if that is not known.

    Checked on the tokenizer's own description: model, normaliser, pre-tokenizer, added tokens.
    """
    spec = json.loads(tokenizer_json)
    model, normalizer, pre = spec["model"], spec["normalizer"], spec["pre_tokenizer"]
    bert = normalizer is not None and normalizer["type"] == "BertNormalizer"
    simple = normalizer is None or normalizer["type"] in ("NFC", "NFKC", "Lowercase")
    if model["type"] not in ("BPE", "WordPiece") or model.get("dropout") or not (bert or simple) or pre is None:
        return None
    if any(t["normalized"] and normalizer is not None for t in spec["added_tokens"]):
        return None
    if bert:
        known = {"BertPreTokenizer": _CLEANED_BERT, "Whitespace": _CLEANED_WHITESPACE}.get(pre["type"])
        return _ascii(known) if known and normalizer["clean_text"] else None
    if pre["type"] == "Whitespace":
        return _ascii(_WHITESPACE)
    if pre["type"] == "ByteLevel" and not pre["add_prefix_space"] and pre.get("use_regex", True):
        return _ascii(_GPT2)
    if pre["type"] == "Sequence" and len(pre["pretokenizers"]) == 2:
        first, second = pre["pretokenizers"]
        rest = second["type"] == "ByteLevel" and not second["add_prefix_space"] and not second.get("use_regex", True)
        known = first["type"] == "Split" and first["pattern"].get("Regex") in _SPLITS
        if known and rest and first["behavior"] == "Isolated" and not first["invert"]:
            return _ascii(first["pattern"]["Regex"])
    return None


class _Memo(dict):
    """text -> token bytes, filled on the first sight of a text."""

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


class TextEncoder:
    """Tokenizes documents to bytes.

    Parameters
    ----------
    tokenizer : a `tokenizers.Tokenizer` without truncation and padding
    dtype : of the output, uint16 or int32; every id must fit
    fast : False keeps to the plain path
    """

    def __init__(self, tokenizer, dtype: np.dtype, fast: bool = True):
        self._tokenizer, self.dtype = tokenizer, np.dtype(dtype)
        description = tokenizer.to_str()
        rule = split_rule(description) if fast else None
        self.fast = rule is not None
        self.plain_documents = 0
        if rule is None:
            return
        self._findall = rule.findall
        self._added = [t["content"] for t in json.loads(description)["added_tokens"]]
        self._heads = sorted({t[:2] if t[:1] == "<" else t[:1] for t in self._added})
        self._parts = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model
        self._byte_level = _FIRST in rule.pattern and json.loads(description)["normalizer"] is None
        self._code = {2: "H", 4: "i"}[self.dtype.itemsize]
        self._words = _Memo(self._word)
        self._stretches = _Memo(lambda text: self._tokens([text])[0])

    def _word(self, word: str) -> bytes:
        """Token bytes of one word; Fallback unless normaliser and pre-tokenizer keep it in one piece.

        Letters, alone or after one space, are one piece of every byte-level rule known here: that is not asked again.
        """
        normalizer, pre_tokenizer, _ = self._parts
        if self._byte_level and word.isalpha():
            return self._ids(word)
        if self._byte_level and word[:1] == " " and word[1:].isalpha():
            return self._ids(_SPACE + word[1:])
        normal = word if normalizer is None else normalizer.normalize_str(word)
        pieces = pre_tokenizer.pre_tokenize_str(normal)
        if len(normal) != len(word) or len(pieces) != 1 or pieces[0][1] != (0, len(word)):
            raise Fallback
        return self._ids(pieces[0][0])

    def _ids(self, piece: str) -> bytes:
        return array(self._code, [t.id for t in self._parts[2].tokenize(piece)]).tobytes()

    def encode_batch(self, texts: list[str]) -> list[bytes]:
        """Token bytes of each text, in order."""
        if not self.fast:
            return self._plain(texts)
        out: list[bytes] = []
        left: list[int] = []
        for i, text in enumerate(texts):
            try:
                out.append(self._document(text))
            except Fallback:
                out.append(b"")
                left.append(i)
        for i, data in zip(left, self._plain([texts[i] for i in left])):
            out[i] = data
        return out

    def _plain(self, texts: list[str]) -> list[bytes]:
        self.plain_documents += len(texts)
        return self._tokens(texts)

    def _tokens(self, texts: list[str]) -> list[bytes]:
        for text in texts:
            if len(text) > MAX_PLAIN_CHARS:
                raise DocumentTooLong(
                    f"this tokenizer needs {len(text):,} characters at once; the limit is {MAX_PLAIN_CHARS:,}; "
                    "split the document into several"
                )
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, self.dtype).tobytes() for e in encodings]

    def _document(self, text: str) -> bytes:
        for head in self._heads:
            if head in text and any(t in text for t in self._added):
                raise Fallback
        if text.isascii():
            if len(text) <= BLOCK_CHARS:
                return b"".join(map(self._words.__getitem__, self._findall(text)))
            return self._ascii_blocks(text, 0, len(text))
        return self._mixed(text)

    def _ascii_blocks(self, text: str, start: int, end: int) -> bytes:
        parts, words = [], self._words.__getitem__
        while start < end:
            stop = end
            if end - start > BLOCK_CHARS:
                m = _BOUNDARY.search(text, start + BLOCK_CHARS - 1, end)
                stop = m.end() if m else end
            parts.append(b"".join(map(words, self._findall(text[start:stop]))))
            start = stop
        return b"".join(parts)

    def _mixed(self, text: str) -> bytes:
        """ASCII stretches by words; stretches with other characters as a whole, cut where no rule joins words."""
        parts, start, size = [], 0, len(text)
        while start < size:
            m = _FOREIGN.search(text, start)
            if m is None:
                parts.append(self._ascii_blocks(text, start, size))
                break
            left = _LAST_BOUNDARY.match(text, start, m.start())
            begin = left.end() if left else start
            right = _BOUNDARY.search(text, m.end())
            end = right.end() if right else size
            if begin > start:
                parts.append(self._ascii_blocks(text, start, begin))
            parts.append(self._stretches[text[begin:end]])
            start = end
        return b"".join(parts)
