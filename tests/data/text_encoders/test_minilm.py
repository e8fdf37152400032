import pytest
import torch

from dfm_nb.data.text_encoders import minilm


@pytest.fixture(scope="module")
def encoder():
    return minilm.build()


def test_token_states_have_true_lengths_and_do_not_depend_on_the_batch(encoder):
    a, b, a2, empty = encoder.encode(
        ["a blue butterfly", "a small orange butterfly over a meadow", "a blue butterfly", ""]
    )
    assert a.shape == (5, 384) and b.shape[0] == 9 and empty.shape == (2, 384) and a.dtype == torch.bfloat16
    assert torch.equal(a, a2)
    alone = encoder.encode(["a blue butterfly"])[0]
    torch.testing.assert_close(alone.float(), a.float(), atol=0.02, rtol=0.02)


def test_meaning_is_near_for_near_captions(encoder):
    """Cosines of mean states, as the model card's example orders them."""
    vectors = [
        e.float().mean(0) for e in encoder.encode(["monarch butterfly", "blue morpho butterfly", "a fast red car"])
    ]
    near, far = (torch.cosine_similarity(vectors[0], v, 0) for v in vectors[1:])
    assert near > far + 0.2


def test_missing_and_changed_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, name: str(tmp_path / name))
    (tmp_path / "model.safetensors").write_bytes(b"not it")
    with pytest.raises(ValueError, match=tmp_path.name):
        minilm.find_weights()
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: None)
    monkeypatch.setattr(minilm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="minilm"):
        minilm.build()
