"""The result of `dfm evaluate` as rows of a table, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("images", "clips")
ESTIMATE = ("value", "low", "high", "real")
DISTANCES = {
    "kernel_distance": ("kernel distance x 1000", 1000, ".1f"),
    "retrieval": ("% nearest to the picture of its caption, of 20 (chance 5)", 100, ".1f"),
    "temporal_consistency": ("temporal consistency", 1, ".4f"),
}
"""Key, and title, factor and format; another measure that has an `ESTIMATE` is shown by its key."""
CHECKPOINTS = {
    "kernel_distance": ("kernel distance to held-out x 1000", 1000, ".1f"),
    "retrieval_held_out": ("% nearest to own held-out picture", 100, ".0f"),
    "retrieval_train": ("% nearest to own training picture", 100, ".0f"),
    "copies": ("% copies", 100, ".0f"),
    "drift": ("drift of the base x 1000", 1000, ".0f"),
}
"""The figures of each checkpoint of a run (`evaluation.verdict`), as above."""


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each kind and measure.

    Of an attribute `value` is the share found confidently (`argmax`: found at all), `chance` that of guessing, `wrong`
    how often wrong names would count as confident, `real` the share in real renders and `upper_bound` the share in real
    renders through the tokenizer. For a distance, `real` is the one between real samples. Rows of a checkpoint have its
    `iteration`.
    """
    found = []
    for kind in (k for k in KINDS if k in result):
        r = result[kind]
        for name in _having(r, "chance"):
            real, bound = (r["real_renders"][k][name]["sure"]["share"] for k in ("as_drawn", "decoded"))
            row = _shares(r[name]) | {"chance": r[name]["chance"], "real": real, "upper_bound": bound}
            found.append({"kind": kind, "measure": name, "samples": r["samples"], **row})
        for key in _having(r, *ESTIMATE):
            row = {name: r[key][name] for name in ESTIMATE}
            found.append({"kind": kind, "measure": key, "samples": r["samples"], **row})
        for network, d in r.get("distances", {}).items():
            row = {"value": d["kernel_distance"], "low": d["low"], "high": d["high"]}
            row |= {"real": d["kernel_distance_as_drawn"], "upper_bound": d["kernel_distance_decoded"]}
            found.append({"kind": kind, "measure": f"kernel_distance {network}", "samples": r["samples"], **row})
    for c in result.get("checkpoints", []):
        for key in (k for k in CHECKPOINTS if k in c):
            real = result["verdict"]["real"].get(key, {}).get("value")
            found.append({"kind": "checkpoint", "iteration": c["iteration"], "measure": key, **c[key], "real": real})
    for form, w in result.get("wordings", {}).items():
        found.append({"kind": "wordings", "measure": form, "samples": w["samples"], **_shares(w)})
    return found


def _having(r: Mapping[str, Any], *keys: str) -> list[str]:
    """The measures with these keys; attributes that a judge names, and sets of them, have the "chance" of a guess."""
    return [name for name, measured in r.items() if isinstance(measured, Mapping) and {*keys} <= measured.keys()]


def _shares(found: Mapping[str, Any]) -> dict[str, float]:
    sure = found["sure"]
    value = {"value": sure["share"], "low": sure["low"], "high": sure["high"]}
    return value | {"argmax": found["argmax"]["share"], "wrong": found["wrong"]}


