"""Muon: orthogonal directions, the matrices inside megatron-core's, torch's own as a reference, and its limits."""

import copy

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb.checkpoints import loading
from dfm_nb.config.schema import OptimizerConfig
from dfm_nb.model.attention import SegmentBounds
from dfm_nb.training.muon import Matrix, Muon, matrices_of, orthogonal
from tests.distributed.layouts import MUON, make_trainer, randomise
from tests.refusals import refused


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16), (1, 8)])
def test_directions_are_orthogonal_with_the_gradients_singular_vectors(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out = orthogonal(x[None])[0]
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    along = torch.diagonal(u.T @ out @ vh.T)
    assert 0.6 < along.min() and along.max() < 1.3
    assert torch.allclose(u * along @ vh, out, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-16, 1e-8, 1e8])
def test_directions_of_tiny_gradients_are_never_large(size, dtype):
    """Layers behind gates that are still zero have such gradients: nothing may overflow or divide zero by zero."""
    x = size * torch.randn((3, 24, 40), generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(x.to(dtype)).float())
    assert values.max() < 1.3
    if size >= 1e-8:
        assert values.min() > 0.6


def test_parts_of_a_matrix_are_queries_keys_and_values_of_all_heads(one_rank):
    trainer, _ = make_trainer([*MUON, "model.qk_layernorm=false", "model.rope=false"])
    randomise(trainer)
    layer, c = trainer.chunks[0].decoder.layers[0], trainer.model_config
    x = torch.randn(5, c.hidden_size)
    matrices = matrices_of(trainer.chunks)
    for attention, linear, parts in (
        (layer.self_attention, layer.self_attention.linear_qkv, 3),
        (layer.cross_attention, layer.cross_attention.linear_kv, 2),
    ):
        with torch.no_grad():
            linear.bias.zero_()
            projected = attention.by_head(linear(x), parts, SegmentBounds([0, 5], [0, 5]))
        m = matrices[linear.weight]
        assert torch.equal(m.join(m.blocks(linear.weight)), linear.weight)
        for block, want in zip(m.blocks(linear.weight), projected, strict=True):
            assert torch.allclose(x @ block.T, want.flatten(1), atol=1e-6)


def test_all_matrices_of_attention_and_mlp_and_nothing_else(one_rank):
    trainer, _ = make_trainer(MUON)
    names = {n for n, p in trainer.chunks[0].named_parameters() if p in matrices_of(trainer.chunks)}
    layers = trainer.model_config.num_layers
    assert len(names) == 7 * layers and all(n.startswith("decoder.layers.") and "adaln" not in n for n in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_torchs_muon(one_rank, dtype):
    """torch's orthogonalises in bfloat16, hence the tolerance; the weights stay float32."""
    generator = torch.Generator().manual_seed(1)
    own = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((24, 24), (96, 24), (24, 96))]
    other = copy.deepcopy(own)
    groups = [{"params": own, "lr": 0.02, "weight_decay": 0.1}]
    optimizer = Muon(groups, {p: Matrix() for p in own}, OptimizerConfig(), dtype)
    reference = torch.optim.Muon(other, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    before = copy.deepcopy(own)
    for _ in range(3):
        for p, q in zip(own, other):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for p, q, start in zip(own, other, before):
        assert p.dtype == torch.float32
        assert (p - q).norm() < 0.03 * (q - start).norm()


def test_low_rank_updates_are_adamws(one_rank):
    trainer, loader = make_trainer([*MUON, "model.lora.rank=2", "model.lora.alpha=2"])
    assert not isinstance(trainer.optimizer.chained_optimizers[0].optimizer, Muon)
    randomise(trainer)
    assert trainer.step(loader.next_step()).grad_norm > 0


def test_a_run_does_not_go_on_with_another_optimizer_or_another_average(tmp_path):
    saved, wanted = (cfg.resolve(None, overrides=[f"optimizer.optimizer={name}"]).config for name in ("adam", "muon"))
    source = loading.Weights(tmp_path, saved)
    loading.check_same_optimizer(source, saved)
    refused("optimizer.optimizer=adam", loading.check_same_optimizer, source, wanted)
    more = cfg.resolve(None, overrides=["ema.sigma_rels=[0.05,0.1,0.2]"]).config
    refused("ema.sigma_rels=", loading.check_same_optimizer, source, more)
