"""The times of `dfm plan` against published ones: WAN 2.1 14B on H100, B200, GB200 and GB300.

    python benchmarks/plan_nodes.py

One number of the planner is free, the share of the peak that matrix products reach. It is fitted to one machine's row,
and the others are predicted with it and their data sheets. This is done for each choice of the fitted row, and once
more with a planner that knows nothing but peaks. Nothing is measured here, so that any machine gives the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from dfm_nb import config as cfg
from dfm_nb.config import counts
from dfm_nb.config.schema import ModelConfig
from dfm_nb.plan import MACHINES, Load, Machine, Plan, StepTime, step_time

TOKENS, TEXT = 37_440, 512
WAN = (
    "num_layers=40 hidden_size=5120 num_attention_heads=40 ffn_hidden_size=13824 in_channels=16 text_dim=4096 "
    "adaln_lora_dim=1"  # WAN's layers have vectors where ours have products
)


@dataclass(frozen=True)
class Run:
    """A published row. recomputed : layers whose activations are computed again in backward."""

    name: str
    machine: str
    tflops: float
    plan: Plan
    packs: int
    recomputed: int = 0

    @property
    def gpus(self) -> int:
        return self.plan.tp * self.plan.cp * self.plan.dp


# TFLOP/s a GPU, GPUs, batch and degrees: NVIDIA-NeMo/Megatron-Bridge, examples/models/wan/performance-summary.md. The
# last is of an earlier edition, NVIDIA-NeMo/DFM at 0c23efef, docs/performance-summary.md. Recomputed layers:
# NVIDIA-NeMo/DFM, examples/megatron/recipes/wan/conf/h100_perf_pretrain_mock.yaml, of the same batch.
_CP2 = Plan(cp=2, dp=16, distributed_optimizer=True)
RUNS = (
    Run("H100", "h100", 325.77, Plan(2, 4, 1, 16, sp=True, distributed_optimizer=True), 128, recomputed=8),
    Run("B200", "b200", 804.02, _CP2, 64),
    Run("GB200", "gb200", 899.62, _CP2, 64),
    Run("GB300", "gb300", 1030.67, _CP2, 64),
)
EARLIER = Run("GB200, CP 4, without FSDP", "gb200", 787.59, Plan(cp=4, dp=8, distributed_optimizer=True), 64)

UNKNOWN = """What is not known of these runs:

- How FLOPs were counted. We count all of attention, as Megatron-Bridge's counter for WAN does since August 2026. The
  one before was of language models and took half. Half would change the fitted shares and little else: {halved}.
- Whether the kernels, and what overlaps, were the same: H100 and GB300 ran container 25.09, B200 and GB200 25.11.
- FSDP (B200, GB200) is taken as the distributed optimizer, its gathering of weights as hidden behind computation.
- Clocks under load. Peaks are those of data sheets. GB300 also has twice the exponentials a second of GB200, of which
  attention takes many; the planner has no rate for them.
- One sample of 37,440 tokens a pack is assumed, with 512 text tokens, so that all packs are the same work."""


def wan() -> ModelConfig:
    """Our network in WAN 2.1 14B's sizes: its products, and 14.2 of its 14.3 billion parameters."""
    return cfg.resolve(None, overrides=[f"model.{word}" for word in WAN.split()]).config.model


def times(run: Run, machine: Machine) -> StepTime:
    """Of a step; layers that recompute are a share of those of `recompute=full`."""
    load = Load(TOKENS, text_tokens=TEXT, packs=run.packs)
    none, full = (asdict(step_time(wan(), replace(run.plan, recompute=r), load, machine)) for r in ("none", "full"))
    share = run.recomputed / wan().num_layers
    return StepTime(**{cause: none[cause] + share * (full[cause] - none[cause]) for cause in none})


def predict(run: Run, efficiency: float, counted: float = 1.0, peaks_only: bool = False) -> float:
    """Model TFLOP/s a GPU. counted : the published count of FLOPs over ours."""
    done = counted * run.packs * counts.model_flops(wan(), [TOKENS], [TEXT]) / run.gpus / 1e12
    time = times(run, replace(MACHINES[run.machine], efficiency=efficiency))
    return done / (time.compute if peaks_only else time.total)


