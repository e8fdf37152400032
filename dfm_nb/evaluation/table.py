"""The result of `dfm evaluate` as Markdown, and as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfm_nb.evaluation.attributes import MEASURED

DISTANCES = (  # key, title, factor and format of the figures shown
    ("frechet_distance", "Frechet distance", 1, ".1f"),
    ("kernel_distance", "kernel distance x 1000", 1000, ".1f"),
    ("temporal_consistency", "temporal consistency", 1, ".4f"),
)


def table(result: Mapping[str, Any]) -> str:
    """What was found of what was asked, distances, and the wing motion of clips; each where it was measured."""
    kinds = [k for k in ("images", "clips") if k in result]
    judged = [(kind, name, result[kind]) for kind in kinds for name in MEASURED if name in result[kind]]
    parts = []
    if judged:
        parts.append(_attribute_rows(judged))
        parts.append(_value_lines(judged))
    if any("frechet_distance" in result[k] for k in kinds):
        parts.append(_distance_rows([(k, result[k]) for k in kinds]))
    if "wing_motion" in result.get("clips", {}):
        m = result["clips"]["wing_motion"]
        parts.append([f"Wing motion of the clips: {m['mean']:.3f} (real clips: {m['real_clips']:.3f}; a still: 0)."])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each kind and measure.

    Of an attribute `value` is the share found as asked, `chance` that of guessing, `real` that in real renders and
    `upper_bound` that in real renders through the tokenizer. Of a distance `real` is that between real samples.
    """
    found = []
    for kind in (k for k in ("images", "clips") if k in result):
        r = result[kind]
        for name in (n for n in MEASURED if n in r):
            share, renders = r[name], r["real_renders"]
            row = {"value": share["accuracy"], "low": share["low"], "high": share["high"], "chance": share["chance"]}
            row |= {"real": renders["as_drawn"][name], "upper_bound": renders["decoded"][name]}
            found.append({"kind": kind, "measure": name, "samples": r["samples"], **row})
        for key in (k for k, *_ in DISTANCES if k in r):
            row = {name: r[key][name] for name in ("value", "low", "high", "real")}
            found.append({"kind": kind, "measure": key, "samples": r["samples"], **row})
    return found


def _attribute_rows(judged: list[tuple[str, str, Mapping[str, Any]]]) -> list[str]:
    lines = [
        "| what | attribute | found as asked | 95 % interval | chance | real renders "
        "| real renders through the tokenizer |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, name, r in judged:
        share, real = r[name], r["real_renders"]
        lines.append(
            f"| {r['samples']} {kind} | {name} | {share['accuracy']:.1%} | {share['low']:.1%} - {share['high']:.1%} "
            f"| {share['chance']:.1%} | {real['as_drawn'][name]:.1%} | {real['decoded'][name]:.1%} |"
        )
    return lines


def _value_lines(judged: list[tuple[str, str, Mapping[str, Any]]]) -> list[str]:
    """A sentence for every attribute that was not always found: how often, by the value asked for."""
    lines = []
    for kind, name, r in judged:
        if r[name]["accuracy"] < 1:
            found = r[name]["found"].items()
            parts = ", ".join(f"{asked} {saw.get(asked, 0)} of {sum(saw.values())}" for asked, saw in found)
            lines.append(f"{kind.capitalize()}, {name} by what was asked: {parts}.")
    return lines


def _distance_rows(measured: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    lines = ["| what | measure | samples against real | 95 % interval | real against real |", "|---|---|---|---|---|"]
    for kind, r in measured:
        for key, title, factor, form in DISTANCES:
            if key in r:
                value, low, high, real = (format(r[key][k] * factor, form) for k in ("value", "low", "high", "real"))
                what = f"{r['samples']} {kind} ({r['network']})"
                lines.append(f"| {what} | {title} | {value} | {low} - {high} | {real} |")
    return lines
