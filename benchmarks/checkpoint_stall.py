"""How long a save stalls training: blocking against asynchronous, interleaved in one run.

    python benchmarks/checkpoint_stall.py [--rounds 3] [--size DiT-B] [--processes 1]

The default model has more than 100 M parameters. The stall is the time that the training loop spends in the writer and
not in training: `save`, `poll` after each step until the checkpoint is written, and `finish` a step later. Steps that
run while a checkpoint is being written share the machine with the writer; how much longer they take is shown apart.
The goal: an asynchronous save stalls training for at most 5 % of the time of a blocking one. Writes
benchmarks/results/checkpoint_stall.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.report import timed
from dfm_nb.base.torchrun import torchrun_argv

SETTINGS = [
    "mixed_precision=fp32",
    "dataset.mock=true",
    "dataset.mock_latent_sizes=[[1,8,8]]",
    "dataset.task_encoder_seq_length=64",
    "dataset.num_workers=0",
    "model.in_channels=16",
    "model.text_dim=384",
    "model.sigma_data=0.5",
    "model.adaln_lora_dim=128",
    "ema.sigma_rels=[0.1]",
    "optimizer.use_distributed_optimizer=true",
]


def measure(size: str, rounds: int, folder: Path) -> dict | None:
    """On every rank of this process group; the figures of rank 0."""
    import torch
    import torch.distributed as dist

    from dfm_nb import config as cfg
    from dfm_nb import parallel
    from dfm_nb.base.argv import world_size_from_env
    from dfm_nb.checkpoints import saving
    from dfm_nb.checkpoints import weights as checkpoint
    from dfm_nb.config import counts
    from dfm_nb.training.batches import open_store, packed_loader
    from dfm_nb.training.trainer import Trainer

    torch.set_num_threads(1)
    world = world_size_from_env()
    resolved = cfg.resolve(None, overrides=[*SETTINGS, f"model.size={size}", f"train.global_batch_size={world}"])
    parallel.init(timeout_s=1800)
    trainer = Trainer(resolved.config)
    loader = packed_loader(resolved.config, open_store(resolved.config), trainer.dp_rank, trainer.dp_size)
    writers = {
        kind: saving.Writer(folder / kind, keep_last=1, asynchronous=kind == "async") for kind in ("blocking", "async")
    }
    iteration, text = 0, cfg.to_yaml(resolved)

    def step() -> None:
        trainer.step(loader.next_step())

    def save(kind: str) -> None:
        state = {"iteration": iteration, "steps_taken": trainer.steps_taken, "skipped": 0, "data": loader.state()}
        writers[kind].save(trainer.pieces(), iteration, state, text)

    rows = []
    for r in range(rounds + 1):  # the first is a warm-up
        iteration = r + 1
        plain = [timed(step) for _ in range(4)]
        dist.barrier()
        blocking = timed(lambda: save("blocking"))
        step()
        dist.barrier()
        begun = time.perf_counter()
        call = timed(lambda: save("async"))
        polls, busy = [], []
        while writers["async"].busy:
            busy.append(timed(step))
            polls.append(timed(writers["async"].poll))
        step()
        wait = timed(writers["async"].finish)
        polls.append(wait)
        row = {
            "blocking_s": blocking,
            "async_call_s": call,
            "async_polls_s": sum(polls),
            "longest_poll_s": max(polls),
            "step_s": statistics.median(plain),
            "step_while_writing_s": statistics.median(busy),
            "steps_while_writing": len(busy),
            "until_whole_s": time.perf_counter() - begun,
        }
        if r:
            rows.append(row)
    for writer in writers.values():
        writer.close()
    total = sum(f.stat().st_size for f in checkpoint.find(folder / "async").iterdir())
    checkpoint.verify(checkpoint.find(folder / "async"))
    out = {
        "size": size,
        "parameters": counts.parameter_count(resolved.config.model),
        "checkpoint_gb": total / 1e9,
        "processes": world,
        "rounds": rows,
    }
    return out if parallel.rank() == 0 else None


def summary(result: dict) -> dict:
    """Medians over the rounds; the stall as a share of the blocking save, round by round."""
    rows = result["rounds"]
    median = lambda f: statistics.median(f(r) for r in rows)  # noqa: E731
    return {
        "blocking_s": median(lambda r: r["blocking_s"]),
        "stall_s": median(lambda r: r["async_call_s"] + r["async_polls_s"]),
        "stall_share": median(lambda r: (r["async_call_s"] + r["async_polls_s"]) / r["blocking_s"]),
        "step_s": median(lambda r: r["step_s"]),
        "step_while_writing_s": median(lambda r: r["step_while_writing_s"]),
        "until_whole_s": median(lambda r: r["until_whole_s"]),
    }


def table(result: dict, s: dict) -> str:
    rows = [
        ["training held up, s", f"{s['blocking_s']:.2f}", f"{s['stall_s']:.3f}"],
        ["share of the blocking save", "100 %", f"{s['stall_share']:.1%}"],
        ["until the checkpoint is whole, s", f"{s['blocking_s']:.2f}", f"{s['until_whole_s']:.2f}"],
        [
            "a training step, alone / while writing, s",
            f"{s['step_s']:.2f} / -",
            f"{s['step_s']:.2f} / {s['step_while_writing_s']:.2f}",
        ],
    ]
    return (
        f"{result['size']}, {result['parameters'] / 1e6:.0f} M parameters, {result['processes']} process(es), "
        f"a checkpoint of {result['checkpoint_gb']:.2f} GB; medians of {len(result['rounds'])} interleaved rounds. "
        f"{report.sentence(result['machine'])}.\n\n{report.table(['', 'blocking', 'asynchronous'], rows)}"
    )


def main() -> int:
    parser = report.arguments(__doc__, rounds=3, size="DiT-B", processes=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        from dfm_nb import parallel

        result = measure(args.size, args.rounds, Path(args.child))
        parallel.shutdown()
        if result is not None:
            (Path(args.child) / "result.json").write_text(json.dumps(result))
        return 0
    about = report.machine()
    with tempfile.TemporaryDirectory(prefix="checkpoint_stall_") as folder:
        mine = ["--child", folder, "--size", args.size, "--rounds", str(args.rounds)]
        report.of_process(torchrun_argv(__file__, mine, args.processes)[1:])
        result = json.loads((Path(folder) / "result.json").read_text())
    result |= {"machine": about, "summary": summary(result)}
    report.save("checkpoint_stall", result, table(result, result["summary"]), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
