import pytest
import torch

from dfm_nb.offline.pca import PCATokenizer, build
from tests.refusals import refused


def videos(count=30, frames=9):
    g = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, frames, 4, 6, generator=g) * 2 - 1
    return torch.nn.functional.interpolate(coarse, (frames, 32, 48), mode="trilinear")


@pytest.fixture(scope="module")
def tokenizer():
    return PCATokenizer.fit(videos())


def test_latents_of_the_fitting_set_are_white(tokenizer):
    z = tokenizer.encode(videos())
    rest = z[:, :, 1:].transpose(0, 1).flatten(1)
    torch.testing.assert_close(rest.mean(1), torch.zeros(16), atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.cov(rest), torch.eye(16), atol=2e-3, rtol=0)


def test_encode_inverts_decode(tokenizer):
    z = torch.randn(2, 16, 3, 4, 6)
    torch.testing.assert_close(tokenizer.encode(tokenizer.decode(z)), z, atol=1e-4, rtol=1e-4)


def test_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = build(tmp_path)
    assert again.identity() == tokenizer.identity() and len(again.identity()["sha256"]) == 64
    x = videos(1)
    assert torch.equal(again.encode(x), tokenizer.encode(x))


def test_fitting_to_stills_codes_still_clips():
    still = PCATokenizer.fit(videos(frames=1))
    x = videos(1, frames=1).expand(-1, -1, 5, -1, -1)
    again = still.decode(still.encode(x))
    torch.testing.assert_close(again[:, :, 4], again[:, :, 0], atol=1e-3, rtol=1e-3)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    refused(tmp_path.name, build, tmp_path, error=FileNotFoundError)
    refused("pca", build)
