"""diffusers' AutoencoderKLWan with random weights, saved as Wan's folder holds it: ours gives what it gives."""

import pytest
import torch

from dfm_nb.integrations.wan import vae
from tests.integrations.wan.pipeline_folder import save_wan_vae
from tests.refusals import refused


@pytest.fixture(scope="module")
def folder(make_once):
    return make_once("wan-vae", save_wan_vae)


@pytest.fixture(scope="module")
def theirs(folder):
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan.from_pretrained(folder / "vae").eval()


@pytest.mark.parametrize("frames", [1, 9])
def test_latents_and_pixels_are_diffusers(folder, theirs, frames):
    ours = vae.build(folder)
    video = torch.rand(2, 3, frames, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        latents = theirs.encode(video).latent_dist.mode()
        pixels = theirs.decode(latents).sample
    assert latents.shape == (2, 16, 1 + (frames - 1) // 4, 4, 6)
    assert torch.equal(ours.encode(video), latents) and torch.equal(ours.decode(latents), pixels)


def test_wrong_files_are_named(folder, tmp_path):
    from diffusers import AutoencoderKLWan

    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path.name, vae.build, tmp_path)
    AutoencoderKLWan(base_dim=8, num_res_blocks=1, z_dim=8).save_pretrained(tmp_path / "small")
    refused("16 channels.* 8", vae.build, tmp_path / "small")
