import json
from dataclasses import replace

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb import plan
from dfm_nb.base.argv import guard
from dfm_nb.config import counts
from dfm_nb.diffusion.objective import EDM
from dfm_nb.model import attention
from dfm_nb.plan import Load, Plan

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
    store = MockStore([(1, 8, 8), (1, 8, 16)], text_tokens=TEXT, channels=4, text_dim=6)  # 16 and 32 tokens: six runs
    settings = PackSettings.of(cfg.Config(), seed=5, caption_dropout=0.0)
    draws = [draw_sample(store.read(i), 0, settings, store.statistics, store.empty_text) for i in range(SAMPLES)]
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


def estimated_layer(layout: Plan, overrides: list[str], precision: str) -> int:
    load = Load(TOKENS, SAMPLES, TEXT, 1, {"fp32": 4, "bf16": 2}[precision], 0, True, runs=SAMPLES)
    return plan.layer_saved_bytes(model_of(*overrides), layout, load)


WAN = ["model.variant=wan", "model.ffn_hidden_size=160"]
LORA = ["model.lora.rank=4"]
NETWORKS = {
    "dit": ("fp32", ["model.rope=true"]),
    "dit lora": ("bf16", LORA),
    "dfm": ("bf16", ["model.variant=dfm", "model.hidden_size=256"]),
    "wan": ("bf16", WAN),
    "wan lora": ("fp32", [*WAN, *LORA]),
}


