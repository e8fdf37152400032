"""Every size of the DiT paper on every axis of parallelism: does it run, what does it take, is the loss one process's?

    python benchmarks/sizes_axes.py [--sizes DiT-S,DiT-B] [--axes 1,TP2] [--again]

Each cell is a run of its own: forked ranks on gloo, float32, the paper's shape with patch 2, two short packs a step,
two optimizer steps. Where weights, gradients and AdamW's moments of two replicas fit in `--memory-gib`, all weights
are trained. Where they do not (DiT-L, DiT-XL), the weights are whole and the backward goes through all of them, but
low-rank updates are what is trained (`model.lora.rank=16`); the table says so. A new DiT puts out zero, which would
hide its layers, so gates and output layer are given values first.
Measured: both losses against one process, seconds of the second step, and the growth of the resident set, added up
over the ranks. Writes benchmarks/results/sizes_axes.{json,md} after each cell and goes on from what is there. Fails
when a loss differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

OUT = Path(__file__).parent / "results" / "sizes_axes"
TOLERANCE = 1e-5
TOKENS = 96
"""Of a pack; there are two in a step."""
SIZES = ("DiT-S", "DiT-B", "DiT-L", "DiT-XL")

AXES = {
    # name: (processes, overrides)
    "1": (1, []),
    "TP2": (2, ["model.tensor_model_parallel_size=2"]),
    "TP2+SP": (2, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]),
    "CP2": (2, ["model.context_parallel_size=2"]),
    "PP2": (2, ["model.pipeline_model_parallel_size=2"]),
    "DP2": (2, []),
    "DP2 distributed optimizer": (2, ["optimizer.use_distributed_optimizer=true"]),
}


def settings(size: str) -> list[str]:
    """Shape of the paper (patch 2), the shortest packs that hold the mock samples."""
    return [
        f"model.size={size}",
        "model.in_channels=16",
        "model.text_dim=384",
        "model.sigma_data=0.5",
        "model.patch_spatial=2",
        "mixed_precision=fp32",
        "dataset.mock=true",
        "dataset.mock_latent_sizes=[[1,8,8],[3,8,8],[1,12,8]]",
        f"dataset.task_encoder_seq_length={TOKENS}",
        "dataset.packing_buffer_size=6",
        "dataset.num_workers=0",
        "train.global_batch_size=2",
        "train.train_iters=10",
        "ema.sigma_rels=[]",
        "optimizer.lr=1e-3",
        "scheduler.lr_warmup_iters=0",
        "rng.seed=7",
    ]


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def rank(overrides: list[str]) -> dict:
    """On one rank: two steps; the losses, the seconds of the second, and how far the resident set grew."""
    import torch

    from dfm_nb import config as cfg
    from dfm_nb import parallel
    from dfm_nb.base.argv import world_size_from_env
    from dfm_nb.parallel.groups import layout_of
    from dfm_nb.training.batches import open_store, packed_loader
    from dfm_nb.training.trainer import Trainer

    torch.set_num_threads(1)
    config = cfg.resolve(None, overrides=overrides, world_size=world_size_from_env()).config
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew from here
    parallel.init(layout_of(config.model), timeout_s=1800, seed=config.rng.seed)
    trainer = Trainer(config)
    wake(trainer)
    loader = packed_loader(config, open_store(config), trainer.dp_rank, trainer.dp_size)
    losses = []
    for _ in range(2):
        packs, begun = loader.next_step(), time.perf_counter()
        losses.append(trainer.step(packs).loss)
        seconds = time.perf_counter() - begun
    return {"losses": losses, "seconds": seconds, "grown": resident_bytes("VmHWM") - before}


def wake(trainer) -> None:
    """Give the gates and the output layer values by name: in a new DiT they are zero and would hide its layers."""
    import torch

    from dfm_nb.base.seeds import generator_for
    from dfm_nb.parallel.groups import global_name

    with torch.no_grad():
        for chunk in trainer.chunks:
            for local, p in chunk.named_parameters():
                name = global_name(local, chunk)
                if ".up." in name or name.startswith("final."):
                    size = 0.5 if name.endswith("up.bias") else 0.02
                    p.copy_(torch.randn(p.shape, generator=generator_for("sizes_axes", name)) * size)
    trainer.optimizer.reload_model_params()


def cell(size: str, axis: str, low_rank: bool) -> dict:
    """Run one size on one axis."""
    from tests.conftest import run_ranks

    world, overrides = AXES[axis]
    more = ["model.lora.rank=16"] if low_rank else []
    ranks = run_ranks(world, rank, [*settings(size), *overrides, *more], timeout_s=1700)
    return {
        "size": size,
        "axis": axis,
        "processes": world,
        "trained": "rank 16" if low_rank else "all",
        "losses": ranks[0]["losses"],
        "seconds": max(r["seconds"] for r in ranks),
        "gib": sum(r["grown"] for r in ranks) / 2**30,
        "tokens": 2 * TOKENS,
    }


def differences(rows: list[dict]) -> dict[tuple[str, str], float]:
    """Largest relative difference of a cell's losses to those of one process of the same size."""
    alone = {r["size"]: r["losses"] for r in rows if r["axis"] == "1"}
    return {
        (r["size"], r["axis"]): max(abs(a - b) / abs(b) for a, b in zip(r["losses"], alone[r["size"]]))
        for r in rows
        if r["size"] in alone and r["axis"] != "1"
    }


