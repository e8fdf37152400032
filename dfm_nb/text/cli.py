"""`dfm text ...`: preprocess, merge, inspect, verify, blend.

The flags of preprocess are those of Megatron-LM's tools/preprocess_data.py. Each command is one function: its parser,
then what it does. The imports are inside, so that a command waits for its own alone.
"""

from __future__ import annotations

import argparse
import json
import sys

from dfm_nb.base.argv import ArgumentParser, guard, output


def _preprocess(argv: list[str]) -> int:
    """JSONL -> .bin/.idx"""
    from dfm_nb.text.corpus import PreprocessConfig, preprocess

    p = PreprocessConfig.parser()
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    # Flags of Megatron's tool that change nothing here: the order is always kept, and no sentences are split.
    for flag in ("--log-interval", "--lang"):
        p.add_argument(flag, help=argparse.SUPPRESS)
    for flag in ("--keep-sequential-samples", "--keep-newlines"):
        p.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--partitions", type=int, choices=[1], help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    result = preprocess(PreprocessConfig(**PreprocessConfig.given(args), progress=sys.stderr.isatty()))
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


def _merge(argv: list[str]) -> int:
    """join the parts of a partitioned run, or any corpora"""
    p = ArgumentParser(prog="dfm text merge", description=_merge.__doc__)
    p.add_argument("prefixes", nargs="*", help="corpora to join, in order; none: all parts of --output-prefix")
    p.add_argument(
        "--output-prefix", type=output, required=True, help="as given to preprocess; _KEY_document is added for parts"
    )
    p.add_argument("--json-keys", nargs="+", default=["text"], help="which corpora of the parts")
    args = p.parse_args(argv)
    from dfm_nb.text.corpus import find_parts, merge

    jobs = {args.output_prefix: args.prefixes}
    if not args.prefixes:
        jobs = {f"{args.output_prefix}_{k}_document": find_parts(args.output_prefix, k) for k in args.json_keys}
    for joined, parts in jobs.items():
        index = merge(parts, joined, progress=sys.stderr.isatty())
        held = f"{index.num_documents:,} documents, {index.num_tokens:,} tokens"
        print(f"{joined}.bin .idx: {held} of {len(parts)} parts")
    return 0


def _inspect(argv: list[str]) -> int:
    """counts, lengths, first documents, frequent tokens"""
    p = ArgumentParser(prog="dfm text inspect", description=_inspect.__doc__)
    p.add_argument("prefix", metavar="PREFIX", help="path without .bin")
    p.add_argument("--tokenizer-model", help="to decode with; by default the recorded one")
    p.add_argument("--documents", type=int, default=3, help="documents to show")
    p.add_argument("--json", action="store_true", help="print JSON")
    args = p.parse_args(argv)
    from dfm_nb.text import check

    report = check.inspect(args.prefix, args.tokenizer_model, args.documents)
    print(json.dumps(report, indent=1) if args.json else check.report_text(report))
    return 0


def _verify(argv: list[str]) -> int:
    """the checklist, as checks that can fail (then it exits with 1)"""
    p = ArgumentParser(prog="dfm text verify", description=_verify.__doc__)
    p.add_argument("prefixes", nargs="+", metavar="PREFIX", help="one corpus, or those of a blend")
    p.add_argument("--tokenizer-model", help="that the corpus must be made with; by default the recorded one")
    p.add_argument("--append-eod", action="store_true", default=None, help="each document must end with EOD")
    p.add_argument("--input", nargs="+", help="the JSONL of the one PREFIX, to count its documents")
    p.add_argument("--json", action="store_true", help="print JSON")
    args = p.parse_args(argv)
    from dfm_nb.text import check

    show = sys.stderr.isatty() and not args.json
    found = {p: check.verify(p, args.tokenizer_model, args.append_eod, args.input, show) for p in args.prefixes}
    ok = all(c.passed is not False for checks in found.values() for c in checks)
    if len(args.prefixes) > 1 and ok:
        same = check.verify_same_tokenizer(args.prefixes)
        found["blend"], ok = [same], same.passed is not False
    if args.json:
        print(json.dumps({"ok": ok, "checks": {p: [vars(c) for c in cs] for p, cs in found.items()}}, indent=1))
    else:
        marks = {True: "ok  ", False: "FAIL", None: "-   "}
        for prefix, checks in found.items():
            print(prefix, *(f"  {marks[c.passed]} {c.name}: {c.detail}" for c in checks), sep="\n")
    return 0 if ok else 1


def _blend(argv: list[str]) -> int:
    """weights, strategies and epochs of a blend"""
    from dfm_nb.text import check, mixture

    p = ArgumentParser(prog="dfm text blend", description=_blend.__doc__)
    p.add_argument("blend", nargs="*", metavar="WEIGHT PREFIX", help="0.5 A 0.5 B; prefixes alone: weights by tokens")
    p.add_argument("--data-path", nargs="+", default=[], help="the same, as Megatron-LM's training takes it")
    p.add_argument("--config", metavar="YAML", help="rows of dataset_prefix, dataset_weight, dataset_split")
    p.add_argument("--strategy", help=", ".join(mixture.STRATEGIES))
    p.add_argument("--normalize", action="store_true", help="divide the weights by their sum")
    p.add_argument("--token-budget", type=float, help="training tokens; by default one epoch's worth of them all")
    p.add_argument("--max-epochs", type=float, default=4.0, help="warn when a corpus is seen more often")
    p.add_argument("--output", type=output, metavar="YAML", help="write the blend here")
    p.add_argument("--json", action="store_true", help="print JSON")
    args = p.parse_args(argv)
    if sum(map(bool, (args.blend, args.data_path, args.config))) != 1:
        raise ValueError("a blend needs one of WEIGHT PREFIX ..., --data-path WEIGHT PREFIX ... and --config YAML")
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
    if args.json:
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


COMMANDS = {"preprocess": _preprocess, "merge": _merge, "inspect": _inspect, "verify": _verify, "blend": _blend}


def main(argv: list[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        return COMMANDS[name](rest)
    usage = "\n".join(f"  {name:<11} {command.__doc__}" for name, command in COMMANDS.items())
    if name not in ("-h", "--help"):
        raise ValueError(f"dfm text has {', '.join(COMMANDS)}; got {name!r}")
    print("usage: dfm text COMMAND ...   (dfm text COMMAND --help for its flags)\n\n" + usage)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
