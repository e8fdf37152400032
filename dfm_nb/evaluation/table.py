"""The result of `dfm evaluate` as Markdown, and as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfm_nb.evaluation.attributes import MEASURED, TOGETHER

DISTANCES = (  # key, title, factor and format of the figures shown
    ("kernel_distance", "kernel distance x 1000", 1000, ".1f"),
    ("temporal_consistency", "temporal consistency", 1, ".4f"),
)


def table(result: Mapping[str, Any]) -> str:
    """What was found of what was asked, distances, and the wing motion of clips; each where it was measured."""
    kinds = [k for k in ("images", "clips") if k in result]
    parts = [_attribute_rows(kinds, result)]
    for kind in kinds:
        parts.append(_notes(kind, result[kind]))
    if "wordings" in result:
        parts.append(_wording_rows(result["wordings"]))
    parts.append(_render_rows(kinds, result))
    if any("kernel_distance" in result[k] for k in kinds):
        parts.append(_distance_rows([(k, result[k]) for k in kinds]))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each kind and measure.

    Of an attribute `value` is the share found surely (`argmax`: found at all), `chance` that of guessing, `real` that
    in real renders and `upper_bound` that in real renders through the tokenizer. Of a distance `real` is that between
    real samples.
    """
    found = []
    for kind in (k for k in ("images", "clips") if k in result):
        r = result[kind]
        for name in (n for n in (*MEASURED, *TOGETHER) if n in r):
            surely, renders = r[name]["sure"], r["real_renders"]
            row = {"value": surely["share"], "low": surely["low"], "high": surely["high"]}
            row |= {"argmax": r[name]["argmax"]["share"], "chance": r[name]["chance"]}
            row |= {"real": renders["as_drawn"][name]["sure"]["share"]}
            row |= {"upper_bound": renders["decoded"][name]["sure"]["share"]}
            found.append({"kind": kind, "measure": name, "samples": r["samples"], **row})
        for key in (k for k, *_ in DISTANCES if k in r):
            row = {name: r[key][name] for name in ("value", "low", "high", "real")}
            found.append({"kind": kind, "measure": key, "samples": r["samples"], **row})
        for network, d in r.get("distances", {}).items():
            row = {"value": d["kernel_distance"], "low": d["low"], "high": d["high"]}
            row |= {"real": d["kernel_distance_as_drawn"], "upper_bound": d["kernel_distance_decoded"]}
            found.append({"kind": kind, "measure": f"kernel_distance {network}", "samples": r["samples"], **row})
    for form, w in result.get("wordings", {}).items():
        row = {"value": w["sure"]["share"], "low": w["sure"]["low"], "high": w["sure"]["high"]}
        row |= {"argmax": w["argmax"]["share"]}
        found.append({"kind": "wordings", "measure": form, "samples": w["samples"], **row})
    return found


def _interval(share: Mapping[str, float]) -> str:
    return f"{share['share']:.1%} ({share['low']:.1%} - {share['high']:.1%})"


def _attribute_rows(kinds: list[str], result: Mapping[str, Any]) -> list[str]:
    lines = [
        "| samples | attribute | surely as asked (95 % interval) | real renders through the tokenizer | real renders "
        "| by argmax | chance |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        r = result[kind]
        for name in (n for n in (*MEASURED, *TOGETHER) if n in r):
            real = r["real_renders"]
            lines.append(
                f"| {r['samples']} {kind} | {name} | {_interval(r[name]['sure'])} "
                f"| {real['decoded'][name]['sure']['share']:.1%} | {real['as_drawn'][name]['sure']['share']:.1%} "
                f"| {r[name]['argmax']['share']:.1%} | {r[name]['chance']:.1%} |"
            )
    return lines if len(lines) > 2 else []


def _notes(kind: str, r: Mapping[str, Any]) -> list[str]:
    """Unseen pairs and triples apart; attributes that were not always found, by the value asked for."""
    lines = [
        f"{kind.capitalize()}, all three surely right of unseen {name}: {_interval(r[name])} of {r[name]['samples']}."
        for name in ("pairs", "triples")
        if name in r
    ]
    for name in (n for n in MEASURED if n in r and r[n]["argmax"]["share"] < 1):
        parts = ", ".join(
            f"{asked} {saw.get(asked, 0)} of {sum(saw.values())}" for asked, saw in r[name]["found"].items()
        )
        lines.append(f"{kind.capitalize()}, {name} by argmax: {parts}.")
    if "memorised" in r:
        m = r["memorised"]
        lines.append(
            f"{kind.capitalize()}: {m['share']:.1%} of {m['samples']} are nearer to a training sample than 99 % of "
            f"{m['held_out']} held-out ones are (of samples that are new: 1 %; {m['training_samples']} looked at)."
        )
    if "wing_motion" in r:
        m = r["wing_motion"]
        lines.append(f"Wing motion of the clips: {m['mean']:.3f} (real clips: {m['real_clips']:.3f}; a still: 0).")
    return lines


def _wording_rows(found: Mapping[str, Any]) -> list[str]:
    lines = ["| wording | samples | all three surely as asked (95 % interval) | by argmax |", "|---|---|---|---|"]
    for form, w in found.items():
        said = form.replace("_", " ")
        lines.append(f"| {said} | {w['samples']} | {_interval(w['sure'])} | {w['argmax']['share']:.1%} |")
    return lines


def _render_rows(kinds: list[str], result: Mapping[str, Any]) -> list[str]:
    """Distances to fresh real renders."""
    lines = [
        "| samples | network | kernel distance x 1000 (95 % interval) | through the tokenizer | real renders "
        "| recall | through the tokenizer |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        for network, d in result[kind].get("distances", {}).items():
            kernel, low, high, decoded, drawn = (
                format(1000 * d[k], ".0f")
                for k in ("kernel_distance", "low", "high", "kernel_distance_decoded", "kernel_distance_as_drawn")
            )
            lines.append(
                f"| {kind} | {network} | {kernel} ({low} - {high}) | {decoded} | {drawn} | {d['recall']:.0%} "
                f"| {d['recall_decoded']:.0%} |"
            )
    return lines if len(lines) > 2 else []


def _distance_rows(measured: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    lines = ["| what | measure | samples against real | 95 % interval | real against real |", "|---|---|---|---|---|"]
    for kind, r in measured:
        for key, title, factor, form in DISTANCES:
            if key in r:
                value, low, high, real = (format(r[key][k] * factor, form) for k in ("value", "low", "high", "real"))
                what = f"{r['samples']} {kind} ({r['network']})"
                lines.append(f"| {what} | {title} | {value} | {low} - {high} | {real} |")
    return lines
