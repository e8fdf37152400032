"""Error of every sampler against network evaluations, on Gaussian mixtures with the exact denoiser.

    python benchmarks/samplers.py [--num-samples 1000]

Targets and starts are seeded. Error is the distance of each sample to the end of its own exact trajectory (a reference
run of 4,000 steps), per dimension and divided by the data's standard deviation; the median over starts, so that the few
starts on a watershed between two modes do not decide, and the root mean square, which they dominate. Orders are
measured on one Gaussian, whose flow is known in closed form. The focus of the schedule "focused" was chosen on the
first two targets; no choice was made on the third. Writes samplers.{json,md}; a minute or two.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import report
from dfm_nb.diffusion.samplers import SAMPLERS, SCHEDULES, evaluations, karras_sigmas, sample_unipc

SIGMA_MAX = 80.0
BUDGETS = (9, 15, 19, 21, 25, 31, 39, 49, 69, 99, 139)
PLAIN_BUDGETS = (10, 15, 20, 25, 30, 40, 50, 70, 100, 140)
DETERMINISTIC = [name for name, sampler in SAMPLERS.items() if not sampler.stochastic]
BASELINE = ("heun", "karras", 35)
"""Sampler, schedule and steps."""


# ---- mixtures with a known answer ---------------------------------------------------------------------------------


class Mixture:
    """Equal-weight isotropic Gaussians with a closed-form denoiser and score.

    Parameters
    ----------
    means : [K, D]; tau : standard deviation of each component.
    """

    def __init__(self, name: str, means: Tensor, tau: float):
        self.name, self.means, self.tau = name, means, tau
        self.sigma_data = math.sqrt((means - means.mean(0)).pow(2).mean().item() + tau**2)

    def denoise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """E[y | x]: each component's posterior mean, weighted by its posterior probability."""
        v = self.tau**2 + float(sigma) ** 2
        weights = (-torch.cdist(x, self.means).square() / (2 * v)).softmax(-1)
        return (self.tau**2 / v) * x + (1 - self.tau**2 / v) * (weights @ self.means)


