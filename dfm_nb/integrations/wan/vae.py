"""`wan_vae`: the video autoencoder of Wan 2.1, diffusers' `AutoencoderKLWan`.

Video [B, 3, 1 + 4k, H, W] in [-1, 1] becomes latents [B, 16, 1 + k, H/8, W/8]: the mean of the posterior, not
normalised, as data sets have their own statistics. It is causal, takes four frames at a time and keeps what it needs of
the past, so a clip of any length is coded as a whole in the memory of a few frames.
"""

from pathlib import Path
from typing import Any

import torch

from dfm_nb.base.files import weights_sha256
from dfm_nb.base.geometry import FRAMES_PER_LATENT, LATENT_CHANNELS, PX_PER_LATENT
from dfm_nb.base.hub import hub_file

SHORT_SIDE_PX = 480
HUB_ID = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
WEIGHTS = "diffusion_pytorch_model.safetensors"
HOW_TO_FETCH = (
    f"with internet access, run `hf download {HUB_ID} --include 'vae/*' --local-dir DIR`, "
    "then pass --tokenizer-path DIR"
)


class WanVAE:
    """See the module.

    path : a folder with the autoencoder's config.json, one of diffusers' with it in vae/, a hub cache folder, or None
        for the default cache.
    """

    name = "wan_vae"

    def __init__(self, path: str | Path | None = None, device: str = "cpu"):
        try:
            from diffusers import AutoencoderKLWan
        except ImportError:
            raise ValueError("the tokenizer wan_vae needs diffusers: pip install diffusers") from None
        self.device = torch.device(device)
        self.folder = _folder(path)
        try:
            network: Any = AutoencoderKLWan.from_pretrained(self.folder, torch_dtype=torch.float32)
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).strip().splitlines()[0]
            raise ValueError(f"{self.folder} is no AutoencoderKLWan ({why}); fetch {HUB_ID} again") from None
        c = network.config
        shape = c.z_dim, c.scale_factor_temporal, c.scale_factor_spatial
        if shape != (LATENT_CHANNELS, FRAMES_PER_LATENT, PX_PER_LATENT):
            raise ValueError(
                f"{self.folder} must have {LATENT_CHANNELS} channels and compress 4 x 8 x 8, as Wan 2.1; it has "
                "{} and {} x {} x {}".format(*shape, shape[2])
            )
        self.network = network.to(self.device).eval()

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """[B, 3, 1 + 4k, H, W] in [-1, 1] -> float32 [B, 16, 1 + k, H/8, W/8]."""
        return self.network.encode(video.to(self.device, torch.float32)).latent_dist.mode()

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, 16, 1 + k, h, w] -> float32 [B, 3, 1 + 4k, 8h, 8w]."""
        return self.network.decode(latents.to(self.device, torch.float32)).sample

    def identity(self) -> dict:
        """Name, origin, and a hash of configuration and weights."""
        digest = weights_sha256(self.folder / "config.json", sorted(self.folder.glob("*.safetensors")))
        return {"name": self.name, "version": HUB_ID, "sha256": digest}


def _folder(path: str | Path | None) -> Path:
    """Folder of config.json and weights: below `path`, else from the hub, with `path` as the cache folder."""
    if path is not None:
        path = Path(path).expanduser()
        for folder in (path, path / "vae"):
            if (folder / "config.json").is_file():
                return folder
    config = hub_file(HUB_ID, "vae/config.json", HOW_TO_FETCH, cache_dir=path)
    hub_file(HUB_ID, f"vae/{WEIGHTS}", HOW_TO_FETCH, cache_dir=path)
    return config.parent


build = WanVAE