def table(rows: list[dict]) -> str:
    """A row a size and axis."""
    found = {(r["size"], r["axis"]): r for r in rows}
    off = differences(rows)
    lines = [
        f"Two training steps of {2 * TOKENS} tokens in fp32 on CPU (gloo): loss of the second step, its largest",
        "relative difference to one process, seconds of the second step (on two cores that other work may share: not a",
        "comparison of speed) and memory over all ranks.",
        "`rank 16`: whole weights, low-rank updates trained, where moments of all weights did not fit.",
        "",
        "| size | parameters | trained | axis | loss | difference | s | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        for axis in AXES:
            r = found.get((size, axis))
            if r:
                difference = f"{off[size, axis]:.1e}" if (size, axis) in off else ""
                lines.append(
                    f"| {size} | {parameters(size) / 1e6:,.0f} M | {r['trained']} | {axis} | {r['losses'][1]:.5f} "
                    f"| {difference} | {r['seconds']:.1f} | {r['gib']:.1f} |"
                )
    return "\n".join(lines) + "\n"


def parameters(size: str) -> int:
    from dfm_nb import config as cfg
    from dfm_nb.config.counts import parameter_count

    return parameter_count(cfg.resolve(None, overrides=settings(size)).config.model)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--sizes", default=",".join(SIZES))
    p.add_argument("--axes", default=",".join(AXES))
    p.add_argument("--memory-gib", type=float, default=9.0, help="all ranks together")
    p.add_argument("--again", action="store_true", help="measure cells anew that are there")
    p.add_argument("--limit", type=int, default=1000, help="cells of this call")
    args = p.parse_args(argv)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    path = OUT.with_suffix(".json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    wanted = [(s, a) for s in args.sizes.split(",") for a in args.axes.split(",")]
    for size, axis in wanted:
        if size not in SIZES or axis not in AXES:
            raise SystemExit(f"sizes are {', '.join(SIZES)}, axes {', '.join(AXES)}; got {size} on {axis}")
    done = {(r["size"], r["axis"]) for r in rows}
    wanted = [w for w in wanted if args.again or w not in done][: args.limit]
    for size, axis in wanted:
        # two replicas of weights, gradients and two moments
        low_rank = parameters(size) * 2 * 16 > args.memory_gib * 2**30
        row = cell(size, axis, low_rank)
        rows = [r for r in rows if (r["size"], r["axis"]) != (size, axis)] + [row]
        print(f"{size:7s} {axis:26s} losses {row['losses']} {row['seconds']:.1f} s {row['gib']:.1f} GiB", flush=True)
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        OUT.with_suffix(".md").write_text(table(rows))
    bad = {cell: d for cell, d in differences(rows).items() if not d <= TOLERANCE}
    for (size, axis), d in bad.items():
        print(f"FAIL: {size} on {axis}: the loss differs by {d:.1e}")
    print(f"{len(rows) - len(bad)} passed, {len(bad)} failed")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
