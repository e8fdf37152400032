"""`make bench`: the CPU benchmarks one after the other, in a reduced form for two quiet cores.

    python benchmarks/bench.py [--only packing,growth] [--list]

Each benchmark makes its own data. Every table goes to standard output and to benchmarks/results/bench.md, with the
machine, the date, and the command, the seconds and the outcome of each benchmark. bench.json holds the same. The
reduced results themselves go to benchmarks/results/bench/, so that the full results beside it, which the documentation
quotes, stay as they are.

Every benchmark is a process group of its own with a time limit; past the limit all of the group is killed. One that
fails does not stop the others, and the exit code is then 1. The index is rewritten after each benchmark, so that an
interrupted run leaves what it had. The run takes about 10 minutes; `--budget-s` holds it under 20.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from benchmarks import report

BUDGET_S = 1200.0


@dataclass(frozen=True)
class Benchmark:
    """A script with the flags of its reduced form.

    In the flags `{out}` stands for the results' folder and `{text}` for a JSONL with text.
    """

    name: str
    flags: str
    limit_s: float
    against: str
    """What it is measured against, in the same run."""

    def argv(self, out: str, text: str) -> list[str]:
        return [f"benchmarks/{self.name}.py", *(f.format(out=out, text=text) for f in self.flags.split())]


SET = (
    Benchmark("packing", "--seeds 5 --output-dir {out}", 120, "padding, next-fit, first-fit-decreasing"),
    Benchmark(
        "prepare",
        "--images 120 --baseline-images 12 --rounds 2 --output-dir {out}",
        240,
        "one image at a time, padded captions",
    ),
    Benchmark("train_step", "--size demo --rounds 3 --output-dir {out}", 180, "a plain PyTorch DiT on padded batches"),
    Benchmark(
        "text_preprocess",
        "{text} --only speed --megabytes 5 --rounds 1 --output-dir {out}",
        300,
        "the design of Megatron-LM's tool",
    ),
    Benchmark("samplers", "--num-samples 200 --output-dir {out}", 240, "35 Heun steps"),
    Benchmark("checkpoint_stall", "--size DiT-S --rounds 2 --output-dir {out}", 180, "a blocking save"),
    Benchmark("growth", "--quick --rounds 2 --output-dir {out}", 300, "fitted exponents"),
)

NOT_IN_THE_SET = {
    "samplers with a checkpoint, studio": "they need a checkpoint: `--checkpoint-path RUN` after `make demo`",
    "speedrun, verdict": "they train for half an hour, to measure models",
    "chaos": "it proves recovery, not speed: `make chaos`",
    "parallel_check, plan_memory": "they prove equality and estimates: `make parallel-check`, the script by name",
    "wan_memory": "it proves that memory is bounded, and writes tens of gigabytes",
    "bench_gpu": "it needs a CUDA device: `make bench-gpu`",
}


def run(argv: list[str], limit_s: float, log: Path) -> dict[str, Any]:
    """Run `python ARGV` in a process group of its own, with stderr going to `log`.

    Returns `seconds`, `outcome` ("ok" or why not) and `printed`, its standard output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    begun = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=report.ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=limit_s)
            outcome = "ok" if process.returncode == 0 else f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            printed, outcome = "", f"failed: not done after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what it left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    if outcome != "ok" and last:
        outcome += ": " + last[0].strip()[-200:]
    return {"seconds": round(time.monotonic() - begun, 1), "outcome": outcome, "printed": printed.strip()}


def index(rows: list[dict], about: dict[str, Any]) -> str:
    """bench.md: the machine, a line a benchmark, then each one's table."""
    total = sum(r["seconds"] for r in rows)
    failed = [r["name"] for r in rows if r["outcome"] != "ok"]
    lines = [
        "# Benchmarks in one run",
        "",
        f"Written by `make bench` (`python benchmarks/bench.py`): reduced forms, {total / 60:.1f} minutes in all, "
        + (f"failed: {', '.join(failed)}." if failed else "none failed."),
        report.sentence(about) + ".",
        "",
        report.table(
            ["benchmark", "against", "seconds", "outcome", "command"],
            [
                [r["name"], r["against"], f"{r['seconds']:.0f}", r["outcome"].replace("|", "/"), f"`{r['command']}`"]
                for r in rows
            ],
        ),
        "",
        "Not in this run:",
        "",
        *(f"- {names}: {why}." for names, why in NOT_IN_THE_SET.items()),
    ]
    for r in rows:
        body = "\n".join(line if not line.startswith("#") else "##" + line for line in r["printed"].splitlines())
        lines += ["", f"## {r['name']}", "", body or f"No result: {r['outcome']}."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(
        __doc__, only=("", "names, with commas between them"), budget_s=(BUDGET_S, "of the whole run")
    )
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args(argv)
    names = [b.name for b in SET]
    wanted = args.only.split(",") if args.only else names
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"--only takes {', '.join(names)}; got {', '.join(unknown)}")
    chosen = [b for b in SET if b.name in wanted]
    if args.list:
        print("\n".join("python " + shlex.join(b.argv("benchmarks/results/bench", "TEXT.jsonl")) for b in chosen))
        return 0
    from benchmarks.growth import write_corpus

    about, rows, deadline = report.machine(), [], time.monotonic() + args.budget_s
    about["threads"] = 1  # of the benchmarks
    out = args.output_dir / "bench"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_") as place:
        corpus = Path(place) / "library.jsonl"
        write_corpus(corpus, 8)
        for benchmark in tqdm(chosen, desc="benchmarks", disable=None):
            limit_s = min(benchmark.limit_s, deadline - time.monotonic())
            flags = benchmark.argv(str(out), str(corpus))
            shown = shlex.join(benchmark.argv("benchmarks/results/bench", "TEXT.jsonl"))
            row: dict[str, Any] = {"name": benchmark.name, "against": benchmark.against, "command": f"python {shown}"}
            row |= {"seconds": 0.0, "outcome": f"not started: {args.budget_s:.0f} s are spent", "printed": ""}
            if limit_s > 0:
                row |= run(flags, limit_s, Path(place) / f"{benchmark.name}.log")
            if row["outcome"] == "ok":  # its table, without what it said on the way
                row["printed"] = (out / f"{benchmark.name}.md").read_text().strip()
            rows.append(row)
            print(f"\n== {benchmark.name}: {row['outcome']}, {row['seconds']:.0f} s\n{row['printed']}", flush=True)
            report.write("bench", {"machine": about, "rows": rows}, index(rows, about), args.output_dir)
    failed = [r["name"] for r in rows if r["outcome"] != "ok"]
    print(
        f"\n{len(rows) - len(failed)} of {len(rows)} benchmarks ran"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
