import json

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb import plan
from dfm_nb.base.argv import guard
from dfm_nb.config import counts
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
        forward(chunk, pack, 0.5, torch.device("cpu"))
    return sum(size for size, _ in kept.values())


def one_layer(overrides: list[str], precision: str) -> int:
    """What a third layer adds to what two keep."""
    return kept_by_autograd(model_of("model.num_layers=3", *overrides), precision) - kept_by_autograd(
        model_of("model.num_layers=2", *overrides), precision
    )


def estimated_layer(layout: Plan, overrides: list[str], precision: str) -> int:
    load = Load(TOKENS, SAMPLES, TEXT, 1, {"fp32": 4, "bf16": 2}[precision], 0, True, runs=SAMPLES)
    return plan.layer_saved_bytes(model_of(*overrides), layout, load)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("norm", ["true", "false"])
@pytest.mark.parametrize("recompute", plan.RECOMPUTE)
def test_layer_bytes_are_what_autograd_keeps(one_rank, monkeypatch, precision, norm, recompute):
    monkeypatch.setattr(attention, "FLOAT32_BELOW", 0)  # bfloat16 stays bfloat16, as on a GPU
    overrides = [f"model.qk_layernorm={norm}", f"model.rope={norm}"]
    layout = Plan(recompute=recompute)
    counted = one_layer([*overrides, layout.overrides()[-1]], precision)
    assert estimated_layer(layout, overrides, precision) == pytest.approx(counted, rel=0.01)


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
    assert 0 <= first["recompute_time"] + first["communication"] + first["bubble"] < 1
    code, text, _ = run_plan(capsys, *argv)
    assert code == 0 and "DiT-XL, 686 M" in text and first["layout"] in text
    assert " ".join(first["overrides"]) in text.splitlines()[-1]


def test_settings_of_a_layout_are_accepted_by_training():
    for p in plan.layouts(2):
        m = cfg.resolve(None, overrides=["model.size=DiT-XL", *p.overrides()], world_size=None).config.model
        assert (m.tensor_model_parallel_size, m.recompute_granularity or "none") == (p.tp, p.recompute)


def test_nothing_fits_says_what_would(capsys):
    code, text, _ = run_plan(capsys, "--model", "DiT-7B", "--gpus", "1")
    assert code == 0 and "0 of 3 layouts fit; the smallest takes 220.7 GiB a GPU" in text


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--model", "DiT-XXL"], ["did you mean DiT-XL?"]),
        (["--model", "DiT-XL", "--gpus", "0"], ["--gpus", "positive"]),
        (["--model", "DiT-XL", "--gpu-memory-gib", "nan"], ["--gpu-memory-gib", "positive"]),
        (["--model", "DiT-XL", "--seq-length", "8", "--samples", "9"], ["--samples"]),
        (["--model", "DiT-XL", "--gpus", "11"], ["no layout of 11 GPUs is legal"]),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, argv, words):
    code, out, err = run_plan(capsys, *argv)
    assert code == 2 and not out and err.count("\n") == 1 and all(w in err for w in words)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_estimate_is_the_measured_peak(recompute):
    from benchmarks import plan_memory

    assert abs(plan_memory.run_case("demo", 1024, recompute)["error"]) < 0.15


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
