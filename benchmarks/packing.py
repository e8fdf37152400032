"""Packing: useful tokens / capacity and time a pack, dfm_nb's packer against padding, next-fit and first-fit.

    python benchmarks/packing.py [--seeds 7] [--packs 200] [--capacity 15360] [--buffer 100]

All packers see the same random streams of sample lengths. The streams are endless, so that no last, half-empty pack is
counted. The packers are:

- padding: the next samples, in the order they come, as rows of one rectangle that has at most `capacity` tokens; its
  share is useful tokens / the rectangle's;
- next-fit: the next samples, in the order they come, until one does not fit;
- first-fit-decreasing, by buffers: `buffer` samples (or enough for two packs) are sorted and packed, all packs are
  given out, and the buffer is read anew. An Energon task encoder with a packing buffer does this;
- first-fit-decreasing, refilled: the same, but only the fullest pack is given out and the buffer is filled up again;
- dfm_nb: the fullest pack that holds the oldest waiting sample (exact subset sum), then the buffer is filled up again.

The longest wait is how many packs went out between a sample's arrival in the buffer and its leaving it.

A second table has the work of the slowest rank over the mean, by the FLOPs of DiT-XL: of the packs of a step over
data-parallel ranks, as they come and with `dataset.balance_steps=32`; and of the shares of a pack over 8
context-parallel ranks, as contiguous slices of a pack sorted by length (which they were) and as dealt now.

Prints the tables and writes benchmarks/results/packing.{json,md}. Takes two minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from dfm_nb import config as cfg
from dfm_nb.butterflies import synthetic
from dfm_nb.config import counts
from dfm_nb.data.order import PackOrder, StepOrder
from dfm_nb.data.stores import MockStore
from dfm_nb.model.attention import SegmentBounds, cumulative
from dfm_nb.packs.packer import Packer, PackItem
from dfm_nb.packs.packs import PackSettings

PATCH_PX = 16
"""A token stands for 16 x 16 px (8x8 of the tokenizer, patches of 2x2) and, after the first, for four frames."""


# ---- mixes: endless streams of lengths in tokens -----------------------------------------------------------------


def _side(units: float, base_px: int) -> int:
    return max(1, round(units * base_px / PATCH_PX))


def synthetic_mix(rng: random.Random, base_px: int) -> Iterator[int]:
    """Lengths as the synthetic source draws them, a fifth of them clips (its defaults: 1,200 images and 300 clips)."""
    while True:
        clip = rng.random() < 0.2
        shapes = synthetic.CLIP_SHAPES if clip else synthetic.IMAGE_SHAPES
        (h, w), _ = rng.choices(shapes, [weight for _, weight in shapes])[0]
        frames = rng.choices([n for n, _ in synthetic.CLIP_FRAMES], [p for _, p in synthetic.CLIP_FRAMES])[0]
        yield _side(h, base_px) * _side(w, base_px) * ((1 + (frames - 1) // 4) if clip else 1)


def uniform_mix(rng: random.Random) -> Iterator[int]:
    """Square pictures, 12 sides from 128 to 1024 px as evenly as multiples of 16 px allow, all equally likely."""
    sides = [round((128 + i * (1024 - 128) / 11) / PATCH_PX) for i in range(12)]
    while True:
        yield rng.choice(sides) ** 2


def text_mix(rng: random.Random, capacity: int) -> Iterator[int]:
    """Document lengths: lognormal, median 400 tokens, sigma 1.2; longer ones than a pack are cut."""
    while True:
        yield min(capacity, max(1, round(rng.lognormvariate(5.99, 1.2))))


MIXES: dict[str, Callable[[random.Random, int], Iterator[int]]] = {
    "synthetic, 64 px": lambda rng, capacity: synthetic_mix(rng, 64),
    "synthetic, 512 px": lambda rng, capacity: synthetic_mix(rng, 512),
    "12 sizes, 128 to 1024 px": lambda rng, capacity: uniform_mix(rng),
    "text-like, lognormal": text_mix,
}


# ---- packers: endless streams of packs ----------------------------------------------------------------------------

Pack = tuple[list[int], int, int]
"""(lengths, tokens of the memory it takes, longest wait in packs)."""


def padding(stream: Iterator[int], capacity: int, buffer: int) -> Iterator[Pack]:
    rows: list[int] = []
    longest = 0
    for length in stream:
        if (len(rows) + 1) * max(longest, length) > capacity:
            yield rows, len(rows) * longest, 0
            rows, longest = [], 0
        rows.append(length)
        longest = max(longest, length)


def next_fit(stream: Iterator[int], capacity: int, buffer: int) -> Iterator[Pack]:
    pack: list[int] = []
    used = 0
    for length in stream:
        if used + length > capacity:
            yield pack, capacity, 0
            pack, used = [], 0
        pack.append(length)
        used += length


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` by pack: the longest first, each into the first pack that has room for it."""
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > capacity:
            raise ValueError(f"a sample of {lengths[i]} tokens does not fit a pack of {capacity}")
        into = next((p for p, free in enumerate(room) if free >= lengths[i]), None)
        if into is None:
            packs.append([])
            room.append(capacity)
            into = -1
        packs[into].append(i)
        room[into] -= lengths[i]
    return packs


