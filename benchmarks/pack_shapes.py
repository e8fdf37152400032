"""What padding a pack's captions and conditioning rows to a multiple is worth on a CPU.

    python benchmarks/pack_shapes.py [--rounds 5] [--size demo] [--packs 20]

A new shape may cost a new kernel there. Packs hold 1,024 tokens of stills and clips. Each pack has other samples,
whose captions have 12 to 36 tokens, as in training. One process with one thread runs forward and backward without the
optimizer.

"Exact" leaves every length as it is; "multiples" pads as training does (`training.batches.pack_settings`). Every round
takes packs that no round has seen. Both cases take the same packs, in turn; a ratio is the median over rounds of the
ratio within a round.

Prints a table and writes benchmarks/results/pack_shapes.{json,md}. Takes about a minute and a half.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from benchmarks import report
from benchmarks.train_step import timed
from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.data.loader import PackBuilder
from dfm_nb.data.pack_plan import PackPlan
from dfm_nb.data.stores import MockStore
from dfm_nb.training.batches import pack_settings
from dfm_nb.training.trainer import Trainer

TOKENS = 1024
SIZES = [[1, 8, 8], [1, 8, 8], [3, 8, 8], [1, 8, 8], [5, 8, 8]]  # latent frames, height, width: 16, 48 and 80 tokens
SHORTEST, LONGEST = 12, 36
PRECISIONS = ("fp32", "bf16")


class Captioned(MockStore):
    """Mock samples whose captions differ in length."""

    def read(self, index: int):
        clip = super().read(index)
        length = SHORTEST + index * 7919 % (LONGEST - SHORTEST + 1)
        return replace(clip, text_emb=clip.text_emb[:, :length])


def measure(precision: str, size: str, rounds: int, count: int) -> dict:
    """Seconds of a forward and backward with exact lengths and with multiples.

    Each round gives the median over its `count` packs.
    """
    config = cfg.resolve(
        None,
        overrides=[
            f"model.size={size}",
            f"mixed_precision={precision}",
            "dataset.mock=true",
            "model.in_channels=16",
            "model.text_dim=384",
            "model.sigma_data=0.5",
            f"dataset.task_encoder_seq_length={TOKENS}",
            "train.global_batch_size=1",
            "ema.sigma_rels=[]",
        ],
    ).config
    trainer = Trainer(config)
    store, settings = Captioned(SIZES, text_tokens=LONGEST), pack_settings(config)
    plan = PackPlan(store, settings, TOKENS, 64)
    builders = {
        "exact": PackBuilder(store, replace(settings, text_multiple=1, row_multiple=1)),
        "multiples": PackBuilder(store, settings),
    }
    seconds: dict[str, list[float]] = {name: [] for name in builders}
    for r in tqdm(range(rounds + 1), desc=precision):  # the first warms up
        entries = [plan.next() for _ in range(count)]
        for name, builder in list(builders.items())[:: 1 if r % 2 else -1]:
            packs = [[builder.build(e, TOKENS)] for e in entries]
            took = [timed(lambda p=p: trainer.backward(p)) for p in packs]
            if r:
                seconds[name].append(statistics.median(took))
    return {"precision": precision, "seconds": seconds}


def text(result: dict) -> str:
    rows = []
    for case in result["cases"]:
        exact, multiples = case["seconds"]["exact"], case["seconds"]["multiples"]
        middle, least, greatest = report.spread([b / a for a, b in zip(exact, multiples)])
        rows.append(
            [
                case["precision"],
                f"{statistics.median(exact) * 1e3:.0f}",
                f"{statistics.median(multiples) * 1e3:.0f}",
                f"{middle:.2f} ({least:.2f} to {greatest:.2f})",
            ]
        )
    return "\n".join(
        [
            f"Size {result['size']}, forward and backward of {TOKENS:,} tokens, one process; "
            f"medians of {result['rounds']} interleaved rounds of {result['packs']} packs.",
            report.sentence(result["machine"]) + ".",
            "",
            report.table(["precision", "exact lengths, ms", "multiples, ms", "time, exact = 1"], rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="demo")
    parser.add_argument("--packs", type=int, default=20, help="in a round")
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    machine = report.machine()
    parallel.init()
    cases = [measure(p, args.size, args.rounds, args.packs) for p in PRECISIONS]
    parallel.shutdown()
    result = {"machine": machine, "size": args.size, "rounds": args.rounds, "packs": args.packs, "cases": cases}
    report.save("pack_shapes", result, text(result), args.output_dir)


if __name__ == "__main__":
    main()
