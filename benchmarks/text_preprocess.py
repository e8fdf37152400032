"""Tokens per second, CPU seconds and memory of `dfm text preprocess` against Megatron-LM's design, on real text.

    python scripts/fetch_text.py data/text
    python benchmarks/text_preprocess.py data/text/*.jsonl [--megabytes 30] [--rounds 3] [--output-dir DIR]

Each JSONL file gives an equal share of the megabytes, as far as it goes. Results go to text_preprocess.json, .md and
.png.

The baseline is the design of Megatron-LM's tools/preprocess_data.py: a forked pool, `imap(encode, lines, 32)`, one
document a call, megatron.core's Hugging Face tokenizer class, IndexedDatasetBuilder. A second comparison is the same
command with `encode_batch_fast` instead of words kept in memory: in two workers, and in one process that uses all
cores.

Every run is a process of its own. The clock runs from loading the tokenizer to the finished index, without the
imports of transformers and torch. Runs are interleaved, round by round; medians are reported; the slow baselines run
once. Where other work shares the cores, CPU seconds say more than the clock. Each run's .bin and .idx are compared
with the baseline's. Memory is the sum of the proportional set sizes of the run's processes, sampled four times a
second.

It takes about 150 CPU seconds for the speed and 250 for the memory; `--only speed` or `--only memory` measures one of
them and keeps the other from the file of the run before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

VARIANTS = {  # name: (kind, workers, once)
    "Megatron-LM's design, 2 workers": ("baseline", 2, True),
    "Megatron-LM's design, 1 worker": ("baseline", 1, True),
    "encode_batch_fast, 2 workers": ("plain", 2, False),
    "encode_batch_fast, 1 process, all cores": ("plain", 1, False),
    "dfm text preprocess, 1 worker": ("fast", 1, False),
    "dfm text preprocess, 2 workers": ("fast", 2, False),
    "dfm text preprocess, 4 workers": ("fast", 4, False),
}
BASELINES = {1: "Megatron-LM's design, 1 worker", 2: "Megatron-LM's design, 2 workers"}


def write_corpus(path: Path, sources: list[Path], limit: float) -> list[dict]:
    """One JSONL from several, `limit` characters in all, shortest sources first so that the others fill up."""
    rows, left = [], limit
    with open(path, "w", encoding="utf-8") as out:
        for number, source in enumerate(sorted(sources, key=lambda p: p.stat().st_size)):
            share, row = (
                left / (len(sources) - number),
                {"source": source.stem, "documents": 0, "characters": 0, "ascii": 0},
            )
            with open(source, encoding="utf-8") as f:
                for line in f:
                    text = json.loads(line)["text"]
                    out.write(json.dumps({"text": text}) + "\n")
                    row["documents"] += 1
                    row["characters"] += len(text)
                    row["ascii"] += text.isascii()
                    if row["characters"] >= share:
                        break
            left -= row["characters"]
            rows.append(row)
    return rows


def train_tokenizer(folder: Path, corpus: Path, vocab_size: int) -> None:
    """A byte-level BPE with GPT-2's pre-tokenizer, trained on every tenth document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = corpus.read_text(encoding="utf-8").splitlines()[::10]
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Encoder:
    """What the tool's worker does with a line: ids and lengths by key, and the bytes for its progress line."""

    tokenizer = None

    def __init__(self, folder: str):
        self.folder = folder

    def initializer(self) -> None:
        from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

        Encoder.tokenizer = HuggingFaceTokenizer(self.folder)

    def encode(self, line: str) -> tuple[dict, dict, int]:
        text = json.loads(line)["text"]
        ids, lengths = [], []
        for sentence in [text]:
            new = Encoder.tokenizer.text_to_ids(sentence)
            if len(new) > 0:
                ids.extend(new)
                lengths.append(len(new))
        if len(ids) > 0:
            ids.append(Encoder.tokenizer.eod)
            lengths[-1] += 1
        return {"text": ids}, {"text": lengths}, len(line)


def run_baseline(source: str, prefix: str, folder: str, workers: int) -> None:
    import multiprocessing

    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    encoder = Encoder(folder)
    encoder.initializer()
    name = f"{prefix}_text_document"
    pool = multiprocessing.get_context("fork").Pool(workers, encoder.initializer)
    with pool, open(source, encoding="utf-8") as f:
        documents = pool.imap(encoder.encode, f, 32)
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=DType.optimal_dtype(Encoder.tokenizer.vocab_size))
        for ids, lengths, _ in documents:
            builder.add_document(ids["text"], lengths["text"])
        builder.finalize(f"{name}.idx")
        pool.close()
        pool.join()


