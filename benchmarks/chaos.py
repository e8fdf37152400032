"""`make chaos`: a packed run on two processes, killed at random instants and started again until it is done.

    python benchmarks/chaos.py [--kills 50] [--iterations 200] [--torchrun 5] [--seed 0] [--output-dir DIR]

A kill is SIGKILL to all processes. The check passes when the losses of all iterations equal the uninterrupted run's
bit for bit: a torn checkpoint that was loaded, or a sample lost or seen twice, would show. A fifth of the kills fall
into start-up and loading, two fifths between steps, and two fifths right after a save began. Every other life saves
asynchronously. A kill counts where it hit: it is "saving" when a checkpoint was unfinished at that moment.

`--torchrun` lives are started by the whole command under torchrun, which spends most of a life on imports. The ranks
of the others are forked from a server that has done the imports and nothing else. Writes
benchmarks/results/chaos.{json,md}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from dfm_nb.base.argv import torchrun_argv
from dfm_nb.base.metrics import read_metrics

RESULTS = Path(__file__).parent / "results"
SETTINGS = [
    "--mock",
    "--recipe",
    "demo",
    "model.num_layers=2",
    "model.hidden_size=48",
    "model.num_attention_heads=4",
    "train.eval_interval=0",
    "dataset.task_encoder_seq_length=96",
    "dataset.mock_latent_sizes=[[1,8,8],[3,4,8],[1,4,4]]",
    "checkpoint.save_interval=3",
    "checkpoint.keep_last=3",
    "logger.log_interval=50",
    "logger.tensorboard=false",
]
NEAR_THE_END = 8
"""Iterations before the last in which a life is only killed in its start-up: it would be done."""


# ---- a life -------------------------------------------------------------------------------------------------------


def rank_main(rank: int, store: str, log: str, argv: list[str]) -> None:
    """One rank of two, in a process of its own."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    import torch
    import torch.distributed as dist

    from dfm_nb import train
    from dfm_nb.base.argv import guard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    os._exit(guard(train.main, argv))


class Life:
    """Two ranks of the run, from start to end or kill."""

    def __init__(self, argv: list[str], log: Path, context, store: Path | None):
        if store is None:
            with log.open("ab") as out:
                launch = torchrun_argv("dfm_nb.train", argv, 2)
                self.torchrun = subprocess.Popen(launch, stdout=out, stderr=out, start_new_session=True)
            self.pids = [self.torchrun.pid]
        else:
            self.torchrun = None
            self.ranks = [context.Process(target=rank_main, args=(r, str(store), str(log), argv)) for r in range(2)]
            for p in self.ranks:
                p.start()
            self.pids = [p.pid for p in self.ranks]

    def ended(self) -> bool:
        if self.torchrun is not None:
            return self.torchrun.poll() is not None
        return any(p.exitcode is not None for p in self.ranks)

    def exit_codes(self) -> list[int | None]:
        """After waiting for the end."""
        if self.torchrun is not None:
            return [self.torchrun.wait()]
        for p in self.ranks:
            p.join()
        return [p.exitcode for p in self.ranks]

    def kill(self) -> None:
        family = []
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for p in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        self.exit_codes()


# ---- what the run folder says -------------------------------------------------------------------------------------