def _fill(waiting: list[tuple[int, int]], stream: Iterator[int], capacity: int, buffer: int, now: int) -> None:
    """Append (length, arrival) as `Packer` does: at least `buffer` samples, and enough for two packs."""
    tokens = sum(length for length, _ in waiting)
    while len(waiting) < buffer or tokens < 2 * capacity:
        waiting.append((next(stream), now))
        tokens += waiting[-1][0]


def ffd_by_buffers(stream: Iterator[int], capacity: int, buffer: int) -> Iterator[Pack]:
    while True:
        waiting: list[tuple[int, int]] = []
        _fill(waiting, stream, capacity, buffer, 0)
        for wait, pack in enumerate(first_fit_decreasing([length for length, _ in waiting], capacity)):
            yield [waiting[i][0] for i in pack], capacity, wait


def ffd_refilled(stream: Iterator[int], capacity: int, buffer: int) -> Iterator[Pack]:
    waiting: list[tuple[int, int]] = []
    now = 0
    while True:
        _fill(waiting, stream, capacity, buffer, now)
        packs = first_fit_decreasing([length for length, _ in waiting], capacity)
        fullest = set(max(packs, key=lambda pack: sum(waiting[i][0] for i in pack)))
        taken = [w for i, w in enumerate(waiting) if i in fullest]
        yield [length for length, _ in taken], capacity, now - min(arrival for _, arrival in taken)
        waiting = [w for i, w in enumerate(waiting) if i not in fullest]
        now += 1


def ours(stream: Iterator[int], capacity: int, buffer: int) -> Iterator[Pack]:
    packer, now = Packer(capacity, buffer), 0
    arriving = (PackItem(now, i, length) for i, length in enumerate(stream))
    while True:
        taken = packer.next(arriving)
        yield [item.tokens for item in taken], capacity, now - min(item.epoch for item in taken)
        now += 1


PACKERS: dict[str, Callable[[Iterator[int], int, int], Iterator[Pack]]] = {
    "padding": padding,
    "next-fit": next_fit,
    "first-fit-decreasing, by buffers": ffd_by_buffers,
    "first-fit-decreasing, refilled": ffd_refilled,
    "dfm_nb": ours,
}


# ---- measurement -------------------------------------------------------------------------------------------------


def draw(mix: str, seed: int, packs: int, capacity: int, buffer: int) -> list[int]:
    """Lengths enough for that many packs and for the buffers behind them."""
    lengths, tokens = [], 0
    drawn = MIXES[mix](random.Random(f"{mix}/{seed}"), capacity)
    while tokens < (packs + 3) * capacity:
        lengths.append(next(drawn))
        tokens += lengths[-1]
    return lengths + list(islice(drawn, buffer))


def measure(packer: str, lengths: list[int], packs: int, capacity: int, buffer: int) -> dict[str, float]:
    """Useful share, milliseconds of processor time a pack and longest wait over the first `packs` packs."""
    begun = time.process_time()
    given_out = list(islice(PACKERS[packer](iter(lengths), capacity, buffer), packs))
    seconds = time.process_time() - begun
    assert len(given_out) == packs and all(sum(pack) <= memory <= capacity for pack, memory, _ in given_out), packer
    useful = sum(sum(pack) for pack, _, _ in given_out) / sum(memory for _, memory, _ in given_out)
    longest = max(wait for _, _, wait in given_out)
    return {"useful": useful, "ms_per_pack": 1e3 * seconds / packs, "longest_wait_packs": longest}


def run(seeds: int, packs: int, capacity: int, buffer: int) -> list[dict]:
    """A row a mix and packer: medians over the seeds, and each seed's figures."""
    rows = []
    for mix in MIXES:
        each: dict[str, list] = {name: [] for name in PACKERS}
        for seed in range(seeds):
            lengths = draw(mix, seed, packs, capacity, buffer)
            for name in PACKERS:  # interleaved
                each[name].append(measure(name, lengths, packs, capacity, buffer))
        for name, runs in each.items():
            medians = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
            rows.append({"mix": mix, "packer": name, **medians, "runs": runs})
    return rows


# ---- balance -----------------------------------------------------------------------------------------------------

BALANCE_STEPS, CP, TEXT_TOKENS = 32, 8, 64
DATA_PARALLEL = {8: 8, 64: 2}
"""Ranks, and how many windows of `BALANCE_STEPS` steps of one pack each are measured."""


