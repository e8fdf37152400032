"""A run saved at TP2 goes on in other layouts: its loss curves beside the uninterrupted one, on one plot.

    python benchmarks/elastic_resume.py [--iterations 60] [--output-dir DIR]

The run trains on two processes at TP2xDP1, on packs of small synthetic pictures and clips, and saves half-way. From
there it goes on at TP1xDP2, PP2 and CP2, and at TP2 again. Each continuation sees exactly the samples of the
uninterrupted run.

Writes elastic_resume.{json,md,png} with the largest relative difference of a loss. It is 0 in the same layout and
rounding in the others. All layouts run one after the other in the same two processes, so that only the first pays for
imports. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SETTINGS = [
    "dataset.task_encoder_seq_length=160",
    "dataset.packing_buffer_size=16",
    "dataset.num_workers=0",
    "model.num_layers=4",
    "model.hidden_size=96",
    "model.num_attention_heads=4",
    "train.global_batch_size=2",
    "optimizer.lr=3e-3",
    "scheduler.lr_warmup_iters=5",
    "mixed_precision=fp32",
    "ema.sigma_rels=[0.1]",
    "optimizer.use_distributed_optimizer=true",
    "checkpoint.async_save=true",
]
TP2 = ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]
RESUMED = {
    "TP2xSPxDP1, the same": TP2,
    "TP1xDP2": [],
    "PP2": ["model.pipeline_model_parallel_size=2"],
    "CP2": ["model.context_parallel_size=2"],
}


def prepare(folder: Path) -> None:
    argv = ["--source", "synthetic", "--num-images", "60", "--num-clips", "8", "--short-side", "32"]
    command = [sys.executable, "-m", "dfm_nb.prepare", *argv, "--output-dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def losses(folder: Path, overrides: list[str], iterations: int, resume: bool) -> dict[int, dict]:
    """Loss and samples seen at each iteration.

    With `resume` the run starts from the checkpoint; else it starts from nothing and saves the checkpoint half-way.
    """
    from dfm_nb import config as cfg
    from dfm_nb import parallel
    from dfm_nb.checkpoints import saving
    from dfm_nb.checkpoints import weights as checkpoint
    from dfm_nb.parallel.groups import layout_of
    from dfm_nb.training.batches import open_store, packed_loader
    from dfm_nb.training.trainer import Trainer

    given = [*SETTINGS, *overrides, f"dataset.path={folder / 'data'}", f"train.train_iters={iterations}"]
    resolved = cfg.resolve(None, overrides=given)
    parallel.init(layout_of(resolved.config.model), timeout_s=300, seed=resolved.config.rng.seed)
    store = open_store(resolved.config)
    derived = {"model.in_channels": store.channels, "model.text_dim": store.text_dim}
    resolved = resolved.with_derived(derived, "the data set")
    config = resolved.config
    trainer = Trainer(config)
    loader = packed_loader(config, store, trainer.dp_rank, trainer.dp_size)
    checkpoints = folder / "checkpoints"
    writer = saving.Writer(checkpoints, asynchronous=True, say=lambda *_: None)
    first = 0
    if resume:
        state = saving.load(trainer.pieces(), checkpoint.find(checkpoints))
        first, trainer.steps_taken = state["iteration"], state["steps_taken"]
        loader.restore(state["data"])
    out = {}
    for iteration in range(first + 1, iterations + 1):
        result = trainer.step(loader.next_step())
        out[iteration] = {"loss": result.loss, "samples": loader.state()["samples"]}
        if not resume and iteration == iterations // 2:
            state = {"iteration": iteration, "steps_taken": trainer.steps_taken, "data": loader.state()}
            writer.save(trainer.pieces(), iteration, state, cfg.to_yaml(resolved))
        writer.poll()
    writer.close()
    return out


def rank_main(rank: int, folder: str, iterations: int) -> None:
    """All runs, one after the other, on one of two ranks."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    import torch
    import torch.distributed as dist

    from dfm_nb import parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    curves = {"uninterrupted": losses(Path(folder), TP2, iterations, resume=False)}
    for name, overrides in RESUMED.items():
        curves[name] = losses(Path(folder), overrides, iterations, resume=True)
    if rank == 0:
        (Path(folder) / "curves.json").write_text(json.dumps(curves))
    parallel.shutdown()


