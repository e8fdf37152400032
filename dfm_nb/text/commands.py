"""`dfm text ...`: preprocess, merge, inspect, verify, blend.

The flags of preprocess are those of Megatron-LM's tools/preprocess_data.py. Each command is its options, then one
function. Imports are inside the functions, so that each command loads only its own.
"""

from __future__ import annotations

import argparse
import json
import sys

from dfm_nb.base.argv import run_command
from dfm_nb.base.options import Options, option


def _preprocess(argv: list[str]) -> int:
    """JSONL -> .bin/.idx"""
    from dfm_nb.text.corpus import PreprocessConfig, preprocess

    p = PreprocessConfig.parser()
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    # Flags of Megatron's tool without effect here: the order is always kept, and sentences are not split.
    for flag in ("--log-interval", "--lang"):
        p.add_argument(flag, help=argparse.SUPPRESS)
    for flag in ("--keep-sequential-samples", "--keep-newlines"):
        p.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--partitions", type=int, choices=[1], help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    given = {name: value for name, value in vars(args).items() if name in PreprocessConfig.model_fields}
    result = preprocess(PreprocessConfig(**given, progress=sys.stderr.isatty()))
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(vars(result)))
        return 0
    for key, prefix in result.prefixes.items():
        empty = result.empty_documents[key]
        print(f"{prefix}.bin .idx: {result.documents:,} documents ({empty} empty), {result.tokens[key]:,} tokens")
    listed = f" (in {result.skipped_path})" if result.skipped else ""
    resumed = f"resumed after {result.resumed_documents:,} documents; " if result.resumed_documents else ""
    print(f"{resumed}bad lines skipped: {result.skipped:,}{listed}; blank lines: {result.blank_lines:,}")
    return 0


class MergeOptions(Options):
    """Join the parts of a partitioned run, or any corpora."""

    prog = "dfm text merge"
    prefixes: list[str] = option([], "corpora to join, in order; none: all parts of --output-prefix", positional=True)
    output_prefix: str = option(help="as for preprocess; _KEY_document is added for parts", output=True)
    json_keys: list[str] = option(["text"], "which corpora of the parts")


def _merge(argv: list[str]) -> int:
    args = MergeOptions.parse(argv)
    from dfm_nb.text.corpus import find_parts, merge

    jobs = {args.output_prefix: args.prefixes}
    if not args.prefixes:
        jobs = {f"{args.output_prefix}_{k}_document": find_parts(args.output_prefix, k) for k in args.json_keys}
    for joined, parts in jobs.items():
        index = merge(parts, joined, progress=sys.stderr.isatty())
        held = f"{index.num_documents:,} documents, {index.num_tokens:,} tokens"
        print(f"{joined}.bin .idx: {held} of {len(parts)} parts")
    return 0


class InspectOptions(Options):
    """Counts, lengths, first documents, frequent tokens."""

    prog = "dfm text inspect"
    prefix: str = option(help="path without .bin", positional=True, metavar="PREFIX")
    tokenizer_model: str | None = option(None, "for decoding; default: the recorded one")
    documents: int = option(3, "documents to show")
    as_json: bool = option(False, "print JSON", flag="--json")


def _inspect(argv: list[str]) -> int:
    args = InspectOptions.parse(argv)
    from dfm_nb.text import check

    report = check.inspect(args.prefix, args.tokenizer_model, args.documents)
    print(json.dumps(report, indent=1) if args.as_json else check.report_text(report))
    return 0


class VerifyOptions(Options):
    """The checklist; exits with 1 if a check fails."""

    prog = "dfm text verify"
    prefixes: list[str] = option(help="one corpus, or the corpora of a blend", positional=True, metavar="PREFIX")
    tokenizer_model: str | None = option(None, "that the corpus must be written with; default: the recorded one")
    append_eod: bool | None = option(None, "each document must end with EOD")
    input: list[str] | None = option(None, "the JSONL of the one PREFIX, to count its documents")
    as_json: bool = option(False, "print JSON", flag="--json")


