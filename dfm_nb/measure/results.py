"""The result of `dfm evaluate`, as rows of a table and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dfm_nb import display

if TYPE_CHECKING:
    import pandas as pd

MEASURES = {
    "kernel_distance": ("kernel distance x 1000", 1000, ".1f"),
    "retrieval": ("nearest to the picture of its caption, of {ways} (chance {chance:.0%})", 1, ".1%"),
    "scatter": ("scatter of samples with one prompt (the same picture: 0)", 1, ".1f"),
    "copies": ("copies of training samples", 1, ".1%"),
    "temporal_consistency": ("temporal consistency", 1, ".4f"),
    "wing_motion": ("wing motion (a still: 0)", 1, ".3f"),
}
"""Title, factor and format of a measure; any other is a share, shown by its key."""
COLUMNS = {
    "upper_bound": "real samples through the tokenizer",
    "real": "real samples",
    "argmax": "by argmax",
    "wrong": "a wrong one passes",
    "chance": "chance",
}
CHECKPOINTS = {
    "kernel_distance": ("kernel distance to held-out x 1000", 1000, ".1f"),
    "retrieval_held_out": ("% nearest to own held-out picture", 100, ".0f"),
    "retrieval_train": ("% nearest to own training picture", 100, ".0f"),
    "copies": ("% copies", 100, ".0f"),
    "drift": ("drift of the base x 1000", 1000, ".0f"),
}
"""The figures of each checkpoint of a run (`measure.verdict`), as above."""


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each kind and measure.

    Of an attribute `value` is the share found confidently (`argmax`: found at all), `chance` that of guessing, `wrong`
    how often wrong names would count as confident, `real` the share in real renders and `upper_bound` the share in real
    renders through the tokenizer. For a distance, `real` is the one between real samples. Rows of a checkpoint have its
    `iteration`.
    """
    out = []
    for kind in _having(result, "samples"):
        measures = result[kind]
        if measures.get("unseen"):
            kind = f"unseen {kind}"
        for row in _rows_of(measures):
            out.append({"kind": kind, "samples": measures["samples"], **row})
    for checkpoint in result.get("checkpoints", []):
        for key in CHECKPOINTS:
            if key in checkpoint:
                real = result["verdict"]["real"].get(key, {}).get("value")
                row = {"kind": "checkpoint", "iteration": checkpoint["iteration"], "measure": key}
                out.append(row | checkpoint[key] | {"real": real})
    for form, measure in result.get("wordings", {}).items():
        out.append({"kind": "wordings", "samples": measure["samples"], "measure": form, **_shares(measure)})
    return out