def measure(iterations: int) -> dict[str, dict[int, dict]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder) / "data")
        ranks = [context.Process(target=rank_main, args=(r, folder, iterations)) for r in range(2)]
        for p in ranks:
            p.start()
        for p in ranks:
            p.join()
        if any(p.exitcode for p in ranks):
            raise SystemExit(f"a rank failed: exit codes {[p.exitcode for p in ranks]}")
        found = json.loads((Path(folder) / "curves.json").read_text())
    return {name: {int(i): r for i, r in curve.items()} for name, curve in found.items()}


def compare(curves: dict[str, dict[int, dict]]) -> dict[str, dict]:
    """Of each resumed run: the largest relative difference of a loss, where, and whether it saw the same samples."""
    want, out = curves["uninterrupted"], {}
    for name in RESUMED:
        got = curves[name]
        difference = {i: abs(r["loss"] - want[i]["loss"]) / abs(want[i]["loss"]) for i, r in got.items()}
        worst = max(difference, key=difference.__getitem__)
        out[name] = {
            "resumed_at": min(got) - 1,
            "iterations": len(got),
            "largest_relative_difference": difference[worst],
            "at_iteration": worst,
            "first_relative_difference": difference[min(got)],
            "same_samples": all(r["samples"] == want[i]["samples"] for i, r in got.items()),
        }
    return out


def plot(curves: dict, differences: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(2, 1), layout="constrained")
    want = curves["uninterrupted"]
    top.plot(
        list(want), [r["loss"] for r in want.values()], color="0.75", linewidth=5, label="uninterrupted, TP2xSPxDP1"
    )
    for k, (name, found) in enumerate(differences.items()):
        got, style = curves[name], {"color": f"C{k}", "linestyle": ("-", "--", "-.", ":")[k], "linewidth": 1.5}
        top.plot(list(got), [r["loss"] for r in got.values()], label=f"resumed at {name}", **style)
        relative = [abs(r["loss"] - want[i]["loss"]) / want[i]["loss"] for i, r in got.items()]
        if found["largest_relative_difference"]:
            bottom.semilogy(list(got), [d or math.nan for d in relative], marker=".", label=name, **style)
    at = min(f["resumed_at"] for f in differences.values()) + 0.5
    for axis in (top, bottom):
        axis.axvline(at, color="0.4", linewidth=0.8)
        axis.grid(alpha=0.3)
    top.annotate(
        "saved, and resumed in another layout",
        (at, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(4, -2),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    top.set_ylabel("EDM loss")
    top.set_title("A run saved at TP2xDP1 goes on in other layouts", fontsize=11)
    top.legend(fontsize=8, loc="lower left")
    bottom.set_ylabel("relative difference\nof the loss (0 not drawn)")
    bottom.set_xlabel("iteration")
    bottom.legend(fontsize=8, loc="lower left")
    fig.savefig(path, dpi=130)


def table(result: dict) -> str:
    rows = [
        f"| {name} | {r['iterations']} | {r['first_relative_difference']:.1e} "
        f"| {r['largest_relative_difference']:.1e} | {'yes' if r['same_samples'] else 'NO'} |"
        for name, r in result["resumed"].items()
    ]
    at = next(iter(result["resumed"].values()))["resumed_at"]
    return "\n".join(
        [
            f"Trained and saved asynchronously at TP2xSPxDP1, resumed at iteration {at} of {result['iterations']}; "
            f"2 processes, fp32, packed synthetic pictures and clips, {result['machine']}; "
            f"{result['seconds']:.0f} s in all. "
            "Differences are those of the loss, relative to the uninterrupted run's.",
            "",
            "| resumed at | iterations | first difference | largest difference | same samples |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "![loss curves](elastic_resume.png)",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    started = time.monotonic()
    curves = measure(args.iterations)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "iterations": args.iterations,
        "resumed": compare(curves),
        "seconds": time.monotonic() - started,
        "curves": {n: {i: r["loss"] for i, r in c.items()} for n, c in curves.items()},
    }
    plot(curves, result["resumed"], args.output_dir / "elastic_resume.png")
    (args.output_dir / "elastic_resume.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    (args.output_dir / "elastic_resume.md").write_text(text + "\n")
    print(text)
    good = all(r["same_samples"] and r["largest_relative_difference"] < 1e-3 for r in result["resumed"].values())
    exact = result["resumed"]["TP2xSPxDP1, the same"]["largest_relative_difference"] == 0
    return int(not (good and exact))


if __name__ == "__main__":
    raise SystemExit(main())
