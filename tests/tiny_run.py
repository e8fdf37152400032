"""Runs of three iterations on a small synthetic set: weights mean nothing (but are far from
zero), everything else is real.
"""

from pathlib import Path

from tests.conftest import run_ranks
from tests.networks import cases

VARIANTS = cases("TINY", {"dit": []})
NETWORK = "model.hidden_size=48 model.num_attention_heads=4 model.patch_spatial=2".split()
SIZE = [
    *NETWORK,
    *"model.num_layers=2 train.train_iters=3 train.global_batch_size=1 train.eval_interval=0 optimizer.lr=0.02".split(),
    *"scheduler.lr_warmup_iters=1 dataset.task_encoder_seq_length=160 mixed_precision=fp32".split(),
]


def prepare(folder: Path, source: str = "synthetic", num_images: int = 30, *flags: str) -> Path:
    """Pictures and 4 clips of short side 32 px."""
    from dfm_nb.prepare import main

    argv = "--tokenizer pca --num-clips 4 --short-side 32 --val-fraction 0.05".split()
    assert main(["--source", source, "--num-images", str(num_images), *argv, *flags, "--output-dir", str(folder)]) == 0
    return folder


def train(data: Path, run: Path, *overrides: str, recipe: str = "demo", ranks: int = 1) -> Path:
    """In processes of its own; returns the run folder."""
    argv = ["--recipe", recipe, "--dataset-path", str(data), "--run-dir", str(run), *SIZE, *overrides]
    assert run_ranks(ranks, _train, argv) == [0] * ranks
    return run


def checkpoint_of(variant: str, make_once, data: Path) -> Path:
    """A run folder with untrained weights."""
    off = ["train.eval_interval=1", "train.eval_iters=0"]  # no validation: these data have no split for it
    return make_once(f"tiny-{variant}", lambda run: train(data, run, *VARIANTS[variant], *off))


def losses(run: Path) -> list[float]:
    from dfm_nb.base.metrics import read_metrics

    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def _train(argv: list[str]) -> int:
    from dfm_nb.train import main

    return main(argv)
