"""`dfm text ...`: preprocess, merge, inspect, verify, blend, train. Flags follow Megatron-LM's tools/preprocess_data.py.

Enters: a command line. Leaves: files and lines to read; `verify` exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys

from dfm_nb.base.argv import ArgumentParser, guard

PARTITION_ENV = (("RANK", "WORLD_SIZE"), ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"))


def parse_partition(text: str | None) -> tuple[int, int]:
    """`i/n`, counted from 0. `auto`, or nothing under torchrun: this process's rank and the number of processes."""
    if text is None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    if text in (None, "auto"):
        for index, count in PARTITION_ENV:
            if index in os.environ and count in os.environ:
                return int(os.environ[index]), int(os.environ[count])
        names = " or ".join(" and ".join(pair) for pair in PARTITION_ENV)
        raise ValueError(f"--partition auto needs {names} in the environment; give --partition i/n")
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"--partition must be i/n with 0 <= i < n, for example 0/4 to 3/4, or auto; got {text}")
    return int(match[1]), int(match[2])


def _preprocess(argv: list[str]) -> int:
    parser = ArgumentParser(prog="dfm text preprocess", description="JSONL -> PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--input", nargs="+", required=True, help="JSONL files or globs, also .gz and .zst; - is stdin")
    parser.add_argument("--output-prefix", required=True, help="path of the output without _KEY_document.bin")
    parser.add_argument("--tokenizer-type", default="HuggingFaceTokenizer", help="only HuggingFaceTokenizer")
    parser.add_argument("--tokenizer-model", required=True, help="hub id, folder, or tokenizer.json")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys to tokenize, one corpus each")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize; 1: this process")
    parser.add_argument("--chunk-size", type=int, default=8192, help="documents a chunk (1 MiB at most)")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--dtype", choices=["uint16", "int32"], help="of the tokens; by default as Megatron chooses")
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="at a bad line")
    parser.add_argument("--partition", help="i/n (from 0): only that part of the lines; auto: from torchrun or a Job")
    parser.add_argument("--max-document-bytes", type=int, default=256 << 20, help="a longer line is refused")
    parser.add_argument("--no-resume", action="store_true", help="begin anew even if a run of this command was stopped")
    parser.add_argument("--split-sentences", action="store_true", help="not offered: a text is one sequence")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    for flag in ("--log-interval", "--partitions"):
        parser.add_argument(flag, type=int, default=1, help=argparse.SUPPRESS)
    for flag in ("--keep-sequential-samples", "--keep-newlines"):  # the order is always kept; no sentences are split
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lang", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tokenizer_type != "HuggingFaceTokenizer":
        raise ValueError(f"--tokenizer-type must be HuggingFaceTokenizer; got {args.tokenizer_type}")
    if args.split_sentences:
        raise ValueError("--split-sentences is not offered; give a list of strings under the key for several sequences")
    if args.partitions != 1:
        raise ValueError(
            f"--partitions is not needed: --workers {max(args.workers, args.partitions)} uses as many processes on one "
            "input; --partition i/n cuts it for several machines"
        )
    from dfm_nb.text.corpus import PreprocessConfig, preprocess

    result = preprocess(
        PreprocessConfig(
            input=tuple(args.input),
            output_prefix=args.output_prefix,
            tokenizer_model=args.tokenizer_model,
            json_keys=tuple(args.json_keys),
            workers=args.workers,
            chunk_size=args.chunk_size,
            append_eod=args.append_eod,
            dtype=args.dtype,
            on_error=args.on_error,
            partition=parse_partition(args.partition),
            max_document_bytes=args.max_document_bytes,
            resume=not args.no_resume,
            progress=sys.stderr.isatty(),
        )
    )
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(vars(result)))
        return 0
    for key, prefix in result.prefixes.items():
        empty = result.empty_documents[key]
        print(f"{prefix}.bin .idx: {result.documents:,} documents ({empty} empty), {result.tokens[key]:,} tokens")
    if result.resumed_documents:
        print(f"went on after {result.resumed_documents:,} documents of a stopped run")
    if result.skipped:
        print(f"bad lines skipped: {result.skipped}, listed in {result.skipped_path}")
    if result.blank_lines:
        print(f"blank lines passed over: {result.blank_lines}")
    return 0


