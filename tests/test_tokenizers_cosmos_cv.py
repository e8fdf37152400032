"""The real loading and windowing code on small scripted modules with the published ones' signature."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dfm_nb.tokenizers import cosmos_cv


class Encoder(nn.Module):
    """Causal in time: each latent is the mean of its own frames, and says how much past it saw."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        pooled = F.avg_pool3d(x, (1, 8, 8))
        first = pooled[:, :, :1]
        rest = pooled[:, :, 1:]
        b, c, t, h, w = rest.shape
        rest = rest.reshape(b, c, t // 4, 4, h, w).mean(3)
        z = torch.cat((first, rest), 2)
        return (z.repeat(1, 6, 1, 1, 1)[:, :16],)


class Decoder(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = z[:, :3].repeat_interleave(8, 3).repeat_interleave(8, 4)
        return torch.cat((x[:, :, :1], x[:, :, 1:].repeat_interleave(4, 2)), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cosmos")
    torch.jit.script(Encoder()).save(str(path / "encoder.jit"))
    torch.jit.script(Decoder()).save(str(path / "decoder.jit"))
    return path


@pytest.mark.parametrize("frames", [1, 9, 49, 121, 241])
def test_windows_put_together_are_the_whole(folder, frames):
    tokenizer = cosmos_cv.build(folder)
    video = torch.rand(1, 3, frames, 16, 24) * 2 - 1
    z = tokenizer.encode(video)
    assert z.shape == (1, 16, 1 + (frames - 1) // 4, 2, 3)
    torch.testing.assert_close(z, Encoder()(video)[0])
    again = tokenizer.decode(z)
    assert again.shape == video.shape
    torch.testing.assert_close(again, Decoder()(z))


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
    with pytest.raises(
        FileNotFoundError, match=r"hf download nvidia/Cosmos-0\.1-Tokenizer-CV4x8x8 encoder\.jit"
    ):
        cosmos_cv.build(tmp_path).encode(torch.zeros(1, 3, 1, 8, 8))


def test_wrong_shapes_are_refused(folder):
    with pytest.raises(ValueError, match=r"1 \+ 4k.*\[1, 3, 4, 8, 8\]"):
        cosmos_cv.build(folder).encode(torch.zeros(1, 3, 4, 8, 8))
