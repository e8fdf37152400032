"""What a training step costs with Muon, AdamW and AdamW's distributed optimizer, in float32 and bfloat16.

    python benchmarks/optimizers.py [--rounds 3] [--size demo] [--tokens 512 768 1024]

The model, packs and two processes are those of `benchmarks/scaling.py` (DP2, one thread each, gloo); `--tokens` are of
one process's pack. Every round measures every case once, in turn; a ratio is the median over rounds of the ratio
within a round. What a step of each is worth is another question: docs/decisions/0008 has losses and samples.

Prints a table and writes benchmarks/results/optimizers.{json,md}. Takes about five minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"

from tqdm import tqdm

from benchmarks import report
from benchmarks.scaling import settings, train_rank
from tests.conftest import run_ranks

CASES = {
    "AdamW": [],
    "AdamW, distributed optimizer": ["optimizer.use_distributed_optimizer=true"],
    "Muon and AdamW": ["optimizer.optimizer=muon"],
    "AdamW, bf16": ["mixed_precision=bf16"],
    "Muon and AdamW, bf16": ["mixed_precision=bf16", "optimizer.optimizer=muon"],
}
BASE = "AdamW"


def one_round(size: str, tokens: list[int], steps: int) -> dict[str, dict[str, float]]:
    """Seconds of a step by pack size and optimizer: the slower process's, the median over steps."""
    return {
        str(n): {
            name: statistics.median(map(max, zip(*run_ranks(2, train_rank, [*settings(size, n), *overrides], steps))))
            for name, overrides in CASES.items()
        }
        for n in tokens
    }


def text(result: dict) -> str:
    rows = []
    for tokens in map(str, result["tokens"]):
        for name in CASES:
            middle, least, greatest = report.spread([r[tokens][name] / r[tokens][BASE] for r in result["steps_s"]])
            seconds = statistics.median(r[tokens][name] for r in result["steps_s"])
            rows.append(
                [
                    tokens,
                    name,
                    f"{seconds * 1e3:.0f}",
                    f"{2 * int(tokens) / seconds:,.0f}",
                    f"{middle:.2f} ({least:.2f} to {greatest:.2f})",
                ]
            )
    header = ["tokens a process and step", "optimizer, precision", "ms a step", "tokens/s", f"time, {BASE} = 1"]
    return "\n".join(
        [
            f"Size {result['size']}, two processes, float32 unless said, gloo; "
            f"medians of {result['rounds']} interleaved rounds, least and greatest ratio in brackets.",
            report.sentence(result["machine"]) + ".",
            "",
            report.table(header, rows),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="demo")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each case in each round")
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    about = report.machine()
    rounds = [
        one_round(args.size, args.tokens, args.steps) for _ in tqdm(range(args.rounds), desc="rounds", disable=None)
    ]
    result = {"machine": about, "rounds": args.rounds, "size": args.size, "tokens": args.tokens, "steps_s": rounds}
    report.save("optimizers", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
