"""`dfm text ...`: preprocess, merge, inspect, verify, blend.

The flags of preprocess are those of Megatron-LM's tools/preprocess_data.py.
"""

import argparse
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

from dfm_nb.base.argv import run_command
from dfm_nb.base.files import MARK, check_free
from dfm_nb.base.options import option
from dfm_nb.base.verb import FileVerb, Report, Verb
from dfm_nb.text import check, chunk
from dfm_nb.text.corpus import find_parts, merge, preprocess


class PreprocessOptions(chunk.PreprocessConfig, Verb):
    """JSONL -> PREFIX_KEY_document.bin and .idx. The names of the flags are Megatron-LM's."""

    own_part: ClassVar[bool] = True
    # flags of Megatron's tool without effect here: the order is always kept, and sentences are not split
    log_interval: str | None = option(None, argparse.SUPPRESS)
    lang: str | None = option(None, argparse.SUPPRESS)
    keep_sequential_samples: bool = option(False, argparse.SUPPRESS)
    keep_newlines: bool = option(False, argparse.SUPPRESS)
    partitions: Literal["1"] | None = option(None, argparse.SUPPRESS)

    def run(self) -> Any:
        done = preprocess(self.replace(progress=sys.stderr.isatty()))
        for warning in done.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return done

    def report(self, result: Any) -> Report:
        lines = []
        for key, prefix in result.prefixes.items():
            documents = f"{result.documents:,} documents ({result.empty_documents[key]} empty)"
            lines.append(f"{prefix}.bin .idx: {documents}, {result.tokens[key]:,} tokens")
        listed = f" (in {result.skipped_path})" if result.skipped else ""
        resumed = f"resumed after {result.resumed_documents:,} documents; " if result.resumed_documents else ""
        lines.append(f"{resumed}bad lines skipped: {result.skipped:,}{listed}; blank lines: {result.blank_lines:,}")
        lines.append(f"encoded by {result.tokenizer_backend}")
        return Report(vars(result), "\n".join(lines))


class MergeOptions(Verb):
    """Join the parts of a partitioned run, or any corpora."""

    prog = "dfm text merge"
    prefixes: list[str] = option([], "corpora to join, in order; none: all parts of --output-prefix", positional=True)
    output_prefix: str = option(help="as for preprocess; _KEY_document is added for parts", output=True)
    json_keys: list[str] = option(["text"], "which corpora of the parts")

    def run(self) -> dict[str, dict[str, int]]:
        parts_of = {self.output_prefix: self.prefixes}
        if not self.prefixes:
            parts_of = {f"{self.output_prefix}_{k}_document": find_parts(self.output_prefix, k) for k in self.json_keys}
        counts = {}
        for joined, parts in parts_of.items():
            index = merge(parts, joined, progress=sys.stderr.isatty())
            counts[joined] = {"documents": index.num_documents, "tokens": index.num_tokens, "parts": len(parts)}
        return counts

    def report(self, result: dict[str, dict[str, int]]) -> Report:
        line = "{}.bin .idx: {documents:,} documents, {tokens:,} tokens of {parts} parts"
        return Report(result, "\n".join(line.format(joined, **counts) for joined, counts in result.items()))


class InspectOptions(Verb):
    """Counts, lengths, first documents, frequent tokens."""

    prog = "dfm text inspect"
    prefix: str = option(help="path without .bin", positional=True, metavar="PREFIX")
    tokenizer_model: str | None = option(None, "for decoding; default: the recorded one")
    documents: int = option(3, "documents to show")

    def run(self) -> dict[str, Any]:
        return check.inspect(self.prefix, self.tokenizer_model, self.documents)

    def report(self, result: dict[str, Any]) -> Report:
        return Report(result, check.report_text(result))


class VerifyOptions(Verb):
    """The checklist; exits with 1 if a check fails."""

    prog = "dfm text verify"
    prefixes: list[str] = option(help="one corpus, or the corpora of a blend", positional=True, metavar="PREFIX")
    tokenizer_model: str | None = option(None, "that the corpus must be written with; default: the recorded one")
    append_eod: bool | None = option(None, "each document must end with EOD")
    input: list[str] | None = option(None, "the JSONL of the one PREFIX, to count its documents")

    def run(self) -> dict[str, list[Any]]:
        show = sys.stderr.isatty() and not self.as_json
        result = {}
        for prefix in self.prefixes:
            result[prefix] = check.verify(prefix, self.tokenizer_model, self.append_eod, self.input, show)
        if len(self.prefixes) > 1:
            unread = check.Check("the corpora are alike", None, "not compared, because a check failed")
            result["blend"] = check.alike(self.prefixes) if _passed(result) else [unread]
        return result

    def report(self, result: dict[str, list[Any]]) -> Report:
        marks = {True: "ok  ", False: "FAIL", None: "-   "}
        lines = []
        for prefix, checks in result.items():
            lines.append(prefix)
            lines += [f"  {marks[each.passed]} {each.name}: {each.detail}" for each in checks]
        ok = _passed(result)
        rows = {prefix: list(map(vars, checks)) for prefix, checks in result.items()}
        return Report({"ok": ok, "checks": rows}, "\n".join(lines), int(not ok))


