"""`make parallel-check`: every layout against one process, on gloo.

It compares the losses of five iterations and every gradient after the first. Gradients must agree to 1e-5 in fp32 and
to 0.02 in bf16. Writes benchmarks/results/parallel_check.{json,md}.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from tests.conftest import run_ranks
from tests.distributed.layouts import LAYOUTS, largest_relative_difference, losses_and_gradients

TOLERANCE = {"fp32": 1e-5, "bf16": 0.02}
"""Largest gradient difference, relative to the parameter's largest gradient.

bf16 has a unit of rounding of 0.4 %, which adds up over layers.
"""


def compare(precision: str) -> list[dict]:
    extra = [f"mixed_precision={precision}"]
    want = run_ranks(1, losses_and_gradients, extra)[0]
    rows = []
    for name, (world, overrides) in LAYOUTS.items():
        got = run_ranks(world, losses_and_gradients, [*overrides, *extra])[0]
        gradient, where = largest_relative_difference(got["gradients"], want["gradients"])
        loss = max(abs(a - b) / abs(b) for a, b in zip(got["losses"], want["losses"]))
        row = {"layout": name, "processes": world, "precision": precision}
        rows.append(row | {"loss": loss, "gradient": gradient, "worst": where})
        print(f"{precision} {name:28s} loss {loss:.1e}  gradient {gradient:.1e}  ({where})", flush=True)
    return rows


def main() -> int:
    args, about = report.arguments(__doc__).parse_args(), report.machine()
    rows = compare("fp32") + compare("bf16")
    shown: dict[str, list] = {}
    for r in rows:
        shown.setdefault(r["layout"], [r["layout"], r["processes"]]).extend(f"{r[k]:.1e}" for k in ("loss", "gradient"))
    text = (
        "Largest relative difference to one process (loss: over 5 iterations; gradients: over all parameters after "
        f"step 1). {report.sentence(about)}."
    )
    head = ["layout", "processes", "fp32 loss", "fp32 gradients", "bf16 loss", "bf16 gradients"]
    text += "\n\n" + report.table(head, list(shown.values()))
    report.write("parallel_check", {"machine": about, "rows": rows}, text, args.output_dir)
    bad = [r for r in rows if r["gradient"] > TOLERANCE[r["precision"]]]
    for r in bad:
        limit = TOLERANCE[r["precision"]]
        print(f"FAIL: {r['precision']} {r['layout']}: {r['gradient']:.2e} is more than {limit:g} in {r['worst']}")
    print(f"{len(rows) - len(bad)} passed, {len(bad)} failed")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
