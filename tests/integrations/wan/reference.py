"""Small Wan networks as diffusers makes them."""

from types import SimpleNamespace

import torch
from diffusers import WanTransformer3DModel

GRIDS = [(1, 8, 6), (3, 4, 8), (2, 6, 4), (1, 4, 4)]
TEXT_DIM = 24


def random_network(seed: int = 0, heads: int = 4, head: int = 16, layers: int = 2, ffn: int = 96, **config):
    """With all weights at random, so that every one of them matters."""
    shape = {"num_attention_heads": heads, "attention_head_dim": head, "num_layers": layers, "ffn_dim": ffn}
    network = WanTransformer3DModel(**shape, **{"text_dim": TEXT_DIM} | config)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in network.named_parameters():
            wide = p.dim() > 1 and "table" not in name
            scale = p[0].numel() ** -0.5 if wide else 0.3
            p.copy_(torch.randn(p.shape, generator=g) * scale + float("norm" in name and name.endswith("weight")))
    return network.eval()


def reference_output(network: WanTransformer3DModel, d: SimpleNamespace, rows: int = 512) -> torch.Tensor:
    """[C, T, H, W]: the velocity that diffusers' network gives, for a text padded as its pipeline does."""
    t = d.sigma / (1 + d.sigma)
    x = (1 - t) * d.latent + t * d.noise
    text = torch.cat((d.text, torch.zeros(rows - len(d.text), d.text.shape[1])))
    return network(x[None], torch.tensor([1000 * t]), text[None]).sample[0]
