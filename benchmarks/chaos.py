"""`make chaos`: a packed run on two processes, killed (SIGKILL of everything) at random instants and started again until it is done.

    python benchmarks/chaos.py [--kills 50] [--iterations 200] [--seed 0]

Passes when the losses of all iterations equal the uninterrupted run's bit for bit, and no torn checkpoint was ever loaded. The random
instants are uniform over start-up, training and saving. Writes benchmarks/results/chaos.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from dfm_nb.argv import torchrun_argv
from dfm_nb.runs import read_metrics

OUT = Path(__file__).parent / "results" / "chaos.json"
SETTINGS = [
    "--mock", "--recipe", "demo", "model.num_layers=2", "model.hidden_size=48", "model.num_attention_heads=4", "train.eval_interval=0",
    "dataset.task_encoder_seq_length=96", "dataset.mock_latent_sizes=[[1,8,8],[3,4,8],[1,4,4]]", "checkpoint.save_interval=3",
    "checkpoint.keep_last=3", "logger.log_interval=50", "logger.tensorboard=false",
]  # fmt: skip


def command(run: Path, iterations: int) -> list[str]:
    return torchrun_argv("dfm_nb.train", [*SETTINGS, "--run-dir", str(run), f"train.train_iters={iterations}"], 2)


def kill_everything(process: subprocess.Popen) -> None:
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for p in family:
        try:
            p.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def losses(run: Path) -> dict[int, float]:
    return {r["iteration"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r}


def time_to_first_record(argv: list[str], run: Path, env: dict) -> float:
    """Run to the end; seconds until the first metrics record."""
    started = time.monotonic()
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not ((run / "metrics.jsonl").exists() and losses(run)):
            time.sleep(0.05)
        first_s = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"the uninterrupted run failed with exit code {process.returncode}: {' '.join(argv)}")
    return first_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, env = random.Random(args.seed), {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        clean, run = Path(folder) / "clean", Path(folder) / "chaos"
        start_s = time_to_first_record(command(clean, args.iterations), clean, env)
        log, kills, progress = Path(folder) / "log.txt", 0, []
        while kills < args.kills:
            with log.open("ab") as out:
                process = subprocess.Popen(
                    command(run, args.iterations), env=env, stdout=out, stderr=out, start_new_session=True
                )
            # half of the kills fall into start-up and loading, half into steps and saves
            wait_s = start_s * rng.uniform(0.3, 1.2) if rng.random() < 0.5 else start_s * 1.2 + rng.uniform(0, 8)
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.02)
            if process.poll() is not None:
                break
            kill_everything(process)
            kills += 1
            progress.append(max(losses(run), default=0) if (run / "metrics.jsonl").exists() else 0)
            print(f"kill {kills}: iteration {progress[-1]}", flush=True)
        subprocess.run(
            command(run, args.iterations), env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        same = losses(run) == losses(clean)
        result = {
            "kills": kills, "iterations": args.iterations, "identical": same, "iteration_at_each_kill": progress,
            "unfinished_checkpoints_passed_over": log.read_text(errors="replace").count("was not finished"),
        }  # fmt: skip
    OUT.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "iteration_at_each_kill"}))
    print(f"{int(same)} passed, {int(not same)} failed")
    return int(not same)


if __name__ == "__main__":
    raise SystemExit(main())
