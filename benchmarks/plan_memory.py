"""Memory that `dfm plan` estimates against the peak of real training steps, on CPU in fp32.

    python benchmarks/plan_memory.py [--sizes demo,DiT-S,DiT-B] [--tokens 1024,4096]

Each case is a fresh process: imports and a tiny model's step first (libraries load their kernels then), then the resident set is read, the peak
counter is reset, the model is built and takes two steps on mock packs (the optimizer's state exists from the first on). Measured: peak minus the
resident set before. glibc gives every freed block of 64 KiB or more back to the system (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_), so
that the resident set is what is held and not what was. Prints a table, writes benchmarks/results/plan_memory.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).parent / "results" / "plan_memory"
RECOMPUTE = ("none", "full")
STEPS = 2


def settings(size: str, tokens: int, recompute: str) -> list[str]:
    return [
        f"model.size={size}", "mixed_precision=fp32", "dataset.mock=true", "model.in_channels=16", "model.text_dim=384", "model.sigma_data=0.5",
        f"dataset.task_encoder_seq_length={tokens}", "train.global_batch_size=1", "train.caption_dropout=0",
        f"model.recompute_granularity={'null' if recompute == 'none' else recompute}",
    ]  # fmt: skip


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def take_steps(overrides: list[str], steps: int):
    """Build a trainer and take steps on one mock pack; returns (configuration, pack, number of runs)."""
    from dfm_nb import config as cfg
    from dfm_nb.attention import SegmentLayout
    from dfm_nb.dataset import PackBuilder, PackPlan
    from dfm_nb.train import open_store, pack_settings
    from dfm_nb.trainer import Trainer

    config = cfg.resolve(None, overrides=overrides).config
    store = open_store(config)
    plan = PackPlan(store, pack_settings(config), config.dataset.task_encoder_seq_length, 64)
    pack = PackBuilder(store, plan.settings).build(plan.next(), config.dataset.task_encoder_seq_length)
    trainer = Trainer(config)
    for _ in range(steps):
        assert not trainer.step([pack]).skipped
    return config, pack, len(SegmentLayout(pack.cu_q, pack.cu_q).runs)


def measure(size: str, tokens: int, recompute: str) -> dict:
    """In this process; see the module's header."""
    import torch

    from dfm_nb import parallel, plan
    from dfm_nb.sizes import parameter_count, resolve_size

    torch.set_num_threads(1)
    parallel.init()
    take_steps(settings("tiny", 64, recompute), 1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counter starts again
    config, pack, runs = take_steps(settings(size, tokens, recompute), STEPS)
    peak = resident("VmHWM") - before
    samples = len(pack.keys)
    load = plan.Load(tokens, samples, round(len(pack.text) / samples), 1, 4, len(config.ema.sigma_rels), True, runs)
    estimate, _ = plan.memory(resolve_size(config.model), plan.Plan(recompute=recompute), load)
    parallel.shutdown()
    return {
        "size": size, "tokens": tokens, "recompute": recompute, "parameters": parameter_count(config), "measured": peak,
        "estimate": estimate.total, "activations": estimate.activations, "error": estimate.total / peak - 1,
    }  # fmt: skip


def run_case(size: str, tokens: int, recompute: str) -> dict:
    """`measure` in a fresh process."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    argv = [sys.executable, __file__, "--case", f"{size},{tokens},{recompute}"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{size} at {tokens} tokens, recompute {recompute}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict]) -> str:
    gib = 1 << 30
    lines = [
        f"Peak memory of {STEPS} training steps, fp32, one CPU process ({platform.machine()}), a fresh process per case; GiB.",
        "", "| model | tokens | recompute | measured | estimate | of it activations | estimate / measured - 1 |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        lines.append(
            f"| {r['size']} | {r['tokens']} | {r['recompute']} | {r['measured'] / gib:.3f} | {r['estimate'] / gib:.3f} "
            f"| {r['activations'] / gib:.3f} | {r['error']:+.1%} |"
        )
    return "\n".join(lines)


def machine() -> dict:
    import torch

    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="demo,DiT-S,DiT-B")
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        size, tokens, recompute = args.case.split(",")
        print(json.dumps(measure(size, int(tokens), recompute)))
        return
    cases = [(s, int(t), r) for s in args.sizes.split(",") for t in args.tokens.split(",") for r in RECOMPUTE]
    rows = []
    for case in cases:
        rows.append(run_case(*case))
        print(*case, f"{rows[-1]['error']:+.1%}", file=sys.stderr, flush=True)
    print(table(rows))
    OUT.with_suffix(".md").write_text(table(rows) + "\n")
    OUT.with_suffix(".json").write_text(json.dumps({"machine": machine(), "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
