"""The demo: prepare, train on two processes, measure, generate; a second run skips finished stages.

python scripts/demo.py [--run-dir runs/demo]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dfm_nb.base.machine import fast_bf16

PROMPTS = (
    "A spotted blue swallowtail flapping its wings over a meadow, seen from above.",
    "A plain orange monarch flapping its wings in the sky, seen from above.",
    "A striped pink longwing flapping its wings over sand, tilted to the left.",
    "An eyespotted yellow morpho flapping its wings at night, seen from above.",
)
IMAGES, CLIPS = 12_000, 4_200
MEASURED = 156
"""Number of unseen attribute combinations for images, and for clips."""


def dfm(verb: str, *flags: str, **settings: object) -> list[str]:
    """A command: `dfm("prepare", "--resume", num_images=8)` is `dfm prepare --resume --num-images 8`."""
    named = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "dfm_nb", verb, *flags, *named]


class Stages:
    """Commands with results in `run_dir`; `times.json` there has the time of each stage."""

    def __init__(self, run_dir: Path):
        self.run, self.times = run_dir, run_dir / "times.json"
        self.run.mkdir(parents=True, exist_ok=True)

    def stage(self, name: str, about: str, done: Path, *commands: list[str]) -> None:
        """Run commands unless `done` exists, and record their time."""
        if done.exists():
            print(f"== {name}: already done ({done})", flush=True)
            return
        print(f"== {name}: {about}", flush=True)
        started = time.monotonic()
        for command in commands:
            threads = "1" if "--nproc-per-node" in command else "2"  # of each process
            code = subprocess.call(command, env={"OMP_NUM_THREADS": threads, **os.environ})
            if code:
                raise SystemExit(f"{name} failed with exit code {code}: {' '.join(command)}")
        times = json.loads(self.times.read_text()) if self.times.exists() else {}
        times[name] = times.get(name, 0.0) + time.monotonic() - started
        self.times.write_text(json.dumps(times))
        print(f"== {name}: {times[name]:.0f} s", flush=True)


class Demo(Stages):
    """The stages, in `run_dir`: data/, train/, samples/, evaluation.json, summary.md."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        self.data, self.train, self.out = run_dir / "data", run_dir / "train", run_dir / "samples"
        # a float32 step takes twice as long: fewer keep the demo below ten minutes
        self.settings = [] if fast_bf16() else ["train.train_iters=1100", "optimizer.weight_decay=6"]

    def main(self) -> None:
        """Run the four stages and write the summary."""
        self.out.mkdir(exist_ok=True)
        print(
            "dfm_nb demo on 2 processes. Estimate on 2 idle CPU cores: prepare 1.5 to 2 min, train 5 to 9 min, measure "
            "and generate 2 to 3 min.",
            flush=True,
        )
        prepare = dfm(
            "prepare",
            "--resume",
            source="synthetic:square",
            tokenizer="residual",
            num_images=IMAGES,
            num_clips=CLIPS,
            shard_size=IMAGES,  # a shard of each process: equal captions of a shard are encoded once
            output_dir=self.data,
            nproc_per_node=2,
        )
        self.stage("prepare", "procedural butterflies -> latents -> shards", self.data / "manifest.json", prepare)
        train = dfm("pretrain", recipe="demo", dataset_path=self.data, run_dir=self.train, nproc_per_node=2)
        trained = self.train / "checkpoints" / "done"
        self.stage("train", "a small DiT with torchrun", trained, [*train, *self.settings], ["touch", str(trained)])
        result = self.run / "evaluation.json"
        evaluate = dfm(
            "evaluate",
            "--distances",
            checkpoint_path=self.train,
            part="test",
            wordings=56,
            num_prompts=MEASURED,
            num_clips=MEASURED,
            output=result,
            contact_sheet=self.run / "contact_sheet.png",
        )
        self.stage("measure", f"{MEASURED} unseen attribute combinations", result, evaluate)
        generate = [
            dfm(
                "generate",
                "--overwrite",
                checkpoint_path=self.train,
                prompt=prompt,
                fps=12,
                num_video_frames=9,
                seed=1,
                video_save_path=self.out / f"{i}.mp4",
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        self.stage("generate", "one mp4 per prompt", self.out / f"{len(PROMPTS) - 1}.mp4.json", *generate)
        shutil.copyfile(self.train / "loss.png", self.run / "loss.png")
        self.summary()

    def summary(self) -> None:
        """Write `summary.md`, and print it."""
        from dfm_nb.base.metrics import read_metrics
        from dfm_nb.measure.results import table

        result, times = json.loads((self.run / "evaluation.json").read_text()), json.loads(self.times.read_text())
        manifest = json.loads((self.data / "manifest.json").read_text())
        psnr = ", ".join(f"{k} {v:.1f} dB" for k, v in manifest["psnr_db"].items() if isinstance(v, float))
        records = [r for r in read_metrics(self.train / "metrics.jsonl") if "loss" in r]
        head = sum(r["loss"] for r in records[:20]) / 20
        tail = sum(r["loss"] for r in records[-50:]) / 50
        stages = "\n".join(f"- {name}: {s:.0f} s" for name, s in times.items())
        clips = "\n".join(f"- [{p}](samples/{i}.mp4)" for i, p in enumerate(PROMPTS))
        text = f"""# Demo summary

Data: {manifest["counts"]["samples"]} butterflies; tokenizer PSNR on held-out samples: {psnr}.

Training: {len(records)} iterations, loss {head:.3f} (first 20) to {tail:.3f} (last 50), {records[-1]["samples"]} \
samples seen.

## Does the model follow its captions?

On attribute combinations that training never saw, half of them a colour that never had that pattern:

{table(result)}

## Times

{stages}

## Pictures

![contact sheet](contact_sheet.png)

![loss](loss.png)

{clips}
"""
        (self.run / "summary.md").write_text(text)
        print(text, flush=True)
        print(f"== see {self.run}/summary.md, contact_sheet.png, loss.png and samples/*.mp4")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/demo", type=Path)
    Demo(parser.parse_args().run_dir).main()
