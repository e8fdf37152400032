"""A preparation on two processes, killed at random instants and resumed until it is done.

    python benchmarks/prepare_kill.py [--kills 24] [--images 500] [--seed 0]

Each kill is a SIGKILL to all processes, to torchrun alone or to one rank. Instants are drawn evenly over a whole run:
imports, fitting, encoding, writing, Energon's metadata. A preparation that finishes before its next kill is compared
and begun anew.

The check passes when no kill left a torn shard under its final name, and every finished folder holds the samples and
bytes of the uninterrupted run, each once. Writes benchmarks/results/prepare_kill.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from dfm_nb.base.argv import torchrun_argv
from dfm_nb.data import shards

OUT = Path(__file__).parent / "results" / "prepare_kill.json"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(folder: Path, images: int) -> subprocess.Popen:
    flags = [
        "--source",
        "synthetic",
        "--num-images",
        str(images),
        "--num-clips",
        "0",
        "--short-side",
        "64",
        "--shard-size",
        "10",
    ]
    argv = torchrun_argv("dfm_nb.prepare", [*flags, "--output-dir", str(folder), "--resume"], 2)
    return subprocess.Popen(argv, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def parts(folder: Path) -> dict[str, bytes]:
    """Every member of every tar by shard and name; reading fails on a torn tar."""
    found: dict[str, bytes] = {}
    for tar in sorted(folder.glob("*.tar")):
        for entry in shards.scan_shard(tar):
            for part, data in shards.read_parts(entry).items():
                name = f"{tar.name}/{entry.key}.{part}"
                assert name not in found, f"{name} is there twice"
                found[name] = data
    return found


def kill(process: subprocess.Popen, how: str, rng: random.Random) -> None:
    family = psutil.Process(process.pid).children(recursive=True)
    if how == "all":
        os.killpg(process.pid, signal.SIGKILL)
    elif how == "rank" and family:
        rng.choice(family).kill()
    else:
        process.kill()
    process.wait()  # a lost rank makes torchrun end the others and fail
    psutil.wait_procs(family, timeout=30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    rng, log, finished, failures = random.Random(args.seed), [], 0, []
    with tempfile.TemporaryDirectory() as place:
        clean = Path(place) / "clean"
        started = time.monotonic()
        assert start(clean, args.images).wait() == 0
        whole_s = time.monotonic() - started
        wanted = parts(clean)
        print(f"uninterrupted: {whole_s:.1f} s, {len(wanted) // 3} samples", flush=True)
        while len(log) < args.kills or not finished:
            folder = Path(place) / f"round{finished}"
            while True:
                process = start(folder, args.images)
                deadline = time.monotonic() + (rng.uniform(0.05, 1.0) * whole_s if len(log) < args.kills else 1e9)
                while time.monotonic() < deadline and process.poll() is None:
                    time.sleep(0.01)
                if process.poll() is not None:
                    break
                how = rng.choice(("all", "torchrun", "rank"))
                kill(process, how, rng)
                there = parts(folder)
                if any(wanted.get(name) != data for name, data in there.items()):
                    failures.append(f"kill {len(log) + 1}: a shard differs from the uninterrupted run's")
                done = len(list(folder.glob(".dfm/rank*.json")))
                log.append(
                    {"signal_to": how, "finished_shards": done, "torn_temporary_files": len(list(folder.glob("*.tmp")))}
                )
                print(f"kill {len(log)} ({how}): {done} shards finished", flush=True)
            if process.returncode:
                failures.append(f"round {finished} ended with exit code {process.returncode}")
            if parts(folder) != wanted:
                failures.append(f"round {finished} differs from the uninterrupted run")
            verify = [sys.executable, "-m", "dfm_nb", "inspect", str(folder), "--verify", "--samples", "0"]
            if subprocess.run(verify, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
                failures.append(f"round {finished} does not verify")
            finished += 1
            print(f"round {finished}: finished after {len(log)} kills in all", flush=True)
    result = {
        "kills": len(log),
        "preparations_finished": finished,
        "images": args.images,
        "identical": not failures,
        "failures": failures,
        "uninterrupted_s": round(whole_s, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "each_kill": log,
    }
    OUT.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "each_kill"}))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
