"""The result of `dfm evaluate` as rows of a table, and as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ESTIMATE = ("value", "low", "high", "real")
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
"""The figures of each checkpoint of a run (`evaluation.verdict`), as above."""


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each kind and measure.

    Of an attribute `value` is the share found confidently (`argmax`: found at all), `chance` that of guessing, `wrong`
    how often wrong names would count as confident, `real` the share in real renders and `upper_bound` the share in real
    renders through the tokenizer. For a distance, `real` is the one between real samples. Rows of a checkpoint have its
    `iteration`.
    """
    found = [
        {"kind": "unseen " * r.get("unseen", 0) + kind, "samples": r["samples"], **row}
        for kind, r in _kinds(result)
        for row in _rows_of(r)
    ]
    for c in result.get("checkpoints", []):
        for key in (k for k in CHECKPOINTS if k in c):
            real = result["verdict"]["real"].get(key, {}).get("value")
            found.append({"kind": "checkpoint", "iteration": c["iteration"], "measure": key, **c[key], "real": real})
    for form, w in result.get("wordings", {}).items():
        found.append({"kind": "wordings", "samples": w["samples"], "measure": form, **_shares(w)})
    return found


def _kinds(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The sets of samples: `images`, `clips`, `training images`, `images at their own size and rate`, ..."""
    return [(kind, r) for kind, r in result.items() if isinstance(r, Mapping) and "samples" in r]


def _rows_of(r: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in _having(r, "chance"):
        real, bound = (r["real_renders"][k][name]["sure"]["share"] for k in ("as_drawn", "decoded"))
        yield {"measure": name, **_shares(r[name]), "chance": r[name]["chance"], "real": real, "upper_bound": bound}
    for name in (n for n in ("pairs", "triples") if n in r):
        ends = {key: r[name][key] for key in ("samples", "low", "high")}
        yield {"measure": f"all three, unseen {name}", "value": r[name]["share"], **ends}
    for name in _having(r, *ESTIMATE):
        yield {"measure": name, **r[name]}
    for network, d in r.get("distances", {}).items():
        for key in ("kernel_distance", "recall"):
            compared = {"real": d[f"{key}_as_drawn"], "upper_bound": d[f"{key}_decoded"]}
            ends = {end: d[end] for end in ("low", "high") if key == "kernel_distance"}
            yield {"measure": f"{key} {network}", "value": d[key], **ends, **compared}
    if m := r.get("scatter"):
        yield {"measure": "scatter", "value": m["mean"], "real": m["real"]}
    if m := r.get("wing_motion"):
        yield {"measure": "wing_motion", "value": m["mean"], "real": m["real_clips"]}


def _having(r: Mapping[str, Any], *keys: str) -> list[str]:
    """The measures with these keys; attributes that a judge names, and sets of them, have the "chance" of a guess."""
    return [name for name, measured in r.items() if isinstance(measured, Mapping) and {*keys} <= measured.keys()]


def _shares(found: Mapping[str, Any]) -> dict[str, float]:
    sure = found["sure"]
    value = {"value": sure["share"], "low": sure["low"], "high": sure["high"]}
    return value | {"argmax": found["argmax"]["share"], "wrong": found["wrong"]}


def table(result: Mapping[str, Any]) -> str:
    """Every measure, with what real samples and guesses give; notes; the checkpoints of a run."""
    found = [r for r in rows(result) if r["kind"] != "checkpoint"]
    columns = [name for name in COLUMNS if any(name in r for r in found)]
    cells = []
    for r in found:
        key, _, _network = r["measure"].partition(" ")
        title, factor, form = MEASURES.get(key, (r["measure"].replace("_", " "), 1, ".1%"))
        title = title.format(ways=(ways := r.get("ways", 0)), chance=1 / (ways or 1))
        told: dict[str, str] = {c: format(factor * r[c], form) for c in ("real", "upper_bound") if c in r}
        told |= {c: f"{r[c]:.1%}" for c in ("argmax", "wrong", "chance") if c in r}
        own = [f"{r['samples']} {r['kind']}", title, _estimate(r, factor, form)]
        cells.append([*own, *(told.get(name, "") for name in columns)])
    head = ["samples", "measure", "result (95 % interval)", *(COLUMNS[name] for name in columns)]
    parts = _markdown(head, cells), _notes(result), _verdict(result)
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _estimate(e: Mapping[str, float] | None, factor: float, form: str) -> str:
    """`12 (8 - 17)`, or `12` without an interval; nothing where it was not measured."""
    value, *ends = [format(factor * e[k], form) for k in ("value", "low", "high") if k in e] if e else [""]
    return value + (f" ({' - '.join(ends)})" if ends else "")


def _markdown(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; none without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *cells)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]] if cells else []


def _notes(result: Mapping[str, Any]) -> list[str]:
    """What was asked for and left out; attributes that were not always found, by the value asked for; what was not
    measured, and why.
    """
    lines = [f"{note}." for note in result.get("dataset", {}).get("notes", ())]
    for kind, r in ((kind.capitalize(), r) for kind, r in _kinds(result)):
        for name in (n for n in _having(r, "found") if r[n]["argmax"]["share"] < 1):
            asked = (f"{value} {saw.get(value, 0)} of {sum(saw.values())}" for value, saw in r[name]["found"].items())
            lines.append(f"{kind}, {name} by argmax: {', '.join(asked)}.")
        lines += [f"{kind}: not measured: {why}." for why in r.get("not_measured", {}).values()]
    return lines


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
    return [*_markdown(head, cells), "", f"Verdict: {verdict['sentence']}. {chance}"]
