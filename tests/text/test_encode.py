"""gigatoken gives the ids of `tokenizers` for every family in the table, on texts made to break it."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_nb.text import encode as text_encode
from dfm_nb.text.encode import FAMILIES, GigatokenEncoder, OtherIds, choose, encoder, family
from tests.refusals import refused
from tests.text.text_tokenizers import FAMILY, FOREIGN, ODD, ODD_TEXTS, SPACES, WORDS, build, sample_text, spec_of

pytest.importorskip("gigatoken")
OTHERS = ["bpe", "wordpiece"]


@pytest.fixture(scope="module")
def specs():
    return {kind: spec_of(build(kind)) for kind in (*FAMILY, *OTHERS)}


def test_every_family_of_the_table_is_tested(specs):
    assert {family(spec) for spec in specs.values()} - {None} == set(FAMILIES.values())
    assert [choose(specs[kind]) for kind in OTHERS] == ["tokenizers"] * len(OTHERS)
    assert choose(specs["gpt2"], "tokenizers") == "tokenizers"
    split = dataclasses.replace(specs["gpt2"], split_special_tokens=True)
    refused("tokenizers", choose, split, "gigatoken")


PIECES = st.sampled_from([*WORDS.split(), *FOREIGN, *ODD, *SPACES, *ODD_TEXTS[:-3], "'l", "12", "\u0301", "ß", " é"])


@pytest.mark.parametrize("kind", FAMILY)
def test_ids_equal_those_of_tokenizers(specs, kind):
    encode, reference = (encoder(specs[kind], backend) for backend in ("gigatoken", "tokenizers"))

    @settings(max_examples=60, deadline=None)
    @given(st.lists(PIECES | st.characters(max_codepoint=0x2FF) | st.characters(blacklist_categories=["Cs"])))
    def same(parts):
        check(["".join(parts)])

    def check(texts):
        for text, ids, want in zip(texts, encode(texts), reference(texts), strict=True):
            assert ids.tolist() == want.tolist(), ascii(text[:200])

    check(ODD_TEXTS)
    check([sample_text(seed, foreign=0.03 * (seed % 3), odd=0.04 * (seed % 4)) for seed in range(60)])
    same()


def test_a_difference_names_text_and_token_and_words_are_forgotten(specs, monkeypatch):
    encode = GigatokenEncoder(specs["gpt2"])
    text = "the quick brown fox"
    assert len(encode([text])) == 1
    encode._reference = lambda texts: [np.zeros(3, np.uint32) for _ in texts]
    refused("token 0 .*the quick", encode, [text], error=OtherIds)
    monkeypatch.setattr(text_encode, "RELOAD_CHARS", 1)
    encode = GigatokenEncoder(specs["gpt2"])
    assert [len(encode([text])[0]) for _ in range(3)] == [len(encoder(specs["gpt2"], "tokenizers")([text])[0])] * 3
    assert encode._chars == len(text)


@pytest.mark.parametrize("kind, token", [("gpt2", "Ā"), ("llama3", "Ã"), ("llama2", "<0xE6>"), ("gemma", "<0x0A>")])
def test_a_vocabulary_without_a_byte_is_encoded_by_tokenizers(specs, kind, token):
    """As of a byte-level BPE trained without the initial alphabet; what gigatoken cannot load is reported as such."""
    about = json.loads(specs[kind].description)
    vocabulary = about["model"]["vocab"]
    vocabulary["another"] = vocabulary.pop(token)
    spec = dataclasses.replace(specs[kind], description=json.dumps(about))
    assert choose(specs[kind]) == "gigatoken" and choose(spec) == "tokenizers"
    if kind == "gpt2":
        refused("test", GigatokenEncoder(spec), ["a fox"], error=OtherIds)


@pytest.mark.parametrize("kind, chosen", [("llama3", "tokenizers"), ("gpt-oss", "tokenizers"), ("gpt2", "gigatoken")])
def test_a_word_that_is_not_written_as_bytes_is_no_word_of_a_text(specs, kind, chosen):
    """With `ignore_merges` gigatoken finds it: beyond the first characters of a text nothing would compare it."""
    about = json.loads(specs[kind].description)
    about["model"]["vocab"]["東京"] = specs[kind].vocab_size
    spec = dataclasses.replace(specs[kind], description=json.dumps(about))
    assert choose(spec) == chosen
    text = "a fox " * 500 + "東京"
    assert encoder(spec, chosen)([text])[0].tolist() == encoder(specs[kind], "tokenizers")([text])[0].tolist()