def run_one(kind: str, source: str, prefix: str, folder: str, workers: int) -> None:
    """In a process of its own: run, and print seconds of wall, of its own CPU and of its workers' CPU."""
    from transformers import AutoTokenizer  # noqa: F401  (brings torch with it: not part of the measured time)

    if kind == "baseline":
        import megatron.core.datasets.indexed_dataset
        import megatron.core.tokenizers.text.libraries.huggingface_tokenizer  # noqa: F401

        def work():
            return run_baseline(source, prefix, folder, workers)
    else:
        from dfm_nb.text.corpus import PreprocessConfig, preprocess

        def work():
            config = PreprocessConfig(
                (source,), prefix, folder, workers=workers, append_eod=True, progress=False, fast=kind == "fast"
            )
            return preprocess(config)

    before, start = os.times(), time.perf_counter()
    work()
    wall, after = time.perf_counter() - start, os.times()
    own = after.user + after.system - before.user - before.system
    children = after.children_user + after.children_system
    print(json.dumps({"wall_s": wall, "main_cpu_s": own, "worker_cpu_s": children, "cpu_s": own + children}))


def measure(kind: str, source: Path, prefix: Path, folder: Path, workers: int) -> dict:
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--run",
        kind,
        str(source),
        str(prefix),
        str(folder),
        str(workers),
    ]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    env.pop("TOKENIZERS_PARALLELISM", None)  # one process lets `tokenizers` use all cores; workers switch that off
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    peak, done = [0], threading.Event()

    def watch() -> None:
        root = psutil.Process(process.pid)
        while not done.wait(0.25):
            total = 0
            try:
                for p in (root, *root.children(recursive=True)):
                    total += p.memory_full_info().pss
            except psutil.Error:
                continue
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    out, _ = process.communicate()
    done.set()
    thread.join()
    if process.returncode:
        raise RuntimeError(f"{kind} with {workers} workers ended with {process.returncode}")
    return {**json.loads(out.strip().splitlines()[-1]), "peak_mb": peak[0] / 1e6, "load": os.getloadavg()[0]}


def digest(prefix: Path) -> str:
    h = hashlib.sha256()
    for suffix in ("bin", "idx"):
        h.update(Path(f"{prefix}_text_document.{suffix}").read_bytes())
    return h.hexdigest()


def tokens_of(prefix: Path) -> int:
    from dfm_nb.text.index import Index

    return Index.open(f"{prefix}_text_document").num_tokens


def speed(work: Path, corpus: Path, folder: Path, rounds: int) -> tuple[list[dict], int]:
    rows = {name: {"name": name, "workers": workers, "runs": []} for name, (_, workers, _) in VARIANTS.items()}
    want, tokens = None, 0
    for number in range(rounds):
        for name, (kind, workers, once) in VARIANTS.items():
            if once and number:
                continue
            run = measure(kind, corpus, work / "out", folder, workers)
            rows[name]["runs"].append(run)
            got = digest(work / "out")
            want, tokens = want or got, tokens or tokens_of(work / "out")
            if got != want:
                raise RuntimeError(f"{name} wrote other bytes than {BASELINES[2]}")
            rate = tokens / run["wall_s"] / 1e6
            print(f"round {number + 1}: {name}: {rate:.2f} M tokens/s, {run['cpu_s']:.1f} CPU s", flush=True)
    for row in rows.values():
        for key in ("wall_s", "cpu_s", "main_cpu_s", "worker_cpu_s", "peak_mb"):
            row[key] = statistics.median(r[key] for r in row["runs"])
        row["tokens_per_s"] = tokens / row["wall_s"]
    for row in rows.values():
        of = rows[BASELINES[min(row["workers"], 2)]]
        row["ratio"], row["cpu_ratio"] = of["wall_s"] / row["wall_s"], of["cpu_s"] / row["cpu_s"]
    return list(rows.values()), tokens


def memory(work: Path, corpus: Path, folder: Path, sizes: list[int]) -> list[dict]:
    """Peak memory with 2 workers for inputs of so many MB; the corpus is repeated where it is too short."""
    lines, rows = corpus.read_bytes().splitlines(keepends=True), []
    for size in sizes:
        source, left = work / "sized.jsonl", size * 1_000_000
        with open(source, "wb") as f:
            while left > 0:
                for line in lines:
                    left -= f.write(line)
                    if left <= 0:
                        break
        run = measure("fast", source, work / "sized", folder, 2)
        rows.append({"input_mb": size, "workers": 2, **run})
        print(f"{size} MB: peak {run['peak_mb']:.0f} MB, {run['wall_s']:.1f} s", flush=True)
        source.unlink()
    return rows