def table(result: Mapping[str, Any]) -> str:
    """Attributes found, distances, and the wing motion of clips, as far as they were measured."""
    found, kinds = rows(result), [k for k in KINDS if k in result]
    head = "samples, attribute, confidently correct (95 % interval), real renders through the tokenizer, real renders, "
    shares = ("upper_bound", "real", "argmax", "wrong", "chance")
    attributes = [
        (f"{r['samples']} {r['kind']}", r["measure"], _interval(r), *_percents(r, *shares))
        for r in found
        if "chance" in r
    ]
    parts = [
        _markdown(head + "by argmax, a wrong name passes, chance", attributes),
        *(_notes(kind, result[kind]) for kind in kinds),
    ]
    worded = [
        (r["measure"].replace("_", " "), str(r["samples"]), _interval(r), *_percents(r, "argmax", "wrong"))
        for r in found
        if r["kind"] == "wordings"
    ]
    parts.append(
        _markdown(
            "wording, samples, all three confidently correct (95 % interval), by argmax, wrong names pass", worded
        )
    )
    head = "samples, network, kernel distance x 1000 (95 % interval), through the tokenizer, real renders, "
    renders = [_renders(kind, name, d) for kind in kinds for name, d in result[kind].get("distances", {}).items()]
    parts.append(_markdown(head + "recall, through the tokenizer", renders))
    distances = [_distance(r, result[r["kind"]]) for r in found if r["kind"] in kinds and "upper_bound" not in r]
    parts.append(_markdown("what, measure, samples against real, 95 % interval, real against real", distances))
    parts.append(_verdict(result))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _verdict(result: Mapping[str, Any]) -> list[str]:
    """The figures of each checkpoint and of real pictures, and which one to take."""
    if "verdict" not in result:
        return []
    verdict, checkpoints = result["verdict"], result["checkpoints"]
    keys = [k for k in CHECKPOINTS if k in checkpoints[0]]
    cells = []
    for c in [*checkpoints, {"iteration": "real pictures", **verdict["real"]}]:
        loss = "" if c.get("val_loss") is None else f"{c['val_loss']:.4f}"
        cells.append([str(c["iteration"]), *(_estimate(c.get(k), *CHECKPOINTS[k][1:]) for k in keys), loss])
    chance = f"Nearest of {verdict['ways']}, so chance is {1 / verdict['ways']:.0%}."
    head = ["iteration", *(CHECKPOINTS[k][0] for k in keys), "validation loss"]
    return [*_markdown(", ".join(head), cells), "", f"Verdict: {verdict['sentence']}. {chance}"]


def _estimate(e: Mapping[str, float] | None, factor: float, form: str) -> str:
    """`12 (8 - 17)`; nothing where it was not measured."""
    return "{} ({} - {})".format(*(format(factor * e[k], form) for k in ("value", "low", "high"))) if e else ""


def _markdown(head: str, cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; none without rows."""
    titles = head.split(", ")
    lines = ["| " + " | ".join(row) + " |" for row in (titles, *cells)]
    return [lines[0], "|---" * len(titles) + "|", *lines[1:]] if cells else []


def _interval(r: Mapping[str, Any], key: str = "value") -> str:
    return f"{r[key]:.1%} ({r['low']:.1%} - {r['high']:.1%})"


def _percents(r: Mapping[str, Any], *keys: str) -> list[str]:
    return [f"{r[k]:.1%}" for k in keys]


def _notes(kind: str, r: Mapping[str, Any]) -> list[str]:
    """Unseen pairs and triples apart; attributes that were not always found, by the value asked for."""
    lines = []
    for name in (n for n in ("pairs", "triples") if n in r):
        share, count = _interval(r[name], "share"), r[name]["samples"]
        lines.append(f"{kind.capitalize()}, all three confidently correct for unseen {name}: {share} of {count}.")
    for name in (n for n in _having(r, "found") if r[n]["argmax"]["share"] < 1):
        parts = ", ".join(
            f"{asked} {saw.get(asked, 0)} of {sum(saw.values())}" for asked, saw in r[name]["found"].items()
        )
        lines.append(f"{kind.capitalize()}, {name} by argmax: {parts}.")
    if "retrieval" in r:
        lines.append(
            f"{kind.capitalize()}: judged by another caption than their own, {r['retrieval']['wrong']:.1%} pass."
        )
    if "memorised" in r:
        m = r["memorised"]
        lines.append(
            f"{kind.capitalize()}: {m['share']:.1%} of {m['samples']} are nearer to a training sample than 99 % of "
            f"{m['held_out']} held-out ones are (of samples that are new: 1 %; {m['training_samples']} looked at)."
        )
    lines += [f"{kind.capitalize()}: not measured: {why}." for why in r.get("not_measured", {}).values()]
    if "wing_motion" in r:
        m = r["wing_motion"]
        lines.append(f"Wing motion of the clips: {m['mean']:.3f} (real clips: {m['real_clips']:.3f}; a still: 0).")
    return lines


def _renders(kind: str, network: str, d: Mapping[str, Any]) -> list[str]:
    keys = ("kernel_distance", "low", "high", "kernel_distance_decoded", "kernel_distance_as_drawn")
    kernel, low, high, decoded, drawn = (format(1000 * d[k], ".0f") for k in keys)
    recall = [f"{d[k]:.0%}" for k in ("recall", "recall_decoded")]
    return [kind, network, f"{kernel} ({low} - {high})", decoded, drawn, *recall]


def _distance(r: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    title, factor, form = DISTANCES.get(r["measure"], (r["measure"].replace("_", " "), 1, ".4g"))
    value, low, high, real = (format(r[k] * factor, form) for k in ("value", "low", "high", "real"))
    return [f"{r['samples']} {r['kind']} ({measured['network']})", title, value, f"{low} - {high}", real]
