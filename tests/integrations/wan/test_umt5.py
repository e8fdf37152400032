"""UMT5 with random weights, saved alone and as in Wan's folder: states are those of transformers' own encoder."""

import pytest
import torch

from dfm_nb.integrations.wan import umt5
from tests.integrations.wan.pipeline_folder import save_umt5
from tests.refusals import refused

CAPTIONS = ["a blue butterfly", "a red morpho over a meadow, wings spread", ""]


@pytest.fixture(scope="module")
def folder(make_once):
    return make_once("umt5", save_umt5)


@pytest.mark.parametrize("layout", ["alone", "wan"])
def test_states_are_those_of_transformers(folder, layout):
    from transformers import AutoTokenizer, UMT5EncoderModel

    encoder = umt5.build(folder / layout)
    words = AutoTokenizer.from_pretrained(folder / "alone")
    network = UMT5EncoderModel.from_pretrained(folder / "alone").eval()
    for caption, state in zip(CAPTIONS, encoder.encode(CAPTIONS)):
        ids = words(caption, return_tensors="pt").input_ids
        with torch.no_grad():
            wanted = network(input_ids=ids).last_hidden_state[0]
        assert state.dtype == torch.bfloat16 and state.shape == wanted.shape
        assert (state.float() - wanted).square().mean().sqrt() < 0.02 * wanted.std()
    assert encoder.identity()["name"] == "umt5" and encoder.dim == 64
    assert encoder.identity()["sha256"] == umt5.build(folder / "alone").identity()["sha256"]


def test_captions_are_cleaned_as_by_wans_pipeline(folder):
    encoder = umt5.build(folder / "alone")
    assert torch.equal(*encoder.encode(["a &amp;quot;blue&quot;\n butterfly ", 'a "blue" butterfly']))


def test_missing_weights_are_named(tmp_path):
    refused("google/umt5-xxl", umt5.build, tmp_path, error=FileNotFoundError)