def plot(result: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.5, 1.5, 1])
    rows = result["speed"][::-1]
    names = [r["name"] for r in rows]
    colors = ["#228833" if "dfm" in r["name"] else "#888888" for r in rows]
    rates = [r["tokens_per_s"] / 1e6 for r in rows]
    left.bar_label(left.barh(names, rates, color=colors), [f"{v:.2f}" for v in rates], padding=3, fontsize=9)
    for y, row in enumerate(rows):
        marks = [result["tokens"] / r["wall_s"] / 1e6 for r in row["runs"]]
        left.plot(marks, [y] * len(marks), "k|", markersize=9)
    left.set_xlabel("million tokens a second\n(bar: median; marks: runs)")
    left.set_xlim(0, max(rates) * 1.22)
    workers = [r["worker_cpu_s"] for r in rows]
    middle.barh(names, workers, color=colors, label="workers")
    middle.barh(names, [r["main_cpu_s"] for r in rows], left=workers, color="#ccbb44", label="main process")
    for y, row in enumerate(rows):
        middle.text(row["cpu_s"] + 0.5, y, f"{row['cpu_s']:.1f}", va="center", fontsize=9)
    middle.set_xlim(0, max(r["cpu_s"] for r in rows) * 1.18)
    middle.set_yticks([])
    middle.set_xlabel("CPU seconds\n(yellow: of the main process)")
    points = [(r["input_mb"], r["peak_mb"]) for r in result["memory"]]
    if points:
        right.plot(*zip(*points), "o-", color="#228833")
        for x, y in points:
            right.annotate(f"{y:.0f}", (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=9)
        right.set_ylim(0, max(y for _, y in points) * 1.25)
    right.set_xscale("log")
    right.set_xlabel("input (MB), 2 workers")
    right.set_ylabel("peak memory (MB)")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def markdown(result: dict) -> str:
    loads = [run["load"] for row in result["speed"] for run in row["runs"]]
    lines = [
        f"{result['tokens']:,} tokens of a byte-level BPE with {result['vocab_size']:,} entries, trained on every "
        f"tenth document. {result['machine']}; other work shared the cores (load average {min(loads):.0f} to "
        f"{max(loads):.0f}), so the CPU seconds say more than the clock. Medians of {result['rounds']} interleaved "
        "rounds, one round of Megatron-LM's design. All runs wrote the same .bin and .idx.",
        "",
        "| text | documents | M characters | ASCII documents |",
        "|---|---|---|---|",
    ]
    for row in result["corpus"]:
        share = 100 * row["ascii"] / max(1, row["documents"])
        lines.append(f"| {row['source']} | {row['documents']:,} | {row['characters'] / 1e6:.1f} | {share:.1f} % |")
    lines += [
        "",
        "| | M tokens/s | against Megatron-LM's design | CPU s | of these in the main process | CPU ratio | peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in result["speed"]:
        lines.append(
            f"| {r['name']} | {r['tokens_per_s'] / 1e6:.2f} | {r['ratio']:.1f}x | {r['cpu_s']:.1f} | "
            f"{r['main_cpu_s']:.1f} | {r['cpu_ratio']:.1f}x | {r['peak_mb']:.0f} |"
        )
    lines += ["", "Ratios are to the same number of workers; those of 4 workers, on two cores, to 2 workers.", ""]
    words, plain = ([r for r in result["speed"] if r["name"].startswith(name)] for name in ("dfm", "encode_batch_fast"))
    times = [min(r[key] for r in plain) / min(r[key] for r in words) for key in ("wall_s", "cpu_s")]
    lines += [
        "The words kept in memory (dfm_nb/text/encode.py) against the whole command with encode_batch_fast, the best "
        f"of each: {times[0]:.1f} times as fast by the clock, {times[1]:.1f} times by CPU seconds.",
        "",
    ]
    if result["memory"]:
        lines += ["| input MB | workers | peak MB | s | CPU s |", "|---|---|---|---|---|"]
    for r in result["memory"]:
        cells = (r["input_mb"], r["workers"], f"{r['peak_mb']:.0f}", f"{r['wall_s']:.1f}", f"{r['cpu_s']:.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="*", type=Path, help="JSONL files, as scripts/fetch_text.py writes them")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--megabytes", type=float, default=30, help="of text for the speed")
    parser.add_argument("--memory-megabytes", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--only", choices=["speed", "memory"], help="keep the other part of the results as it is")
    parser.add_argument("--name", default="text_preprocess", help="of the result files")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.run:
        kind, source, prefix, folder, workers = args.run
        run_one(kind, source, prefix, folder, int(workers))
        return 0
    if not args.input:
        parser.error("name JSONL files; python scripts/fetch_text.py data/text makes some")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    saved = args.output_dir / f"{args.name}.json"
    result = json.loads(saved.read_text()) if args.only and saved.exists() else {"speed": [], "memory": []}
    work = Path(tempfile.mkdtemp())
    try:
        corpus, whole = work / "in.jsonl", work / "whole.jsonl"
        about = write_corpus(corpus, args.input, args.megabytes * 1e6)
        train_tokenizer(work / "tokenizer", corpus, args.vocab_size)
        result |= {"vocab_size": args.vocab_size, "machine": _machine()}
        if args.only != "memory":
            rows, tokens = speed(work, corpus, work / "tokenizer", args.rounds)
            result |= {"corpus": about, "tokens": tokens, "rounds": args.rounds, "speed": rows}
        if args.only != "speed":
            write_corpus(whole, args.input, float("inf"))
            result["memory"] = memory(work, whole, work / "tokenizer", args.memory_megabytes)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    saved.write_text(json.dumps(result, indent=1) + "\n")
    if result["speed"]:
        saved.with_suffix(".md").write_text(markdown(result))
        plot(result, saved.with_suffix(".png"))
        print(markdown(result))
    return 0


def _machine() -> str:
    return f"{os.cpu_count()} cores ({_cpu()}), Python {platform.python_version()}"


def _cpu() -> str:
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
