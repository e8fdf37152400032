"""The shipped `residual` and `general` against the PCA they contain."""

import pytest
import torch

from dfm_nb.base import plugins
from dfm_nb.butterflies import synthetic
from dfm_nb.data.encoding import to_pixels
from dfm_nb.offline import residual


@pytest.fixture(scope="module", params=["residual", "general"])
def tokenizer(request):
    return plugins.load("tokenizers", request.param).build()


def videos(count=2, frames=9):
    """Smooth random clips in [-1, 1]."""
    coarse = torch.rand(count, 3, frames, 6, 10, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.nn.functional.interpolate(coarse, (frames, 48, 80), mode="trilinear")


def psnr_db(made, video):
    return -10 * torch.log10((made.clamp(-1, 1) - video).square().mean() / 4).item()


@pytest.fixture(scope="module")
def unseen():
    """4 images and 4 clips of attribute combinations that training left out, each [1, 3, T, H, W]."""
    source = synthetic.build("unseen", num_images=4, num_clips=4, seed=31)
    drawn = [to_pixels(next(source.read(i)).video)[None] for i in range(8)]
    return {"images": drawn[:4], "clips": drawn[4:]}


@pytest.mark.parametrize("kind, at_least_db", [("images", 2.5), ("clips", 1.2)])
def test_reconstruction_is_better_than_the_pcas(tokenizer, unseen, kind, at_least_db):
    gains = [psnr_db(tokenizer.decode(tokenizer.encode(x)), x) for x in unseen[kind]]
    base = [psnr_db(tokenizer.pca.decode(tokenizer.pca.encode(x)), x) for x in unseen[kind]]
    assert sum(gains) / 4 >= sum(base) / 4 + at_least_db


def test_coding_is_causal_both_ways(tokenizer):
    x = videos(1, 17)
    y = x.clone()
    y[:, :, 9:] = -y[:, :, 9:]
    z, other = tokenizer.encode(x), tokenizer.encode(y)
    torch.testing.assert_close(other[:, :, :3], z[:, :, :3], atol=1e-5, rtol=0)
    assert (other[:, :, 3:] - z[:, :, 3:]).abs().max() > 0.1
    changed = z.clone()
    changed[:, :, 3:] += 1
    a, b = tokenizer.decode(z), tokenizer.decode(changed)
    torch.testing.assert_close(b[:, :, :9], a[:, :, :9], atol=1e-5, rtol=0)
    assert (b[:, :, 9:] - a[:, :, 9:]).abs().max() > 0.01


def test_identity_is_that_of_the_content(tokenizer, tmp_path):
    tokenizer.save(tmp_path / residual.ASSET.name)
    again = residual.build(tmp_path)
    assert again.identity() == tokenizer.identity() and again.identity()["name"] == "residual"
    x = videos(1, 5)
    assert torch.equal(again.decode(again.encode(x)), tokenizer.decode(tokenizer.encode(x)))
    again.encoder.head.bias += 0.1
    assert again.identity()["sha256"] != tokenizer.identity()["sha256"]


@pytest.mark.parametrize("name", ["nothing", "text", "pca"])
def test_wrong_files_are_named(tokenizer, tmp_path, name):
    (tmp_path / "text.safetensors").write_text("no tensors here")
    tokenizer.pca.save(tmp_path / "pca.safetensors")
    with pytest.raises((FileNotFoundError, ValueError), match=f"{name}.safetensors"):
        residual.build(tmp_path / f"{name}.safetensors")
