"""What a layer keeps for backward, and what a trainer holds: counted, and as estimated."""

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb.config import counts
from dfm_nb.diffusion.objective import EDM
from dfm_nb.model import attention
from dfm_nb.planner.layouts import RECOMPUTE, GpuLayout, Load
from dfm_nb.planner.step_cost import layer_saved_bytes, training_bytes
from tests.networks import cases

WIDTH = ["model.hidden_size=48", "model.num_attention_heads=4", "model.in_channels=4", "model.text_dim=6"]
SAMPLES, TEXT = 6, 8
TOKENS = 6 * 24


def model_of(*overrides):
    return cfg.resolve(None, overrides=[*WIDTH, *overrides]).config.model


def kept_by_autograd(model, precision: str) -> int:
    """Bytes of the distinct storages that one forward keeps for backward, parameters aside."""
    from dfm_nb.data.stores import MockStore
    from dfm_nb.model.build import build_chunks
    from dfm_nb.model.denoiser import forward
    from dfm_nb.packs.packs import PackSettings, draw_sample, pack_draws

    _, (chunk,) = build_chunks(model, precision, seed=1)
    chunk.train()
    store = MockStore([(1, 8, 12)], text_tokens=TEXT, channels=4, text_dim=6)  # 24 tokens each: one run of attention
    settings = PackSettings(cfg.resolve(None, overrides=["train.caption_dropout=0"]).config, store.statistics)
    draws = [draw_sample(store.read(i), 0, settings, store.empty_text) for i in range(SAMPLES)]
    pack = pack_draws(draws, settings)
    assert len(pack.x0) == TOKENS and len(pack.text) == SAMPLES * TEXT
    weights = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor holds the address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward(chunk, pack, EDM(0.5), torch.device("cpu"))
    return sum(size for size, _ in kept.values())


def one_layer(overrides: list[str], precision: str) -> int:
    """What a third layer adds to what two keep."""
    return kept_by_autograd(model_of("model.num_layers=3", *overrides), precision) - kept_by_autograd(
        model_of("model.num_layers=2", *overrides), precision
    )


def estimated_layer(layout: GpuLayout, overrides: list[str], precision: str) -> int:
    load = Load(TOKENS, SAMPLES, TEXT, 1, {"fp32": 4, "bf16": 2}[precision], 0, True)
    return layer_saved_bytes(model_of(*overrides), layout, load)


LORA = ["model.lora.rank=4"]
NETWORKS = cases("MEMORY", {"dit": ("fp32", ["model.rope=true"]), "dit lora": ("bf16", LORA)})


@pytest.mark.parametrize("precision, overrides", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_layer_bytes_are_what_autograd_keeps(one_rank, monkeypatch, precision, overrides, recompute):
    monkeypatch.setattr(attention, "FLOAT32_BELOW", 0)  # bfloat16 stays bfloat16, as on a GPU
    layout = GpuLayout(recompute=recompute)
    counted = one_layer([*overrides, layout.overrides()[-1]], precision)
    assert estimated_layer(layout, overrides, precision) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("precision, lora", [("fp32", []), ("bf16", LORA)], ids=["all weights", "lora"])
def test_a_trainer_holds_what_is_estimated(one_rank, precision, lora):
    """With low-rank updates the frozen weights have no gradients, no state of the optimizer and no averages."""
    from dfm_nb.checkpoints.saving import make_optimizer_state
    from dfm_nb.training.trainer import Trainer

    asked = ["dataset.mock=true", f"mixed_precision={precision}", "model.num_layers=2", *WIDTH, *lora]
    config = cfg.resolve(None, overrides=asked).config
    trainer = Trainer(config)
    make_optimizer_state(trainer.optimizer)
    adam = trainer.optimizer.chained_optimizers[0].optimizer
    states = [t for state in adam.state.values() for name, t in state.items() if name != "step"]
    if precision == "bf16":  # its parameters are float32 copies of the network's
        states += [p for group in adam.param_groups for p in group["params"]]
    averages = [a for kept in trainer.ema.averages.values() for a in kept]
    found = [p.nbytes for p in trainer.chunks[0].parameters()], [t.nbytes for t in (*states, *averages)]
    number = {"fp32": 4, "bf16": 2}[precision]
    held = training_bytes(config.model, GpuLayout(), Load(TOKENS, bytes_per_number=number))
    assert (held["parameters"], held["optimizer"]) == tuple(map(sum, found))
    gradients = sum(p.main_grad.nbytes for p in trainer.chunks[0].parameters() if p.requires_grad)
    assert held["gradients"] == gradients == sum(b.grad_data.nbytes for b in trainer.ddp[0].buffers)


def test_a_distributed_optimizer_shares_its_state():
    """What layers keep and hold in a layout: tests/distributed/test_plan_layouts.py."""
    asked = ["model.size=DiT-XL", "model.in_channels=16", "model.text_dim=384"]
    model = cfg.resolve(None, overrides=asked).config.model
    base, load = GpuLayout(dp=8), Load(8192)
    of = lambda p: training_bytes(model, p, load)  # noqa: E731
    sharded = of(GpuLayout(dp=8, distributed_optimizer=True))
    averages = 4 * load.ema_averages * counts.parameter_count(model)
    assert (of(base)["optimizer"] - averages) == pytest.approx(8 * (sharded["optimizer"] - averages), rel=1e-6)
    # of a short pack, the gradients wait for their sum, where megatron-core does not add each at once
    alone, overlapped = (training_bytes(model, plan, Load(16))["activations"] for plan in (GpuLayout(), base))
    assert overlapped < alone == 2 * counts.parameter_count(model)