def fit(run: Run, counted: float = 1.0, peaks_only: bool = False) -> float:
    """The efficiency that gives a row its published rate, by bisection: rates rise with it."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if predict(run, middle, counted, peaks_only) > run.tflops else (middle, high)
    return high


def fits(counted: float = 1.0, peaks_only: bool = False) -> list[dict[str, Any]]:
    """For each fitted row the efficiency, and the relative errors of the others and of the earlier edition's."""
    rows = []
    for fitted in RUNS:
        efficiency = fit(fitted, counted, peaks_only)
        found = {run.name: predict(run, efficiency, counted, peaks_only) for run in (*RUNS, EARLIER)}
        errors = {run.name: found[run.name] / run.tflops - 1 for run in (*RUNS, EARLIER) if run is not fitted}
        rows.append({"fitted": fitted.name, "efficiency": efficiency, "tflops": found, "errors": errors})
    return rows


def errors(rows: list[dict[str, Any]]) -> list[float]:
    """Absolute errors of all predictions, without the earlier edition's row."""
    return [abs(error) for row in rows for name, error in row["errors"].items() if name != EARLIER.name]


def text(result: dict[str, Any]) -> str:
    shares = []
    for run in RUNS:
        time = result["steps"][run.name]
        total = sum(time.values())
        of = [f"{100 * time[k] / total:.1f} %" for k in ("compute", "recompute", "elementwise", "communication")]
        layout = str(run.plan).removesuffix(" recompute none")
        shares.append([run.name, run.gpus, layout, run.recomputed, f"{total:.2f}", *of])
    names = [run.name for run in (*RUNS, EARLIER)]
    predicted = [["published", "", *(f"{run.tflops:.0f}" for run in (*RUNS, EARLIER))]]
    for row in result["fits"]:
        cells = [
            f"{row['tflops'][n]:.0f}" + (f" ({row['errors'][n]:+.1%})" if n in row["errors"] else "") for n in names
        ]
        predicted.append([row["fitted"], f"{row['efficiency']:.3f}", *cells])
    mean = lambda kind: f"{100 * statistics.mean(errors(result[kind])):.1f} %"  # noqa: E731
    worst = lambda kind: f"{100 * max(errors(result[kind])):.1f} %"  # noqa: E731
    used = [sorted(f"{row['efficiency']:.2f}" for row in result[kind]) for kind in ("half_of_attention", "fits")]
    halved = " instead of ".join(f"{u[0]} to {u[-1]}" for u in used) + f", mean error {mean('half_of_attention')}"
    return "\n\n".join(
        [
            "WAN 2.1 14B, 37,440 tokens a sample, model TFLOP/s a GPU: published, and predicted with the efficiency "
            "fitted to one row (error).",
            report.table(["fitted to", "efficiency", *names], predicted),
            f"Mean absolute error of the twelve predictions among the first four: {mean('fits')}, largest "
            f"{worst('fits')}. Peaks alone, one share of them everywhere: {mean('peaks_only')}, largest "
            f"{worst('peaks_only')}.",
            "Seconds of a step, each with the efficiency of its own row:",
            report.table(
                [
                    "machine",
                    "GPUs",
                    "layout",
                    "layers recomputed",
                    "s",
                    "products",
                    "recomputed",
                    "elementwise",
                    "links",
                ],
                shares,
            ),
            UNKNOWN.format(halved=halved),
            f"{report.sentence(result['machine'])}.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    attention = 3 * counts.attention_flops(wan(), [TOKENS], [0])
    result = {
        "machine": report.machine(),
        "fits": fits(),
        "peaks_only": fits(peaks_only=True),
        "half_of_attention": fits(1 - attention / 2 / counts.model_flops(wan(), [TOKENS], [TEXT])),
        "steps": {r.name: asdict(times(r, replace(MACHINES[r.machine], efficiency=fit(r)))) for r in RUNS},
    }
    report.save("plan_nodes", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
