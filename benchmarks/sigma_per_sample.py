"""What a noise level for each sample is worth against one for each pack, which NeMo DFM's DiT and Bridge's WAN have.

    python benchmarks/sigma_per_sample.py --dataset-path runs/demo/data [--seeds 1 2] [--steps 300]

The demo's recipe in one process, trained anew for each arm and seed. The arms differ in one line: the second gives all
samples of a pack the first one's sigma. Validation has its own fixed levels in both. *Scatter* is the standard
deviation of the last fifth of the training losses.

Prints a table and writes benchmarks/results/sigma_per_sample.{json,md}. Takes about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from dfm_nb.base.cpu import fast_bf16
from dfm_nb.base.metrics import read_metrics

ARMS = ("sample", "pack")


def train(arm: str, dataset: str, run_dir: str, seed: int, steps: int) -> int:
    """One arm, in this process."""
    from dfm_nb import train as verb
    from dfm_nb.data import loader
    from dfm_nb.packs import packs

    if arm == "pack":
        loader.pack_draws = lambda draws, *args: packs.pack_draws(
            [replace(d, sigma=draws[0].sigma) for d in draws], *args
        )
    settings = [f"train.train_iters={steps}", f"train.eval_interval={steps // 3}", f"rng.seed={seed}"]
    settings += ["validation.samples=false", f"checkpoint.save_interval={steps}", "ema.sigma_rels=[]"]
    recipe = "demo_bf16" if fast_bf16() else "demo"
    return verb.main(["--recipe", recipe, "--dataset-path", dataset, "--run-dir", run_dir, *settings])


def measured(run_dir: Path) -> dict:
    """Validation losses, and the scatter of the training loss."""
    records = read_metrics(run_dir / "metrics.jsonl")
    losses = [r["loss"] for r in records if "loss" in r]
    return {
        "val_loss": {r["iteration"]: r["val_loss"] for r in records if "val_loss" in r},
        "scatter": statistics.stdev(losses[-len(losses) // 5 :]),
    }


def text(result: dict) -> str:
    steps = list(next(iter(result["sample"].values()))["val_loss"])
    rows = [
        [
            f"one sigma a {arm}",
            *(", ".join(f"{r['val_loss'][s]:.4f}" for r in result[arm].values()) for s in steps),
            ", ".join(f"{r['scatter']:.3f}" for r in result[arm].values()),
        ]
        for arm in ARMS
    ]
    apart = [
        statistics.mean(
            result["pack"][seed]["val_loss"][s] - result["sample"][seed]["val_loss"][s] for seed in result["pack"]
        )
        for s in steps
    ]
    scatter = statistics.mean(result["pack"][s]["scatter"] / result["sample"][s]["scatter"] for s in result["pack"])
    rows.append(["difference, mean", *(f"{a:+.4f}" for a in apart), f"{scatter:.1f} times"])
    seeds = ", ".join(map(str, result["sample"]))
    head = ["", *(f"validation loss at step {s}" for s in steps), "scatter of the training loss"]
    return f"Seeds {seeds}. {report.sentence(result['machine'])}.\n\n{report.table(head, rows)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset-path", required=True, help="prepared with the tokenizer of the demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # of a process that this one starts
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.arm:
        return train(args.arm, args.dataset_path, args.run_dir, args.seeds[0], args.steps)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    result: dict = {"machine": report.machine(), "sample": {}, "pack": {}}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for arm in ARMS:
                run = Path(folder, f"{arm}-{seed}")
                own = ["--arm", arm, "--run-dir", str(run), "--seeds", str(seed), "--steps", str(args.steps)]
                subprocess.run([sys.executable, __file__, "--dataset-path", args.dataset_path, *own], check=True)
                result[arm][seed] = measured(run)
    report.save("sigma_per_sample", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
