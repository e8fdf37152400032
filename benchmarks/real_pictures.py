"""A model trained on real drawings: does it draw what it is asked for?

    python scripts/fetch_openclipart.py data/openclipart
    python scripts/fetch_fluent.py data/fluent
    python benchmarks/real_pictures.py --openclipart data/openclipart [--fluent data/fluent] [KEY=VALUE ...]

Trains the demo's network from nothing on 64 px pictures, with the demo's recipe and the settings KEY=VALUE. Captions
are "a drawing of a KIND: TITLE" for 20 kinds, which are folders of Open Clip Art whose real drawings are told apart;
all other pictures keep their own caption. Of every kind the drawings of some authors are held out (series have one
author), and those that still look like a training picture are left out.

The judge is a linear probe (ridge regression on one of 20) on EfficientNet-Lite0's features of the training pictures
as drawn. It names the kind of: held-out drawings, the same through the tokenizer, samples for "a drawing of a KIND",
and samples for the captions of held-out drawings. Chance is 5 %.

Writes real_pictures.{json,md,png} into benchmarks/results; the PNG has samples beside held-out drawings. Takes half an
hour on two cores.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from dfm_nb.base.intervals import wilson
from dfm_nb.base.plots import plot_pictures

KINDS = {
    "map": ("geography",),
    "fruit": ("food/fruit",),
    "planet": ("geography/astronomy", "science/astronomy"),
    "musical instrument": ("recreation/music",),
    "vehicle": ("transportation", "transportation/vehicles"),
    "mammal": ("animals/mammals", "animals/mammals/big_cats", "animals/mammals/housecats", "animals/mammals/horses"),
    "stick figure": ("people/stickmen",),
    "insect": ("animals/bugs",),
    "book": ("education/books",),
    "bird": ("animals/birds",),
    "road sign": ("transportation/roadsigns",),
    "smiley": ("people/smilies",),
    "computer": ("computer/hardware",),
    "drink": ("food/beverages", "food/beverages/alcohol"),
    "house": ("buildings/homes",),
    "chess piece": ("recreation/games/chess",),
    "flower": ("plants/flowers",),
    "clock": ("signs_and_symbols/clocks",),
    "telephone": ("office/telephone",),
    "hat": ("people/clothing/hats",),
}
HELD_OUT = 0.2
SAME = 0.9
"""Cosine of centred features from which a held-out drawing is the same as one of training."""
SIZE_PX = 64


def asked(kind: str) -> str:
    return f"a drawing of {'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def read_table(folder: Path) -> pd.DataFrame:
    """captions.csv with the columns `kind` (empty for other drawings) and a caption that says it; paths absolute."""
    rows = pd.read_csv(folder / "captions.csv", keep_default_na=False)
    kind_of = {category: kind for kind, categories in KINDS.items() for category in categories}
    rows["kind"] = [kind_of.get(c, "") for c in rows["category"]]
    titles = [re.sub(r"[\W\d_]+", " ", t).strip().lower() for t in rows["title"]]
    rows["caption"] = [f"{asked(k)}: {t}" if k else c for k, t, c in zip(rows["kind"], titles, rows["caption"])]
    rows["file"] = [str((folder / f).resolve()) for f in rows["file"]]
    return rows


def hold_out(rows: pd.DataFrame, seed: int) -> np.ndarray:
    """Which rows are held out, bool [N]: in every kind whole authors, until a fifth is reached; never the largest."""
    held, rng = np.zeros(len(rows), bool), np.random.default_rng(seed)
    for _, of_kind in rows[rows["kind"] != ""].groupby("kind"):
        counts = of_kind["author"].value_counts().sort_index()
        wanted, names = HELD_OUT * len(of_kind), sorted(set(counts.index) - {counts.idxmax()})
        for name in rng.permutation(names):
            group = rows.index.get_indexer(of_kind.index[of_kind["author"] == name])
            if held[rows.index.get_indexer(of_kind.index)].sum() + len(group) <= wanted:
                held[group] = True
    return held


def pictures(files: list[str]) -> np.ndarray:
    """On a white ground and square, uint8 [N, SIZE_PX, SIZE_PX, 3]."""
    from PIL import Image

    out = np.empty((len(files), SIZE_PX, SIZE_PX, 3), np.uint8)
    for i, file in enumerate(files):
        with Image.open(file) as opened:
            rgba = opened.convert("RGBA")
        rgba.thumbnail((SIZE_PX, SIZE_PX), Image.Resampling.LANCZOS)
        ground = Image.new("RGBA", (SIZE_PX, SIZE_PX), "white")
        ground.alpha_composite(rgba, tuple((SIZE_PX - side) // 2 for side in rgba.size))
        out[i] = np.asarray(ground.convert("RGB"))
    return out


class Probe:
    """Ridge regression on one of K of equal weight: features [N, D] and labels [N] to the labels of other features."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, ridge: float = 0.005):
        self.classes, of_row, counts = np.unique(labels, return_inverse=True, return_counts=True)
        which = np.eye(len(counts))[of_row]
        self.mean = (which.T @ features / counts[:, None]).mean(0)
        x, wanted = self._prepared(features), which - 1 / len(counts)
        self.matrix = x.T @ np.linalg.solve(x @ x.T + ridge * np.diag(counts[of_row]), wanted)

    def _prepared(self, features: np.ndarray) -> np.ndarray:
        x = features.astype(np.float64) - self.mean
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        return self.classes[(self._prepared(features) @ self.matrix).argmax(1)]


