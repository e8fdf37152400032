"""Tokens per second and memory of `dfm text preprocess` against one document a call, on real text.

    python benchmarks/text_preprocess.py [--output-dir benchmarks/results] [--megabytes 30] [--rounds 3]

What enters: docstrings of the Python installation this runs in (the standard library and site-packages), each a document,
or with --wordnet DIR the glosses of WordNet's data files (Debian's wordnet-base). What leaves: text_preprocess.json, .md
and .png. The baseline is the design of Megatron-LM's tools/preprocess_data.py: `Pool.imap(encode, lines, 32)`, one
document a call, megatron.core's tokenizer class and IndexedDatasetBuilder. Every run is a process of its own; the clock
runs from loading the tokenizer to the finished index, imports excluded; the runs are interleaved, round by round, and
medians are reported. Each run's .bin and .idx are compared with the baseline's, byte for byte. Memory is the sum of the
proportional set sizes of the run's processes, sampled ten times a second. Cost: about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import psutil

VARIANTS = {  # name: (kind, workers)
    "one document a call, 2 workers": ("baseline", 2),
    "batches of encode_batch_fast, 2 workers": ("plain", 2),
    "dfm text preprocess, 2 workers": ("fast", 2),
    "one document a call, 1 worker": ("baseline", 1),
    "dfm text preprocess, 1 worker": ("fast", 1),
}
BASELINE = "one document a call, 2 workers"


def docstrings(limit: int):
    """Docstrings of 80 characters or more, each once."""
    roots = [sysconfig.get_paths()[k] for k in ("stdlib", "purelib")]
    seen: set[bytes] = set()
    for path in (p for root in roots for p in sorted(Path(root).rglob("*.py"))):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                key = hashlib.md5((text or "").encode("utf-8", "replace"), usedforsecurity=False).digest()
                if text and len(text) >= 80 and key not in seen:
                    seen.add(key)
                    yield text
                    limit -= len(text)
                    if limit <= 0:
                        return


def glosses(folder: Path, limit: int):
    """WordNet's glosses: what stands behind the bar in data.noun, data.verb, data.adj, data.adv."""
    for path in sorted(folder.glob("data.*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("  ") and " | " in line:
                text = line.split(" | ", 1)[1].strip()
                yield text
                limit -= len(text)
                if limit <= 0:
                    return


def write_corpus(path: Path, texts) -> dict:
    documents = size = ascii_only = 0
    with open(path, "w", encoding="utf-8") as f:
        for text in texts:
            f.write(json.dumps({"text": text}) + "\n")
            documents, size, ascii_only = documents + 1, size + len(text), ascii_only + text.isascii()
    return {"documents": documents, "characters": size, "ascii_documents": ascii_only / max(1, documents)}


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


_TOKENIZER = None


def _start(folder: str) -> None:
    global _TOKENIZER
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    _TOKENIZER = HuggingFaceTokenizer(folder)


def _encode(line: str) -> list[int]:
    ids = _TOKENIZER.text_to_ids(json.loads(line)["text"])
    if ids:
        ids.append(_TOKENIZER.eod)
    return ids


def run_baseline(source: str, prefix: str, folder: str, workers: int) -> None:
    import multiprocessing

    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    _start(folder)
    name = f"{prefix}_text_document"
    builder = IndexedDatasetBuilder(f"{name}.bin", dtype=DType.optimal_dtype(_TOKENIZER.vocab_size))
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, _start, (folder,)) as pool, open(source, encoding="utf-8") as f:
        for ids in pool.imap(_encode, f, 32):
            builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(f"{name}.idx")


def run_one(kind: str, source: str, prefix: str, folder: str, workers: int) -> None:
    """In a process of its own: run, and print seconds of wall and CPU (children included)."""
    import transformers  # noqa: F401  (not part of the measured time)

    if kind == "baseline":
        import megatron.core.datasets.indexed_dataset
        import megatron.core.tokenizers.text.libraries.huggingface_tokenizer  # noqa: F401

        def work():
            return run_baseline(source, prefix, folder, workers)
    else:
        from dfm_nb.text_corpus import PreprocessConfig, preprocess

        def work():
            config = PreprocessConfig(
                (source,), prefix, folder, workers=workers, append_eod=True, progress=False, fast=kind == "fast"
            )
            return preprocess(config)

    cpu, start = sum(os.times()[:4]), time.perf_counter()
    work()
    print(json.dumps({"wall_s": time.perf_counter() - start, "cpu_s": sum(os.times()[:4]) - cpu}))


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
    env = dict(os.environ, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    peak, done = [0], threading.Event()

    def watch() -> None:
        root = psutil.Process(process.pid)
        while not done.wait(0.1):
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
    return {**json.loads(out.strip().splitlines()[-1]), "peak_mb": peak[0] / 1e6}


def digest(prefix: Path) -> str:
    h = hashlib.sha256()
    for suffix in ("bin", "idx"):
        h.update(Path(f"{prefix}_text_document.{suffix}").read_bytes())
    return h.hexdigest()


def tokens_of(prefix: Path) -> int:
    from dfm_nb.text_index import Index

    return Index.open(f"{prefix}_text_document").num_tokens


def speed(work: Path, corpus: Path, folder: Path, rounds: int) -> tuple[list[dict], int]:
    rows = {name: {"name": name, "runs": []} for name in VARIANTS}
    want, tokens = None, 0
    for number in range(rounds):
        for name, (kind, workers) in VARIANTS.items():
            run = measure(kind, corpus, work / "out", folder, workers)
            rows[name]["runs"].append(run)
            got = digest(work / "out")
            want, tokens = want or got, tokens or tokens_of(work / "out")
            if got != want:
                raise RuntimeError(f"{name} wrote other bytes than {BASELINE}")
            print(
                f"round {number + 1}: {name}: {tokens / run['wall_s'] / 1e6:.2f} M tokens/s, {run['cpu_s']:.1f} CPU s"
            )
    for row in rows.values():
        for key in ("wall_s", "cpu_s", "peak_mb"):
            row[key] = statistics.median(r[key] for r in row["runs"])
        row["tokens_per_s"] = tokens / row["wall_s"]
    for row in rows.values():
        of = rows[BASELINE if "2 workers" in row["name"] else "one document a call, 1 worker"]
        row["ratio"], row["cpu_ratio"] = of["wall_s"] / row["wall_s"], of["cpu_s"] / row["cpu_s"]
    return list(rows.values()), tokens


def memory(work: Path, corpus: Path, folder: Path, sizes: list[int]) -> list[dict]:
    """Peak memory for inputs of so many MB; the corpus is repeated where it is too short."""
    lines, rows = corpus.read_bytes().splitlines(keepends=True), []
    for size in sizes:
        source, left = work / "sized.jsonl", size * 1_000_000
        with open(source, "wb") as f:
            while left > 0:
                for line in lines:
                    left -= f.write(line)
                    if left <= 0:
                        break
        for workers in (1, 2):
            run = measure("fast", source, work / "sized", folder, workers)
            rows.append({"input_mb": size, "workers": workers, **run})
            print(f"{size} MB, {workers} workers: peak {run['peak_mb']:.0f} MB, {run['wall_s']:.1f} s")
        source.unlink()
    return rows


def plot(result: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    rows = sorted(result["speed"], key=lambda r: r["tokens_per_s"])
    colors = ["#228833" if "dfm" in r["name"] else "#888888" for r in rows]
    rates = [r["tokens_per_s"] / 1e6 for r in rows]
    bars = left.barh([r["name"] for r in rows], rates, color=colors)
    left.bar_label(bars, [f"{v:.2f}" for v in rates], padding=3, fontsize=9)
    for y, row in enumerate(rows):
        left.plot(
            [result["tokens"] / r["wall_s"] / 1e6 for r in row["runs"]], [y] * len(row["runs"]), "k|", markersize=9
        )
    left.set_xlabel("million tokens a second (bar: median; marks: runs)")
    left.set_xlim(0, max(rates) * 1.18)
    for workers, style in ((1, "o-"), (2, "s--")):
        points = [(r["input_mb"], r["peak_mb"]) for r in result["memory"] if r["workers"] == workers]
        right.plot(*zip(*points), style, label=f"{workers} worker" + "s" * (workers > 1))
    right.set_xscale("log")
    right.set_ylim(0)
    right.set_xlabel("input (MB)")
    right.set_ylabel("peak memory (MB)")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def markdown(result: dict) -> str:
    c = result["corpus"]
    lines = [
        f"Text: {c['source']}; {c['documents']:,} documents, {c['characters'] / 1e6:.1f} M characters, "
        f"{result['tokens']:,} tokens of a byte-level BPE with {result['vocab_size']:,} entries; "
        f"{100 * c['ascii_documents']:.1f} % of the documents are ASCII. {result['machine']}; medians of "
        f"{result['rounds']} interleaved rounds. All runs wrote the same .bin and .idx.",
        "",
        "| | M tokens/s | against one document a call | CPU s | CPU ratio | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    for r in result["speed"]:
        lines.append(
            f"| {r['name']} | {r['tokens_per_s'] / 1e6:.2f} | {r['ratio']:.1f}x | {r['cpu_s']:.1f} | "
            f"{r['cpu_ratio']:.1f}x | {r['peak_mb']:.0f} |"
        )
    lines += ["", "| input MB | workers | peak MB | s |", "|---|---|---|---|"]
    lines += [
        f"| {r['input_mb']} | {r['workers']} | {r['peak_mb']:.0f} | {r['wall_s']:.1f} |" for r in result["memory"]
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--megabytes", type=int, default=30, help="of text for the speed")
    parser.add_argument("--memory-megabytes", type=int, nargs="*", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--wordnet", type=Path, help="folder of WordNet's data.* files")
    parser.add_argument("--name", default="text_preprocess", help="of the result files")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.run:
        kind, source, prefix, folder, workers = args.run
        run_one(kind, source, prefix, folder, int(workers))
        return 0
    work = Path(tempfile.mkdtemp())
    try:
        limit = args.megabytes * 1_000_000
        texts = glosses(args.wordnet, limit) if args.wordnet else docstrings(limit)
        corpus = work / "in.jsonl"
        about = write_corpus(corpus, texts)
        about["source"] = "WordNet glosses" if args.wordnet else "docstrings of Python's library and site-packages"
        train_tokenizer(work / "tokenizer", corpus, args.vocab_size)
        rows, tokens = speed(work, corpus, work / "tokenizer", args.rounds)
        result = {
            "corpus": about,
            "tokens": tokens,
            "vocab_size": args.vocab_size,
            "rounds": args.rounds,
            "machine": f"{os.cpu_count()} cores ({_cpu()}), Python {platform.python_version()}",
            "speed": rows,
            "memory": memory(work, corpus, work / "tokenizer", args.memory_megabytes) if args.memory_megabytes else [],
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.output_dir / f"{args.name}.md").write_text(markdown(result))
    plot(result, args.output_dir / f"{args.name}.png")
    print(markdown(result))
    return 0


def _cpu() -> str:
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
