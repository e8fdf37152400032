"""What `dfm prepare` holds and takes before and after the encoding, as the source and the ranks grow.

    python benchmarks/preparation_growth.py [--items 10000 100000 1000000] [--ranks 10 100 1000]

- plan: which item goes into which shard, by a thousand ranks; the share of one of them is planned
  (`shard_plan.ShardPlans`).
- list: a folder of that many files, opened as a source, with a caption beside every tenth (`sources.folder`).
- merge: the records of that many ranks, 40 shards each with 25 drops, read and merged into what the manifest says
  (`preparation.merge`, `merged_statistics`); also whether the order of the records changes the statistics.

Each in a process of its own. Memory is what it takes above the process before the call, by its largest resident set.
Exponents are fitted over the sizes. Writes benchmarks/results/preparation_growth.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report

SHARDS, DROPS = 40, 25

MEASURE = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from dfm_nb.data import preparation, shards
from dfm_nb.data.shard_plan import ShardPlans
from dfm_nb.data.sources import folder
kind, size, place = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def records(names):
    return (shards.read_record(Path(place), name) for name in names)

def plan():
    plans = ShardPlans((f"item-{i:09d}" for i in range(size)), 0.05, 0.0, 1000, 250)
    return len(plans.share(999, 1000))

def listing():
    source = folder.build(place)
    return len(source) + len(source.item_key(size // 2))

def merge():
    names = [f"rank{rank}-{n:06d}.tar" for rank in range(size) for n in range(40)]
    full, drops, reasons = preparation.merge(records(names))
    found = preparation.merged_statistics(full)
    return [reasons.total(), found == preparation.merged_statistics(full[::-1])]

rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, begun = rss(), time.perf_counter()
answer = {"plan": plan, "list": listing, "merge": merge}[kind]()
print(json.dumps([time.perf_counter() - begun, rss() - before, answer]))
"""


def measure(kind: str, size: int, place: object) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, kind, str(size), str(place)], check=True, capture_output=True, text=True
    )
    seconds, mib, answer = json.loads(done.stdout.splitlines()[-1])
    return {"size": size, "seconds": seconds, "mib": mib, "answer": answer}


def make_files(place: Path, count: int) -> None:
    """Small files, a thousand a folder."""
    for start in range(0, count, 1000):
        below = place / f"{start // 1000:04d}"
        below.mkdir(parents=True)
        for i in range(start, min(start + 1000, count)):
            (below / f"picture_{i:07d}.png").touch()
            if i % 10 == 0:
                (below / f"picture_{i:07d}.txt").touch()


def make_records(place: Path, ranks: int) -> None:
    """What `dfm prepare` leaves of shards without samples' bytes."""
    rng = np.random.default_rng(ranks)
    (place / ".dfm").mkdir(parents=True)
    for rank in range(ranks):
        for n in range(SHARDS):
            name = f"rank{rank}-{n:06d}.tar"
            drops = [
                {"key": f"k{rank}-{n}-{i}", "reason": "too_small", "detail": "8 x 8 px " * 4} for i in range(DROPS)
            ]
            sums = rng.normal(size=(3, 16)) * 10.0 ** rng.integers(0, 9, (3, 16))
            record = {"name": name, "split": "train", "samples": 225, "bytes": 0, "sha256": "0" * 64, "drops": drops,
                      "latent_sums": np.abs(sums).tolist(), "text_tokens": 9000}  # fmt: skip
            (place / name).touch()
            (place / ".dfm" / f"{name}.json").write_text(json.dumps(record))


def exponent(rows: list[dict], what: str) -> float:
    """Of `what` ~ size ** exponent, least squares in logarithms."""
    x, y = np.log([r["size"] for r in rows]), np.log([max(r[what], 1e-3) for r in rows])
    return float(np.polyfit(x, y, 1)[0])


def text(result: dict) -> str:
    rows = [
        [kind, f"{r['size']:,}", f"{r['seconds']:.2f}", f"{r['mib']:.0f}"]
        for kind, found in result["rows"].items()
        for r in found
    ]
    fits = [
        [kind, f"{exponent(found, 'seconds'):.2f}", f"{exponent(found, 'mib'):.2f}"]
        for kind, found in result["rows"].items()
    ]
    same = all(r["answer"][1] for r in result["rows"]["merge"])
    return "\n\n".join(
        [
            report.sentence(result["machine"]) + f". Records in another order give the same statistics: {same}.",
            report.table(["what", "items (merge: ranks)", "s", "MiB more"], rows),
            report.table(["what", "exponent of time", "exponent of memory"], fits),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--folder", help="for the files; default: the system's for temporary files")
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict]] = {"plan": [], "list": [], "merge": []}
    result = {"machine": report.machine(), "rows": found}
    parts = (("plan", args.items, None), ("list", args.items, make_files), ("merge", args.ranks, make_records))
    for kind, sizes, make in parts:
        for size in sizes:
            with tempfile.TemporaryDirectory(dir=args.folder) as place:
                if make:
                    make(Path(place), size)
                found[kind].append(measure(kind, size, place))
    print(text(result), flush=True)
    report.write("preparation_growth", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
