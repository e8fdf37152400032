"""Does `dfm evaluate --all-checkpoints` find copies that were planted, and take the right checkpoint?

    python benchmarks/verdict.py [--seeds 3] [--iterations 600]

Of the package's drawings, by seed: 32 are trained on, 20 of them stored twenty times, by the recipe `finetune` on the
packaged model at 64 px; 64 are held out for the verdict, and 64 more are never seen by it. Eight checkpoints.

- found: of the last checkpoint's samples for the captions of repeated drawings, the share that is called copies.
- false alarms: of all checkpoints' samples whose nearest training drawing (by all pixels) is not a repeated one.
- checkpoint: how many places the one to take is from the one with the least kernel distance to the unseen drawings.
  Both are of those before copies begin; then of all, by distance alone.

The judge must not be flattered: the last checkpoint's samples are also sharpened, smoothed, given to wrong captions, or
replaced by one of them, or by drawings of training. Writes benchmarks/results/verdict_ITERATIONS.{json,md}. Takes three
minutes a seed on one core.
"""

from __future__ import annotations

import csv
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image, ImageFilter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from dfm_nb import Pipeline, prepare_dataset
from dfm_nb.base.intervals import wilson
from dfm_nb.base.metrics import compared_loss, read_metrics, series
from dfm_nb.data.sources import drawings
from dfm_nb.evaluation import reference
from dfm_nb.evaluation.distance import kernel_distance
from dfm_nb.evaluation.diversity import pairwise
from dfm_nb.evaluation.features import Features
from dfm_nb.evaluation.verdict import Judge, nearness, thumbnails

TRAINED, PLANTED, TIMES, HELD_OUT, ASKED = 32, 20, 20, 64, 32
SETTINGS = ["checkpoint.keep_last=0", "train.eval_iters=4", "dataset.use_train_split_for_val=false"]
FIGURES = ("kernel_distance", "retrieval_held_out", "retrieval_train", "copies")


def plant(folder: Path, seed: int) -> str:
    """Drawings as a folder with splits, prepared; captions are unique."""
    tables = [pd.read_csv(at / "metadata.csv").assign(at=str(at)) for at in sorted(drawings.FOLDER.glob("t*/"))]
    rows = pd.concat(tables).drop_duplicates("text").sample(frac=1, random_state=seed)
    ends = {"train": (0, TRAINED), "validation": (TRAINED, TRAINED + HELD_OUT), "test": (-HELD_OUT, None)}
    for split, (begin, end) in ends.items():
        place = folder / "pictures" / split
        place.mkdir(parents=True)
        lines = [("file_name", "text")]
        for i, row in enumerate(rows[begin:end].itertuples()):
            for k in range(TIMES if split == "train" and i < PLANTED else 1):
                lines.append((f"{i:02}-{k:02}.png", row.text))
                shutil.copy(Path(row.at, row.file_name), place / lines[-1][0])
        with open(place / "metadata.csv", "w", newline="") as file:
            csv.writer(file).writerows(lines)
    source, data = f"folder:{folder / 'pictures'}", str(folder / "data")
    prepare_dataset(source=source, output_dir=data, short_side=64)
    return data


def train(data: str, run: Path, seed: int, iterations: int) -> dict[int, float]:
    """Validation losses by iteration."""
    words = ["-m", "dfm_nb", "pretrain", "--recipe", "finetune", "--dataset-path", data, "--run-dir", run]
    words += ["checkpoint.pretrained=butterflies", f"train.train_iters={iterations}", f"rng.seed={seed}", *SETTINGS]
    every = iterations // 8
    words += [f"checkpoint.save_interval={every}", f"train.eval_interval={every}", "validation.samples=false"]
    report.of_process(words)
    records = read_metrics(run)
    return dict(zip(*series(records, compared_loss({key for r in records for key in r}))))


def filtered(frames: list[np.ndarray], kind: ImageFilter.Filter) -> list[np.ndarray]:
    return [np.asarray(Image.fromarray(f[0]).filter(kind))[None] for f in frames]


