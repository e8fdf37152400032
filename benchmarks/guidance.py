"""Do a negative prompt and a guidance interval change what a trained model samples, and in the right direction?

    python benchmarks/guidance.py --checkpoint-path runs/demo/train [--num-prompts 128] [--repeats 3]

It needs a checkpoint trained on the synthetic set (`scripts/demo.py` makes one). It writes guidance.json, guidance.md
and guidance.png; the picture shows the first samples of each negative prompt, from the same noise.

A classifier fitted on real renders reads colour, background and pattern off each sample. Frequencies come with 95 %
Wilson intervals, their differences with Newcombe's interval. The arms of a comparison share prompts and starting
noise.

1. Negative prompt: the prompt names no background; the negative prompt is "in the sky" or "over a meadow". The
   background that the negative prompt names should become rarer.
2. Guidance interval: the prompt names colour, background and pattern, in combinations that training never showed.
   Guidance should raise the share sampled as asked. Where it acts only below sigma 0.1, when all is decided, it should
   not. Between 0.1 and 10 it should do as much as everywhere.

Cost: 7 arms of `--repeats` times `--num-prompts` images with 15 evaluations of DPM-Solver++(2M). Where guidance acts,
an evaluation takes each sample twice.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path

import torch

from dfm_nb import parallel
from dfm_nb.base import video
from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation.attributes import CORE, unseen_attributes, wilson
from dfm_nb.evaluation.judge import AttributeClassifier
from dfm_nb.generate import Request
from dfm_nb.generation.pipeline import Pipeline

SETTINGS = {"height": 64, "width": 64, "num_steps": 15, "sampler": "dpmpp_2m", "seed": 5}
STRONG = 3.0


def newcombe(a: tuple[int, int], b: tuple[int, int]) -> tuple[float, float, float]:
    """Difference a - b of two shares (successes, trials) and its 95 % interval (Newcombe 1998, method 10)."""
    (p, q), (la, ua), (lb, ub) = (a[0] / a[1], b[0] / b[1]), wilson(*a), wilson(*b)
    d = p - q
    return d, d - math.hypot(p - la, ub - q), d + math.hypot(ua - p, q - lb)


def without_background(attributes: dict[str, str]) -> str:
    return synthetic.with_articles(f"A {attributes['colour']} {attributes['species']} butterfly, seen from above.")


def draw(pipe: Pipeline, prompts: list[str], name: str, **settings) -> list:
    requests = [Request(p, index=i, **{**SETTINGS, **settings}) for i, p in enumerate(prompts)]
    started = time.monotonic()
    done = dict(pipe.run(requests, batch_size=32, progress=True))
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    return [done[i].frames for i in range(len(prompts))]


def negative_prompts(pipe: Pipeline, judge, wanted: list[dict[str, str]], sheet: list) -> dict:
    """Frequencies of backgrounds that no prompt names, by negative prompt; the first samples of each go to `sheet`."""
    prompts, arms = [without_background(a) for a in wanted], {}
    for name, negative in (
        ("none", ""),
        ("in the sky", "A butterfly in the sky."),
        ("over a meadow", "A butterfly over a meadow."),
    ):
        drawn = draw(pipe, prompts, f"negative prompt {name}", guidance=STRONG, negative_prompt=negative)
        sheet += [(frames, f"negative prompt {name}: {p}") for frames, p in zip(drawn[:8], prompts)]
        found = judge.predict(drawn)
        arms[name] = {b: sum(f["background"] == b for f in found) for b in synthetic.BACKGROUNDS}
    return arms


def intervals(pipe: Pipeline, judge, wanted: list[dict[str, str]]) -> dict:
    """Samples with colour, background and pattern all as asked, and each, by where guidance acts."""
    prompts, arms = [synthetic.caption_for(a, template=i) for i, a in enumerate(wanted)], {}
    for name, settings in (
        ("no guidance", {"guidance": 1.0}),
        ("everywhere", {"guidance": STRONG}),
        ("0.1 < sigma <= 10", {"guidance": STRONG, "guidance_interval": (0.1, 10.0)}),
        ("sigma <= 0.1", {"guidance": STRONG, "guidance_interval": (0.0, 0.1)}),
    ):
        found = judge.predict(draw(pipe, prompts, name, **settings))
        arms[name] = {m: sum(f[m] == w[m] for f, w in zip(found, wanted)) for m in CORE}
        arms[name]["all"] = sum(all(f[m] == w[m] for m in CORE) for f, w in zip(found, wanted))
    return arms


def share(k: int, n: int) -> str:
    low, high = wilson(k, n)
    return f"{k / n:.1%} ({low:.0%} - {high:.0%})"


def comparisons(negative: dict, interval: dict, n: int) -> list[dict]:
    """Each expectation with the difference measured and whether its interval leaves out 0 on the expected side."""
    rows = []
    for background, arm in (("sky", "in the sky"), ("meadow", "over a meadow")):
        rows.append(
            (
                f"negative prompt '{arm}' makes {background} rarer",
                "below",
                (negative[arm][background], n),
                (negative["none"][background], n),
            )
        )
    base = (interval["no guidance"]["all"], n)
    rows.append(
        ("guidance everywhere: more drawn as asked than without", "above", (interval["everywhere"]["all"], n), base)
    )
    rows.append(
        ("guidance in 0.1 < sigma <= 10: more than without", "above", (interval["0.1 < sigma <= 10"]["all"], n), base)
    )
    rows.append(
        (
            "guidance in 0.1 < sigma <= 10: more than below 0.1",
            "above",
            (interval["0.1 < sigma <= 10"]["all"], n),
            (interval["sigma <= 0.1"]["all"], n),
        )
    )
    out = []
    for text, side, a, b in rows:
        d, low, high = newcombe(a, b)
        shown = high < 0 if side == "below" else low > 0
        out.append({"expected": text, "difference": d, "low": low, "high": high, "shown": shown})
    return out


def table(result: dict) -> str:
    n = result["samples"]
    backgrounds = synthetic.BACKGROUNDS
    lines = [f"Negative prompt (guidance {STRONG:g}, {n} samples; prompts name no background)", ""]
    lines += ["| negative prompt | " + " | ".join(backgrounds) + " |", "|---|" + "---|" * len(backgrounds)]
    lines += [
        f"| {arm} | " + " | ".join(share(c[b], n) for b in backgrounds) + " |" for arm, c in result["negative"].items()
    ]
    lines += ["", f"Where guidance {STRONG:g} acts ({n} samples; unseen combinations, found as asked)", ""]
    lines += ["| guidance | colour | background | pattern | all three |", "|---|---|---|---|---|"]
    lines += [
        f"| {arm} | " + " | ".join(share(c[m], n) for m in (*CORE, "all")) + " |"
        for arm, c in result["interval"].items()
    ]
    lines += ["", "| expected | difference (95 % interval) | shown |", "|---|---|---|"]
    lines += [
        f"| {c['expected']} | {c['difference']:+.1%} ({c['low']:+.1%} to {c['high']:+.1%}) "
        f"| {'yes' if c['shown'] else 'no'} |"
        for c in result["comparisons"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint-path", required=True)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="samples of each prompt, each from its own noise")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    pipe = Pipeline.from_checkpoint(args.checkpoint_path)
    judge = AttributeClassifier.load()
    wanted = unseen_attributes(args.num_prompts, "still") * args.repeats
    sheet: list = []
    negative, interval = negative_prompts(pipe, judge, wanted, sheet), intervals(pipe, judge, wanted)
    result = {
        "num_prompts": args.num_prompts,
        "samples": len(wanted),
        "guidance": STRONG,
        "settings": SETTINGS,
        "negative": negative,
        "interval": interval,
        "comparisons": comparisons(negative, interval, len(wanted)),
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
    }
    (args.output_dir / "guidance.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.output_dir / "guidance.md").write_text(table(result))
    pictures, captions = zip(*sheet)
    video.write_png(args.output_dir / "guidance.png", video.contact_sheet(list(pictures), list(captions), columns=8))
    print(table(result))
    parallel.shutdown()


if __name__ == "__main__":
    main()
