"""The loader on a T5 of T5-11B's width saved whole, against the encoding that NeMo DFM prepares data with."""

import shutil

import pytest
import torch

from dfm_nb.data.text_encoders import t5
from tests.data import encoder_files
from tests.json_files import read_json, write_json
from tests.refusals import refused

CAPTIONS = ["a blue butterfly", "a red butterfly over a meadow, wings spread", "", "a zebra", "a blue butterfly"]


@pytest.fixture(scope="module")
def folder(theirs):
    return theirs / "t5"


def padded_reference(folder, captions, max_length=512):
    """float32 [N, 512, 1024] and lengths: T5TokenizerFast padded to 512, the mask applied, padded rows set to zero."""
    from transformers import T5EncoderModel, T5TokenizerFast

    how = {"truncation": True, "padding": "max_length", "max_length": max_length, "return_tensors": "pt"}
    batch = T5TokenizerFast.from_pretrained(folder)(captions, **how)
    model = T5EncoderModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return states * batch.attention_mask[..., None], batch.attention_mask.sum(1).tolist()


def test_states_are_those_of_the_padded_reference(folder):
    """bfloat16 weights and arithmetic against float32: 8 bits, so 1 % of the spread on average, 5 % at most."""
    encoder = t5.build(folder)
    states, (reference, lengths) = encoder.encode(CAPTIONS), padded_reference(folder, CAPTIONS)
    assert type(encoder.tokenizer).__name__ in ("T5Tokenizer", "T5TokenizerFast") and encoder.dim == 1024
    assert [len(s) for s in states] == lengths and lengths[2] == 1  # the empty caption is its end token
    torch.testing.assert_close(encoder.encode(CAPTIONS[:1])[0].float(), states[4].float(), atol=0.05, rtol=0.05)
    for state, wanted, length in zip(states, reference, lengths):
        assert state.dtype == torch.bfloat16 and state.shape == (length, 1024)
        assert wanted[length:].abs().max() == 0  # what NeMo DFM stores behind a caption
        difference, spread = state.float() - wanted[:length], wanted[:length].std()
        assert difference.square().mean().sqrt() < 0.01 * spread and difference.abs().max() < 0.05 * spread


def test_long_captions_are_cut_as_the_reference_cuts_them(folder):
    cut = t5.build(folder, max_tokens=7).encode([CAPTIONS[1]])[0]
    reference, lengths = padded_reference(folder, [CAPTIONS[1]], max_length=7)
    assert len(cut) == lengths[0] == 7  # the last one is the end token
    assert t5.build(folder, max_tokens=7).lost(CAPTIONS[1]).keys() == {"text_cut"} and not t5.build(folder).lost("")
    torch.testing.assert_close(cut.float(), reference[0], atol=0.05, rtol=0.05)


def test_identity_tells_other_weights_and_another_config(folder, tmp_path):
    sha256 = t5.build(folder).identity()["sha256"]
    copied = shutil.copytree(folder, tmp_path / "copy")
    assert t5.build(copied).identity()["sha256"] == sha256 and len(sha256) == 64
    other = encoder_files.save_t5(tmp_path / "other", seed=1)
    config = read_json(copied / "config.json")
    write_json(copied / "config.json", config | {"relative_attention_max_distance": 64})
    found = {t5.build(place).identity()["sha256"] for place in (other, copied)}
    assert len(found | {sha256}) == 3


def test_missing_weights_are_named(tmp_path):
    refused("google-t5/t5-11b", t5.build, tmp_path, error=FileNotFoundError)
    refused("nowhere", t5.build, str(tmp_path / "nowhere"), error=FileNotFoundError)


def test_path_is_a_folder_a_hub_id_or_a_cache_to_be(tmp_path, monkeypatch):
    (tmp_path / "weights" / "t5").mkdir(parents=True)
    (tmp_path / "weights" / "t5" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    default = "google-t5/t5-11b"
    assert t5.place_of(None, default) == (default, None)
    assert t5.place_of("t5_cache", default) == (default, "t5_cache")  # NeMo DFM's default, made by the download
    assert t5.place_of("google-t5/t5-small", default) == ("google-t5/t5-small", None)
    assert t5.place_of("weights", default) == (default, "weights")
    assert t5.place_of("weights/t5", default) == ("weights/t5", None)