def losses(run: Path) -> dict[int, float]:
    return {r["iteration"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r}


def last_iteration(run: Path) -> int:
    """Of the last whole line of metrics.jsonl; 0 without one."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            return json.loads(line)["iteration"]
    return 0


def unfinished(run: Path) -> set[int]:
    """Checkpoints that are being written, or were when the run was killed, by inode."""
    found = set()
    for folder in (run / "checkpoints").glob("iter_*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            found.add(folder.stat().st_ino)
    return found


# ---- when to kill -------------------------------------------------------------------------------------------------


def wait_until(condition, life: Life, limit_s: float) -> None:
    """Until the condition holds, the life ends or the time is up."""
    deadline = time.monotonic() + limit_s
    while not condition() and not life.ended() and time.monotonic() < deadline:
        time.sleep(0.004)


def live(life: Life, run: Path, kind: str, rng: random.Random, start_s: float, goal: int) -> None:
    """Let the run live until it is time to kill it. goal : iteration it should have reached by then, within a few."""
    if kind == "start-up":
        wait_until(lambda: False, life, start_s * rng.uniform(0.02, 1.0))
        return
    before, torn = last_iteration(run), unfinished(run)
    wait_until(lambda: last_iteration(run) > max(before, goal - rng.randrange(4)), life, 180)
    wait_until(lambda: False, life, rng.uniform(0, 0.03))
    if kind == "saving":
        wait_until(lambda: unfinished(run) - torn, life, 20)
        wait_until(lambda: False, life, rng.uniform(0, 0.06))


def clean_run(start, run: Path) -> float:
    """Run to the end; seconds until the first metrics record."""
    started, life = time.monotonic(), start()
    wait_until(lambda: last_iteration(run), life, 600)
    first_s = time.monotonic() - started
    codes = life.exit_codes()
    if any(codes):
        raise SystemExit(f"the uninterrupted run failed with exit codes {codes}")
    return first_s


def plan(kills: int, rng: random.Random) -> list[str]:
    kinds = ["start-up"] * (kills // 5) + ["steps"] * (2 * kills // 5)
    kinds += ["saving"] * (kills - len(kinds))
    rng.shuffle(kinds)
    return kinds


# ---- all of it ----------------------------------------------------------------------------------------------------


def chaos(folder: Path, kills: int, iterations: int, by_torchrun: int, seed: int) -> dict:
    """The clean run, the killed one, and what happened."""
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dfm_nb.training.loop", "torch._dynamo"])  # `dfm_nb.train` imports them late
    clean, run, log = folder / "clean", folder / "chaos", folder / "log.txt"
    lives = 0

    def start(where: Path, torchrun: bool = False) -> Life:
        nonlocal lives
        lives += 1
        mode = "true" if lives % 2 else "false"
        argv = [*SETTINGS, "--run-dir", str(where), f"train.train_iters={iterations}", f"checkpoint.async_save={mode}"]
        return Life(argv, log, context, None if torchrun else folder / f"store{lives}")

    began = time.monotonic()
    imports = context.Process(target=time.sleep, args=(0,))  # the server does them before the first life
    imports.start()
    imports.join()
    first_s = clean_run(lambda: start(clean), clean)
    print(f"{first_s:.1f} s from the start of a life to its first step", flush=True)
    with_torchrun = set(rng.sample(range(kills), by_torchrun))
    record: list[dict] = []
    for i, kind in enumerate(plan(kills, rng)):
        before, torn = last_iteration(run), unfinished(run)
        if before > iterations - NEAR_THE_END:
            kind = "start-up"
        life = start(run, i in with_torchrun)
        live(life, run, kind, rng, first_s * (4 if i in with_torchrun else 1), (iterations - 16) * (i + 1) // kills)
        if life.ended():
            print(f"the run ended by itself: {life.exit_codes()}", flush=True)
            break
        life.kill()
        at = last_iteration(run)
        hit = "saving" if unfinished(run) - torn else "steps" if at > before else "start-up"
        launcher = "torchrun" if i in with_torchrun else "fork"
        record.append({"meant": kind, "hit": hit, "iteration": at, "launcher": launcher})
        print(f"kill {len(record)}: iteration {at}, {hit}", flush=True)
    codes = start(run).exit_codes()
    text = log.read_text(errors="replace")
    if any(codes):
        print(text[-3000:])
    same = not any(codes) and losses(run) == losses(clean) and len(losses(run)) == iterations
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "kills": len(record),
        "hit": dict(Counter(k["hit"] for k in record)),
        "by_torchrun": by_torchrun,
        "iterations": iterations,
        "seed": seed,
        "identical": same,
        "unfinished_checkpoints_passed_over": text.count("was not finished"),
        "resumed": text.count("Resumed from"),
        "seconds": round(time.monotonic() - began, 1),
        "passed": same and len(record) == kills,
        "each_kill": record,
    }


def table(r: dict) -> str:
    rows = [
        ("kills (SIGKILL of all processes)", r["kills"]),
        *(
            (f"of these {what}", r["hit"].get(key, 0))
            for key, what in (
                ("start-up", "in start-up and loading"),
                ("steps", "between steps"),
                ("saving", "with a checkpoint unfinished"),
            )
        ),
        ("lives under torchrun, the others forked after the imports", r["by_torchrun"]),
        ("times a run went on from a checkpoint", r["resumed"]),
        ("unfinished checkpoints named and passed over", r["unfinished_checkpoints_passed_over"]),
        (
            f"losses of the {r['iterations']} iterations equal to the uninterrupted run's, bit for bit",
            "yes" if r["identical"] else "NO",
        ),
    ]
    body = "\n".join(f"| {name} | {value} |" for name, value in rows)
    head = f"2 processes, packed mock data, {r['machine']}, seed {r['seed']}, {r['seconds'] / 60:.1f} minutes in all."
    return f"{head}\n\n| | |\n|---|---|\n{body}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--torchrun", type=int, default=5, help="lives that the whole command starts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = chaos(Path(folder), args.kills, args.iterations, args.torchrun, args.seed)
    (args.output_dir / "chaos.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.output_dir / "chaos.md").write_text(table(result) + "\n")
    print(table(result))
    print(f"{int(result['passed'])} passed, {int(not result['passed'])} failed")
    return int(not result["passed"])


if __name__ == "__main__":
    raise SystemExit(main())
