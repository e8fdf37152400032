"""Merging thousands of text parts, and opening blends of many corpora: time, memory, and what a kill costs.

    python benchmarks/text_scale.py [--parts 2000] [--part-mib 2] [--corpora 10 100 1000] [--folder DIR]

Parts of random tokens are joined by `dfm_nb.text.corpus.merge` in a process of its own, and compared with `cat` of the
same files to one, synced to disk as the merge is: the two take turns, three times, and the medians are compared. Then
a merge is killed half way and called again; its bytes must be those of the whole one. A blend is opened as training
does it (`build_datasets`): once with empty caches, once with them. Memory is the process's largest resident set, mapped
files that were read among it.

Prints tables and writes benchmarks/results/text_scale.{json,md}. Needs three times the parts' size on disk.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report

DOCUMENT_TOKENS = 500  # on average
ROUNDS = 3

MERGE = """
import json, resource, sys, time
from dfm_nb.text.corpus import merge
begun = time.perf_counter()
merge(json.load(open(sys.argv[1])), sys.argv[2], progress=False)
print(json.dumps([time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""

BLEND = """
import json, resource, sys, time
from dfm_nb import parallel
from dfm_nb.text.blend import BlendConfig, TokenizerIds, build_datasets
from dfm_nb.text.weights import parse_list
prefixes = json.load(open(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
begun = time.perf_counter()
parallel.init()
blend = parse_list(prefixes)
config = BlendConfig(256, (len(prefixes) * 200, 0, 0), cache_dir=sys.argv[2])
train = build_datasets(blend, config, TokenizerIds(60_000, 0))["train"]
opened = time.perf_counter() - begun
train[len(train) // 2]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([opened, before, peak, len(train)]))
"""


def make_parts(folder: Path, count: int, mib: float) -> list[str]:
    """Corpora of uint16 tokens, each of `mib` MiB."""
    from dfm_nb.text.index import write_index

    rng, prefixes = np.random.default_rng(0), []
    for number in range(count):
        prefix = folder / f"part{number:05d}"
        lengths = rng.integers(1, 2 * DOCUMENT_TOKENS, max(1, int(mib * 2**20) // (2 * DOCUMENT_TOKENS)), np.int32)
        rng.integers(0, 60_000, int(lengths.sum()), np.uint16).tofile(f"{prefix}.bin")
        lengths.tofile(folder / "lengths")
        np.ones(len(lengths), np.int32).tofile(folder / "counts")
        with open(f"{prefix}.idx", "wb") as f:
            write_index(f, np.dtype(np.uint16), folder / "lengths", folder / "counts")
        prefixes.append(str(prefix))
    return prefixes


def run(script: str, *args: object) -> list[float]:
    done = subprocess.run([sys.executable, "-c", script, *map(str, args)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def cat(prefixes: list[str], out: Path) -> float:
    """Seconds to join the same files as they are."""
    begun = time.perf_counter()
    with open(out, "wb") as f:
        for suffix in ("bin", "idx"):
            subprocess.run(["xargs", "-0", "cat"], input="\0".join(f"{p}.{suffix}" for p in prefixes).encode(),
                           stdout=f, check=True)  # fmt: skip
    subprocess.run(["sync", str(out)], check=True)
    return time.perf_counter() - begun


def same(a: Path, b: Path) -> bool:
    return all(filecmp.cmp(f"{a}.{s}", f"{b}.{s}", shallow=False) for s in ("bin", "idx"))


def merging(folder: Path, prefixes: list[str], listing: Path) -> dict:
    seconds, plain, peaks = [], [], []
    whole = folder / "whole"
    for _ in range(ROUNDS):
        plain.append(cat(prefixes, folder / "cat"))
        (folder / "cat").unlink()
        took, peak = run(MERGE, listing, whole)
        seconds.append(took)
        peaks.append(peak)
    process = subprocess.Popen([sys.executable, "-c", MERGE, str(listing), str(folder / "killed")])
    wanted, part = Path(f"{whole}.bin").stat().st_size // 2, folder / "killed.bin.part"
    while process.poll() is None and not (part.exists() and part.stat().st_size >= wanted):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part.stat().st_size
    again, _ = run(MERGE, listing, folder / "killed")
    size = sum(Path(f"{whole}.{s}").stat().st_size for s in ("bin", "idx"))
    return {
        "parts": len(prefixes),
        "bytes": size,
        "seconds": seconds,
        "cat_seconds": plain,
        "ratio_to_cat": statistics.median(a / b for a, b in zip(seconds, plain)),
        "peak_mib": max(peaks),
        "killed_at_bytes": kept,
        "seconds_after_kill": again,
        "same_after_kill": same(whole, folder / "killed"),
    }


def blending(folder: Path, prefixes: list[str]) -> dict:
    (folder / "few.json").write_text(json.dumps(prefixes))
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        first, before, peak, samples = run(BLEND, folder / "few.json", cache)
        again = run(BLEND, folder / "few.json", cache)
    return {"corpora": len(prefixes), "first_s": first, "again_s": again[0], "start_mib": before,
            "peak_mib": max(peak, again[2]), "samples": samples}  # fmt: skip


def text(result: dict) -> str:
    m = result["merge"]
    gib = m["bytes"] / 2**30
    lines = [
        f"{report.sentence(result['machine'])}. Medians of {ROUNDS} rounds in turn.",
        report.table(
            ["parts", "GiB", "merge s", "`cat` and sync s", "ratio", "peak MiB", "killed half way, again s", "equal"],
            [[m["parts"], f"{gib:.1f}", f"{statistics.median(m['seconds']):.1f}",
              f"{statistics.median(m['cat_seconds']):.1f}", f"{m['ratio_to_cat']:.2f}", f"{m['peak_mib']:.0f}",
              f"{m['seconds_after_kill']:.1f}", "yes" if m["same_after_kill"] else "NO"]],
        ),
        report.table(
            ["corpora", "samples", "opened first s", "again s", "peak MiB", "of these before opening"],
            [[b["corpora"], f"{b['samples']:.0f}", f"{b['first_s']:.1f}", f"{b['again_s']:.1f}",
              f"{b['peak_mib']:.0f}", f"{b['start_mib']:.0f}"] for b in result["blends"]],
        ),
    ]  # fmt: skip
    return "\n\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=2000)
    parser.add_argument("--part-mib", type=float, default=2.0)
    parser.add_argument("--corpora", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--folder", help="for the parts; default: the system's for temporary files")
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    result = {"machine": report.machine(), "part_mib": args.part_mib}
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        folder = Path(place)
        prefixes = make_parts(folder, args.parts, args.part_mib)
        (folder / "all.json").write_text(json.dumps(prefixes))
        result["merge"] = merging(folder, prefixes, folder / "all.json")
        result["blends"] = [blending(folder, prefixes[:n]) for n in args.corpora]
    print(text(result), flush=True)
    report.write("text_scale", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
