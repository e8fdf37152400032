"""Resume time: finding the place in the data again and loading a training state, against what people do without.

    python benchmarks/resume_time.py [--size DiT-B] [--samples 600] [--steps 100,400,1200] [--rounds 3]

The first table is the time from a new process' open loader to its first batch after N steps of packs. dfm_nb restores
a place (epoch, cursor, waiting samples). Energon's savable loader restores its own state. A loader without state is
run forward N steps, and its batches are thrown away. When dfm_nb gives another batch than the uninterrupted run, that
is an error; how often Energon gives the same is reported.

The second table is the time to load a checkpoint of one process, with weights, averages and optimizer, from the page
cache. This project first checks every byte against its checksum. `torch.load` of one file with the same tensors checks
nothing.

Prints the tables and writes benchmarks/results/resume_time.{json,md,png}. Takes about six minutes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from benchmarks import report
from benchmarks.checkpoint_stall import SETTINGS
from benchmarks.loader import BUFFER, CAPACITY, energon_packs_loader, prepare
from dfm_nb.config import Config
from dfm_nb.data.loader import PackedLoader
from dfm_nb.data.pack_plan import PackPlan
from dfm_nb.data.stores import EnergonStore
from dfm_nb.packs.packs import PackSettings


def timed(function: Callable) -> tuple[float, object]:
    """(seconds, what it returned)."""
    gc.collect()
    begun = time.perf_counter()
    result = function()
    return time.perf_counter() - begun, result


# ---- the place in the data ---------------------------------------------------------------------------------------


def ours(store: EnergonStore, settings: PackSettings) -> PackedLoader:
    return PackedLoader(PackPlan(store, settings, CAPACITY, BUFFER), packs_per_step=1)


def keys(packs) -> list[str]:
    return [key for pack in packs for key in pack.keys]


def places(folder: Path, steps: list[int], rounds: int) -> tuple[dict[str, dict[int, list[float]]], dict[str, int]]:
    """By way of getting there: seconds to the first batch after a restart at each of `steps`, and exact restarts.

    A restart is exact when its first batch is the uninterrupted run's.
    """
    settings, store = PackSettings.of(Config(), seed=1), EnergonStore(folder)
    loader, theirs = ours(store, settings), energon_packs_loader(folder, settings)
    stream = iter(theirs)
    marks: dict[int, tuple] = {}
    for step in tqdm(range(max(steps) + 1), desc="uninterrupted run", disable=None):
        if step in steps:
            marks[step] = loader.state(), theirs.save_state_rank(), keys(loader.next_step()), keys(next(stream))
        else:
            loader.next_step(), next(stream)

    def restored(step: int):
        again = ours(store, settings)
        again.restore(marks[step][0])
        return again.next_step()

    def energon(step: int):
        again = energon_packs_loader(folder, settings)
        again.restore_state_rank(marks[step][1])
        return next(iter(again))

    def replayed(step: int):
        again = ours(store, settings)
        for _ in range(step):
            again.next_step()
        return again.next_step()

    ways = {
        "dfm_nb, its place restored": (restored, 2),
        "Energon's savable loader": (energon, 3),
        "run forward (dfm_nb's loader)": (replayed, 2),
    }
    out: dict[str, dict[int, list[float]]] = {name: {s: [] for s in steps} for name in ways}
    exact = dict.fromkeys(ways, 0)
    for _ in tqdm(range(rounds), desc="restarts", disable=None):
        for step in steps:
            for name, (way, expected) in ways.items():
                seconds, packs = timed(lambda way=way, step=step: way(step))
                same = keys(packs) == marks[step][expected]
                exact[name] += same
                if not same and way is not energon:
                    raise RuntimeError(f"{name}: the batch after step {step} is not the one of the uninterrupted run")
                out[name][step].append(seconds)
    return out, exact


# ---- the training state ------------------------------------------------------------------------------------------


def states(size: str, rounds: int, place: Path) -> dict:
    """Seconds to load a whole training state, by way of loading."""
    from dfm_nb import config as cfg
    from dfm_nb import parallel
    from dfm_nb.checkpoints import saving
    from dfm_nb.checkpoints import weights as checkpoint
    from dfm_nb.config import counts
    from dfm_nb.training.batches import open_store, packed_loader
    from dfm_nb.training.trainer import Trainer

    resolved = cfg.resolve(None, overrides=[*SETTINGS, f"model.size={size}", "train.global_batch_size=1"])
    parallel.init(timeout_s=600)
    trainer = Trainer(resolved.config)
    loader = packed_loader(resolved.config, open_store(resolved.config), 0, 1)
    trainer.step(loader.next_step())
    writer = saving.Writer(place / "sharded", say=lambda *_: None)
    state = {"iteration": 1, "steps_taken": trainer.steps_taken, "skipped": 0, "data": loader.state()}
    writer.save(trainer.pieces(), 1, state, cfg.to_yaml(resolved))
    writer.close()
    folder, file = checkpoint.find(place / "sharded"), place / "whole.pt"
    (optimizer,) = trainer.optimizer.chained_optimizers
    named = {n: p for chunk in trainer.chunks for n, p in chunk.named_parameters()}
    moments = optimizer.optimizer.state
    optimized = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    torch.save(
        {
            "model": {n: p.data for n, p in named.items()},
            "ema": dict(trainer.ema.named(0.1)[0]),
            "optimizer": [{**moments[p], "weights": p.data.clone()} for p in optimized],
        },
        file,
    )
    size_of = {"sharded": sum(f.stat().st_size for f in folder.iterdir()), "whole": file.stat().st_size}
    if not 0.98 < size_of["sharded"] / size_of["whole"] < 1.02:
        raise RuntimeError(f"the two files should hold the same tensors: {size_of} bytes")

    def plain() -> None:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, value in loaded["model"].items():
                named[name].copy_(value)
            for name, average in trainer.ema.named(0.1)[0].items():
                average.copy_(loaded["ema"][name])
            for p, values in zip(optimized, loaded["optimizer"], strict=True):
                p.data.copy_(values["weights"])
                for kind in ("exp_avg", "exp_avg_sq"):
                    moments[p][kind].copy_(values[kind])

    before = [p.detach().clone() for p in list(named.values())[:8]]
    ways: dict[str, Callable[[], object]] = {
        "torch.load of one file": plain,
        "dfm_nb: checksums of every byte": lambda: checkpoint.verify(folder),
        "dfm_nb: load": lambda: saving.load(trainer.pieces(), folder),
    }
    out: dict[str, list[float]] = {name: [] for name in ways}
    for r in tqdm(range(rounds + 1), desc="loads", disable=None):
        for name, way in ways.items():
            seconds, _ = timed(way)
            if r:
                out[name].append(seconds)
    if not all(torch.equal(a, b) for a, b in zip(before, named.values())):
        raise RuntimeError("loading changed the weights that were saved")
    parallel.shutdown()
    return {
        "size": size,
        "parameters": counts.parameter_count(resolved.config.model),
        "bytes": size_of["sharded"],
        "seconds": out,
    }


# ---- report ------------------------------------------------------------------------------------------------------


def text(result: dict) -> str:
    places, loads, steps = result["places"], result["loads"], result["steps"]
    restarts = len(steps) * result["rounds"]
    rows = [
        [name, *(f"{statistics.median(by[s]) * 1e3:,.1f}" for s in steps), f"{result['exact'][name]} of {restarts}"]
        for name, by in places.items()
    ]
    base = statistics.median(loads["seconds"]["torch.load of one file"])
    more = [
        [
            name,
            f"{statistics.median(times):.2f}",
            f"{min(times):.2f} to {max(times):.2f}",
            f"{statistics.median(times) / base:.2f}",
        ]
        for name, times in loads["seconds"].items()
    ]
    return "\n".join(
        [
            f"Milliseconds from an open data set ({result['samples']} samples, packs of {CAPACITY:,} tokens, "
            f"buffer {BUFFER}) to the first pack after a restart,",
            f"medians of {result['rounds']} interleaved rounds. {report.sentence(result['machine'])}.",
            "",
            report.table(["restart after", *(f"{s:,} steps" for s in steps), "the uninterrupted run's pack"], rows),
            "",
            f"Seconds to load the training state of {loads['size']} ({loads['parameters'] / 1e6:.0f} M parameters "
            f"with averages and moments, {loads['bytes'] / 1e9:.2f} GB) from the page cache, one process:",
            "",
            report.table(["", "s", "range", "against torch.load"], more),
        ]
    )


def picture(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, by), marker in zip(result["places"].items(), "osD"):
        axes.plot(result["steps"], [statistics.median(by[s]) for s in result["steps"]], marker=marker, label=name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="steps before the restart",
        ylabel="seconds to the first pack",
        title="Finding the place in the data",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="DiT-B")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--steps", default="100,400,1200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    steps = sorted({int(s) for s in args.steps.split(",")})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="megatron|webdataset|torch")
    about = report.machine()
    with tempfile.TemporaryDirectory(prefix="resume_time_") as place:
        prepare(Path(place) / "data", args.samples)
        seconds, exact = places(Path(place) / "data", steps, args.rounds)
        result = {
            "machine": about,
            "samples": args.samples,
            "steps": steps,
            "rounds": args.rounds,
            "places": seconds,
            "exact": exact,
            "loads": states(args.size, args.rounds, Path(place)),
        }
    report.save("resume_time", result, text(result), args.output_dir)
    picture(result, args.output_dir / "resume_time.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