@pytest.mark.parametrize("precision, overrides", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("recompute", plan.RECOMPUTE)
def test_layer_bytes_are_what_autograd_keeps(one_rank, monkeypatch, precision, overrides, recompute):
    monkeypatch.setattr(attention, "FLOAT32_BELOW", 0)  # bfloat16 stays bfloat16, as on a GPU
    layout = Plan(recompute=recompute)
    counted = one_layer([*overrides, layout.overrides()[-1]], precision)
    assert estimated_layer(layout, overrides, precision) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("precision, lora", [("fp32", []), ("bf16", LORA)], ids=["all weights", "lora"])
def test_a_trainer_holds_what_is_estimated(one_rank, precision, lora):
    """With low-rank updates the frozen weights have no gradients, no state of the optimizer and no averages."""
    from dfm_nb.checkpoints.saving import _make_optimizer_state
    from dfm_nb.training.trainer import Trainer

    asked = ["dataset.mock=true", f"mixed_precision={precision}", "model.num_layers=2", *WIDTH, *WAN, *lora]
    config = cfg.resolve(None, overrides=asked).config
    trainer = Trainer(config)
    _make_optimizer_state(trainer.optimizer)
    adam = trainer.optimizer.chained_optimizers[0].optimizer
    states = [t for state in adam.state.values() for name, t in state.items() if name != "step"]
    if precision == "bf16":  # its parameters are float32 copies of the network's
        states += [p for group in adam.param_groups for p in group["params"]]
    averages = [a for kept in trainer.ema.averages.values() for a in kept]
    found = [p.nbytes for p in trainer.chunks[0].parameters()], [t.nbytes for t in (*states, *averages)]
    number = {"fp32": 4, "bf16": 2}[precision]
    held = plan.memory(config.model, Plan(), Load(TOKENS, bytes_per_number=number))
    assert (held.parameters, held.optimizer) == tuple(map(sum, found))
    gradients = sum(p.main_grad.nbytes for p in trainer.chunks[0].parameters() if p.requires_grad)
    assert held.gradients == gradients == sum(b.grad_data.nbytes for b in trainer.ddp[0].buffers)


GIVEN = ["model.in_channels=16", "model.text_dim=384"]


def found_for(gib=80.0):
    return plan.plan_layouts("DiT-XL", gpus=8, gpu_memory_gib=gib)


def test_layouts_use_every_gpu_once_and_differ():
    every = list(plan.layouts(12))
    assert len(set(every)) == len(every) and all(p.tp * p.cp * p.pp * p.dp == 12 for p in every)
    assert not any(p.sp and p.tp == 1 for p in every)
    assert not any(p.distributed_optimizer and p.dp * p.cp == 1 for p in every)


def test_planned_layouts_are_legal_and_the_best_is_first():
    found = found_for()
    assert {c.plan.tp for c in found} == {1, 2, 4, 8} and {c.plan.pp for c in found} == {1, 2, 4}  # 28 layers: not 8
    times = [c.time.total for c in found]
    assert times == sorted(times) and len(found) > 100


def test_memory_limit_divides_the_candidates():
    found = found_for(gib=30)
    assert {c.fits for c in found} == {True, False}
    assert all(c.fits == (c.memory.total * 1.15 <= 30 * plan.GIB) for c in found)
    fitting = [str(c.plan) for c in found if c.fits]
    assert list(found.table()["layout"]) == fitting[: plan.SHOWN]


def test_each_setting_saves_what_it_is_for():
    model = cfg.resolve(None, overrides=["model.size=DiT-XL", *GIVEN]).config.model
    base, load = Plan(dp=8), Load(8192)
    of = lambda p: plan.memory(model, p, load)  # noqa: E731
    sharded = of(Plan(dp=8, distributed_optimizer=True))
    averages = 4 * load.ema_averages * counts.parameter_count(model)
    assert (of(base).optimizer - averages) == pytest.approx(8 * (sharded.optimizer - averages), rel=1e-6)
    assert of(Plan(dp=8, recompute="full")).activations < of(base).activations / 4
    assert of(Plan(cp=8)).activations < of(base).activations / 4
    assert of(Plan(tp=8, sp=True)).activations < of(Plan(tp=8)).activations < of(base).activations
    assert of(Plan(pp=4, dp=2)).parameters < of(base).parameters / 3


def test_time_names_its_causes():
    model = cfg.resolve(None, overrides=["model.size=DiT-XL", *GIVEN]).config.model
    of = lambda p: plan.step_time(model, p, Load(8192), plan.Machine())  # noqa: E731
    plain, full, pipeline, tensor = (
        of(Plan(dp=8)),
        of(Plan(dp=8, recompute="full")),
        of(Plan(pp=4, dp=2)),
        of(Plan(tp=8)),
    )
    assert plain.recompute == plain.bubble == 0 and plain.compute > 0
    assert full.recompute == pytest.approx(full.compute / 3)
    pack = (pipeline.compute + pipeline.recompute) / 16
    assert pipeline.bubble >= 3 * pack and pipeline.compute == pytest.approx(plain.compute)
    assert tensor.communication > plain.communication


def test_a_ring_between_nodes_has_the_adapters_of_its_members_in_a_node():
    machine = plan.Machine(bytes_per_s=450.0, node_bytes_per_s=50.0, gpus_per_node=8)
    of = machine.link
    assert of(1, 8, 8) == of(2, 4, 64) == of(1, 2, 64) == 450  # within a node
    assert of(1, 16, 16) == 400 and of(2, 8, 16) == 200 and of(8, 2, 16) == of(16, 4, 64) == 50
    assert of(1, 3, 24) == 50  # ranks 6, 7 and 8: the last is alone on its node
    assert replace(machine, gpus_per_node=72).link(1, 64, 64) == 450
    assert replace(machine, gpus_per_node=72).link(1, 32, 128) == 400  # 8 of ranks 64 to 95 are on the first


def test_time_of_a_step_in_closed_form():
    """Two nodes of two GPUs, CP 4: products, elementwise work, keys and values, gradients."""
    model = cfg.resolve(None, overrides=["model.size=DiT-XL", *GIVEN]).config.model
    machine = plan.Machine(1e12, 1e9, 1e8, 2, 1e10, efficiency=0.5)
    load, p = Load(8192, packs=3), Plan(cp=4)
    time = plan.step_time(model, p, load, machine)
    assert time.compute == pytest.approx(3 * counts.model_flops(model, [8192], [512]) / (4 * 0.5e12))
    kept = model.num_layers * plan.layer_saved_bytes(model, p, load)
    assert time.elementwise == pytest.approx(3 * 5 * kept / 1e10)
    gathered = 2 * 3 / 4 * 2 * 8192 * model.hidden_size * 2  # forward and backward, keys and values, bf16
    summed = 2 * 3 / 4 * 4 * counts.parameter_count(model)
    assert time.communication == pytest.approx((3 * model.num_layers * gathered + summed) / (2 * 1e8))
    assert plan.step_time(model, Plan(cp=4, recompute="full"), load, machine).elementwise == pytest.approx(
        time.elementwise * 7 / 5
    )


def test_imbalance_lengthens_computation_where_ranks_wait_for_others():
    model = cfg.resolve(None, overrides=["model.size=DiT-XL", *GIVEN]).config.model
    of = lambda p, load: plan.step_time(model, p, load, plan.MACHINES["h100"])  # noqa: E731
    even, uneven = Load(8192), Load(8192, imbalance=1.24)
    for p in (Plan(dp=8, recompute="full"), Plan(cp=2, dp=4)):
        assert of(p, uneven).compute == pytest.approx(1.24 * of(p, even).compute)
        assert of(p, uneven).recompute == pytest.approx(1.24 * of(p, even).recompute)
        assert of(p, uneven).elementwise == of(p, even).elementwise
    assert of(Plan(cp=8), uneven) == of(Plan(cp=8), even)  # one pack at a time: nobody waits


def test_flags_name_a_machine_and_change_its_rates():
    found = lambda **flags: plan.plan_layouts("DiT-XL", gpus=16, **flags)  # noqa: E731
    asked = {"machine": "GB200", "gpus_per_node": 8, "efficiency": 0.4}
    args = plan.parser().read(plan.parser().words({"model": "DiT-XL", **asked}))
    assert plan.machine_of(args) == replace(plan.MACHINES["gb200"], gpus_per_node=8, efficiency=0.4)
    assert found(machine="gb200").gpu_memory_gib == 186 and found().gpu_memory_gib == 80
    whole, split = found(machine="gb200"), found(machine="gb200", gpus_per_node=8)
    seconds = lambda some: dict(zip(some.to_frame()["layout"], some.to_frame()["step_s"]))  # noqa: E731
    whole, split = seconds(whole), seconds(split)
    assert all(split[k] >= whole[k] for k in whole) and split["TP16 recompute none"] > whole["TP16 recompute none"]
    with pytest.raises(ValueError, match="b100.*gb200"):
        found(machine="b100")


def run_plan(capsys, *argv):
    code = guard(plan.main, list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_json_has_every_layout_and_the_table_the_first(capsys):
    argv = ("--model", "dit-xl", "--seq-length", "8192", "--gpus", "8", "--gpu-memory-gib", "30")
    code, text, _ = run_plan(capsys, *argv, "--json")
    rows = json.loads(text)
    first = next(row for row in rows if row["fits"])
    assert code == 0 and len(rows) == len(found_for(30)) and first["relative_time"] == 1
    parts = [first[f"gib_{k}"] for k in ("parameters", "gradients", "optimizer", "activations")]
    assert sum(parts) == pytest.approx(first["gib_total"])
    assert 0 <= first["recompute_time"] + first["elementwise"] + first["communication"] + first["bubble"] < 1
    code, text, _ = run_plan(capsys, *argv)
    assert code == 0 and "DiT-XL, 686 M" in text and first["layout"] in text
    assert " ".join(first["overrides"]) in text.splitlines()[-1]


def test_settings_of_a_layout_are_accepted_by_training():
    for p in plan.layouts(2):
        m = cfg.resolve(None, overrides=["model.size=DiT-XL", *p.overrides()], world_size=None).config.model
        assert (m.tensor_model_parallel_size, m.recompute_granularity or "none") == (p.tp, p.recompute)


@pytest.mark.parametrize(
    "argv, name",
    [
        (["--model", "DiT-XXL"], "DiT-XL"),
        (["--model", "DiT-XL", "--gpu-memory-gib", "nan"], "--gpu-memory-gib"),
        (["--model", "DiT-XL", "--efficiency", "40"], "--efficiency"),
        (["--model", "DiT-XL", "--imbalance", "0.9"], "--imbalance"),
        (["--model", "DiT-XL", "--seq-length", "8", "--samples", "9"], "--samples"),
        (["--model", "DiT-XL", "--gpus", "11"], "11 GPUs"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, argv, name):
    code, out, err = run_plan(capsys, *argv)
    assert code == 2 and not out and err.count("\n") == 1 and name in err


def test_estimate_of_a_training_adds_up_its_packs():
    """Packs of 768 tokens hold 16 samples of 3x8x8 latents, as the demo's validation generates them."""
    resolved = cfg.resolve("demo", overrides=["train.train_iters=10"])
    model = resolved.with_derived(plan.FED, "test").config.model
    found = plan.estimate(resolved)
    assert found.parameters == counts.parameter_count(model)
    assert found.flops == 10 * 2 * counts.model_flops(model, [48] * 16, [24] * 16)
    halved = cfg.resolve("demo", overrides=["train.train_iters=10", "model.tensor_model_parallel_size=2"])
    assert plan.estimate(halved, 2).bytes < found.bytes and plan.estimate(halved, 2).flops == found.flops
    assert plan.estimate(cfg.resolve("default")).bytes > found.bytes
