"""NeMo DFM's DiT in plain torch, written after the description of its published source, for comparison with ours.

Names of modules are those of its state dict, so `state_dict()` is what its `model.pth` holds. Positions and sinusoids
are diffusers' own, as there. Each sample is computed by itself, with dense attention; everything is in one dtype, where
NeMo DFM casts c_noise, fps and the conditioning to bfloat16.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from diffusers.models.embeddings import TimestepEmbedding, Timesteps, get_3d_sincos_pos_embed

TABLE = (34, 40, 40)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def attend(q, k, v):
    """[s, heads, d], [l, heads, d] twice -> [s, heads * d]."""
    scores = torch.einsum("shd,lhd->hsl", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hsl,lhd->shd", scores.softmax(-1), v).flatten(1)


class Attention(nn.Module):
    def __init__(self, h: int, heads: int, eps: float, text: int | None):
        super().__init__()
        self.heads, self.text = heads, text
        if text is None:
            self.linear_qkv = nn.Linear(h, 3 * h, bias=False)
        else:
            self.linear_q, self.linear_kv = nn.Linear(h, h, bias=False), nn.Linear(text, 2 * h, bias=False)
        self.linear_proj = nn.Linear(h, h, bias=False)
        self.q_layernorm, self.k_layernorm = RMSNorm(h // heads, eps), RMSNorm(h // heads, eps)

    def forward(self, x, context=None):
        if self.text is None:  # megatron-core keeps the three of a head together
            q, k, v = self.linear_qkv(x).unflatten(-1, (self.heads, 3, -1)).unbind(2)
        else:
            q = self.linear_q(x).unflatten(-1, (self.heads, -1))
            k, v = self.linear_kv(context).unflatten(-1, (self.heads, 2, -1)).unbind(2)
        return self.linear_proj(attend(self.q_layernorm(q), self.k_layernorm(k), v))


class MLP(nn.Module):
    def __init__(self, h: int):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(h, 4 * h, bias=False), nn.Linear(4 * h, h, bias=False)

    def forward(self, x):
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class AdaLN(nn.Module):
    def __init__(self, h: int, rank: int = 256):
        super().__init__()
        down, up = nn.Linear(h, rank, bias=False), nn.Linear(rank, 9 * h, bias=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), down, up)


class Layer(nn.Module):
    def __init__(self, h: int, heads: int, eps: float, text: int):
        super().__init__()
        self.eps = eps
        self.full_self_attention = Attention(h, heads, eps, None)
        self.cross_attention = Attention(h, heads, eps, text)
        self.mlp, self.adaLN = MLP(h), AdaLN(h)

    def forward(self, x, condition, context):
        branches = (self.full_self_attention, lambda y: self.cross_attention(y, context), self.mlp)
        vectors = self.adaLN.adaLN_modulation(condition).chunk(9)
        for i, branch in enumerate(branches):
            shift, scale, gate = vectors[3 * i : 3 * i + 3]
            x = x + gate * branch(F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift)
        return x


class Decoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Positions(nn.Module):
    def __init__(self, h: int):
        super().__init__()
        t, rows, columns = TABLE
        self.pos_embedding = nn.Embedding(t * rows * columns, h)
        table = get_3d_sincos_pos_embed(h, [rows, columns], t)
        self.pos_embedding.weight.requires_grad_(False).copy_(table.flatten(0, 1))

    def forward(self, ids):
        _, rows, columns = TABLE
        return self.pos_embedding(ids[:, 0] * rows * columns + ids[:, 1] * columns + ids[:, 2])


class NeMoDFM(nn.Module):
    def __init__(self, h=256, layers=2, heads=4, text=24, channels=16, patch=2, eps=1e-5):
        super().__init__()
        self.patch = patch
        self.decoder = Decoder(Layer(h, heads, eps, text) for _ in range(layers))
        self.t_embedder = nn.Sequential(Timesteps(h, False, 0), TimestepEmbedding(h, h))
        self.fps_embedder = nn.Sequential(Timesteps(256, False, 1), TimestepEmbedding(256, 256))
        self.x_embedder = nn.Linear(channels * patch**2, h)
        self.pos_embedder = Positions(h)
        self.final_layer_linear = nn.Linear(h, channels * patch**2)
        self.affline_norm = RMSNorm(h, 1e-6)  # there, and used by nothing

    def forward(self, latent, c_noise, text, fps):
        """F of one sample. latent : [C, T, H, W] scaled by c_in; text : [L, D]; c_noise, fps : numbers."""
        c, t, h, w = latent.shape
        p, (rows, columns) = self.patch, (h // self.patch, w // self.patch)
        # (T H W) tokens of (ph pw C)
        tokens = latent.reshape(c, t, rows, p, columns, p).permute(1, 2, 4, 3, 5, 0).reshape(t * rows * columns, -1)
        ids = torch.cartesian_prod(torch.arange(t), torch.arange(rows), torch.arange(columns))
        x = self.x_embedder(tokens) + self.pos_embedder(ids)
        scalar = lambda value: torch.tensor([float(value)], dtype=torch.float64)  # noqa: E731
        wide = lambda embedder, value: embedder[1](embedder[0](scalar(value)).to(x.dtype))[0]  # noqa: E731
        condition = wide(self.t_embedder, c_noise)
        condition = condition + F.pad(wide(self.fps_embedder, fps), (0, len(condition) - 256))
        for layer in self.decoder.layers:
            x = layer(x, condition, text)
        out = self.final_layer_linear(x)
        return out.reshape(t, rows, columns, p, p, c).permute(5, 0, 1, 3, 2, 4).reshape(c, t, h, w)


def random_network(seed: int = 0, **sizes) -> NeMoDFM:
    """With all weights at random: those that start at zero too."""
    network, g = NeMoDFM(**sizes), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                scale = 0.3 if p.dim() == 1 else p.shape[1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=g) * scale + (p.dim() == 1))
    return network
