"""Scaling from 1 to 2 processes on one machine: training tokens/s by axis of parallelism, preparation images/s.

    python benchmarks/scaling.py [--rounds 3] [--size demo] [--images 600]

Each process has one thread (OMP_NUM_THREADS=1). Every round measures every case once, in turn; a ratio is the median
over rounds of the ratio within a round. A training step is two packs of 1,024 tokens in float32 on gloo in every case.
DP2 gives each process one pack, TP2 halves the heads and the MLP, CP2 halves the tokens.

The ceiling is two processes that train alone at the same time and know nothing of each other. It is what two cores of
this machine give; efficiency is against it. Preparation is the driver as torchrun would run it (synthetic pictures,
pca, MiniLM), imports not counted.

Prints a table and writes benchmarks/results/scaling.{json,md}. Takes about two minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"

from tqdm import tqdm

from benchmarks import report
from tests.conftest import run_ranks

TRAINING: dict[str, tuple[int, list[str]]] = {
    "1 process": (1, []),
    "DP2": (2, []),
    "CP2": (2, ["model.context_parallel_size=2"]),
    "TP2": (2, ["model.tensor_model_parallel_size=2"]),
}
CEILING = "2 processes, each alone"
PACKS = 2
"""In a step, over all processes."""


def train_rank(overrides: list[str], steps: int) -> list[float]:
    """On one rank: seconds of each of `steps` optimizer steps, after one that does not count."""
    import torch
    import torch.distributed as dist

    from dfm_nb import config as cfg
    from dfm_nb import parallel
    from dfm_nb.base.argv import world_size_from_env
    from dfm_nb.parallel.groups import layout_of
    from dfm_nb.training.batches import open_store, packed_loader
    from dfm_nb.training.trainer import Trainer

    torch.set_num_threads(1)
    config = cfg.resolve(None, overrides=overrides, world_size=world_size_from_env()).config
    parallel.init(layout_of(config.model), seed=config.rng.seed)
    trainer = Trainer(config)
    loader = packed_loader(config, open_store(config), trainer.dp_rank, trainer.dp_size)
    seconds = []
    for step in range(steps + 1):
        packs = loader.next_step()
        dist.barrier()
        begun = time.perf_counter()
        trainer.step(packs)
        if step:
            seconds.append(time.perf_counter() - begun)
    loader.close()
    return seconds


def settings(size: str, tokens: int) -> list[str]:
    return [
        f"model.size={size}",
        "model.in_channels=16",
        "model.text_dim=384",
        "model.sigma_data=0.5",
        "mixed_precision=fp32",
        "dataset.mock=true",
        "dataset.mock_latent_sizes=[[1,8,8],[1,8,12],[3,8,8]]",
        f"dataset.task_encoder_seq_length={tokens}",
        "dataset.packing_buffer_size=40",
        "dataset.num_workers=0",
        f"train.global_batch_size={PACKS}",
        "ema.sigma_rels=[]",
    ]


def training_round(size: str, tokens: int, steps: int) -> dict[str, float]:
    """Tokens a second of each case, and of two processes that each work alone.

    Tokens are a pack's capacity: packs are full to a few tokens.
    """
    common, rates = settings(size, tokens), {}
    for name, (world, overrides) in TRAINING.items():
        ranks = run_ranks(world, train_rank, [*common, *overrides], steps)
        step_s = statistics.median(max(of_step) for of_step in zip(*ranks))
        rates[name] = PACKS * tokens / step_s
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_ranks, 1, train_rank, common, steps) for _ in range(2)]
        alone = [statistics.median(job.result()[0]) for job in jobs]
    rates[CEILING] = sum(PACKS * tokens / s for s in alone)
    return rates


def prepare_rank(argv: list[str]) -> float:
    """On one rank: seconds of the whole driver."""
    import torch

    from dfm_nb.prepare import main

    torch.set_num_threads(1)
    begun = time.perf_counter()
    assert main(argv) == 0
    return time.perf_counter() - begun


def preparation_round(images: int, short_side: int) -> dict[str, float]:
    """Images a second with 1 and 2 processes."""
    rates = {}
    for world in (1, 2):
        with tempfile.TemporaryDirectory(prefix="scaling_") as place:
            argv = [
                "--source",
                "synthetic",
                "--num-images",
                str(images),
                "--num-clips",
                "0",
                "--short-side",
                str(short_side),
                "--shard-size",
                str(max(1, images // 8)),
                "--workers",
                "2",
                "--output-dir",
                f"{place}/data",
            ]
            seconds = run_ranks(world, prepare_rank, argv, timeout_s=600)
        rates[f"{world} process{'es' * (world > 1)}"] = images / max(seconds)
    return rates


def ratios(rounds: list[dict[str, float]], base: str) -> dict[str, tuple[float, float, float]]:
    """For each case (median, least, greatest) over rounds of its rate / `base`'s in the same round."""
    return {name: report.spread([r[name] / r[base] for r in rounds]) for name in rounds[0]}


def text(result: dict) -> str:
    def rows(rounds: list[dict[str, float]], base: str, ceiling: str | None) -> list[list[str]]:
        speedup = ratios(rounds, base)
        of_ceiling = ratios(rounds, ceiling) if ceiling else None
        out = []
        for name in rounds[0]:
            middle, least, greatest = speedup[name]
            row = [
                name,
                f"{statistics.median(r[name] for r in rounds):,.0f}",
                f"{middle:.2f} ({least:.2f} to {greatest:.2f})",
            ]
            out.append([*row, f"{of_ceiling[name][0]:.0%}"] if of_ceiling else row)
        return out

    return "\n".join(
        [
            f"Medians of {result['rounds']} interleaved rounds; "
            "ratio to 1 process within a round, least and greatest in brackets.",
            report.sentence(result["machine"]) + ".",
            "",
            f"Training, size {result['size']}, {PACKS} packs of {result['tokens']:,} tokens a step, float32, gloo:",
            "",
            report.table(
                ["training", "tokens/s", "ratio", "of the ceiling"], rows(result["training"], "1 process", CEILING)
            ),
            "",
            f"Preparation of {result['images']} synthetic pictures of {result['short_side']} px "
            "(drawing them included, imports apart):",
            "",
            report.table(["preparation", "images/s", "ratio"], rows(result["preparation"], "1 process", None)),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="demo")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each case in each round")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--short-side", type=int, default=128)
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    about = report.machine()
    training, preparation = [], []
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
        training.append(training_round(args.size, args.tokens, args.steps))
        preparation.append(preparation_round(args.images, args.short_side))
    chosen = {k: getattr(args, k) for k in ("rounds", "size", "tokens", "steps", "images", "short_side")}
    result = {"machine": about, **chosen, "training": training, "preparation": preparation}
    report.save("scaling", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
