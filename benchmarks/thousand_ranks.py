"""A thousand data-parallel ranks, simulated: is a sample lost or used twice, does any rank see other packs?

    python benchmarks/thousand_ranks.py [--samples 100000000] [--ranks 1024] [--steps 10000] [--kills 1000]

No network, no model: an index of generated samples, the loader that training uses (`PackedLoader`, which here gives out
what it would read), and torch's fake process group, in which megatron-core says which packs a rank has.

One pass over the plan is the reference; it counts each sample of each epoch. On the way the layout changes: degrees of
TP, CP and PP, the number of ranks, and twice the number of packs a step. At random steps a random rank of the layout is
killed: a new one opens the data set, goes on from a state of some steps before, as JSON, and must have the reference's
packs up to and after the step at which it died.

Writes benchmarks/results/thousand_ranks.{json,md}. In full it takes an hour of two cores (0.13 s a step of 1,024 packs,
two seconds a kill) and 8 GB of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from benchmarks import report
from benchmarks.growth import write_generated
from dfm_nb.config import Config
from dfm_nb.data.loader import PackedLoader
from dfm_nb.data.order import PackOrder
from dfm_nb.data.stores import EnergonStore
from dfm_nb.packs.packer import PackItem
from dfm_nb.packs.packs import PackSettings
from dfm_nb.parallel.groups import Layout

CAPACITY, BUFFER, BALANCE_STEPS, BEFORE = 4096, 100, 8, 4
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4, cp=2), Layout(tp=2, pp=2), Layout(cp=4), Layout(tp=4, pp=4)]


class Listed(PackedLoader):
    """The packs of a rank as lists of samples, unread."""

    def _build(self, items):
        return lambda: items


def open_loader(folder: Path, lanes: int, packs: int, dp_rank: int, dp_size: int) -> Listed:
    order = PackOrder(EnergonStore(folder), PackSettings.of(Config(), seed=1), CAPACITY, BUFFER, lanes=lanes)
    return Listed(order, packs, dp_rank, dp_size, num_workers=0, balance_steps=BALANCE_STEPS)


def place_of(layout: Layout, rank: int, world: int) -> tuple[int, int]:
    """(data-parallel rank, ranks), as megatron-core says of a rank in a world that is not there."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dfm_nb import parallel

    made = dist.new_group
    dist.new_group = lambda *args, **kwargs: made(*args, **(kwargs | {"backend": "fake"}))
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        parallel.init(layout)
        return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
        dist.new_group = made


def digest(items: list[PackItem]) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(items).encode(), digest_size=8).digest(), "little")


def replay(folder: Path, lanes: int, place: Path, job: tuple, digests: list[np.ndarray]) -> tuple[int, int, float]:
    """Of a killed rank that goes on: steps with other packs than the reference's, steps, seconds to the first."""
    saved, _, layout, world, packs, rank = job
    state = json.loads((place / f"{saved}.json").read_text())
    dp_rank, dp_size = place_of(layout, rank, world)
    begun = time.perf_counter()
    again = open_loader(folder, lanes, packs, dp_rank, dp_size)
    again.restore(state)
    own = again.next_step()
    seconds = time.perf_counter() - begun
    wrong = checked = 0
    for of_all in digests:
        if len(of_all) != packs:
            break  # the batch size changes here
        own = again.next_step() if checked else own
        wrong += [digest(items) for items in own] != of_all[dp_rank::dp_size].tolist()
        checked += 1
    return wrong, checked, seconds