def train(table: pd.DataFrame, folder: Path, steps: int, settings: list[str]) -> dict:
    """Prepare the table with both tokenizers and train on `residual`; PSNR in dB and seconds."""
    from dfm_nb import prepare_dataset, train_model
    from dfm_nb.base.cpu import fast_bf16

    psnr = {}
    for tokenizer in ("pca", "residual"):
        data = prepare_dataset(
            table, output_dir=str(folder / tokenizer), tokenizer=tokenizer, short_side=SIZE_PX, resume=True
        )
        psnr[tokenizer] = data["psnr_db"]["images"]
    run = train_model(
        dataset_path=str(folder / "residual"),
        run_dir=str(folder / "run"),
        recipe="demo_bf16" if fast_bf16() else "demo",
        num_processes=2,
        overrides={"train.train_iters": steps, "checkpoint.save_interval": steps, "validation.samples": False}
        | dict(setting.split("=", 1) for setting in settings),
    )
    return {"psnr_db": psnr, "train_s": float(run.metrics["elapsed_s"].max())}


def named_right(found: np.ndarray, wanted: np.ndarray) -> dict:
    right = int((found == wanted).sum())
    low, high = wilson(right, len(wanted))
    by_kind = {k: float((found[wanted == k] == k).mean()) for k in np.unique(wanted)}
    return {"samples": len(wanted), "right": right / len(wanted), "low": low, "high": high, "by_kind": by_kind}


def mosaic(rows: list[tuple[str, np.ndarray, np.ndarray]], path: Path) -> None:
    """A row a kind: samples, then held-out drawings, uint8 [n, H, W, 3]."""
    count = 6
    cells = [[*made[:count], *real[:count]] for _, made, real in rows]
    plot_pictures(
        path, cells, [kind for kind, _, _ in rows], [["samples"] + [""] * (count - 1) + ["held-out drawings"]]
    )


