"""`make chaos`: a packed run on two processes, killed (SIGKILL of everything) at random instants and started again until it is done.

    python benchmarks/chaos.py [--kills 50] [--iterations 200] [--seed 0]

Passes when the losses of all iterations equal the uninterrupted run's bit for bit: a torn checkpoint that was loaded, a sample lost or seen twice
would show. Of the kills a fifth falls into start-up and loading, two fifths between steps, two fifths right after a save began. A kill counts where
it hit: "saving" when a checkpoint was unfinished at that moment. Writes benchmarks/results/chaos.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
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


def unfinished(run: Path) -> set[int]:
    """Checkpoints that are being written, or were when the run was killed, by inode."""
    found = set()
    for folder in (run / "checkpoints").glob("iter_*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            found.add(folder.stat().st_ino)
    return found


def last_iteration(run: Path) -> int:
    return max(losses(run), default=0) if (run / "metrics.jsonl").exists() else 0


def clean_run(argv: list[str], run: Path, env: dict) -> tuple[float, float]:
    """Run to the end; seconds until the first metrics record, and from there to the last."""
    started = time.monotonic()
    first_s = None
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if first_s is None and last_iteration(run):
                first_s = time.monotonic() - started
            time.sleep(0.02)
    if process.returncode or first_s is None:
        raise SystemExit(f"the uninterrupted run failed with exit code {process.returncode}: {' '.join(argv)}")
    return first_s, time.monotonic() - started - first_s


def wait_until(condition, process: subprocess.Popen, limit_s: float) -> None:
    """Until the condition holds, the process ends or the time is up."""
    deadline = time.monotonic() + limit_s
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def live(process: subprocess.Popen, run: Path, kind: str, rng: random.Random, start_s: float, pause_s: float) -> None:
    """Let the run live until it is time to kill it."""
    if kind == "start-up":
        wait_until(lambda: False, process, start_s * rng.uniform(0.1, 1.0))
        return
    before, torn = last_iteration(run), unfinished(run)
    wait_until(lambda: last_iteration(run) > before, process, 120)
    wait_until(lambda: False, process, rng.uniform(0, pause_s))
    if kind == "saving":
        wait_until(lambda: unfinished(run) - torn, process, 20)
        wait_until(lambda: False, process, rng.uniform(0, 0.05))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, env = random.Random(args.seed), {**os.environ, "OMP_NUM_THREADS": "1"}
    kinds = ["start-up"] * (args.kills // 5) + ["steps"] * (2 * args.kills // 5)
    kinds += ["saving"] * (args.kills - len(kinds))
    rng.shuffle(kinds)
    with tempfile.TemporaryDirectory() as folder:
        clean, run = Path(folder) / "clean", Path(folder) / "chaos"
        start_s, train_s = clean_run(command(clean, args.iterations), clean, env)
        print(
            f"uninterrupted: {start_s:.1f} s to the first step, {train_s:.1f} s for {args.iterations} iterations",
            flush=True,
        )
        log, kills = Path(folder) / "log.txt", []
        for kind in kinds:
            with log.open("ab") as out:
                process = subprocess.Popen(
                    command(run, args.iterations), env=env, stdout=out, stderr=out, start_new_session=True
                )
            before, torn = last_iteration(run), unfinished(run)
            live(process, run, kind, rng, start_s, train_s / args.kills)
            if process.poll() is not None:
                break
            kill_everything(process)
            at = last_iteration(run)
            hit = "saving" if unfinished(run) - torn else "steps" if at > before else "start-up"
            kills.append({"hit": hit, "iteration": at})
            print(f"kill {len(kills)}: iteration {at}, {hit}", flush=True)
        with log.open("ab") as out:
            code = subprocess.run(command(run, args.iterations), env=env, stdout=out, stderr=out).returncode
        same = code == 0 and losses(run) == losses(clean)
        passed = same and len(kills) == args.kills
        text = log.read_text(errors="replace")
        result = {
            "kills": len(kills), "hit": dict(Counter(k["hit"] for k in kills)), "iterations": args.iterations, "identical": same,
            "unfinished_checkpoints_passed_over": text.count("was not finished"), "each_kill": kills,
        }  # fmt: skip
        if code:
            print(text[-3000:])
    OUT.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "each_kill"}))
    print(f"{int(passed)} passed, {int(not passed)} failed")
    return int(not passed)


if __name__ == "__main__":
    raise SystemExit(main())
