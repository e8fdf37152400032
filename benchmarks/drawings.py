"""Which settings train a model of diverse drawings? Short trainings that differ in one setting each.

    python scripts/fetch_openclipart.py data/openclipart
    python scripts/fetch_emoji.py data/fluent
    python scripts/train_base.py --model drawings --clipart data/openclipart --emoji data/fluent
    python benchmarks/drawings.py --data runs/drawings/data [--only "decay 0.5" ...]

Each trains in one process on the same pictures (packs of 768 tokens). Judged are the validation loss, on pictures of
training's authors, and `dfm evaluate` on 93 captions of drawings by other authors: the share of samples whose nearest
of 20 drawings is that of their caption. Latents are scaled as for the weights that an arm starts from, so losses are
comparable only between arms with the same start.

Writes benchmarks/results/drawings.{json,md} after each arm; arms that it has are not trained again.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from dfm_nb import evaluate_model, read_metrics

COMMON = {
    "train.global_batch_size": 1,
    "dataset.task_encoder_seq_length": 768,
    "train.eval_iters": 4,
    "optimizer.muon_momentum": 0.95,
    "validation.samples": "false",
}
FROM_BUTTERFLIES = {"optimizer.weight_decay": 0.5, "checkpoint.pretrained": "butterflies"}
ARMS: dict[str, dict[str, object]] = {
    "recipe demo (decay 4)": {},
    "decay 0.5": {"optimizer.weight_decay": 0.5},
    "decay 0.5, network base": {"optimizer.weight_decay": 0.5, "model.size": "base"},
    "decay 0.5, from butterflies": FROM_BUTTERFLIES,
    "the same, P_mean -0.8": FROM_BUTTERFLIES | {"model.P_mean": -0.8},
    "the same, P_mean 0": FROM_BUTTERFLIES | {"model.P_mean": 0.0},
    "the same, P_std 1.4": FROM_BUTTERFLIES | {"model.P_std": 1.4},
    "the same, decay 0.05": FROM_BUTTERFLIES | {"optimizer.weight_decay": 0.05},
}


def one_arm(data: str, settings: dict[str, object], iterations: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["-m", "dfm_nb", "pretrain", "--recipe", "demo", "--dataset-path", data, "--run-dir", run]
        ends = dict.fromkeys(("train.train_iters", "train.eval_interval", "checkpoint.save_interval"), iterations)
        words += [f"{key}={value}" for key, value in (COMMON | ends | settings).items()]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        report.of_process(words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        records = read_metrics(run)
        found = evaluate_model(run, dataset=data, split="test", num_prompts=93, num_clips=0).values["images"]
    return {
        "settings": settings,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "samples": int(records["samples"].max()),
        "val_loss": float(records["val_loss"].dropna().iloc[-1]),
        **{name: found[name] for name in ("retrieval", "kernel_distance")},
    }


def text(result: dict) -> str:
    rows = []
    for name, arm in result["arms"].items():
        share, apart = ([100 * arm["retrieval"][k] for k in ("value", "low", "high", "real")], arm["kernel_distance"])
        near = f"{share[0]:.0f} % ({share[1]:.0f} - {share[2]:.0f})"
        figures = f"{arm['samples']:,}", f"{arm['cpu_s']:.0f}", f"{arm['val_loss']:.3f}"
        rows.append([name, *figures, near, f"{1000 * apart['value']:.0f}"])
    real = next(iter(result["arms"].values()))["retrieval"]["real"]
    head = ["arm", "samples seen", "CPU seconds", "validation loss", "nearest of 20 (chance 5 %)", "KID x 1000"]
    about = f"{report.sentence(result['machine'])}. {result['iterations']} iterations, one seed. Real drawings through "
    return f"{about}the tokenizer: {100 * real:.0f} %.\n\n{report.table(head, rows)}"


def main() -> None:
    parser = report.arguments(__doc__, data=("runs/drawings/data", "prepared drawings"), iterations=300)
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS))
    args = parser.parse_args()
    file = args.output_dir / "drawings.json"
    result = json.loads(file.read_text()) if file.exists() else {"arms": {}}
    if result.setdefault("iterations", args.iterations) != args.iterations:
        raise SystemExit(f"{file} is of {result['iterations']} iterations; remove it, or ask for as many")
    result.setdefault("machine", report.machine())
    for name in args.only:
        if name not in result["arms"]:
            result["arms"][name] = one_arm(args.data, ARMS[name], args.iterations)
            report.save("drawings", result, text(result), args.output_dir)


if __name__ == "__main__":
    main()
