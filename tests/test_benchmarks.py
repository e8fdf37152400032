"""The benchmarks' own arithmetic, packers against what must hold of any packing, the run of
many, and the CUDA set's code on tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks import (
    bench,
    bench_gpu,
    growth,
    monitor,
    noise_levels,
    packing,
    plan_nodes,
    real_pictures,
    report,
    scaling,
    speedrun,
    thousand_ranks,
)
from dfm_nb.config import counts
from tests.processes import commands

ROOT = Path(__file__).resolve().parent.parent


# ---- report ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponent_recovers_a_power(power):
    sizes = [250, 500, 1000, 4000]
    k, c = report.exponent(sizes, [0.003 * n**power for n in sizes])
    assert k == pytest.approx(power) and c == pytest.approx(0.003)


@pytest.mark.parametrize(("sizes", "costs"), [([1, 1], [1, 2]), ([1, 2], [1]), ([1, 2], [0, 1]), ([5], [1])])
def test_exponent_refuses_what_fits_no_line(sizes, costs):
    with pytest.raises(ValueError, match="fit needs|must be positive"):
        report.exponent(sizes, costs)


def test_start_up_is_told_from_growth():
    sizes = [100, 200, 400, 3200]
    fixed, rate = report.fixed_and_growing(sizes, [2 + 0.01 * n for n in sizes])
    assert fixed == pytest.approx(2) and rate == pytest.approx(0.01)
    fixed, rate = report.fixed_and_growing(sizes, [n**2 for n in sizes])  # a line through them would start below zero
    assert fixed == 0 and rate > 0


def test_table_refuses_a_row_of_another_width():
    assert report.table(["a", "b"], [[1, 2]]).splitlines() == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]
    with pytest.raises(AssertionError):
        report.table(["a", "b"], [[1]])


# ---- noise levels ------------------------------------------------------------------------------------------------


def test_gain_of_neighbours_is_wieners():
    """None in white noise; of n equal latents it is that of their mean, whose noise is sigma / sqrt(n)."""
    g = torch.Generator().manual_seed(0)
    white = torch.randn(400, 2, 3, 4, 8, generator=g, dtype=torch.float64)
    assert noise_levels.gain(*noise_levels.spectrum(white)).abs().max() < 0.01
    equal = torch.randn(400, 2, 1, 1, 1, generator=g, dtype=torch.float64).expand(-1, -1, 3, 4, 8)
    n, variance, sigma2 = 3 * 4 * 8, 0.25, torch.exp(2 * noise_levels.LN_SIGMA)
    alone, together = variance / (variance + sigma2), variance / (n * variance + sigma2)
    found = noise_levels.gain(*noise_levels.spectrum(equal))
    torch.testing.assert_close(found, 1 - together / alone, atol=1e-3, rtol=0)


# ---- packing -----------------------------------------------------------------------------------------------------


def test_first_fit_decreasing_by_hand():
    packs = packing.first_fit_decreasing([3, 7, 5, 4, 6, 2], 10)
    assert [[1, 0], [4, 3], [2, 5]] == packs  # 7+3, 6+4, 5+2
    with pytest.raises(ValueError, match="11 tokens does not fit a pack of 10"):
        packing.first_fit_decreasing([11], 10)


def test_first_fit_decreasing_packs_every_sample_once():
    rng = random.Random(0)
    lengths = [rng.randint(1, 100) for _ in range(300)]
    packs = packing.first_fit_decreasing(lengths, 128)
    assert sorted(i for pack in packs for i in pack) == list(range(300))
    assert all(sum(lengths[i] for i in pack) <= 128 for pack in packs)
    assert len(packs) <= 11 / 9 * -(-sum(lengths) // 128) + 6 / 9 + 3  # 11/9 OPT + 6/9 (Dosa 2007), OPT near the bound


@pytest.mark.parametrize("mix", list(packing.MIXES))
def test_packers_use_each_sample_of_the_stream_at_most_once(mix):
    lengths = packing.draw(mix, 0, 12, 4096 if "512" not in mix else 15_360, 40)
    capacity = max(4096, *lengths)
    for name, packer in packing.PACKERS.items():
        packs = list(islice(packer(iter(lengths), capacity, 20), 4))
        used = sorted(length for pack, _, _ in packs for length in pack)
        left = sorted(lengths)
        for length in used:
            left.remove(length)  # raises when a length is used more often than it came
        assert len(packs) == 4 and all(sum(pack) <= memory <= capacity for pack, memory, _ in packs), name


def test_our_packer_is_the_fullest_on_mixed_sizes():
    lengths = packing.draw("12 sizes, 128 to 1024 px", 3, 40, 15_360, 100)
    useful = {name: packing.measure(name, lengths, 40, 15_360, 100)["useful"] for name in packing.PACKERS}
    assert useful["dfm_nb"] >= 0.98
    assert useful["padding"] < useful["next-fit"] < useful["first-fit-decreasing, by buffers"] < useful["dfm_nb"]


def test_synthetic_mix_has_the_lengths_of_the_source():
    from dfm_nb.data.sources import synthetic

    source = synthetic.build(num_images=150, num_clips=30, size_px=64)
    real = set()
    for i in range(180):
        (clip,) = source.read(i)
        frames, height, width, _ = clip.video.shape
        real.add((1 + (frames - 1) // 4) * (height // 16) * (width // 16))
    assert real <= set(islice(packing.synthetic_mix(random.Random(0), 64), 4000))


# ---- scaling, growth ---------------------------------------------------------------------------------------------


def test_scaling_ratios_are_taken_within_a_round():
    rounds = [{"1 process": 10.0, "DP2": 19.0}, {"1 process": 5.0, "DP2": 9.0}, {"1 process": 20.0, "DP2": 30.0}]
    assert scaling.ratios(rounds, "1 process")["DP2"] == pytest.approx((1.8, 1.5, 1.9))


def test_growth_corpus_has_the_megabytes_asked_for(tmp_path):
    written = growth.write_corpus(tmp_path / "text.jsonl", 0.3)
    lines = (tmp_path / "text.jsonl").read_text(encoding="utf-8").splitlines()
    assert 300_000 <= written < 310_000 and all(json.loads(line)["text"] for line in lines)


def test_growth_plot_and_table_show_the_fit(tmp_path):
    curves = [
        growth.curve("data", "prepare", [250, 500, 1000], [1.0, 2.0, 4.0]),
        growth.curve("corpus", "text preprocess", [1, 2, 4], [3.0, 4.0, 6.0]),
    ]
    growth.plot(curves, tmp_path / "growth.png")
    shown = growth.text(curves, report.machine(), 3).splitlines()
    assert "| prepare | 250 to 1,000 samples | 1 to 4 | 1.00 |" in shown[-2]
    assert "2 s + 1e+03 ms a MB" in shown[-1]
    assert (tmp_path / "growth.png").stat().st_size > 5000


# ---- published times ---------------------------------------------------------------------------------------------


def test_wans_flops_are_its_products_and_attention():
    t, text, h, f = plan_nodes.TOKENS, plan_nodes.TEXT, 5120, 13_824
    layer = t * (8 * h * h + 4 * h * h + 4 * h * f) + text * 4 * h * h + 4 * h * (t * t + t * text)
    outside = 2 * t * 2 * 64 * h + 2 * text * (4096 * h + h * h)  # patches in and out, two layers on the text
    assert counts.model_flops(plan_nodes.wan(), [t], [text]) == pytest.approx(3 * (40 * layer + outside), rel=1e-4)


def test_a_fit_gives_its_own_row_and_the_others_their_errors():
    for row in plan_nodes.fits():
        published = {run.name: run.tflops for run in (*plan_nodes.RUNS, plan_nodes.EARLIER)}
        assert row["tflops"][row["fitted"]] == pytest.approx(published[row["fitted"]], rel=1e-6)
        assert set(row["errors"]) == set(published) - {row["fitted"]}
        for name, error in row["errors"].items():
            assert row["tflops"][name] == pytest.approx(published[name] * (1 + error))


def test_a_count_of_half_the_flops_doubles_the_share_of_peaks():
    whole, half = (plan_nodes.fit(plan_nodes.RUNS[0], counted, peaks_only=True) for counted in (1.0, 0.5))
    assert half == pytest.approx(2 * whole)


# ---- the run of many ---------------------------------------------------------------------------------------------


def test_bench_says_why_a_benchmark_failed(tmp_path):
    good = bench.run(["-c", "print('| a |')"], 30, tmp_path / "a.log")
    assert good["outcome"] == "ok" and good["printed"] == "| a |"
    bad = bench.run(["-c", "import sys; print('half'); sys.exit('the disk is full')"], 30, tmp_path / "b.log")
    assert bad["outcome"] == "failed with exit code 1: the disk is full"
    slow = bench.run(["-c", "import time; time.sleep(60)"], 0.5, tmp_path / "c.log")
    assert slow["outcome"].startswith("failed: not done after") and slow["seconds"] < 20


def test_bench_index_names_what_failed():
    rows = [
        {
            "name": "packing",
            "against": "padding",
            "command": "python x",
            "seconds": 61.0,
            "outcome": "ok",
            "printed": "# head\n| a |",
        },
        {
            "name": "loader",
            "against": "tar",
            "command": "python y",
            "seconds": 2.0,
            "outcome": "failed: it hung",
            "printed": "",
        },
    ]
    lines = bench.index(rows, report.machine()).splitlines()
    assert "1.1 minutes in all, failed: loader." in lines[2]
    assert "### head" in lines and "No result: failed: it hung." in lines


def test_bench_has_limits_that_the_budget_cuts_short():
    assert sum(b.limit_s for b in bench.SET) > bench.BUDGET_S


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", bench.SET, ids=lambda b: b.name)
def test_bench_scripts_take_the_flags_of_the_set(benchmark):
    script, *flags = benchmark.argv("OUT", "TEXT")
    shown = commands().run("python", ROOT / script, "--help")
    assert shown.returncode == 0, shown.stderr
    assert {f for f in flags if f.startswith("--")} <= set(re.findall(r"--[a-z-]+", shown.stdout))


# ---- the CUDA set ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_are_found_by_the_gpus_name(name, peak):
    assert bench_gpu.peak_flops(name) == peak


def test_layer_stack_grows_with_memory():
    few, many = (bench_gpu.layers_that_fit(gib * 2**30, 270e6, 16384, 4096, 28) for gib in (40, 140))
    assert 1 <= few < many <= 28
    assert bench_gpu.layers_that_fit(2**30, 270e6, 16384, 4096, 28) == 1
    assert bench_gpu.layers_that_fit(2**50, 270e6, 16384, 4096, 28) == 28


def test_cuda_set_has_every_size_back_end_and_both_modes():
    from dfm_nb.model.attention import BACKENDS

    args = argparse.Namespace(
        smoke=False, sizes="DiT-S,DiT-XL", tokens="8192,16384", device="cpu", steps=5, profile=True
    )
    cases = bench_gpu.cases(args)
    assert {(c["size"], c["tokens"], c["compiled"]) for c in cases} >= {
        (s, t, m) for s in ("DiT-S", "DiT-XL") for t in (8192, 16384) for m in (False, True)
    }
    assert {c["backend"] for c in cases if c["size"] == "DiT-XL"} == set(BACKENDS) - {"sdpa"}  # auto is sdpa on a CPU
    missing = {c["backend"]: c["unavailable"] for c in cases if "unavailable" in c}
    assert set(missing) == {"varlen", "flash_attn", "flex"} and "CUDA" in missing["varlen"]


@pytest.mark.slow
def test_cuda_set_runs_its_code_on_a_cpu(tmp_path):
    flags = ["--device", "cpu", "--smoke", "--profile", "--output-dir", tmp_path]
    done = commands().run("python", ROOT / "benchmarks/bench_gpu.py", *flags, cwd=tmp_path)  # not the checkout's folder
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "bench_gpu.json").read_text())
    ran = [r for r in result["rows"] if "unavailable" not in r]
    assert {(r["resolved_backend"], r["compiled"]) for r in ran} >= {
        ("sdpa", False),
        ("sdpa", True),
        ("sdpa_loop", False),
    }
    assert all(
        r["tokens_per_s"] > 0 and r["tflops_per_s"] > 0 and r["peak_bytes"] > 1e6 and r["mfu"] is None for r in ran
    )
    assert any(r["time_by_kernel"]["longest"] for r in ran if r["profile"])
    assert "a smoke run on the CPU" in done.stdout


@pytest.mark.slow
def test_cuda_set_without_cuda_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = commands().run("python", ROOT / "benchmarks/bench_gpu.py")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "needs a CUDA device" in done.stderr


def test_the_monitors_benchmark_measures_every_size(tmp_path):
    assert monitor.main(["--records", "50", "2500", "--repaints", "2", "--output-dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "monitor.json").read_text())["measured"]
    assert [r["records"] for r in found] == [50, 2500] and all(len(r["repaint_s"]) == 2 for r in found)


# ---- speedrun ----------------------------------------------------------------------------------------------------


def test_speedrun_finds_when_a_line_crosses_the_target():
    rows = [[100, 10.0, 0.6], [200, 20.0, 0.5], [300, 30.0, 0.4]]
    assert speedrun.seconds_to(0.45, rows) == pytest.approx(25)
    assert speedrun.seconds_to(0.4, rows) == pytest.approx(30)
    assert speedrun.seconds_to(0.39, rows) is None


def test_speedrun_counts_the_steps_and_not_what_lies_between(tmp_path):
    records = [{"iteration": i, "loss": 1.0, "tokens": 50, "tokens_per_s": 100.0, "tflops_per_s": 1e-3} for i in (1, 2)]
    records += [{"iteration": 2, "val_loss": 0.7}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = speedrun.measured(tmp_path / "metrics.jsonl")
    assert found == {"steps": [[2, 1.0, 0.7]], "model_flops_per_s": pytest.approx(2e9)}


def test_speedruns_interval_covers_19_of_20():
    """By simulation: the mean of five normal numbers lies within its interval of their expectation."""
    rng, within = random.Random(0), 0
    for _ in range(2000):
        mean, half = map(float, speedrun.interval([rng.gauss(100, 3) for _ in range(5)]).split(" ± "))
        within += abs(mean - 100) <= half
    assert within / 2000 == pytest.approx(0.95, abs=0.015)


# ---- real pictures -----------------------------------------------------------------------------------------------


def test_held_out_drawings_are_of_other_authors():
    rng = np.random.default_rng(0)
    kinds = list(real_pictures.KINDS)
    rows = pd.DataFrame(
        {"kind": rng.choice([*kinds[:5], ""], 400), "author": [f"author {i}" for i in rng.geometric(0.15, 400)]}
    )
    held = real_pictures.hold_out(rows, seed=1)
    assert not held[rows["kind"] == ""].any()
    for _, of_kind in rows.assign(held=held)[rows["kind"] != ""].groupby("kind"):
        assert 0.1 < of_kind["held"].mean() <= real_pictures.HELD_OUT
        assert of_kind.groupby("author")["held"].nunique().max() == 1


def test_probe_counts_rare_kinds_as_much_as_common_ones():
    """Two directions that overlap: without weights the common one takes all that is between them."""
    rng = np.random.default_rng(0)
    labels = np.array(["common"] * 900 + ["rare"] * 30)
    at = lambda which: np.where(which == "rare", 0.6, -0.6)[:, None] * np.eye(1, 20)  # noqa: E731
    noise = lambda n: rng.normal(0, 0.4, (n, 20))  # noqa: E731
    probe = real_pictures.Probe(at(labels) + noise(930) + 1, labels)
    asked = np.repeat(["common", "rare"], 200)
    found = probe(at(asked) + noise(400) + 1)
    assert (found == asked)[:200].mean() > 0.75 and (found == asked)[200:].mean() > 0.75


# ---- a thousand ranks --------------------------------------------------------------------------------------------

FEW_RANKS = "--samples 3000 --ranks 4 --steps 120 --kills 12 --layouts 6 --lanes 8 --workers 1".split()


@pytest.mark.slow
def test_simulated_ranks_lose_no_sample_and_see_the_plans_packs(tmp_path):
    assert thousand_ranks.main([*FEW_RANKS, "--output-dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "thousand_ranks.json").read_text())
    assert found["epochs"] >= 2 and found["steps_compared"] >= 24 and len(found["layouts"]) == 6


@pytest.mark.slow
def test_the_simulation_notices_a_state_that_is_not_whole(tmp_path, monkeypatch):
    whole = thousand_ranks.PackPlan.restore

    def forgetful(plan, state):
        whole(plan, state)
        for lane in plan.lanes:
            del lane.packer.waiting[-2:]

    monkeypatch.setattr(thousand_ranks.PackPlan, "restore", forgetful)
    assert thousand_ranks.main([*FEW_RANKS, "--output-dir", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "thousand_ranks.json").read_text())
    assert found["steps_that_differ"] and found["lost_in_whole_epochs"]