def simulate(folder: Path, args: argparse.Namespace, place: Path) -> dict:
    """The reference pass, and what the killed ranks saw."""
    rng = random.Random(0)
    kills: dict[int, list[int]] = {}  # step before which a rank's state was saved -> steps at which it dies
    for _ in range(args.kills):
        dies = rng.randrange(1, args.steps - 1)
        kills.setdefault(max(0, dies - rng.randrange(BEFORE)), []).append(dies)
    loader = open_loader(folder, args.lanes, args.ranks, 0, 1)
    used: dict[int, np.ndarray] = {}
    twice, digests, layouts, step_s = 0, [], [], []
    packs = args.ranks
    for step in tqdm(range(args.steps), desc="reference", unit="step", disable=None):
        if step % -(-args.steps // args.layouts) == 0:
            number = len(layouts)
            if number in (args.layouts // 3, 2 * args.layouts // 3):  # another batch size, there and back
                packs = args.ranks // 2 if packs == args.ranks else args.ranks
                state = json.loads(json.dumps(loader.state()))
                loader = open_loader(folder, args.lanes, packs, 0, 1)
                loader.restore(state)
            layout = LAYOUTS[number % len(LAYOUTS)]
            layouts.append((step, layout, packs * layout.model_size // (1 + number % 2), packs))
        if step in kills:
            (place / f"{step}.json").write_text(json.dumps(loader.state()))
        begun = time.perf_counter()
        made = loader.next_step()
        step_s.append(time.perf_counter() - begun)
        digests.append(np.array([digest(items) for items in made], np.uint64))
        pairs = np.array([item for items in made for item in items])
        for epoch in np.unique(pairs[:, 0]).tolist():
            if epoch not in used:
                used[epoch] = np.zeros(args.samples, bool)
            own, seen = pairs[pairs[:, 0] == epoch, 1], used[epoch]
            twice += int(seen[own].sum()) + len(own) - len(np.unique(own))
            seen[own] = True
    lanes = loader.steps.packs.lanes
    whole = min(lane.epoch for lane in lanes) - 1  # of the last whole epochs some samples still wait
    lost = sum(int((~seen).sum()) for epoch, seen in used.items() if epoch < whole)
    waiting = {item.sample for lane in lanes for item in lane.packer.waiting}
    jobs = []
    for saved, dying in kills.items():
        _, layout, world, packs = next(x for x in reversed(layouts) if x[0] <= saved)
        jobs += [(saved, dies, layout, world, packs, rng.randrange(world)) for dies in dying]
    begun = time.perf_counter()
    again = functools.partial(replay, folder, args.lanes, place)
    seen_until = [digests[saved : dies + 2] for saved, dies, *_ in jobs]
    with contextlib.ExitStack() as stack:
        each = map
        if args.workers > 1:
            # not forked: a fork of a process with threads may die
            pool = ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"))
            each = stack.enter_context(pool).map
        found = list(tqdm(each(again, jobs, seen_until), total=len(jobs), desc="kills", unit="kill", disable=None))
    wrong, checked, resumed_s = sum(f[0] for f in found), sum(f[1] for f in found), [f[2] for f in found]
    return {
        "samples_used": int(sum(seen.sum() for seen in used.values())),
        "epochs": len(used),
        "used_twice": twice,
        "lost_in_whole_epochs": lost,
        "waiting": len(waiting),
        "layouts": [[step, repr(layout), world, packs] for step, layout, world, packs in layouts],
        "steps_compared": checked,
        "steps_that_differ": wrong,
        "kills_s": time.perf_counter() - begun,
        "plan_step_ms": 1e3 * statistics.fmean(step_s),
        "resume_s": report.spread(resumed_s),
        "state_kib": len(json.dumps(loader.state())) / 1024,
    }


def rank_memory(folder: str, lanes: int, packs: int) -> float:
    """On one rank, a fresh process: MiB by which opening and some steps make it grow."""
    before = report.resident_mib()
    loader = open_loader(Path(folder), lanes, packs, 0, packs)
    for _ in range(2 * BALANCE_STEPS):
        loader.next_step()
    return report.resident_mib() - before


def text(result: dict) -> str:
    low, high = result["resume_s"][1:]
    rows = [
        ["samples; used, over epochs", f"{result['samples']:,}; {result['samples_used']:,} over {result['epochs']}"],
        ["ranks, steps, kills, layouts", ", ".join(f"{result[k]:,}" for k in ("ranks", "steps", "kills"))
         + f", {len(result['layouts'])}"],
        ["used twice in an epoch", result["used_twice"]],
        ["never used in a whole epoch", result["lost_in_whole_epochs"]],
        ["steps of killed ranks compared with the plan", f"{result['steps_compared']:,}"],
        ["of these, other packs", result["steps_that_differ"]],
        ["planning a step of all ranks, ms", f"{result['plan_step_ms']:.0f}"],
        ["open, restore and first step, s (median; least to greatest)",
         f"{result['resume_s'][0]:.2f}; {low:.2f} to {high:.2f}"],
        ["state in a checkpoint, KiB", f"{result['state_kib']:.0f}"],
        ["memory of a rank, MiB", f"{result['rank_mib']:.0f}"],
    ]  # fmt: skip
    return f"{report.sentence(result['machine'])}.\n\n{report.table(['', ''], rows)}"


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(
        __doc__,
        samples=100_000_000,
        ranks=(1024, "data-parallel ranks, one pack a step each"),
        steps=10_000,
        kills=1000,
        layouts=20,
        lanes=(0, "0: as many as suit the data set"),
        workers=(len(os.sched_getaffinity(0)), "processes for the kills"),
    )
    args = parser.parse_args(argv)
    from tests.conftest import run_ranks

    about = report.machine()
    with tempfile.TemporaryDirectory(prefix="ranks_") as place:
        folder = Path(place, "data")
        run_ranks(1, write_generated, folder, args.samples, timeout_s=3600)
        (mib,) = run_ranks(1, rank_memory, str(folder), args.lanes, args.ranks, timeout_s=3600)
        result = simulate(folder, args, Path(place))
    named = {k: getattr(args, k) for k in ("samples", "ranks", "steps", "kills", "lanes")}
    result = {"machine": about, **named, **result, "rank_mib": mib}
    report.save("thousand_ranks", result, text(result), args.output_dir)
    return int(bool(result["used_twice"] or result["lost_in_whole_epochs"] or result["steps_that_differ"]))


if __name__ == "__main__":
    raise SystemExit(main())
