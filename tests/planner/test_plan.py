import json
from dataclasses import replace

import pytest

from dfm_nb import config as cfg
from dfm_nb.base.argv import guard
from dfm_nb.base.machine import GIB
from dfm_nb.config import counts
from dfm_nb.planner import plan
from dfm_nb.planner.layouts import GpuLayout, Load, layouts
from dfm_nb.planner.ranking import SHOWN, fed, training_cost
from dfm_nb.planner.step_cost import MACHINES, Machine, layer_saved_bytes, step_seconds
from tests.refusals import refused

GIVEN = ["model.in_channels=16", "model.text_dim=384"]


def found_for(**flags):
    return plan.plan_layouts("DiT-XL", gpus=8, **flags)


def test_layouts_use_every_gpu_once_and_differ():
    every = list(layouts(12))
    assert len(set(every)) == len(every) and all(p.tp * p.cp * p.pp * p.dp == 12 for p in every)
    assert not any(p.sp and p.tp == 1 for p in every)
    assert not any(p.distributed_optimizer and p.dp * p.cp == 1 for p in every)


def test_planned_layouts_are_legal_and_the_best_is_first():
    found = found_for()
    assert {c.plan.tp for c in found} == {1, 2, 4, 8} and {c.plan.pp for c in found} == {1, 2, 4}  # 28 layers: not 8
    times = [c.step_s for c in found]
    assert times == sorted(times) and len(found) > 100


def test_memory_limit_divides_the_candidates():
    found = found_for(machine="a100-80", seq_length=65536)
    assert {c.fits for c in found} == {True, False}
    assert all(c.fits == (c.total_bytes * 1.15 <= 80 * GIB) for c in found)
    assert list(found.table()["layout"]) == [str(c.plan) for c in found if c.fits][:SHOWN]


def test_a_ring_between_nodes_has_the_adapters_of_its_members_in_a_node():
    machine = MACHINES["h100"]
    of = lambda *group: machine.link(*group) / 1e9  # noqa: E731
    assert of(1, 8, 8) == of(2, 4, 64) == of(1, 2, 64) == 450  # within a node
    assert of(1, 16, 16) == 400 and of(2, 8, 16) == 200 and of(8, 2, 16) == of(16, 4, 64) == 50
    assert of(1, 3, 24) == 50  # ranks 6, 7 and 8: the last is alone on its node
    assert replace(machine, gpus_per_node=72).link(1, 64, 64) == 450e9
    assert replace(machine, gpus_per_node=72).link(1, 32, 128) == 400e9  # 8 of ranks 64 to 95 are on the first


def test_time_of_a_step_in_closed_form():
    """Two nodes of two GPUs, CP 4: products, elementwise work, keys and values, gradients."""
    model = cfg.resolve(None, overrides=["model.size=DiT-XL", *GIVEN]).config.model
    machine = Machine(0.5, 1, 0.1, 2, 0.01, 80)
    load, p = Load(8192, packs=3), GpuLayout(cp=4)
    time = step_seconds(model, p, load, machine)
    assert time["compute"] == pytest.approx(3 * counts.model_flops(model, [8192], [512]) / (4 * 0.5e12))
    kept = model.num_layers * layer_saved_bytes(model, p, load)
    assert time["elementwise"] == pytest.approx(3 * 5 * kept / 1e10)
    gathered = 2 * 3 / 4 * 2 * 8192 * model.hidden_size * 2  # forward and backward, keys and values, bf16
    summed = 2 * 3 / 4 * 4 * counts.parameter_count(model)
    assert time["communication"] == pytest.approx((3 * model.num_layers * gathered + summed) / (2 * 1e8))
    again = step_seconds(model, GpuLayout(cp=4, recompute="full"), load, machine)
    assert again["elementwise"] == pytest.approx(time["elementwise"] * 7 / 5)


def test_flags_name_a_machine_and_the_size_of_its_nodes():
    asked = plan.PlanOptions(model="DiT-XL", machine="gb200", gpus_per_node=8)
    assert asked.hardware() == replace(MACHINES["gb200"], gpus_per_node=8)
    assert plan.PlanOptions(model="DiT-XL").hardware() == MACHINES["h100"]
    assert plan.MachineName.__args__ == tuple(MACHINES) and found_for(machine="gb200").gpu_memory_gib == 186
    refused("--machine.*b100", found_for, machine="b100")


def run_plan(capsys, *argv):
    code = guard(plan.main, list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_json_has_every_layout_and_the_table_the_first(capsys):
    argv = "--model dit-xl --seq-length 65536 --gpus 8".split()
    code, text, _ = run_plan(capsys, *argv, "--json")
    rows = json.loads(text)["layouts"]
    first = next(row for row in rows if row["fits"])
    assert [row["gib_total"] for row in rows] == pytest.approx(
        [c.total_bytes / GIB for c in found_for(seq_length=65536)]
    )
    assert code == 0 and first["relative_time"] == 1
    parts = [first[f"gib_{k}"] for k in ("parameters", "gradients", "optimizer", "activations")]
    assert sum(parts) == pytest.approx(first["gib_total"])
    assert 0 <= first["recompute_time"] + first["elementwise"] + first["communication"] + first["bubble"] < 1
    code, text, _ = run_plan(capsys, *argv)
    assert code == 0 and " ".join(first["overrides"]) in text.splitlines()[-1]
    assert "model.num_attention_heads=18 or 9" in text, "its heads have 72 channels"


def test_settings_of_a_layout_are_accepted_by_training():
    for p in layouts(2):
        m = cfg.resolve(None, overrides=["model.size=DiT-XL", *p.overrides()], world_size=None).config.model
        assert (m.tensor_model_parallel_size, m.recompute_granularity or "none") == (p.tp, p.recompute)


@pytest.mark.parametrize(
    "words, name",
    [
        ("DiT-XXL", "DiT-XL"),
        ("DiT-XL --seq-length nan", "--seq-length"),
        ("DiT-XL --seq-length 8 --samples 9", "--samples"),
        ("DiT-XL --gpus 11", "11 GPUs"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, words, name):
    code, out, err = run_plan(capsys, "--model", *words.split())
    assert code == 2 and not out and err.count("\n") == 1 and name in err


def test_estimate_of_a_training():
    parameters, held = training_cost(cfg.resolve("demo"))
    assert parameters == counts.parameter_count(fed(cfg.resolve("demo")).model)
    halved = cfg.resolve("demo", overrides=["model.tensor_model_parallel_size=2"])
    assert training_cost(halved, 2)[1] < held < training_cost(cfg.resolve("default"))[1]