def _rows_of(measures: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in _having(measures, "chance"):
        yield {
            "measure": name,
            **_shares(measures[name]),
            "chance": measures[name]["chance"],
            "real": measures["real_renders"]["as_drawn"][name]["sure"]["share"],
            "upper_bound": measures["real_renders"]["decoded"][name]["sure"]["share"],
        }
    for name in ("pairs", "triples"):
        if name in measures:
            row = dict(measures[name])
            yield {"measure": f"all three, unseen {name}", "value": row.pop("share"), **row}
    for name in _having(measures, "value", "low", "high", "real"):
        yield {"measure": name, **measures[name]}
    for network, d in measures.get("distances", {}).items():
        for key in ("kernel_distance", "recall"):
            row = {"measure": f"{key} {network}", "value": d[key]}
            if key == "kernel_distance":
                row |= {"low": d["low"], "high": d["high"]}
            yield row | {"real": d[f"{key}_as_drawn"], "upper_bound": d[f"{key}_decoded"]}
    for name, real in (("scatter", "real"), ("wing_motion", "real_clips")):
        if name in measures:
            yield {"measure": name, "value": measures[name]["mean"], "real": measures[name][real]}


def _having(measures: Mapping[str, Any], *keys: str) -> list[str]:
    """The measures with these keys; attributes that a judge names, and sets of them, have the "chance" of a guess.

    Sets of samples (`images`, `training images`, `images at their own size and rate`, ...) have "samples".
    """
    return [name for name, measure in measures.items() if isinstance(measure, Mapping) and {*keys} <= measure.keys()]


def _shares(measure: Mapping[str, Any]) -> dict[str, float]:
    sure = measure["sure"]
    return {
        "value": sure["share"],
        "low": sure["low"],
        "high": sure["high"],
        "argmax": measure["argmax"]["share"],
        "wrong": measure["wrong"],
    }


def table(result: Mapping[str, Any]) -> str:
    """Every measure, with what real samples and guesses give; notes; the checkpoints of a run."""
    measured = [row for row in rows(result) if row["kind"] != "checkpoint"]
    columns = [name for name in COLUMNS if name in set().union(*measured)]
    cells = []
    for row in measured:
        measure = row["measure"]
        key = measure.partition(" ")[0]
        title, factor, form = MEASURES.get(key, (measure.replace("_", " "), 1, ".1%"))
        ways = row.get("ways", 1)
        title = title.format(ways=ways, chance=1 / ways)
        line = [f"{row['samples']} {row['kind']}", title, _estimate(row, factor, form)]
        for name in columns:
            if name not in row:
                line.append("")
            elif name in ("real", "upper_bound"):
                line.append(format(factor * row[name], form))
            else:
                line.append(f"{row[name]:.1%}")
        cells.append(line)
    head = ["samples", "measure", "result (95 % interval)", *(COLUMNS[name] for name in columns)]
    parts = filter(None, (_markdown(head, cells), _notes(result), _verdict(result)))
    return "\n\n".join(map("\n".join, parts))


def _estimate(e: Mapping[str, float] | None, factor: float, form: str) -> str:
    """`12 (8 - 17)`, or `12` without an interval; nothing where it was not measured."""
    if not e:
        return ""
    interval = f" ({factor * e['low']:{form}} - {factor * e['high']:{form}})" if "low" in e else ""
    return format(factor * e["value"], form) + interval


def _markdown(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; none without rows."""
    if not cells:
        return []
    lines = [f"| {' | '.join(row)} |" for row in (head, *cells)]
    lines.insert(1, "|---" * len(head) + "|")
    return lines


def _notes(result: Mapping[str, Any]) -> list[str]:
    """What was asked for and left out; attributes that were not always found, by the value asked for; what was not
    measured, and why.
    """
    notes = list(result.get("dataset", {}).get("notes", ()))
    for kind in _having(result, "samples"):
        measures = result[kind]
        kind = kind.capitalize()
        for name in _having(measures, "found"):
            if measures[name]["argmax"]["share"] < 1:
                counts = []
                for value, names in measures[name]["found"].items():
                    counts.append(f"{value} {names.get(value, 0)} of {sum(names.values())}")
                notes.append(f"{kind}, {name} by argmax: {', '.join(counts)}")
        for why in measures.get("not_measured", {}).values():
            notes.append(f"{kind}: not measured: {why}")
    return [f"{note}." for note in notes]


def _verdict(result: Mapping[str, Any]) -> list[str]:
    """The figures of each checkpoint and of real pictures, and which one to take."""
    if "verdict" not in result:
        return []
    verdict = result["verdict"]
    keys = [key for key in CHECKPOINTS if key in result["checkpoints"][0]]
    cells = []
    for row in [*result["checkpoints"], {"iteration": "real pictures", **verdict["real"]}]:
        loss = row.get("val_loss")
        estimates = [_estimate(row.get(key), *CHECKPOINTS[key][1:]) for key in keys]
        cells.append([str(row["iteration"]), *estimates, "" if loss is None else f"{loss:.4f}"])
    chance = f"Nearest of {verdict['ways']}, so chance is {1 / verdict['ways']:.0%}."
    head = ["iteration", *(CHECKPOINTS[key][0] for key in keys), "validation loss"]
    return [*_markdown(head, cells), "", f"Verdict: {verdict['sentence']}. {chance}"]


@dataclass
class EvaluationResult:
    """The result of an evaluation.

    values : by kind (`images`, `clips`), as `dfm evaluate --output` writes it.
    samples : by heading some of the generated ones with their captions; before each the real one of its caption, where
        there is one. uint8 [T, H, W, 3].
    """

    values: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[tuple[list[np.ndarray], str]]] = field(default_factory=dict)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each kind and measure, with its 95 % interval (`low`, `high`); see `rows`."""
        import pandas as pd

        return pd.DataFrame(rows(self.values))

    def contact_sheet(self) -> np.ndarray:
        """The samples beside the real ones of their captions, uint8 [H, W, 4]."""
        return display.contact_sheet(self.samples, columns=12)

    def __str__(self) -> str:
        """Markdown."""
        return table(self.values)

    __repr__ = _repr_markdown_ = __str__
