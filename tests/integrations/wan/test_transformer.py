"""The network against diffusers' `WanTransformer3DModel`: outputs and gradients, alone and packed.

In layouts: tests/distributed, and tests/test_generate_layouts.py for what samples.
"""

import pytest
import torch
from diffusers import WanTransformer3DModel

from dfm_nb import config as cfg
from dfm_nb.diffusion.objective import Flow
from dfm_nb.integrations.wan import folder
from dfm_nb.integrations.wan.names import places
from dfm_nb.model.build import build_chunks
from dfm_nb.model.denoiser import forward
from dfm_nb.packs.packs import PackSettings, noised, pack_draws
from dfm_nb.packs.patches import unpatchify
from tests.integrations.wan.reference import GRIDS, TEXT_DIM, random_network, reference_output
from tests.networks import samples


def settings_of(network, *more: str):
    c = network.config
    shape = {"num_layers": c.num_layers, "hidden_size": c.num_attention_heads * c.attention_head_dim}
    shape |= {"num_attention_heads": c.num_attention_heads, "ffn_hidden_size": c.ffn_dim}
    shape |= {"variant": "wan", "in_channels": 16, "text_dim": TEXT_DIM}
    return cfg.resolve(None, overrides=[*(f"model.{k}={v}" for k, v in shape.items()), *more]).config


def weights_of(network, model, tensor=lambda p: p.detach()):
    """By our names."""
    theirs = {name: tensor(p) for name, p in network.named_parameters()}
    found = list(places(model))
    assert sorted(s for p in found for s in p.sources) == sorted(theirs)
    return {p.name: p.ours([theirs[s] for s in p.sources]) for p in found}


def close(got, want, atol=1e-5):
    assert want.std() > 0
    torch.testing.assert_close(got, want, rtol=0, atol=atol * want.abs().max().item())


@pytest.mark.parametrize("sizes, rows", [({}, 512), ({"heads": 2, "head": 44, "layers": 3, "ffn": 160}, 8)])
def test_outputs_and_gradients_are_those_of_diffusers(one_rank, sizes, rows):
    network = random_network(**sizes)
    config = settings_of(network, f"model.text_padding={rows}")
    _, (chunk,) = build_chunks(config.model, "fp32", seed=3)
    assert chunk.load_state_dict(weights_of(network, config.model))
    draws, settings = samples(GRIDS, TEXT_DIM), PackSettings(config)
    segments = [noised(config.model, **vars(d)) for d in draws]
    pack = pack_draws(segments, settings, capacity=120)  # 100 tokens and padding
    output, loss_of = forward(chunk, pack, Flow(), torch.device("cpu"))
    total = 0
    for i, key in enumerate(pack.keys):
        d = draws[int(key)]
        want = reference_output(network, d, rows)
        close(unpatchify(output[pack.cu_q[i] : pack.cu_q[i + 1]], pack.grids[i], 2), want)
        total = total + (want - (d.noise - d.latent)).square().sum() / 64
        alone, _ = forward(chunk, pack_draws([noised(config.model, **vars(d))], settings), Flow(), torch.device("cpu"))
        close(unpatchify(alone, pack.grids[i], 2), want)
    losses = loss_of(output)
    loss = losses.loss[losses.mask].sum()
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    loss.backward()
    total.backward()
    gradients = weights_of(network, config.model, lambda p: p.grad)
    largest = max(g.abs().max() for g in gradients.values())
    for name, p in chunk.named_parameters():
        # Among 512 rows that are nearly all alike, what cross attention's queries learn is a small difference of large
        # numbers, in diffusers' float32 as in ours; so there the scale is that of all gradients.
        want = gradients[name]
        bound = 1e-5 * (largest if rows == 512 else want.abs().max())
        torch.testing.assert_close(p.grad, want, rtol=0, atol=bound.item())


PUBLISHED = {
    "Wan-1.3B": {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
    "Wan-14B": {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824},
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_names_and_shapes_of_a_published_size_are_those_of_diffusers(one_rank, size):
    """Neither network is held in memory."""
    with torch.device("meta"):
        network = WanTransformer3DModel(**PUBLISHED[size], attention_head_dim=128, text_dim=4096)
    asked = [f"model.size={size}", "model.in_channels=16", "model.text_dim=4096"]
    model = cfg.resolve(None, overrides=asked).config.model
    assert all(getattr(model, ours) == network.config[theirs] for theirs, ours in folder.SIZES.items())
    assert folder._shapes(model) == {name: list(t.shape) for name, t in network.state_dict().items()}
