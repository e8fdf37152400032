"""diffusers' AutoencoderKLWan with random weights, saved as Wan's folder holds it: ours gives what it gives."""

import pytest
import torch

from dfm_nb.data.tokenizers import wan_vae
from tests.data import encoder_files


@pytest.fixture(scope="module")
def folder(make_once):
    return make_once("wan-vae", encoder_files.save_wan_vae)


@pytest.fixture(scope="module")
def theirs(folder):
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan.from_pretrained(folder / "vae").eval()


@pytest.mark.parametrize("frames", [1, 5, 17])
def test_latents_and_pixels_are_diffusers(folder, theirs, frames):
    ours = wan_vae.build(folder)
    video = torch.rand(2, 3, frames, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        latents = theirs.encode(video).latent_dist.mode()
        pixels = theirs.decode(latents).sample
    assert latents.shape == (2, 16, 1 + (frames - 1) // 4, 4, 6)
    assert torch.equal(ours.encode(video), latents) and torch.equal(ours.decode(latents), pixels)


def test_coding_is_causal(folder):
    ours = wan_vae.build(folder / "vae")
    video = torch.rand(1, 3, 9, 32, 32, generator=torch.Generator().manual_seed(2)) * 2 - 1
    torch.testing.assert_close(ours.encode(video[:, :, :5]), ours.encode(video)[:, :, :2], atol=1e-5, rtol=1e-5)


def test_identity_tells_other_weights_and_another_configuration(folder, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    first = wan_vae.build(folder).identity()
    other = shutil.copytree(folder, tmp_path / "other")
    path = next(other.rglob("*.safetensors"))
    save_file({name: t + 1e-3 for name, t in load_file(path).items()}, path)
    assert first["name"] == "wan_vae" and wan_vae.build(other).identity()["sha256"] != first["sha256"]


def test_wrong_input_and_wrong_files_end_in_a_sentence(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"1 \+ 4k"):
        wan_vae.build(folder).encode(torch.zeros(1, 3, 4, 32, 32))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is no AutoencoderKLWan .*; fetch Wan-AI/Wan2.1-T2V-1.3B-Diffusers again"):
        wan_vae.build(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="hf download Wan-AI/Wan2.1-T2V-1.3B-Diffusers --include 'vae/"):
        wan_vae.build(tmp_path / "none")


def test_smaller_latents_than_wans_are_refused(tmp_path):
    from diffusers import AutoencoderKLWan

    AutoencoderKLWan(base_dim=8, num_res_blocks=1, z_dim=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must have 16 channels and compress 4 x 8 x 8, as Wan 2.1; it has 8"):
        wan_vae.build(tmp_path)