class Work:
    """FLOPs of DiT-XL's forward pass: linear in tokens, and in the products of queries and keys."""

    def __init__(self) -> None:
        settings = ["model.size=DiT-XL", "model.in_channels=16", "model.text_dim=1024"]
        model = cfg.resolve(None, overrides=settings, world_size=1).config.model
        one, two = (counts.forward_flops(model, [n], [TEXT_TOKENS]) for n in (1024, 2048))
        self.product = (two - 2 * one) / (2048**2 - 2 * 1024**2)  # what a sample costs beside is left out: it is equal
        self.token = (one - self.product * 1024**2) / 1024

    def __call__(self, lengths: list[int]) -> float:
        return self.token * sum(lengths) + self.product * sum(n * n for n in lengths)

    def shares(self, pack: list[int], dealt: bool) -> list[float]:
        """Of each context-parallel rank; a pack that the number of ranks does not divide is padded."""
        lengths = [*sorted(pack), -sum(pack) % CP]
        cu = cumulative(lengths)
        out = []
        for rank in range(CP):
            if dealt:
                own = SegmentBounds(cu, cu).dealt(rank, CP).cu_q
            else:
                start, stop = (r * cu[-1] // CP for r in (rank, rank + 1))
                own = [min(max(c, start), stop) for c in cu]
            queries = [b - a for a, b in zip(own, own[1:])]
            out.append(self.token * sum(queries) + self.product * sum(q * n for q, n in zip(queries, lengths)))
        return out


def slowest_over_mean(groups: list[list[float]]) -> float:
    """All wait for the slowest of each group: the sum of the slowest over that of the means."""
    return sum(map(max, groups)) / sum(map(statistics.fmean, groups))


def balance(capacity: int, buffer: int) -> list[dict]:
    """A row a mix: slowest over mean by what it is of."""
    work, rows = Work(), []
    settings = PackSettings(cfg.Config())
    for mix in MIXES:
        packs = BALANCE_STEPS * max(ranks * windows for ranks, windows in DATA_PARALLEL.items())
        lengths = draw(mix, 0, packs, capacity, buffer)
        area = settings.patch_volume
        store = MockStore([(1, 1, n * area) for n in lengths], length=len(lengths))
        row: dict = {"mix": mix}
        for ranks, windows in DATA_PARALLEL.items():
            for window in (1, BALANCE_STEPS):
                order = StepOrder(PackOrder(store, settings, capacity, buffer, shuffle=False), ranks, window)
                steps = [order.next() for _ in range(windows * BALANCE_STEPS)]
                of_step = [[work([lengths[item.sample] for item in pack]) for pack in step] for step in steps]
                row[f"{ranks} ranks, {window}"] = slowest_over_mean(of_step)
        some = [[lengths[item.sample] for item in pack] for step in steps[:4] for pack in step]
        for name, dealt in (("slices", False), ("dealt", True)):
            row[f"CP {CP}, {name}"] = slowest_over_mean([work.shares(pack, dealt) for pack in some])
        rows.append(row)
    return rows


def balance_table(rows: list[dict]) -> str:
    names = list(rows[0])[1:]
    head = [n.replace(", 1", ", as they come") if n.endswith(", 1") else n.replace(f", {BALANCE_STEPS}", ", balanced")
            for n in names]  # fmt: skip
    return report.table(["slowest / mean", *head], [[r["mix"], *(f"{r[n]:.3f}" for n in names)] for r in rows])


def mean_length(mix: str, capacity: int) -> float:
    return statistics.fmean(islice(MIXES[mix](random.Random(0), capacity), 5000))


def text(rows: list[dict], about: dict, args: argparse.Namespace) -> str:
    lines = [
        "Useful tokens / capacity (of padding: / the rectangle's tokens); "
        f"capacity {args.capacity:,}, buffer {args.buffer} samples and at least two packs.",
        f"Medians of {args.seeds} seeds, {args.packs} packs each; least and greatest in brackets. "
        f"{report.sentence(about)}.",
        "",
    ]
    cells = []
    for row in rows:
        middle, least, greatest = report.spread([r["useful"] for r in row["runs"]])
        mix = f"{row['mix']} (mean {mean_length(row['mix'], args.capacity):,.0f} tokens)"
        cells.append(
            [
                mix,
                row["packer"],
                f"{middle:.3f} ({least:.3f} to {greatest:.3f})",
                f"{row['ms_per_pack']:.2f}",
                f"{row['longest_wait_packs']:.0f}",
            ]
        )
    return (
        "\n".join(lines)
        + "\n"
        + report.table(["mix", "packer", "useful", "CPU ms a pack", "longest wait, packs"], cells)
    )


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__, seeds=7, packs=200, capacity=15_360, buffer=100)
    args = parser.parse_args(argv)
    about = report.machine()
    rows = run(args.seeds, args.packs, args.capacity, args.buffer)
    settings = {k: getattr(args, k) for k in ("seeds", "packs", "capacity", "buffer")}
    balanced = balance(args.capacity, args.buffer)
    result = {"machine": about, **settings, "rows": rows, "balance": balanced}
    report.save("packing", result, f"{text(rows, about, args)}\n\n{balance_table(balanced)}", args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
