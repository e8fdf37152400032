"""`dfm text blend`: checks a blend, sets its weights by a strategy, says how often each corpus is seen.

Enters: a command line. Leaves: a table, warnings, and on request the YAML that the loader and Megatron read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dfm_nb.base.argv import ArgumentParser
from dfm_nb.text import check as text_check
from dfm_nb.text import weights as tw


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="dfm text blend", description="weights, strategies and epochs of a blend")
    parser.add_argument("blend", nargs="*", metavar="WEIGHT PREFIX", help="0.5 A 0.5 B; or prefixes with --strategy")
    parser.add_argument("--config", metavar="YAML", help="rows of dataset_prefix, dataset_weight, dataset_split")
    parser.add_argument("--strategy", help=", ".join(tw.STRATEGIES))
    parser.add_argument("--normalize", action="store_true", help="divide the weights by their sum")
    parser.add_argument("--token-budget", type=float, help="training tokens; by default one epoch's worth of them all")
    parser.add_argument("--max-epochs", type=float, default=4.0, help="warn when a corpus is seen more often")
    parser.add_argument("--output", metavar="YAML", help="write the blend here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if bool(args.blend) == bool(args.config):
        raise ValueError("dfm text blend takes either WEIGHT PREFIX ... or --config YAML")
    blend = (
        tw.read_yaml(args.config, args.normalize) if args.config else tw.parse_list(args.blend, None, args.normalize)
    )
    counts = tw.token_counts(blend)
    if args.strategy or (blend.train[0].weight is None and not blend.phases):
        blend = tw.apply_strategy(blend, args.strategy or "proportional", counts)
    budget = args.token_budget or float(sum(counts[s.prefix] for s in blend.train))
    rows = tw.exposures(blend, counts, budget)
    same = text_check.verify_same_tokenizer(blend.prefixes())
    warnings = list(blend.warnings)
    if same.passed is False:
        raise ValueError(f"a blend needs one tokenizer; {same.detail}; preprocess them with the same one")
    if same.passed is None:
        warnings.append(same.detail)
    for row in rows:
        if row.epochs > args.max_epochs:
            warnings.append(
                f"{row.name} is seen {row.epochs:.1f} times in {budget:,.0f} tokens (over --max-epochs {args.max_epochs:g}); "
                "lower its weight or the budget, or add text"
            )
    if args.output:
        write_yaml(blend, args.output)
    if args.json:
        print(json.dumps({"token_budget": budget, "train": [vars(r) for r in rows], "warnings": warnings}, indent=1))
        return 0
    print(f"training on {budget:,.0f} tokens")
    width = max(len(r.name) for r in rows)
    print(f"  {'corpus':<{width}}  {'weight':>7}  {'tokens':>15}  {'epochs':>7}")
    for row in rows:
        print(f"  {row.name:<{width}}  {row.weight:>7.4f}  {row.tokens:>15,}  {row.epochs:>7.2f}")
    for phase in blend.phases:
        print(
            f"  from {100 * phase.start:g} %: "
            + ", ".join(f"{s.name} {w:g}" for s, w in zip(blend.train, phase.weights))
        )
    for split in tw.SPLITS[1:]:
        for source in blend.sources(split):
            print(f"  {split}: {source.name} {source.weight:g}, {counts[source.prefix]:,} tokens")
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr)
    print("--data-path " + " ".join(f"{r.weight:.6g} {r.prefix}" for r in rows))
    return 0


def write_yaml(blend: tw.Blend, path: str | Path) -> None:
    """Write the blend in the form that `read_yaml` reads."""
    import yaml

    rows = [
        {"dataset_prefix": s.prefix, "dataset_weight": s.weight, "dataset_split": split}
        for split in tw.SPLITS
        for s in blend.sources(split)
    ]
    data: object = rows
    if blend.phases or blend.split:
        names = [s.name for s in blend.train]
        phases = [{"start": p.start, "weights": dict(zip(names, p.weights))} for p in blend.phases]
        data = {"datasets": rows, **({"split": blend.split} if blend.split else {})}
        data |= {"curriculum": phases} if phases else {}
    Path(path).write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
