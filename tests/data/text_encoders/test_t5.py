"""The real loading code on a tiny random T5 with a tokenizer made on the spot."""

import pytest
import torch

from dfm_nb.data.text_encoders import t5
from tests.data import encoder_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return encoder_files.save_t5(tmp_path_factory.mktemp("t5"))


def test_states_have_true_lengths_and_do_not_depend_on_the_batch(folder):
    encoder = t5.build(folder)
    captions = ["a blue butterfly", "a red butterfly over a meadow", "", "a blue butterfly"]
    states = encoder.encode(captions)
    assert [len(s) for s in states] == [4, 7, 1, 4] and encoder.dim == 16
    assert all(s.dtype == torch.bfloat16 for s in states) and torch.equal(states[0], states[3])
    for caption, state in zip(captions, states):
        torch.testing.assert_close(encoder.encode([caption])[0].float(), state.float(), atol=0.05, rtol=0.05)


def test_long_captions_are_cut(folder):
    assert len(t5.build(folder, max_tokens=3).encode(["a red butterfly over a meadow"])[0]) == 3


def test_missing_weights_name_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="hf download google-t5/t5-11b"):
        t5.build(tmp_path)
    with pytest.raises(FileNotFoundError, match="--t5-cache-dir"):
        t5.build(str(tmp_path / "nowhere"))
