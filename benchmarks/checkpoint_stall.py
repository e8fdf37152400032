"""What a checkpoint costs: blocking and asynchronous saves, interleaved in one run, and loading.

    python benchmarks/checkpoint_stall.py [--rounds 3] [--sizes base,DiT-B] [--processes 1]

The sizes have 5 M and 129 M parameters. The stall is the time that the training loop spends in the writer and not in
training: `save`, `poll` after each step until the checkpoint is written, and `finish` a step later. Steps that run
while a checkpoint is being written share the machine with the writer; how much longer they take is shown apart. Loading
is `verify`, which hashes every file, and `load`. Memory is the proportional set size of all processes together, so that
a page which a writer shares with its trainer counts once.
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
from functools import partial
from pathlib import Path
from typing import Any

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
        (folder / "phase").write_text(kind)
        state = {"iteration": iteration, "steps_taken": trainer.steps_taken, "skipped": 0, "data": loader.state()}
        writers[kind].save(trainer.pieces(), iteration, state, text)

    rows = []
    for r in range(rounds + 1):  # the first is a warm-up
        iteration = r + 1
        (folder / "phase").write_text("training")
        plain = [timed(step) for _ in range(4)]
        dist.barrier()
        blocking = timed(lambda: save("blocking"))
        step()
        dist.barrier()
        begun = time.perf_counter()
        stalls, busy = [timed(lambda: save("async"))], []
        while writers["async"].busy:
            busy.append(timed(step))
            stalls.append(timed(writers["async"].poll))
        step()
        stalls.append(timed(writers["async"].finish))
        until_whole = time.perf_counter() - begun
        (folder / "phase").write_text("load")
        newest = checkpoint.whole_checkpoints(folder / "async")[-1]
        row = {
            "blocking_s": blocking,
            "stall_s": sum(stalls),
            "stall_share": sum(stalls) / blocking,
            "call_s": stalls[0],
            "step_s": statistics.median(plain),
            "step_while_writing_s": statistics.median(busy),
            "until_whole_s": until_whole,
            "verify_s": timed(partial(checkpoint.verify, newest)),
            "load_s": timed(partial(saving.load, trainer.pieces(), newest)),
        }
        if r:
            rows.append(row)
    out = {
        "size": size,
        "parameters": counts.parameter_count(resolved.config.model),
        "checkpoint_gb": sum(f.stat().st_size for f in newest.iterdir()) / 1e9,
        "processes": world,
        "rounds": rows,
        "medians": {key: statistics.median(row[key] for row in rows) for key in row},
    }
    return out if parallel.rank() == 0 else None


def table(result: dict) -> str:
    m, gib = result["medians"], {phase: f"{peak / 2**30:.2f}" for phase, peak in result["peak_bytes"].items()}
    rows = [
        ["training held up, s", f"{m['blocking_s']:.3f}", f"{m['stall_s']:.3f}"],
        ["share of the blocking save", "100 %", f"{m['stall_share']:.1%}"],
        ["until the checkpoint is whole, s", f"{m['blocking_s']:.3f}", f"{m['until_whole_s']:.3f}"],
        ["a training step meanwhile, s", "-", f"{m['step_while_writing_s']:.3f} (alone {m['step_s']:.3f})"],
        ["peak memory, GiB", gib["blocking"], gib["async"]],
    ]
    return (
        f"{result['size']}, {result['parameters'] / 1e6:.0f} M parameters, {result['processes']} process(es), a "
        f"checkpoint of {result['checkpoint_gb']:.3f} GB; medians of {len(result['rounds'])} interleaved rounds.\n\n"
        f"{report.table(['', 'blocking', 'asynchronous'], rows)}\n\nLoading takes {m['load_s']:.3f} s after "
        f"{m['verify_s']:.3f} s of checksums. Peak memory: {gib['training']} GiB in steps without a save, "
        f"{gib['load']} in loading."
    )


def run(size: str, rounds: int, processes: int) -> dict:
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="checkpoint_stall_") as folder:

        def memory(process: Any) -> int:
            phase = (Path(folder) / "phase").read_text() or "training"  # empty while it is written
            used = sum(p.memory_full_info().pss for p in (process, *process.children(recursive=True)))
            peaks[phase] = max(used, peaks.get(phase, 0))
            return used

        mine = ["--child", folder, "--sizes", size, "--rounds", str(rounds)]
        report.of_process(torchrun_argv(__file__, mine, processes)[1:], memory, every_s=0.1)
        return json.loads((Path(folder) / "result.json").read_text()) | {"peak_bytes": peaks}


def main() -> int:
    parser = report.arguments(__doc__, rounds=3, sizes="base,DiT-B", processes=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        from dfm_nb import parallel

        result = measure(args.sizes, args.rounds, Path(args.child))
        parallel.shutdown()
        if result is not None:
            (Path(args.child) / "result.json").write_text(json.dumps(result))
        return 0
    about = report.machine()
    results = [run(size, args.rounds, args.processes) for size in args.sizes.split(",")]
    text = "\n\n".join([f"{report.sentence(about)}.", *map(table, results)])
    report.save("checkpoint_stall", {"machine": about, "sizes": results}, text, args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
