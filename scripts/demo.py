"""The demo: prepare, train on two processes, measure, generate; finished stages are skipped, so it can be run again.

python scripts/demo.py [--run-dir runs/demo]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dfm_nb.doctor import fast_bf16

PROMPTS = (
    "A spotted blue swallowtail flapping its wings over a meadow, seen from above.",
    "A plain orange monarch flapping its wings in the sky, seen from above.",
    "A striped pink longwing flapping its wings over sand, tilted to the left.",
    "An eyespotted yellow morpho flapping its wings at night, seen from above.",
)
DRAW = ["--num-steps", "18", "--guidance", "2", "--fps", "12", "--num-video-frames", "9", "--seed", "1"]
FAST_BF16 = fast_bf16()
IMAGES, CLIPS = (12000, 4200) if FAST_BF16 else (8000, 2800)  # as many as the minutes of training can use
IMAGES_DRAWN, CLIPS_DRAWN = 156, 156
BF16 = [
    "mixed_precision=bf16",
    "dataset.task_encoder_seq_length=1024",
    "train.train_iters=1600",
    "train.eval_interval=800",
    "checkpoint.save_interval=800",
    "optimizer.weight_decay=4",
]
"""What differs from the recipe where the CPU multiplies bfloat16 in hardware: the same minutes hold twice the tokens."""


def dfm(*argv: object) -> list[str]:
    return [sys.executable, "-m", "dfm_nb", *map(str, argv)]


class Demo:
    def __init__(self, run_dir: Path):
        self.run = run_dir
        self.data, self.train, self.out = run_dir / "data", run_dir / "train", run_dir / "samples"
        self.times = run_dir / "times.json"

    def stage(self, name: str, about: str, done: Path, *commands: list[str]) -> None:
        """Run commands unless `done` exists; remember how long they took."""
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

    def main(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        print(
            "dfm_nb demo on 2 processes. Estimate on 2 idle CPU cores: prepare 2 min, train 6 to 7 min, measure and draw 2 min.\n"
            + (
                f"This CPU multiplies bfloat16 in hardware: training with {' '.join(BF16)}"
                if FAST_BF16
                else "Training in float32."
            ),
            flush=True,
        )
        prepare = dfm(
            "prepare",
            "--source",
            "synthetic:square",
            "--tokenizer",
            "residual",
            "--num-images",
            IMAGES,
            "--num-clips",
            CLIPS,
            "--output-dir",
            self.data,
            "--nproc-per-node",
            2,
            "--resume",
        )
        self.stage("prepare", "procedural butterflies -> latents -> shards", self.data / "manifest.json", prepare)
        train = dfm(
            "pretrain",
            "--nproc-per-node",
            2,
            "--recipe",
            "demo",
            "--dataset-path",
            self.data,
            "--run-dir",
            self.train,
            *(BF16 if FAST_BF16 else []),
        )
        self.stage(
            "train",
            "a small DiT with torchrun",
            self.train / "checkpoints" / "done",
            train,
            ["touch", str(self.train / "checkpoints" / "done")],
        )
        evaluate = dfm(
            "evaluate",
            "--checkpoint-path",
            self.train,
            "--num-prompts",
            IMAGES_DRAWN,
            "--num-clips",
            CLIPS_DRAWN,
            "--output",
            self.run / "evaluation.json",
            "--contact-sheet",
            self.run / "contact_sheet.png",
        )
        self.stage("measure", f"{IMAGES_DRAWN} unseen attribute combinations", self.run / "evaluation.json", evaluate)
        self.out.mkdir(exist_ok=True)
        draw = [
            dfm(
                "generate",
                "--checkpoint-path",
                self.train,
                "--prompt",
                p,
                *DRAW,
                "--overwrite",
                "--video-save-path",
                self.out / f"{i}.mp4",
            )
            for i, p in enumerate(PROMPTS)
        ]
        self.stage("generate", "one mp4 per prompt", self.out / f"{len(PROMPTS) - 1}.mp4.json", *draw)
        shutil.copyfile(self.train / "loss.png", self.run / "loss.png")
        self.summary()

    def summary(self) -> None:
        from dfm_nb.base.metrics import read_metrics
        from dfm_nb.evaluate import table

        result, times = json.loads((self.run / "evaluation.json").read_text()), json.loads(self.times.read_text())
        manifest = json.loads((self.data / "manifest.json").read_text())
        records = [r for r in read_metrics(self.train / "metrics.jsonl") if "loss" in r]
        head = sum(r["loss"] for r in records[:20]) / 20
        tail = sum(r["loss"] for r in records[-50:]) / 50
        lines = [
            "# Demo summary",
            "",
            f"Data: {manifest['counts']['samples']} butterflies; tokenizer PSNR on held-out samples: "
            + ", ".join(f"{k} {v:.1f} dB" for k, v in manifest["psnr_db"].items() if k != "split")
            + ".",
            "",
            f"Training: {len(records)} iterations, loss {head:.3f} (first 20) to {tail:.3f} (last 50), "
            f"{records[-1]['samples']} samples seen.",
            "",
            "## Does the model obey its captions?",
            "",
            "On attribute combinations (colour, pattern, background) that training never saw:",
            "",
            table(result),
            "",
            "## Times",
            "",
            *[f"- {name}: {s:.0f} s" for name, s in times.items()],
            "",
            "## Pictures",
            "",
            "![contact sheet](contact_sheet.png)",
            "",
            "![loss](loss.png)",
            "",
            *[f"- [{p}](samples/{i}.mp4)" for i, p in enumerate(PROMPTS)],
            "",
        ]
        (self.run / "summary.md").write_text("\n".join(lines))
        print("\n".join(lines[:14] + lines[14:]), flush=True)
        print(f"== see {self.run}/summary.md, contact_sheet.png, loss.png and samples/*.mp4")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/demo", type=Path)
    Demo(parser.parse_args().run_dir).main()