def one_seed(folder: Path, seed: int, iterations: int, network: Features) -> dict:
    data, run = plant(folder, seed), folder / "run"
    losses = train(data, run, seed, iterations)
    judge, rows, unseen, alarms, found = None, [], {}, [], None
    for place in sorted((run / "checkpoints").glob("iter_*")):
        pipe, iteration = Pipeline.from_checkpoint(place), int(place.name[5:])
        if judge is None:
            real, counts = {}, {}
            for split in ("train", "val", "test"):
                opened = reference.PreparedFolder(data, split, pipe.decode_stored, pipe.manifest["tokenizer"])
                chosen = reference.choose(opened, 1000, 0, 1, seed)[0]
                real[split] = {r.caption: r.frames for r in chosen}
                counts[split] = pd.Series([r.caption for r in chosen]).value_counts()
            drawn = {split: list(of.values()) for split, of in real.items()}
            asked = {split: list(of)[: None if split == "test" else ASKED] for split, of in real.items()}
            held_out, training = drawn["val"][:ASKED], drawn["train"]
            judge = Judge(held_out, training, drawn["val"], training, network, lambda f: f)
            planted = np.array([counts["train"][caption] > 1 for caption in asked["train"]])
            flat, test = np.stack(training).reshape(TRAINED, -1), judge.features(drawn["test"])
        size = {"num_video_frames": 1, "height": 64, "width": 64}
        made = {split: [c.frames for c in pipe(captions, seed=1, **size)] for split, captions in asked.items()}
        row = judge.figures(iteration, made["val"], made["train"])
        rows.append(row | {"val_loss": losses[iteration]})
        unseen[iteration] = kernel_distance(judge.features(made["test"]), test)
        everything = [f for frames in made.values() for f in frames]
        called = nearness(thumbnails(everything), judge.training) < judge.threshold
        near = pairwise(np.stack(everything).reshape(len(everything), -1), flat).argmin(1)
        alarms += called[~planted[near]].tolist()
        found = called[: len(asked["train"])][planted]
    assert judge is not None and found is not None
    verdict = judge.verdict(rows)
    steps = [r["iteration"] for r in rows]
    clean = [i for i in steps if verdict["copies_begin"] is None or i < verdict["copies_begin"]] or steps[:1]
    alone = min(rows, key=lambda r: r["kernel_distance"]["value"])["iteration"]
    apart = [
        abs(steps.index(took) - steps.index(min(among, key=unseen.__getitem__)))
        for took, among in ((verdict["take"], clean), (alone, steps))
    ]
    some, last = drawn["train"], made
    rolled = {split: last[split][1:] + last[split][:1] for split in ("val", "train")}
    arms = {
        "the last checkpoint's samples": (last["val"], last["train"]),
        "sharpened": [filtered(last[s], ImageFilter.UnsharpMask(1, 150, 0)) for s in ("val", "train")],
        "smoothed by a filter": [filtered(last[s], ImageFilter.MedianFilter(3)) for s in ("val", "train")],
        "of the wrong captions": (rolled["val"], rolled["train"]),
        "one sample for all": (last["val"][:1] * ASKED, last["train"][:1] * ASKED),
        "drawings of training for all captions": (some, some),
        "unseen drawings for all captions": (drawn["test"][:ASKED], drawn["test"][ASKED:]),
        "held-out drawings for their captions": (held_out, drawn["test"][:ASKED]),
    }
    figures = {name: judge.figures(-1, *sets) for name, sets in arms.items()}
    return {
        "seed": seed,
        "verdict": {k: v for k, v in verdict.items() if k != "real"},
        "checkpoints": rows,
        "unseen": unseen,
        "found": [int(found.sum()), len(found)],
        "alarms": [int(sum(alarms)), len(alarms)],
        "apart": apart,
        "arms": {name: {key: f[key]["value"] for key in FIGURES} for name, f in figures.items()},
    }


def text(result: dict) -> str:
    seeds = result["seeds"]
    parts = [f"{report.sentence(result['machine'])}. {result['iterations']} iterations.", ""]
    cells = [
        [s["seed"], s["verdict"]["sentence"], *(f"{a} of {b}" for a, b in (s["found"], s["alarms"])), *s["apart"]]
        for s in seeds
    ]
    shares = []
    for hits, of in (np.sum([s[key] for s in seeds], 0) for key in ("found", "alarms")):
        low, high = wilson(hits, of)
        shares.append(f"{hits} of {of}: {hits / of:.1%} ({low:.1%} - {high:.1%})")
    cells.append(["all", "", *shares, *(f"at most {worst}" for worst in np.max([s["apart"] for s in seeds], 0))])
    head = ["seed", "verdict", "planted copies found", "false alarms", "places from the best", "by distance alone"]
    parts += [report.table(head, cells), ""]
    names = ["instead of samples", "kernel distance x 1000", "% own held-out", "% own of training", "% copies"]
    factors = (1000, 100, 100, 100)
    means = [
        [name, *(f"{x * np.mean([s['arms'][name][k] for s in seeds]):.0f}" for x, k in zip(factors, FIGURES))]
        for name in seeds[0]["arms"]
    ]
    return "\n".join([*parts, report.table(names, means)])


def main() -> None:
    args = report.arguments(__doc__, seeds=3, iterations=(600, "a multiple of 8")).parse_args()
    result: dict = {"machine": report.machine(), "iterations": args.iterations, "seeds": []}
    network = Features()
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            result["seeds"].append(one_seed(Path(folder), seed, args.iterations, network))
        report.save(f"verdict_{args.iterations}", result, text(result), args.output_dir)


if __name__ == "__main__":
    main()
