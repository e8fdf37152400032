"""The real loading and windowing code on small scripted modules with the published ones' signature."""

import pytest
import torch

from dfm_nb.data.tokenizers import cosmos_cv
from tests.data import encoder_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return encoder_files.save_cosmos(tmp_path_factory.mktemp("cosmos"))


@pytest.mark.parametrize("frames", [1, 9, 49, 121, 241])
def test_windows_put_together_are_the_whole(folder, frames):
    tokenizer = cosmos_cv.build(folder)
    video = torch.rand(1, 3, frames, 16, 24) * 2 - 1
    z = tokenizer.encode(video)
    assert z.shape == (1, 16, 1 + (frames - 1) // 4, 2, 3)
    torch.testing.assert_close(z, encoder_files.CosmosEncoder()(video)[0])
    again = tokenizer.decode(z)
    assert again.shape == video.shape
    torch.testing.assert_close(again, encoder_files.CosmosDecoder()(z))


@pytest.mark.parametrize("count", [1, 13, 14, 23, 24, 31, 61])
def test_window_plan_covers_each_latent_once(count):
    kept = [i for a, b, drop in cosmos_cv._windows(count, 13, 3) for i in range(a + drop, b)]
    assert kept == list(range(count))
    assert all(b - a <= 13 for a, b, _ in cosmos_cv._windows(count, 13, 3))


def test_tiles_put_together_are_the_whole(folder):
    video = torch.rand(1, 3, 5, 256, 320) * 2 - 1
    tiled, whole = cosmos_cv.build(folder, tile_px=128), cosmos_cv.build(folder)
    z = whole.encode(video)
    torch.testing.assert_close(tiled.encode(video), z, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tiled.decode(z), whole.decode(z), atol=1e-5, rtol=1e-5)


def test_only_the_used_half_is_loaded(folder):
    tokenizer = cosmos_cv.build(folder)
    tokenizer.encode(torch.zeros(1, 3, 1, 8, 8))
    assert list(tokenizer.identity()["files"]) == ["encoder"]


def test_missing_files_name_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(FileNotFoundError, match=r"hf download nvidia/Cosmos-0\.1-Tokenizer-CV4x8x8 encoder\.jit"):
        cosmos_cv.build(tmp_path).encode(torch.zeros(1, 3, 1, 8, 8))


def test_wrong_shapes_are_refused(folder):
    with pytest.raises(ValueError, match=r"1 \+ 4k.*\[1, 3, 4, 8, 8\]"):
        cosmos_cv.build(folder).encode(torch.zeros(1, 3, 4, 8, 8))