def _passed(result: dict[str, list[Any]]) -> bool:
    return all(each.passed is not False for each in itertools.chain(*result.values()))


class BlendOptions(FileVerb):
    """Weights, strategies and epochs of a blend."""

    prog = "dfm text blend"
    blend: list[str] = option(
        [], "0.5 A 0.5 B; prefixes alone: weights by tokens", positional=True, metavar="WEIGHT PREFIX"
    )
    data_path: list[str] = option([], "the same, in the form of Megatron-LM's training")
    config: str | None = option(None, "rows of dataset_prefix, dataset_weight, dataset_split", metavar="YAML")
    strategy: str | None = option(None, "proportional, equal, upweight:NAME=0.6 or token-balanced")
    normalize: bool = option(False, "divide the weights by their sum")
    token_budget: float | None = option(None, "training tokens; default: the sum of all corpora", gt=0)
    max_epochs: float = option(4.0, "warn when a corpus is seen more often")
    output: str | None = option(None, "write the blend here", metavar="YAML", output=True)

    def run(self) -> dict[str, Any]:
        from dfm_nb.text import mixture  # and with it config

        if sum(map(bool, (self.blend, self.data_path, self.config))) != 1:
            raise ValueError("a blend needs one of WEIGHT PREFIX ..., --data-path WEIGHT PREFIX ... or --config YAML")
        if self.config:
            blend = mixture.read_yaml(self.config, self.normalize)
        else:
            blend = mixture.parse_list(self.blend or self.data_path, self.normalize)
        counts = mixture.token_counts(blend)
        if self.strategy or blend[0].dataset_weight is None:
            blend = mixture.apply_strategy(blend, self.strategy or "proportional", counts)
        budget = self.token_budget or float(sum(counts[c.dataset_prefix] for c in blend.train))
        rows = mixture.exposures(blend, counts, budget)
        warnings = [*blend.warnings, *check.require_alike(blend.prefixes(), but=check.ONE_EOD)]
        limit = f"in {budget:,.0f} tokens (over --max-epochs {self.max_epochs:g})"
        for row in rows:
            if row["epochs"] > self.max_epochs:
                often = f"{row['name']} is seen {row['epochs']:.1f} times {limit}"
                warnings.append(f"{often}; lower its weight, or add text")
        if self.output:
            check_free(Path(self.output), self.overwrite, mark=MARK)
            mixture.write_yaml(blend, self.output)
        others = []
        for corpus in blend[len(rows) :]:
            weight = f"{corpus.dataset_split}: {corpus.name} {corpus.dataset_weight:g}"
            others.append(f"{weight}, {counts[corpus.dataset_prefix]:,} tokens")
        for text in warnings:
            print(f"warning: {text}", file=sys.stderr)
        return {"token_budget": budget, "train": rows, "warnings": warnings, "others": others}

    def report(self, result: dict[str, Any]) -> Report:
        lines = [
            f"training on {result['token_budget']:,.0f} tokens",
            f"  {'corpus':<24}  {'weight':>7}  {'tokens':>15}  {'epochs':>7}",
        ]
        data_path = "--data-path"
        for row in result["train"]:
            lines.append("  {name:<24}  {weight:>7.4f}  {tokens:>15,}  {epochs:>7.2f}".format(**row))
            data_path += f" {row['weight']:.6g} {shlex.quote(row['prefix'])}"
        lines += [f"  {line}" for line in result["others"]]
        return Report(result, "\n".join([*lines, data_path]))


VERBS = (PreprocessOptions, MergeOptions, InspectOptions, VerifyOptions, BlendOptions)
COMMANDS = {verb.prog.rpartition(" ")[2]: (verb.main, str(verb.__doc__)) for verb in VERBS}


def main(argv: list[str] | None = None) -> int:
    return run_command("dfm text", COMMANDS, argv)
