"""Twenty pictures of one style: is it better to train from `drawings` than from scratch, or from `butterflies`?

    python benchmarks/few_pictures.py --table runs/drawings/table [--iterations 1000]

The table is that of `scripts/drawings_table.py`. Of its held-out drawings, which no packaged network has seen, 20 are
trained on and 60 others asked for, all as ink drawings (dark lines on paper). The recipe `finetune` trains adapters of
a packaged model; from scratch the recipe `demo_bf16` trains its own network on the same packs. Judged is, for the 60
captions, the share of samples whose nearest of 20 ink drawings is that of their caption, and the kernel distance to
all 60.

Writes benchmarks/results/few_pictures.{json,md,png}; in the PNG each row shows an ink drawing and the samples.
"""

from __future__ import annotations

import io
import resource
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image, ImageFilter, ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from dfm_nb import Pipeline, prepare_dataset
from dfm_nb.base.plots import plot_pictures
from dfm_nb.evaluation.distance import kernel_estimate
from dfm_nb.evaluation.features import Features
from dfm_nb.evaluation.retrieval import retrieval

TRAINED, ASKED, SHOWN, SIZE_PX = 20, 60, 8, 64
STARTS = {
    "from drawings": ["--recipe", "finetune", "checkpoint.pretrained=drawings"],
    "from butterflies": ["--recipe", "finetune", "checkpoint.pretrained=butterflies"],
    "from scratch": ["--recipe", "demo_bf16", "optimizer.weight_decay=0.5", "train.global_batch_size=1"],
}
COMMON = ["dataset.task_encoder_seq_length=512", "dataset.use_train_split_for_val=true", "train.eval_interval=0"]


def ink(data: bytes) -> Image.Image:
    """A drawing as dark lines on paper, SIZE_PX square."""
    rgba = ImageOps.pad(Image.open(io.BytesIO(data)).convert("RGBA"), (128, 128))
    grey = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("L")
    lines = ImageOps.invert(
        ImageOps.expand(grey, 4, 255).filter(ImageFilter.FIND_EDGES).filter(ImageFilter.MaxFilter(3))
    )
    paper = ImageOps.colorize(ImageOps.autocontrast(lines, cutoff=1), (40, 28, 20), (244, 236, 214))
    return paper.crop((2, 2, 134, 134)).resize((SIZE_PX, SIZE_PX), Image.Resampling.BOX)


def text(result: dict) -> str:
    head = ["20 ink drawings", "CPU seconds", "nearest of 20 (chance 5 %)", "KID x 1000"]
    rows = []
    for name, arm in result["arms"].items():
        share, apart = ([100 * arm["retrieval"][k] for k in ("value", "low", "high")], arm["kernel_distance"])
        rows.append(
            [name, f"{arm['cpu_s']:.0f}", "{:.0f} % ({:.0f} - {:.0f})".format(*share), f"{1000 * apart['value']:.0f}"]
        )
    about = f"{report.sentence(result['machine'])}. {result['iterations']} iterations, one seed."
    picture = "![ink drawings of unseen captions, and samples](few_pictures.png)"
    return f"{about}\n\n{report.table(head, rows)}\n\n{picture}"


def main() -> None:
    parser = report.arguments(__doc__, table=("runs/drawings/table", "of drawings_table.py"), iterations=1000)
    args = parser.parse_args()
    rows = pd.read_parquet(Path(args.table) / "test.parquet").drop_duplicates("caption").sample(frac=1, random_state=0)
    rows = rows.assign(image=[ink(data) for data in rows["image"]], caption="An ink drawing: " + rows["caption"])
    own, asked = rows[:TRAINED][["image", "caption"]], rows[TRAINED : TRAINED + ASKED]
    network, real = Features(), np.stack([np.asarray(image) for image in asked["image"]])
    of_real, made = network(real), [real]
    result: dict = {"machine": report.machine(), "iterations": args.iterations, "arms": {}}
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "data"))
        options = {"tokenizer": "residual", "short_side": SIZE_PX, "val_fraction": 0.0}
        prepare_dataset(own, output_dir=data, **options)
        for name, start in STARTS.items():
            run = Path(folder, name.replace(" ", "-"))
            ends = [f"{key}={args.iterations}" for key in ("train.train_iters", "checkpoint.save_interval")]
            words = ["-m", "dfm_nb", "pretrain", *start, "--dataset-path", data, "--run-dir", run, *COMMON, *ends]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            report.of_process(words)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            size = {"num_video_frames": 1, "height": SIZE_PX, "width": SIZE_PX}
            clips = Pipeline.from_checkpoint(str(run))(list(asked["caption"]), seed=1, guidance=2.0, **size)
            made.append(np.stack([clip.frames[0] for clip in clips]))
            features = network(made[-1])
            result["arms"][name] = {
                "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                "retrieval": asdict(retrieval(features, of_real)),
                "kernel_distance": asdict(kernel_estimate(features, of_real)),
            }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    cells = [[pictures[i] for pictures in made] for i in range(SHOWN)]
    names = [caption.removeprefix("An ink drawing: ").split(",")[0] for caption in asked["caption"][:SHOWN]]
    plot_pictures(args.output_dir / "few_pictures.png", cells, names, [["wanted", *STARTS]])
    report.save("few_pictures", result, text(result), args.output_dir)


if __name__ == "__main__":
    main()
