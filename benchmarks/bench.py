"""`make bench`: the CPU benchmarks one after the other, in a reduced form for two quiet cores.

    python benchmarks/bench.py [--output-dir build/bench]

Each benchmark makes its own data, and is a process group of its own with a time limit; past the limit all of the group
is killed. One that fails does not stop the others; the exit code is then 1. Their results, and bench.{md,json} with the
machine and all tables, go to a folder that git ignores: the full results, which the docs quote, stay as they are.

Others by name: `studio.py` measures a trained model, `speedrun.py` trains five, `bench_gpu.py` needs a GPU
(`make bench-gpu`). `chaos.py` and `parallel_check.py` prove, and measure nothing.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

SET = {
    # name: (flags of its reduced form, limit in seconds, what it is measured against in the same run)
    "train_step": ("--size demo --rounds 3", 180, "a plain PyTorch DiT on padded batches"),
    "text_preprocess": ("{text} --only speed --megabytes 5 --rounds 1", 300, "the design of Megatron-LM's tool"),
    "samplers": ("--num-samples 200", 240, "35 Heun steps"),
}


def run(argv: list[str], limit_s: float) -> dict[str, Any]:
    """Run `python ARGV` in a process group of its own: `seconds`, and `outcome` ("ok" or why not)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=report.ROOT, env=environment, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            outcome = "ok" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"failed: not done after {limit_s} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what it left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        last = [line.strip() for line in errors if line.strip()][-1:]
    if outcome != "ok" and last:
        outcome += ": " + last[0][-200:]
    return {"seconds": round(time.monotonic() - begun, 1), "outcome": outcome}


def index(rows: list[dict], about: dict[str, Any], out: Path) -> str:
    """bench.md: the machine, a line a benchmark, then each one's table."""
    head = ["benchmark", "against", "seconds", "outcome", "command"]
    cells = [
        [row["name"], row["against"], row["seconds"], row["outcome"].replace("|", "/"), row["command"]] for row in rows
    ]
    lines = [f"# Benchmarks in one run\n\n{report.sentence(about)}.\n\n{report.table(head, cells)}"]
    for row in rows:
        ok = row["outcome"] == "ok"
        lines.append(
            f"## {row['name']}\n\n" + ((out / f"{row['name']}.md").read_text().strip() if ok else "No result.")
        )
    return "\n\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__)
    parser.set_defaults(output_dir=report.ROOT / "build" / "bench")
    out = parser.parse_args(argv).output_dir.resolve()
    about, rows = report.machine(), []
    about["threads"] = 1  # of the benchmarks
    with tempfile.TemporaryDirectory(prefix="bench_") as place:
        corpus = Path(place) / "library.jsonl"
        report.write_library(corpus, 8)
        for name, (flags, limit_s, against) in SET.items():
            print(f"== {name}", flush=True)
            given = [f"benchmarks/{name}.py", *shlex.split(flags.format(text=corpus)), "--output-dir", str(out)]
            rows.append({"name": name, "against": against, "command": f"`benchmarks/{name}.py {flags}`"})
            rows[-1] |= run(given, limit_s)
            print(f"== {name}: {rows[-1]['outcome']}, {rows[-1]['seconds']:.0f} s", flush=True)
            report.write("bench", {"machine": about, "rows": rows}, index(rows, about, out), out)
    return int(any(row["outcome"] != "ok" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
