"""The fast path gives the ids of the tokenizer itself, for every family, on texts made to break it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_nb.text import encode as text_encode
from dfm_nb.text.encode import WordEncoder
from tests.text.text_tokenizers import FOREIGN, ODD, SPACES, WORDS, build, sample_text

FAMILIES = ["gpt2", "llama3", "qwen"]
OTHERS = ["bpe", "wordpiece", "metaspace"]


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: build(kind) for kind in FAMILIES + OTHERS}


def reference(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode(encoder: WordEncoder, text: str) -> list[int]:
    return np.frombuffer(encoder.encode_batch([text])[0], encoder.dtype).tolist()


@pytest.mark.parametrize("kind", FAMILIES)
def test_fast_path_equals_tokenizer(tokenizers, kind, monkeypatch):
    """Also when the memory of words is full."""
    encoder = WordEncoder(tokenizers[kind], np.uint16)
    assert encoder.fast
    for seed in range(150):
        text = sample_text(seed, foreign=0.03 * (seed % 3), odd=0.04 * (seed % 4))
        assert encode(encoder, text) == reference(tokenizers[kind], text), repr(text)
    assert len(encoder._words) > 50
    monkeypatch.setattr(text_encode, "MAX_WORDS", 10)
    encoder = WordEncoder(tokenizers[kind], np.uint16)
    assert encode(encoder, text) == reference(tokenizers[kind], text) and len(encoder._words) <= 10


PIECES = st.sampled_from([*WORDS.split(), *FOREIGN, *ODD, *SPACES, "'", "'l", "12", "a", "B", "\u0301", "ß", " é"])


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.characters(max_codepoint=0x2FF) | st.characters(blacklist_categories=["Cs"]), max_size=30))
def test_fast_path_equals_tokenizer_on_any_text(tokenizers, parts):
    text = "".join(parts)
    for kind in FAMILIES:
        encoder = WordEncoder(tokenizers[kind], np.int32)
        assert encode(encoder, text) == reference(tokenizers[kind], text), (kind, text)


@pytest.mark.parametrize("kind", FAMILIES)
def test_blocks_of_a_long_document_join_exactly(tokenizers, kind, monkeypatch):
    monkeypatch.setattr(text_encode, "BLOCK_CHARS", 50)
    encoder = WordEncoder(tokenizers[kind], np.uint16)
    for seed in range(20):
        text = sample_text(seed, words=200, foreign=0.02 * (seed % 2), odd=0.0)
        assert encode(encoder, text) == reference(tokenizers[kind], text)


def test_added_tokens_in_the_text_are_found(tokenizers):
    for kind, token in (("gpt2", "<|endoftext|>"), ("wordpiece", "[MASK]"), ("bpe", "</s>")):
        encoder = WordEncoder(tokenizers[kind], np.uint16)
        text = f"the fox {token} jumps"
        assert tokenizers[kind].token_to_id(token) in encode(encoder, text)
        assert encode(encoder, text) == reference(tokenizers[kind], text)


def test_a_stretch_over_the_limit_is_refused(tokenizers, monkeypatch):
    monkeypatch.setattr(text_encode, "MAX_PLAIN_CHARS", 100)
    encoder = WordEncoder(tokenizers["gpt2"], np.uint16)
    with pytest.raises(text_encode.DocumentTooLong, match="200|100"):
        encoder.encode_batch(["é" * 200])
    assert encode(encoder, "the fox " * 100) == reference(tokenizers["gpt2"], "the fox " * 100)
