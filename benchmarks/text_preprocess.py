"""Tokens per second, CPU seconds and memory of `dfm text preprocess` against Megatron-LM's design, on real text.

    python scripts/fetch_text.py data/text
    python benchmarks/text_preprocess.py data/text/*.jsonl [--megabytes 30] [--rounds 3]

Each JSONL file gives an equal share of the megabytes, as far as it goes. Results go to text_preprocess.{json,md}.

There are two baselines. The design of Megatron-LM's tools/preprocess_data.py: a forked pool, `imap(encode, lines, 32)`,
one document a call, megatron.core's Hugging Face tokenizer class, IndexedDatasetBuilder. And the steps of its
tools/preprocess_data_fast.py (d98e8a6; needs awkward): gigatoken encodes the whole file on all cores. The command runs
with each of its back ends.

Every run is a process of its own, measured whole: start and imports too, of torch and transformers where they are
needed. Runs are interleaved, round by round; medians are reported; the slow baselines run once. Where other work shares
the cores, CPU seconds say more than the clock. Each run's .bin and .idx are compared with the baseline's. Memory is the
sum of the proportional set sizes of the run's processes, sampled four times a second.

With `--rounds 1 --megabytes 15` the runs take 141 CPU seconds for the speed and 22 for the memory; `--only speed` or
`--only memory` measures one of them and keeps the other from the file of the run before.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

if (ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, ROOT)

import psutil

from benchmarks import report

VARIANTS = {  # name: (kind, workers, once)
    "Megatron-LM's design, 2 workers": ("baseline", 2, True),
    "Megatron-LM's design, 1 worker": ("baseline", 1, True),
    "steps of Megatron-LM's fast tool": ("fast_tool", 2, False),
    "dfm with tokenizers, 2 workers": ("tokenizers", 2, False),
    "dfm text preprocess, 1 worker": ("auto", 1, False),
    "dfm text preprocess, 2 workers": ("auto", 2, False),
}
BASELINES = {1: "Megatron-LM's design, 1 worker", 2: "Megatron-LM's design, 2 workers"}


def write_corpus(path: Path, sources: list[Path], limit: float) -> list[dict]:
    """One JSONL from several, `limit` characters in all, shortest sources first so that the others fill up."""
    rows, left = [], limit
    with open(path, "w", encoding="utf-8") as out:
        for number, source in enumerate(sorted(sources, key=lambda p: p.stat().st_size)):
            share = left / (len(sources) - number)
            row = {"source": source.stem, "documents": 0, "characters": 0, "ascii": 0}
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


def run_fast_tool(source: str, prefix: str, folder: str) -> None:
    import awkward
    import gigatoken
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from transformers import AutoTokenizer

    tokenizer, name = AutoTokenizer.from_pretrained(folder), f"{prefix}_text_document"
    documents = gigatoken.Tokenizer(tokenizer).encode_files(gigatoken.JsonlFileSource([source]), parallel=True)
    builder = IndexedDatasetBuilder(f"{name}.bin", dtype=DType.optimal_dtype(len(tokenizer)))
    lengths = np.asarray(awkward.num(documents, axis=1))
    ids = np.asarray(awkward.flatten(documents), dtype=builder.dtype)
    ids = np.insert(ids, np.cumsum(lengths), tokenizer.eos_token_id)
    builder.data_file.write(ids.tobytes())
    builder.sequence_lengths.extend((lengths + 1).tolist())
    builder.document_indices.extend(range(1, len(lengths) + 1))
    builder.finalize(f"{name}.idx")


def run_one(kind: str, source: str, prefix: str, folder: str, workers: int) -> None:
    """In a process of its own: run, and print its wall seconds and the CPU seconds of it and its workers."""
    if kind == "baseline":
        run_baseline(source, prefix, folder, workers)
    elif kind == "fast_tool":
        run_fast_tool(source, prefix, folder)
    else:
        from dfm_nb.text.corpus import PreprocessConfig, preprocess

        files = {"input": [source], "output_prefix": prefix, "tokenizer_model": folder}
        how = {"workers": workers, "tokenizer_backend": kind}
        preprocess(PreprocessConfig(**files, **how, append_eod=True, progress=False))
    used, wall = os.times(), time.time() - psutil.Process().create_time()
    user, system = used.user + used.children_user, used.system + used.children_system
    print(json.dumps({"wall_s": wall, "user_s": user, "system_s": system, "cpu_s": user + system}))


def shared_out(process: psutil.Process) -> int:
    """Sum of the proportional set sizes of a process and all below it."""
    return sum(p.memory_full_info().pss for p in (process, *process.children(recursive=True)))


def measure(kind: str, source: Path, prefix: Path, folder: Path, workers: int) -> dict:
    argv = ["-W", "ignore", __file__, "--run", kind, source, prefix, folder, str(workers)]
    # one process lets `tokenizers` use all cores; workers switch that off
    said, peak = report.of_process(argv, shared_out, TOKENIZERS_PARALLELISM=None)
    return {**json.loads(said.strip().splitlines()[-1]), "peak_mb": peak / 1e6}


def digest(prefix: Path) -> str:
    h = hashlib.sha256()
    for suffix in ("bin", "idx"):
        h.update(Path(f"{prefix}_text_document.{suffix}").read_bytes())
    return h.hexdigest()


def tokens_of(prefix: Path) -> int:
    from dfm_nb.text.indexed import Index

    return Index.open(f"{prefix}_text_document").num_tokens


def speed(work: Path, corpus: Path, folder: Path, rounds: int) -> tuple[list[dict], int]:
    rows = {name: {"name": name, "workers": workers, "runs": []} for name, (_, workers, _) in VARIANTS.items()}
    want, tokens = None, 0
    for number in range(rounds):
        for name, (kind, workers, once) in VARIANTS.items():
            if once and number:
                continue
            out = work / f"{kind}-{workers}"
            run = measure(kind, corpus, out, folder, workers)
            rows[name]["runs"].append(run)
            got = digest(out)
            want, tokens = want or got, tokens or tokens_of(out)
            if got != want:
                raise RuntimeError(f"{name} wrote other bytes than {BASELINES[2]}")
            rate = tokens / run["wall_s"] / 1e6
            print(f"round {number + 1}: {name}: {rate:.2f} M tokens/s, {run['cpu_s']:.1f} CPU s", flush=True)
    for row in rows.values():
        for key in ("wall_s", "user_s", "system_s", "cpu_s", "peak_mb"):
            row[key] = statistics.median(r[key] for r in row["runs"])
    for row in rows.values():
        of = rows[BASELINES[min(row["workers"], 2)]]
        row["cpu_ratio"] = of["cpu_s"] / row["cpu_s"]
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
        run = measure("auto", source, work / "sized", folder, 2)
        rows.append({"input_mb": size, "workers": 2, **run})
        print(f"{size} MB: peak {run['peak_mb']:.0f} MB, {run['wall_s']:.1f} s", flush=True)
        source.unlink()
    return rows


def text(result: dict) -> str:
    rows = []
    for row in result["corpus"]:
        share = 100 * row["ascii"] / max(1, row["documents"])
        rows.append([row["source"], f"{row['documents']:,}", f"{row['characters'] / 1e6:.1f}", f"{share:.1f} %"])
    cells = []
    for r in result["speed"]:
        used = f"{r['user_s']:.1f} + {r['system_s']:.1f}"
        cells.append([r["name"], f"{r['wall_s']:.1f}", used, f"{r['cpu_ratio']:.1f}x", f"{r['peak_mb']:.0f}"])
    head = ["", "wall s", "CPU s (user + system)", "CPU ratio", "peak MB"]
    rounds = f"Medians of {result['rounds']} interleaved rounds" if result["rounds"] > 1 else "One interleaved round"
    parts = [
        f"{result['tokens']:,} tokens of a byte-level BPE with {result['vocab_size']:,} entries, trained on every "
        f"tenth document. Whole processes, with start and imports. {rounds}; "
        "Megatron-LM's design ran once. All runs wrote the same .bin and .idx. "
        f"{report.sentence(result['machine'])}.",
        report.table(["text", "documents", "M characters", "ASCII documents"], rows),
        report.table(head, cells),
        "Ratios are to Megatron-LM's design (tools/preprocess_data.py) with the same number of workers. The "
        "fast tool is tools/preprocess_data_fast.py of d98e8a6, on all cores; its ratio is to 2 workers. Most of its "
        "CPU seconds on so little text are imports of torch, transformers and megatron.core; text_fast_path.md gives "
        "them apart, with larger inputs.",
    ]
    rows = [
        [r["input_mb"], *(f"{r['peak_mb']:.0f} {r['wall_s']:.1f} {r['cpu_s']:.1f}".split())] for r in result["memory"]
    ]
    if rows:
        parts.append("Memory by the size of the input; one that is longer than the text given repeats it.")
        parts.append(report.table(["input MB, 2 workers", "peak MB", "s", "CPU s"], rows))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__, megabytes=(30.0, "of text for the speed"), rounds=3, vocab_size=32000)
    parser.add_argument("input", nargs="*", type=Path, help="JSONL files, as scripts/fetch_text.py writes them")
    parser.add_argument("--memory-megabytes", type=int, nargs="*", default=[10, 100, 400])
    parser.add_argument("--only", choices=["speed", "memory"], help="keep the other part of the results as it is")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.run:
        kind, source, prefix, folder, workers = args.run
        run_one(kind, source, prefix, folder, int(workers))
        return 0
    if not args.input:
        parser.error("name JSONL files; python scripts/fetch_text.py data/text makes some")
    saved = args.output_dir / "text_preprocess.json"
    if args.only == "memory" and not saved.exists():
        parser.error("--only memory needs the speed of an earlier run; there is none")
    result = json.loads(saved.read_text()) if args.only and saved.exists() else {"memory": []}
    result |= {"vocab_size": args.vocab_size, "machine": report.machine()}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        about = write_corpus(work / "in.jsonl", args.input, args.megabytes * 1e6)
        train_tokenizer(work / "tokenizer", work / "in.jsonl", args.vocab_size)
        if args.only != "memory":
            rows, tokens = speed(work, work / "in.jsonl", work / "tokenizer", args.rounds)
            result |= {"corpus": about, "tokens": tokens, "rounds": args.rounds, "speed": rows}
        if args.only != "speed":
            write_corpus(work / "whole.jsonl", args.input, float("inf"))
            result["memory"] = memory(work, work / "whole.jsonl", work / "tokenizer", args.memory_megabytes)
    report.save("text_preprocess", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
