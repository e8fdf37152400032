"""Closed-form counts against a plain torch model of the same structure, and against the DiT paper."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dfm_nb.config import sizes
from dfm_nb.config.resolve import resolve


def config(*overrides):
    return resolve(None, overrides=list(overrides)).config


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        h, d = s.hidden_size, s.head_dim
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.cross_q, self.cross_kv, self.cross_proj = nn.Linear(h, h), nn.Linear(h, 2 * h), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, s.ffn_hidden_size), nn.Linear(s.ffn_hidden_size, h)
        if s.adaln_lora_dim is None:
            self.adaln = nn.Linear(h, 9 * h)
        else:
            self.adaln = nn.Sequential(nn.Linear(h, s.adaln_lora_dim, bias=False), nn.Linear(s.adaln_lora_dim, 9 * h))
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(2)) if s.qk_layernorm else None
        self.heads = s.num_attention_heads

    def attend(self, q, k, v):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(0, 1) for t in (q, k, v))
        return (q @ k.transpose(1, 2) @ v).transpose(0, 1).flatten(1)

    def forward(self, x, text, condition):
        self.adaln(condition)
        x = self.proj(self.attend(*self.qkv(x).chunk(3, -1)))
        x = self.cross_proj(self.attend(self.cross_q(x), *self.cross_kv(text).chunk(2, -1)))
        return self.fc2(self.fc1(x))


class Model(nn.Module):
    """The structure that sizes.py counts, one sample at a time."""

    def __init__(self, s):
        super().__init__()
        h = s.hidden_size
        self.x_embedder = nn.Linear(s.patch_dim, h)
        self.sigma_embedder = nn.Sequential(nn.Linear(256, h), nn.Linear(h, h))
        self.fps_embedder = nn.Sequential(nn.Linear(256, h), nn.Linear(h, h))
        self.text_embedder, self.text_norm = nn.Linear(s.text_dim, h), nn.RMSNorm(h)
        self.pooled = nn.Linear(h, h) if s.pooled_text else None
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_layers))
        self.final_adaln, self.final = nn.Linear(h, 2 * h), nn.Linear(h, s.patch_dim)

    def forward(self, x, text):
        condition = self.sigma_embedder(torch.zeros(1, 256)) + self.fps_embedder(torch.zeros(1, 256))
        x, text = self.x_embedder(x), self.text_embedder(text)
        if self.pooled is not None:
            condition = condition + self.pooled(text.mean(0, keepdim=True))
        for layer in self.layers:
            x = layer(x, text, condition)
        self.final_adaln(condition)
        return self.final(x)


VARIANTS = [
    [],
    ["model.adaln_lora_dim=16"],
    ["model.qk_layernorm=false", "model.pooled_text=false"],
    ["model.ffn_hidden_size=100", "model.in_channels=8", "model.text_dim=40", "model.patch_temporal=2"],
]


@pytest.mark.parametrize("extra", VARIANTS, ids=str)
def test_parameter_count_is_that_of_a_built_model(extra):
    c = config("model.size=tiny", *extra)
    model = Model(sizes.resolve_size(c.model))
    assert sizes.parameter_count(c) == sum(p.numel() for p in model.parameters())
    assert sizes.parameter_count(c) == sizes.parameter_count(c.model) == sum(sizes.parameter_table(c).values())


@pytest.mark.parametrize("extra", VARIANTS, ids=str)
def test_forward_flops_are_those_that_torch_counts(extra):
    c = config("model.size=tiny", *extra)
    shape = sizes.resolve_size(c.model)
    model, lengths = Model(shape), [(12, 5), (30, 1)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for q, k in lengths:
            model(torch.zeros(q, shape.patch_dim), torch.zeros(k, shape.text_dim))
    q_lens, kv_lens = zip(*lengths)
    assert sizes.forward_flops(c, q_lens, kv_lens) == counter.get_total_flops()
    assert sizes.model_flops(c, q_lens, kv_lens) == 3 * counter.get_total_flops()


def test_flops_of_a_pack_are_the_sum_over_its_samples():
    """Attention counts true segments: packing two samples costs what the two cost, not their joint square."""
    c = config("model.size=tiny")
    apart = sizes.forward_flops(c, [64], [8]) + sizes.forward_flops(c, [256], [3])
    assert sizes.forward_flops(c, [64, 256], [8, 3]) == apart < sizes.forward_flops(c, [320], [11])
    with pytest.raises(ValueError, match="one text length per sample"):
        sizes.forward_flops(c, [64], [])


@pytest.mark.parametrize("name, millions", [("DiT-S", 33.0), ("DiT-B", 130.5), ("DiT-L", 458.1), ("DiT-XL", 675.1)])
def test_sizes_without_cross_attention_are_those_of_the_dit_paper(name, millions):
    """The paper counts 4 latent channels, 1,000 classes and six modulation vectors, no text and no q/k norms."""
    row = sizes.SIZES[name]
    h, layers = row.hidden_size, row.num_layers
    attention, mlp, adaln = 4 * h * h + 4 * h, 8 * h * h + 5 * h, 6 * h * h + 6 * h
    embedders = (16 * h + h) + (256 * h + h + h * h + h) + 1001 * h
    learned_sigma_final = (2 * h * h + 2 * h) + (32 * h + 32)
    count = layers * (attention + mlp + adaln) + embedders + learned_sigma_final
    assert count / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize("name", sizes.SIZES)
def test_every_size_is_a_legal_model_with_a_source(name):
    c = config(f"model.size={name}")
    assert sizes.SIZES[name].source and c.model.hidden_size == sizes.SIZES[name].hidden_size


def test_sizes_grow():
    counts = [sizes.parameter_count(config(f"model.size={name}")) for name in sizes.SIZES]
    assert counts == sorted(counts)


@pytest.mark.parametrize("text", ["DiT-XL", "dit-xl", "DiT-XL/2", " dit-xl/2 "])
def test_find_size_forgives_case_and_patch_suffix(text):
    assert sizes.find_size(text).name == "DiT-XL"


def test_find_size_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'DiT-XL'"):
        sizes.find_size("DiTXL")
