"""Seconds of training until the demo's model reaches a fixed validation loss, over several seeds.

    python benchmarks/speedrun.py --dataset-path runs/demo/data [--seeds 1 2 3 4 5] [--target 0.43] [KEY=VALUE ...]

Trains with the demo's recipe on two processes, once for each seed. Settings KEY=VALUE are the idea that is tried, on
the same seeds. The validation loss is that of 40 packs at fixed noise levels, every 100 steps. The time is that of the
steps alone: neither start-up nor validation counts. A training that does not reach the target counts as a miss. The
interval is Student's t over the seeds.

Also measured, before and after each training: how fast the cores multiply matrices of the model's size, all at the same
time (`matrix_rate`), and which share of that the model's own FLOPs are.

Prints a table and writes benchmarks/results/speedrun.{json,md}, where earlier arms with the same target are kept.
Takes eight minutes a seed on two quiet cores. Records: benchmarks/results/speedrun.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from benchmarks import report
from dfm_nb.base.machine import fast_bf16
from dfm_nb.base.metrics import read_metrics
from dfm_nb.measure.distance import mean_estimate

PROCESSES = 2


def matrix_rate(_: int = 0) -> float:
    """FLOP/s of one core on the demo's MLP: forward and backward of LayerNorm and MLP."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    width, inner, rows = 192, 4 * 192, 512
    dtype = torch.bfloat16 if fast_bf16() else torch.float32
    shapes = (rows, width), (inner, width), (width, inner)
    x, up, down = (torch.randn(s).to(dtype).requires_grad_() for s in shapes)
    best_s = float("inf")
    for _ in range(3):  # the first compiles oneDNN's kernels
        began = time.perf_counter()
        F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[1:]), up)), down).sum().backward()
        best_s = min(best_s, time.perf_counter() - began)
    return 3 * 2 * 2 * rows * width * inner / best_s


def all_cores_rate() -> float:
    """FLOP/s of as many cores as train, measured at the same time."""
    with ProcessPoolExecutor(PROCESSES) as pool:
        return sum(pool.map(matrix_rate, range(PROCESSES)))


def train(dataset: str, run_dir: Path, seed: int, idea: list[str]) -> dict:
    """One training: validation losses by step, seconds of all steps up to each, and the rates of FLOPs."""
    recipe = "demo"
    command = [sys.executable, "-m", "dfm_nb", "pretrain", "--recipe", recipe, "--dataset-path", dataset]
    command += ["--run-dir", str(run_dir), "--nproc-per-node", str(PROCESSES), f"rng.seed={seed}"]
    command += ["train.eval_interval=100", "train.eval_iters=20", "validation.samples=false"]
    command += ["checkpoint.save_interval=100000", "logger.log_interval=1", *idea]
    before = all_cores_rate()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return measured(run_dir / "metrics.jsonl") | {"matrix_flops_per_s": [before, all_cores_rate()]}


def measured(metrics: Path) -> dict:
    """`steps`: [step, seconds of steps so far, validation loss]; the median FLOP/s of all processes in its steps."""
    seconds, rows, rates = 0.0, [], []
    for record in read_metrics(metrics):
        if "loss" in record:
            seconds += record["tokens"] / record["tokens_per_s"]
            rates.append(PROCESSES * 1e12 * record["tflops_per_s"])
        elif "val_loss" in record:
            rows.append([record["iteration"], round(seconds, 2), record["val_loss"]])
    return {"steps": rows, "model_flops_per_s": statistics.median(rates)}


def seconds_to(target: float, rows: list[list[float]]) -> float | None:
    """When the validation loss first is at or under `target`, on straight lines between measurements; None if never."""
    for (_, begun, before), (_, ended, after) in zip(rows, rows[1:]):
        if after <= target:
            return begun + (ended - begun) * min(1.0, max(0.0, (before - target) / (before - after)))
    return None


def interval(values: list[float]) -> str:
    """Mean and half width of the 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else "none"
    mean = mean_estimate(np.array(values))
    return f"{mean['value']:.4g} ± {mean['high'] - mean['value']:.2g}"


def text(result: dict) -> str:
    rows = []
    for name, arm in result["arms"].items():
        runs = list(arm["runs"].values())
        times = [seconds_to(result["target"], r["steps"]) for r in runs]
        reached = [t for t in times if t is not None]
        share = [100 * r["model_flops_per_s"] / statistics.mean(r["matrix_flops_per_s"]) for r in runs]
        rows.append(
            [
                name,
                f"{len(reached)} of {len(runs)}",
                interval(reached),
                interval([r["steps"][-1][1] for r in runs]),
                interval([r["steps"][-1][2] for r in runs]),
                interval(share) + " %",
                arm["machine"]["date"],
            ]
        )
    head = ["idea", f"reached {result['target']}", "seconds to it", "seconds in all", "last validation loss"]
    head += ["model FLOP/s of the cores' matrix product", "when"]
    machine = next(iter(result["arms"].values()))["machine"]
    return f"Mean and 95 % interval over seeds. {report.sentence(machine)}.\n\n{report.table(head, rows)}"


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__, target=0.43)
    parser.add_argument("--dataset-path", required=True, help="data of `make demo`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("idea", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(argv)
    file = args.output_dir / "speedrun.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    arms = known["arms"] if known.get("target") == args.target else {}
    arm = arms.setdefault(" ".join(args.idea) or "the recipe", {"machine": report.machine(), "runs": {}})
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            arm["runs"][str(seed)] = train(args.dataset_path, Path(folder, "run"), seed, args.idea)
        result = {"target": args.target, "arms": arms}
        report.write("speedrun", result, text(result), args.output_dir)
    print(text(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