def _verify(argv: list[str]) -> int:
    args = VerifyOptions.parse(argv)
    from dfm_nb.text import check

    show = sys.stderr.isatty() and not args.as_json
    found = {p: check.verify(p, args.tokenizer_model, args.append_eod, args.input, show) for p in args.prefixes}
    ok = all(c.passed is not False for checks in found.values() for c in checks)
    if len(args.prefixes) > 1 and ok:
        same = check.verify_same_tokenizer(args.prefixes)
        found["blend"], ok = [same], same.passed is not False
    if args.as_json:
        print(json.dumps({"ok": ok, "checks": {p: [vars(c) for c in cs] for p, cs in found.items()}}, indent=1))
    else:
        marks = {True: "ok  ", False: "FAIL", None: "-   "}
        for prefix, checks in found.items():
            print(prefix, *(f"  {marks[c.passed]} {c.name}: {c.detail}" for c in checks), sep="\n")
    return 0 if ok else 1


class BlendOptions(Options):
    """Weights, strategies and epochs of a blend."""

    prog = "dfm text blend"
    blend: list[str] = option(
        [], "0.5 A 0.5 B; prefixes alone: weights by tokens", positional=True, metavar="WEIGHT PREFIX"
    )
    data_path: list[str] = option([], "the same, in the form of Megatron-LM's training")
    config: str | None = option(None, "rows of dataset_prefix, dataset_weight, dataset_split", metavar="YAML")
    strategy: str | None = option(None, "proportional, equal, upweight:NAME=0.6 or token-balanced")
    normalize: bool = option(False, "divide the weights by their sum")
    token_budget: float | None = option(None, "training tokens; default: the sum of all corpora")
    max_epochs: float = option(4.0, "warn when a corpus is seen more often")
    output: str | None = option(None, "write the blend here", metavar="YAML", output=True)
    as_json: bool = option(False, "print JSON", flag="--json")


def _blend(argv: list[str]) -> int:
    args = BlendOptions.parse(argv)
    from dfm_nb.text import check, mixture

    if sum(map(bool, (args.blend, args.data_path, args.config))) != 1:
        raise ValueError("a blend needs one of WEIGHT PREFIX ..., --data-path WEIGHT PREFIX ... or --config YAML")
    if args.config:
        blend = mixture.read_yaml(args.config, args.normalize)
    else:
        blend = mixture.parse_list(args.blend or args.data_path, args.normalize)
    counts = mixture.token_counts(blend)
    if args.strategy or blend.train[0].weight is None:
        blend = mixture.apply_strategy(blend, args.strategy or "proportional", counts)
    same = check.require_same_tokenizer(blend.prefixes())
    budget = args.token_budget or float(sum(counts[c.prefix] for c in blend.train))
    rows = mixture.exposures(blend, counts, budget)
    warnings = [*blend.warnings, *([same.detail] if same.passed is None else [])]
    seen = f"times in {budget:,.0f} tokens (over --max-epochs {args.max_epochs:g}); lower its weight, or add text"
    warnings += ["{name} is seen {epochs:.1f} ".format(**r) + seen for r in rows if r["epochs"] > args.max_epochs]
    if args.output:
        mixture.write_yaml(blend, args.output)
    if args.as_json:
        print(json.dumps({"token_budget": budget, "train": rows, "warnings": warnings}, indent=1))
        return 0
    print(f"training on {budget:,.0f} tokens")
    print(f"  {'corpus':<24}  {'weight':>7}  {'tokens':>15}  {'epochs':>7}")
    for row in rows:
        print("  {name:<24}  {weight:>7.4f}  {tokens:>15,}  {epochs:>7.2f}".format(**row))
    for split in mixture.SPLITS[1:]:
        for corpus in blend.corpora(split):
            print(f"  {split}: {corpus.name} {corpus.weight:g}, {counts[corpus.prefix]:,} tokens")
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr)
    print("--data-path " + " ".join("{weight:.6g} {prefix}".format(**row) for row in rows))
    return 0


COMMANDS = {
    "preprocess": (_preprocess, "JSONL -> .bin/.idx"),
    "merge": (_merge, "join the parts of a partitioned run, or any corpora"),
    "inspect": (_inspect, "counts, lengths, first documents, frequent tokens"),
    "verify": (_verify, "the checklist; exits with 1 if a check fails"),
    "blend": (_blend, "weights, strategies and epochs of a blend"),
}


def main(argv: list[str] | None = None) -> int:
    return run_command("dfm text", COMMANDS, argv)
