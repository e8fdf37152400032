"""Where cross attention looks at words, in closed form."""

import pytest
import torch

from tests.refusals import refused
from workbench.words import word_attention

pytestmark = pytest.mark.slow
PROMPT = "A red moth, over a meadow"


@pytest.fixture
def clip(tiny_pipe):
    return tiny_pipe([PROMPT], height=32, width=48, num_frames=5, num_steps=2)[0]


def test_queries_of_zero_look_at_all_tokens_alike(tiny_pipe, clip, monkeypatch):
    for layer in tiny_pipe.chunks[0].decoder.layers:
        for p in layer.cross_attention.linear_q.parameters():
            monkeypatch.setattr(p, "data", torch.zeros_like(p))
    tokens = len(tiny_pipe.encode_text([PROMPT])[0])
    found = word_attention(tiny_pipe, clip, num_noises=1)
    assert [word for word, _ in found] == ["A", "red", "moth", "over", "a", "meadow"]
    for _, maps in found:  # each of these words is one token
        assert maps.shape == (len(tiny_pipe.chunks[0].decoder.layers), 2, 2, 3)
        torch.testing.assert_close(maps, torch.full_like(maps, 1 / tokens))
    assert tokens == len(found) + 3, "begin, end and the comma are nobody's"
    assert not any(layer.cross_attention.core_attention._forward_hooks for layer in tiny_pipe.chunks[0].decoder.layers)


def test_text_encoder_without_a_tokenizer_is_refused(tiny_pipe, clip, monkeypatch):
    monkeypatch.delattr(tiny_pipe.text_encoder, "tokenizer")
    refused("tokens to words", word_attention, tiny_pipe, clip)