def targets() -> list[Mixture]:
    angles = torch.arange(8, dtype=torch.float64) * (2 * math.pi / 8)
    ring = torch.stack([angles.cos(), angles.sin()], 1) * 0.67
    cloud = torch.randn(100, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.43
    bunch = torch.randn(30, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 0.47
    return [
        Mixture("ring: 8 modes in 2-D", ring, 0.15),
        Mixture("cloud: 100 modes in 64-D", cloud, 0.25),
        Mixture("bunch: 30 modes in 16-D (held out)", bunch, 0.17),
    ]


def steps_for(name: str, budget: int) -> int:
    """The most steps that cost no more than `budget` evaluations."""
    return max(1, (budget + 1) // 2 if SAMPLERS[name].evaluations_per_step == 2 else budget)


def error_table(target: Mixture, num_samples: int, progress: tqdm) -> dict[str, dict[str, dict[int, dict[str, float]]]]:
    """{sampler: {schedule: {evaluations: {median, rms}}}}."""
    g = torch.Generator().manual_seed(7)
    x = SIGMA_MAX * torch.randn(num_samples, target.means.shape[1], generator=g, dtype=torch.float64)
    reference = sample_unipc(target.denoise, x, karras_sigmas(2000))
    progress.update()
    scale = target.sigma_data * math.sqrt(x.shape[1])
    table: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for name in DETERMINISTIC:
        for schedule, sigmas in SCHEDULES.items():
            row = table.setdefault(name, {}).setdefault(schedule, {})
            for budget in BUDGETS if SAMPLERS[name].evaluations_per_step == 2 else (*range(10, 41), *PLAIN_BUDGETS[6:]):
                steps = steps_for(name, budget)
                out = SAMPLERS[name](target.denoise, x, sigmas(steps))
                error = (out - reference).norm(dim=1) / scale
                row[evaluations(name, steps)] = {
                    "median": float(f"{error.median().item():.4g}"),
                    "rms": float(f"{error.square().mean().sqrt().item():.4g}"),
                }
            progress.update()
    return table


def measured_orders() -> dict[str, float]:
    """Slope of log error against log steps on N(0, 0.5^2), between 80 and 160 steps, at sigma_min."""
    sd, x = 0.5, SIGMA_MAX * torch.randn(256, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact = x * math.sqrt((0.002**2 + sd**2) / (SIGMA_MAX**2 + sd**2))

    def denoise(z: Tensor, sigma: Tensor) -> Tensor:
        return sd**2 / (sd**2 + sigma**2) * z

    def error(sampler: Callable[..., Tensor], steps: int) -> float:
        return (sampler(denoise, x, karras_sigmas(steps)[:-1]) - exact).norm().item()

    return {name: math.log2(error(SAMPLERS[name], 80) / error(SAMPLERS[name], 160)) for name in DETERMINISTIC}


def evaluations_needed(row: dict[int, dict[str, float]], goal: float, measure: str) -> int | None:
    """The fewest evaluations from which on every measured budget is at least as accurate as `goal`."""
    needed = None
    for count in sorted(row, reverse=True):
        if row[count][measure] > goal:
            break
        needed = count
    return needed


def markdown(results: dict) -> str:
    lines = ["# Samplers: error against network evaluations", "", "Written by `benchmarks/samplers.py`.", ""]
    orders = [[name, f"{order:.2f}"] for name, order in results["orders"].items()]
    lines.append(report.table(["sampler", "order measured on a Gaussian"], orders))
    shown = [n for n in PLAIN_BUDGETS if n not in (50, 100)]
    for target in results["targets"]:
        goal, rows = target["goal"], []
        for name, by_schedule in target["errors"].items():
            for schedule, row in by_schedule.items():
                most = [max(n for n in row if n <= budget) for budget in shown]
                needed = [target["needed"][name][schedule][m] or "> 140" for m in ("median", "rms")]
                rows.append([name, schedule, *(f"{row[n]['median']:.1e}" for n in most), *needed])
        lines += [
            "",
            f"## {target['name']}",
            "",
            f"Goal: Heun, Karras schedule, 35 steps = 69 evaluations: median {goal['median']:.2e}, rms "
            f"{goal['rms']:.2e} of the data's standard deviation. Entries are medians; a column shows the budget that "
            "is spent at most.",
            "",
            report.table(["sampler", "schedule", *shown, "needed (median)", "needed (rms)"], rows),
        ]
    return "\n".join([*lines, "", *results["findings"]])


def findings(targets_: list[dict]) -> list[str]:
    """A sentence a target and sampler in question: does it reach the goal with 20 evaluations?"""
    out = [
        "## Do 20 evaluations reach the error of 35 Heun steps?",
        "",
        "In brackets the best schedule for the sampler at 20 evaluations.",
        "",
    ]
    for target in targets_:
        for name in ("dpmpp_2m", "unipc_2", "unipc"):
            best = min(SCHEDULES, key=lambda s: target["errors"][name][s][20]["median"])
            error, goal = target["errors"][name][best][20]["median"], target["goal"]["median"]
            needed = [target["needed"][name][best][m] or "more than 140" for m in ("median", "rms")]
            verdict = "yes" if error <= goal else "no"
            out.append(
                f"- {target['name']}, {name} ({best}): {verdict}; median error at 20 is {error:.1e}, "
                f"the goal {goal:.1e}; {needed[0]} evaluations suffice for the median, {needed[1]} for the rms."
            )
        strict = target["errors"]["heun"]["focused"][69]["median"]
        needed = evaluations_needed(target["errors"]["unipc"]["focused"], strict, "median")
        out.append(
            f"- {target['name']}: Heun gains from the focused schedule too ({strict:.1e} after 35 steps); "
            f"unipc on it gets there with {needed} evaluations."
        )
    return out


def on_mixtures(num_samples: int) -> dict:
    results: dict = {"orders": measured_orders(), "targets": []}
    runs = len(targets()) * (1 + len(DETERMINISTIC) * len(SCHEDULES))
    with tqdm(total=runs, desc="samplers", disable=None) as progress:
        for target in targets():
            errors = error_table(target, num_samples, progress)
            name, schedule, steps = BASELINE
            goal = errors[name][schedule][evaluations(name, steps)]
            needed = {
                n: {s: {m: evaluations_needed(row, goal[m], m) for m in ("median", "rms")} for s, row in by.items()}
                for n, by in errors.items()
            }
            results["targets"].append({"name": target.name, "goal": goal, "errors": errors, "needed": needed})
    return results | {"findings": findings(results["targets"])}


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__, num_samples=(1000, "starts per target"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = {"machine": report.machine()} | on_mixtures(args.num_samples)
    report.save("samplers", result, markdown(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
