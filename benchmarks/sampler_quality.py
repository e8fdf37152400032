"""On a trained model: what does a sampler's budget of network evaluations buy?

    python benchmarks/sampler_quality.py --checkpoint-path runs/demo/train [--num-prompts 48]

It needs a checkpoint trained on the synthetic set (`scripts/demo.py` makes one) and writes
sampler_quality.{json,md,png}. All cells share prompts (attribute combinations that training never showed), starting
noise and guidance. Measured, by sampler and evaluations:

- distance to the fine solution of the same trajectory (UniPC, 150 steps): root mean square over the latent, in units
  of sigma_data, the median over samples. Stochastic samplers follow no trajectory and have none;
- share of samples in which a classifier fitted on real renders finds colour, background and pattern all as asked, with
  its Wilson interval;
- kernel distance of EfficientNet-Lite0 features to 192 real renders of the same attributes, beside that of
  other renders. Most of the distance between the fine solution and the renders is the small tokenizer's blur, which is
  in every row.

Cost: about 1,000 evaluations of `--num-prompts` samples, with guidance; the time taken is in the JSON (`elapsed_s`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from dfm_nb import parallel
from dfm_nb.base.plots import PALETTE
from dfm_nb.data.sources import synthetic
from dfm_nb.diffusion.samplers import SAMPLERS, evaluations
from dfm_nb.evaluation import features
from dfm_nb.evaluation.attributes import CORE, unseen_attributes, wilson
from dfm_nb.evaluation.distance import kernel_distance
from dfm_nb.evaluation.judge import AttributeClassifier
from dfm_nb.generate import Request
from dfm_nb.generation.pipeline import Pipeline

SETTINGS = {"height": 64, "width": 64, "guidance": 2.0, "seed": 3}
REFERENCE = {"sampler": "unipc", "num_steps": 150}
REAL_RENDERS = 192
BUDGETS = (5, 10, 15, 20, 30, 50)
CELLS = [
    *(("euler", "karras", n) for n in BUDGETS),
    *(("heun", "karras", n) for n in (*BUDGETS, 70)),
    *(("dpmpp_2m", "karras", n) for n in (*BUDGETS, 100)),
    *(("unipc", "karras", n) for n in BUDGETS),
    *((name, "focused", n) for name in ("dpmpp_2m", "unipc") for n in (10, 20)),
    *((name, "karras", n) for name, sampler in SAMPLERS.items() if sampler.stochastic for n in (20, 50)),
]
"""Sampler, schedule and the evaluations that it may spend."""


def steps_for(sampler: str, budget: int) -> int:
    """The most steps that cost no more than `budget` evaluations."""
    return (budget + 1) // 2 if evaluations(sampler, 2) == 3 else budget


def renders(wanted: list[dict[str, str]], count: int, first: int) -> np.ndarray:
    """Real pictures uint8 [count, 64, 64, 3] of these attributes, in turn; `first` makes sets disjoint."""
    return np.concatenate([synthetic.render(wanted[i % len(wanted)], first + i, 64, 64) for i in range(count)])


class Judge:
    """Measures latents of the same prompts: against the fine solution, the prompts and real renders."""

    def __init__(self, pipe: Pipeline, wanted: list[dict[str, str]], classifier, network: features.Features):
        self.pipe, self.wanted, self.classifier, self.network = pipe, wanted, classifier, network
        self.real = network(renders(wanted, REAL_RENDERS, 0), progress=True)
        self.fine: torch.Tensor | None = None

    def features_distance(self, pictures: np.ndarray) -> dict[str, float]:
        return {"kernel": kernel_distance(self.network(pictures), self.real)}

    def __call__(self, latents: torch.Tensor, trajectory: bool) -> dict:
        pictures = [self.pipe.decode(latent) for latent in latents]
        found = self.classifier.predict(pictures)
        hits = sum(all(f[m] == w[m] for m in CORE) for f, w in zip(found, self.wanted))
        low, high = wilson(hits, len(pictures))
        out = {
            "as_asked": hits / len(pictures),
            "low": low,
            "high": high,
            **self.features_distance(np.concatenate(pictures)),
        }
        if trajectory and self.fine is not None:
            rms = (latents - self.fine).square().mean((1, 2, 3, 4)).sqrt() / self.pipe.config.model.sigma_data
            out["distance"] = float(rms.median())
        return out


def measure(pipe: Pipeline, judge: Judge, prompts: list[str]) -> dict:
    def latents(**settings) -> torch.Tensor:
        return pipe.sample_latents([Request(p, index=i, **SETTINGS, **settings) for i, p in enumerate(prompts)])

    total = REFERENCE["num_steps"] + sum(n for _, _, n in CELLS)
    cells = []
    with tqdm(total=total, unit="evaluation", desc="sampler quality") as bar:
        fine = latents(**REFERENCE)
        result = {"reference": judge(fine, trajectory=False)}
        judge.fine = fine
        bar.update(REFERENCE["num_steps"])
        for sampler, schedule, budget in CELLS:
            steps = steps_for(sampler, budget)
            deterministic = not SAMPLERS[sampler].stochastic
            measured = judge(latents(sampler=sampler, schedule=schedule, num_steps=steps), deterministic)
            spent = evaluations(sampler, steps)
            cells.append({"sampler": sampler, "schedule": schedule, "steps": steps, "evaluations": spent, **measured})
            bar.update(budget)
    return {**result, "cells": cells, "real": judge.features_distance(renders(judge.wanted, len(prompts), 10_000))}


# ---- table and picture --------------------------------------------------------------------------------------------


def row(name: str, spent: int | str, m: dict) -> str:
    distance = f"{m['distance']:.3f}" if "distance" in m else ""
    asked = f"{m['as_asked']:.0%} ({m['low']:.0%} - {m['high']:.0%})" if "as_asked" in m else ""
    return f"| {name} | {spent} | {distance} | {asked} | {1000 * m['kernel']:.0f} |"


def table(result: dict) -> str:
    lines = [
        "# Samplers on the demo's model: quality against network evaluations",
        "",
        f"Written by `benchmarks/sampler_quality.py`: {result['num_prompts']} unseen attribute combinations, guidance "
        f"{SETTINGS['guidance']:g}, the same noise in every row.",
        "",
        "| sampler, schedule | evaluations | distance to the fine solution / sigma_data "
        "| all three attributes as asked | kernel distance x 1000 |",
        "|---|---|---|---|---|",
    ]
    lines += [row(f"{c['sampler']}, {c['schedule']}", c["evaluations"], c) for c in result["cells"]]
    lines.append(row("fine solution: unipc, karras", REFERENCE["num_steps"], result["reference"]))
    lines.append(row("real renders against other real renders", "", result["real"]))
    return "\n".join([*lines, "", *findings(result), ""])


def at(result: dict, sampler: str, spent: int, schedule: str = "karras") -> dict:
    """The cell with the most evaluations that are not more than `spent`."""
    fits = [
        c for c in result["cells"] if (c["sampler"], c["schedule"]) == (sampler, schedule) and c["evaluations"] <= spent
    ]
    return max(fits, key=lambda c: c["evaluations"])


def findings(result: dict) -> list[str]:
    """Who reaches the distance of 35 Heun steps, and with how many evaluations."""
    goal = at(result, "heun", 70)
    out = [
        f"35 Heun steps ({goal['evaluations']} evaluations) end {goal['distance']:.3f} sigma_data "
        "from the fine solution.",
        "",
    ]
    for sampler in ("dpmpp_2m", "unipc"):
        for schedule in ("karras", "focused"):
            cells = [c for c in result["cells"] if (c["sampler"], c["schedule"]) == (sampler, schedule)]
            fewest = min((c["evaluations"] for c in cells if c["distance"] <= goal["distance"]), default=None)
            twenty = at(result, sampler, 20, schedule)["distance"]
            none = f"none of the measured {', '.join(str(c['evaluations']) for c in cells)} is as near"
            said = f"the first measured budget that is as near is {fewest}" if fewest else none
            out.append(f"- {sampler}, {schedule}: {twenty:.3f} with 20 evaluations; {said}.")
    return out


def draw(result: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), dpi=90, layout="constrained")
    panels = figure.subplots(1, 3)
    lines: dict[tuple[str, str], list[dict]] = {}
    for c in result["cells"]:
        lines.setdefault((c["sampler"], c["schedule"]), []).append(c)
    names = list(dict.fromkeys(sampler for sampler, _ in lines))
    for (sampler, schedule), cells in lines.items():
        colour, style = PALETTE[names.index(sampler)], "--" if schedule == "focused" else "-"
        for axes, key in zip(panels, ("distance", "as_asked", "kernel")):
            if key in cells[0]:
                axes.plot(
                    [c["evaluations"] for c in cells],
                    [c[key] for c in cells],
                    style,
                    marker="o",
                    markersize=4,
                    color=colour,
                    linewidth=1.5,
                    label=f"{sampler}, {schedule}",
                )
    reference, real = result["reference"], result["real"]
    panels[1].axhspan(reference["low"], reference["high"], color="#eeeeee", zorder=0)
    panels[1].axhline(
        reference["as_asked"], color="#666666", linewidth=0.8, linestyle=":", label="fine solution, 95 % interval"
    )
    panels[2].axhline(reference["kernel"], color="#666666", linewidth=0.8, linestyle=":")
    panels[2].axhline(real["kernel"], color="#666666", linewidth=0.8, linestyle="--")
    panels[2].annotate("real renders", (5, real["kernel"]), va="bottom", fontsize=8, color="#444444")
    titles = (
        "distance to the fine solution / sigma_data",
        "share with all attributes as asked",
        "kernel distance to real renders",
    )
    for axes, title in zip(panels, titles):
        axes.set(xscale="log", xlabel="network evaluations", title=title)
        axes.set_xticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", linewidth=0.6)
    panels[0].set(yscale="log")
    panels[1].set(ylim=(0, 1))
    panels[2].set(ylim=(0, None))
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint-path", required=True)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.monotonic()
    pipe = Pipeline.from_checkpoint(args.checkpoint_path, mixed_precision="fp32")
    wanted = unseen_attributes(args.num_prompts, "still")
    judge = Judge(pipe, wanted, AttributeClassifier.load(), features.Features())
    result = measure(pipe, judge, [synthetic.caption_for(a, template=i) for i, a in enumerate(wanted)])
    result |= {"num_prompts": args.num_prompts, "settings": SETTINGS, "elapsed_s": round(time.monotonic() - started)}
    result["machine"] = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    (args.output_dir / "sampler_quality.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.output_dir / "sampler_quality.md").write_text(table(result))
    draw(result, args.output_dir / "sampler_quality.png")
    print(table(result))
    parallel.shutdown()


if __name__ == "__main__":
    main()
