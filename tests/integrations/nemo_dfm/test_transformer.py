"""The network against an independent implementation of NeMo DFM's DiT, from its state dict on."""

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb.diffusion.objective import EDM
from dfm_nb.integrations.nemo_dfm.weights import check_positions, converted, settings_of
from dfm_nb.model.build import build_chunks
from dfm_nb.model.denoiser import forward
from dfm_nb.packs.packs import PackSettings, noised, pack_draws
from dfm_nb.packs.patches import unpatchify
from dfm_nb.training.batches import open_store, pack_settings
from tests.conftest import STORED
from tests.integrations.nemo_dfm.reference import random_network
from tests.networks import samples
from tests.refusals import refused

DFM_TEXT = 512
GRIDS = [(1, 8, 6), (3, 4, 8), (2, 6, 4), (1, 4, 90)]  # the last is 45 patches wide, where its table of 40 wraps


def ours(reference):
    weights = reference.state_dict()
    model = cfg.resolve(None, overrides=settings_of(weights)).config.model
    _, (chunk,) = build_chunks(model, "fp32", seed=3)
    chunk.load_state_dict(converted(weights, model.patch_spatial))
    return chunk, model


def test_variant_is_the_published_network(one_rank):
    reference = random_network(h=288, layers=3, heads=6, text=40)
    chunk, model = ours(reference)
    config = cfg.Config(model=model)
    draws = samples(GRIDS, model.text_dim)
    with torch.no_grad():
        pack = pack_draws([noised(model, **vars(d)) for d in draws], PackSettings(config), capacity=400)
        got, _ = forward(chunk, pack, EDM(0.5), torch.device("cpu"))
        for i, key in enumerate(pack.keys):
            d = draws[int(key)]
            x, c_noise = d.latent + d.sigma * d.noise, torch.tensor(d.sigma).log() / 4
            text = torch.cat((d.text, torch.zeros(DFM_TEXT - len(d.text), model.text_dim)))
            want = reference(x / (d.sigma**2 + 0.25) ** 0.5, c_noise, text, d.fps)
            tokens = got[pack.cu_q[i] : pack.cu_q[i + 1]]
            mine = unpatchify(tokens, pack.grids[i], 2)
            assert want.std() > 0.3
            torch.testing.assert_close(mine, want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.slow
def test_positions_of_another_table_are_refused():
    table = random_network().state_dict()["pos_embedder.pos_embedding.weight"]
    check_positions(table, 256)
    check_positions(table.bfloat16(), 256)
    for other in (table[:-1600], table.flip(0)):
        refused("34 x 40 x 40", check_positions, other, 256)


def test_latents_are_multiplied_by_sigma_data_and_nothing_else():
    config = cfg.resolve(None, overrides=["model.variant=dfm", f"dataset.path={STORED / 'data'}"]).config
    statistics = pack_settings(config, open_store(config).statistics).statistics
    latent = torch.randn(16, 1, 2, 2)
    assert torch.equal(statistics.to_model(latent, 0.5), latent * 0.5)