def _merge(argv: list[str]) -> int:
    parser = ArgumentParser(prog="dfm text merge", description="join corpora by streaming")
    parser.add_argument("prefixes", nargs="*", help="corpora to join, in order; none: all parts of --output-prefix")
    parser.add_argument(
        "--output-prefix", required=True, help="as given to preprocess; _KEY_document is added for parts"
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="which corpora of the parts")
    args = parser.parse_args(argv)
    from dfm_nb.text.corpus import find_parts, merge

    jobs = [(args.prefixes, args.output_prefix)]
    if not args.prefixes:
        jobs = [(find_parts(args.output_prefix, k), f"{args.output_prefix}_{k}_document") for k in args.json_keys]
    for prefixes, output in jobs:
        index = merge(prefixes, output, progress=sys.stderr.isatty())
        print(
            f"{output}.bin .idx: {index.num_documents:,} documents, {index.num_tokens:,} tokens of {len(prefixes)} parts"
        )
    return 0


def _inspect(argv: list[str]) -> int:
    parser = ArgumentParser(prog="dfm text inspect", description="what a corpus holds")
    parser.add_argument("prefix", metavar="PREFIX", help="path without .bin")
    parser.add_argument("--tokenizer-model", help="to decode with; by default the recorded one")
    parser.add_argument("--documents", type=int, default=3, help="documents to show")
    parser.add_argument("--histogram", metavar="PNG", help="write the histogram of lengths here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from dfm_nb.text import check as text_check

    report = text_check.inspect(args.prefix, args.tokenizer_model, args.documents)
    print(json.dumps(report, indent=1) if args.json else text_check.report_text(report))
    if args.histogram:
        path = text_check.histogram(args.prefix, args.histogram)
        print(f"histogram: {path}", file=sys.stderr)
    return 0


def _verify(argv: list[str]) -> int:
    parser = ArgumentParser(prog="dfm text verify", description="the checklist; exits with 1 when a check fails")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="one corpus, or those of a blend")
    parser.add_argument("--tokenizer-model", help="that the corpus must be made with; by default the recorded one")
    parser.add_argument("--append-eod", action="store_true", default=None, help="each document must end with EOD")
    parser.add_argument("--input", nargs="+", help="the JSONL, to count its documents (with one PREFIX)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.input and len(args.prefixes) > 1:
        raise ValueError(f"--input counts the documents of one corpus; got {len(args.prefixes)} prefixes")
    from dfm_nb.text import check as text_check

    show = sys.stderr.isatty() and not args.json
    found = {p: text_check.verify(p, args.tokenizer_model, args.append_eod, args.input, show) for p in args.prefixes}
    ok = all(c.passed is not False for checks in found.values() for c in checks)
    if len(args.prefixes) > 1 and ok:
        found["blend"] = [text_check.verify_same_tokenizer(args.prefixes)]
        ok = found["blend"][0].passed is not False
    if args.json:
        print(json.dumps({"ok": ok, "checks": {p: [vars(c) for c in cs] for p, cs in found.items()}}, indent=1))
        return 0 if ok else 1
    marks = {True: "ok  ", False: "FAIL", None: "-   "}
    for prefix, checks in found.items():
        print(prefix)
        for check in checks:
            print(f"  {marks[check.passed]} {check.name}: {check.detail}")
    return 0 if ok else 1


def _train(argv: list[str]) -> int:
    from dfm_nb.text import train_cli as text_train_cli

    return text_train_cli.main(argv)


def _blend(argv: list[str]) -> int:
    from dfm_nb.text import blend_cli as text_blend_cli

    return text_blend_cli.main(argv)


COMMANDS = {
    "preprocess": (_preprocess, "JSONL -> .bin/.idx"),
    "merge": (_merge, "join the parts of a partitioned run, or any corpora"),
    "inspect": (_inspect, "counts, lengths, first documents, frequent tokens"),
    "verify": (_verify, "the checklist, as checks that can fail"),
    "blend": (_blend, "weights, strategies and epochs of a blend"),
    "train": (_train, "a small GPT on a blend: can it be learned from?"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()]
        print("usage: dfm text COMMAND ...   (dfm text COMMAND --help for its flags)\n\n" + "\n".join(lines))
        return 0
    if argv[0] not in COMMANDS:
        raise ValueError(f"dfm text has {', '.join(COMMANDS)}; got {argv[0]!r}")
    return COMMANDS[argv[0]][0](list(argv[1:]))


if __name__ == "__main__":
    raise SystemExit(guard(main))