def measure(
    table: pd.DataFrame, held: np.ndarray, frames: np.ndarray, run: Path, guidance: float, picture: Path
) -> dict:
    from dfm_nb import Pipeline
    from dfm_nb.evaluation.features import Features

    network = Features()
    named = (table["kind"] != "").to_numpy()
    trained_on, frames, held = int((~held).sum()), frames[named], held[named]
    kinds, captions = (table[name].to_numpy()[named] for name in ("kind", "caption"))
    features = network(frames, progress=True)
    centred = features - features[~held].mean(0)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    doubles = held.copy()
    doubles[held] = (centred[held] @ centred[~held].T).max(1) > SAME
    test = held & ~doubles
    probe = Probe(features[~held], kinds[~held])
    pipe = Pipeline.from_checkpoint(str(run))
    coded = np.stack([pipe.decode(pipe.encode_pixels(f[None]))[0] for f in frames[test]])
    settings = {"num_video_frames": 1, "height": SIZE_PX, "width": SIZE_PX, "guidance": guidance, "seed": 1}
    plain = np.repeat(np.array(list(KINDS)), 10)
    made = np.stack([f[0] for f in pipe([asked(k) for k in plain], **settings).frames])
    captioned = np.stack([f[0] for f in pipe(list(captions[test]), **settings).frames])
    mosaic([(k, made[plain == k], frames[test & (kinds == k)]) for k in KINDS], picture)
    return {
        "trained_on": trained_on,
        "of_the_kinds": int((~held).sum()),
        "doubles_left_out": int(doubles.sum()),
        "held-out drawings": named_right(probe(features[test]), kinds[test]),
        "the same through the tokenizer": named_right(probe(network(coded)), kinds[test]),
        'samples for "a drawing of a KIND"': named_right(probe(network(made)), plain),
        "samples for captions of held-out drawings": named_right(probe(network(captioned)), kinds[test]),
    }


def text(result: dict) -> str:
    rows = [
        [name, v["samples"], f"{100 * v['right']:.1f}% ({100 * v['low']:.1f}% - {100 * v['high']:.1f}%)"]
        for name, v in result.items()
        if isinstance(v, dict) and "right" in v
    ]
    sets = list(k for k, v in result.items() if isinstance(v, dict) and "right" in v)
    by_kind = [[k, *(f"{100 * result[s]['by_kind'].get(k, float('nan')):.0f}%" for s in sets)] for k in KINDS]
    psnr = ", ".join(f"`{k}` {v:.1f} dB" for k, v in result["psnr_db"].items())
    own = " ".join(result["settings"]) or "no settings of its own"
    return "\n".join(
        [
            f"{result['trained_on']:,} pictures of training, {result['of_the_kinds']} of them of the 20 kinds; "
            f"{result['doubles_left_out']} held-out drawings that look like one of training left out. "
            f"Tokenizers on them: {psnr}. {result['steps']:,} steps in {result['train_s'] / 60:.0f} minutes, guidance "
            f"{result['guidance']:g}, {own}. {report.sentence(result['machine'])}.",
            "",
            report.table(["named by the probe (chance 5 %)", "pictures", "right (95 % interval)"], rows),
            "",
            report.table(["kind", *sets], by_kind),
            "",
            "![samples beside held-out drawings](real_pictures.png)",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__, steps=4500, guidance=2.0, seed=(0, "of the choice of held-out authors"))
    parser.add_argument("--openclipart", type=Path, required=True, help="what fetch_openclipart.py wrote")
    parser.add_argument("--fluent", type=Path, help="what fetch_fluent.py wrote")
    parser.add_argument("--work-dir", type=Path, help="keep data and run here, and continue from there")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    table = read_table(args.openclipart)
    if args.fluent:
        more = pd.read_csv(args.fluent / "captions.csv")
        more["file"], more["kind"] = [str((args.fluent / f).resolve()) for f in more["file"]], ""
        table = pd.concat([table, more], ignore_index=True)
    held, frames = hold_out(table, args.seed), pictures(list(table["file"]))
    named = {name: getattr(args, name) for name in ("steps", "guidance", "settings")}
    result: dict = {"machine": report.machine(), **named}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work_dir or Path(temporary)
        shown = pd.DataFrame({"image": list(frames[~held]), "caption": list(table["caption"][~held])})
        result |= train(shown, folder, args.steps, args.settings)
        picture = args.output_dir / "real_pictures.png"
        result |= measure(table, held, frames, folder / "run", args.guidance, picture)
    report.save("real_pictures", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
