"""Growth: how cost grows with data set size, sequence length and corpus size; fitted exponents.

    python benchmarks/growth.py [--only data|index|sequence|corpus] [--quick] [--largest]

It makes its own pictures and packs, and takes text from Python's own library and installed packages. It prints a table
and writes benchmarks/results/growth.{json,md}. Everything runs on one thread, one process at a time, and imports
are not counted. Figures are medians of `--rounds` interleaved rounds; preparation runs once.

- data set size: seconds to prepare N synthetic pictures of 32 px, to open the folder, and to plan one epoch of packs;
- index: N samples in shards of 10,000, of which all but the first are holes with a generated index. Seconds and memory
  of a fresh process to open the folder for training, to plan a pack, and to restore a place in the data and go on;
- sequence length: seconds of a training step (demo size, float32) on one pack of S tokens. Either the pack is a single
  clip, whose attention is quadratic, or it holds pictures of 64 tokens, whose attention is linear. The exponent of the
  step's FLOPs over the same lengths stands beside it;
- corpus: seconds of `dfm text preprocess` on M megabytes, one worker.

The exponent k is that of cost = c * size^k over all sizes. Beside it stand a start-up a and the rate b after it, from
cost = a + b * size with the smallest relative error. Takes about four minutes on a quiet core, with `--quick` a minute
and a half.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from tqdm import tqdm

from benchmarks import report
from benchmarks.report import timed
from tests.conftest import run_ranks

SIZES = {
    "data": [250, 500, 1000, 2000, 4000],
    "index": [10**4, 10**5, 10**6, 10**7],
    "sequence": [512, 1024, 2048, 4096, 8192],
    "corpus": [1, 2, 4, 8, 16],
}
QUICK = {
    "data": [125, 250, 500, 1000],
    "index": [10**4, 10**5, 10**6],
    "sequence": [512, 1024, 2048, 4096],
    "corpus": [1, 2, 4, 8],
}
UNITS = {"data": "samples", "index": "samples", "sequence": "tokens", "corpus": "MB"}
PICTURE = 64
"""Tokens of the pictures in the linear case: latents of 1 x 16 x 16, patches of 2 x 2."""


# ---- data set size -----------------------------------------------------------------------------------------------


def medians(functions: list, rounds: int) -> list[float]:
    """Seconds of each call, over interleaved rounds."""
    return [statistics.median(times) for times in zip(*([timed(f) for f in functions] for _ in range(rounds)))]


def data_rank(sizes: list[int], rounds: int) -> dict[str, list[float]]:
    """On one rank: seconds by size of preparing, opening and planning an epoch."""
    import torch

    from dfm_nb.config import Config
    from dfm_nb.data.order import PackOrder
    from dfm_nb.data.stores import ShardStore
    from dfm_nb.packs.packs import PackSettings
    from dfm_nb.prepare import main

    torch.set_num_threads(1)

    def epoch(store):
        order = PackOrder(store, PackSettings(Config()), 1024, 100)
        while order.lanes[0].epoch == 0:
            order.next()

    with tempfile.TemporaryDirectory(prefix="growth_") as place:
        folders = [Path(place, str(n)) for n in (sizes[0] // 2, *sizes)]  # the first loads the encoders' files
        flags = "--source synthetic --num-clips 0 --short-side 32 --num-images".split()
        prepares = [lambda f=f: main([*flags, f.name, "--output-dir", str(f)]) for f in folders]
        opens = [lambda f=f: ShardStore(f) for f in folders]
        out = {"prepare": medians(prepares, 1)[1:], "open": medians(opens, rounds)[1:]}
        stores = [ShardStore(f) for f in folders[1:]]
        for index in Path(place).glob("*/*.index.arrow"):
            index.unlink()
        out["open without an index"] = medians(opens, rounds)[1:]
        out["plan an epoch"] = medians([lambda s=s: epoch(s) for s in stores], rounds)
    return out


# ---- index -------------------------------------------------------------------------------------------------------

SHARD_SAMPLES, SAMPLE_BYTES = 10_000, 1 << 16
SIDES = [8, 12, 16, 24, 32]


def write_generated(folder: Path, samples: int) -> int:
    """A folder of so many samples, of which the first few are real; returns the bytes of its index."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import torch
    from safetensors.torch import save_file

    from dfm_nb.base.records import EncodedClip
    from dfm_nb.data.prepared_folder import write_manifest
    from dfm_nb.data.sample_index import SCHEMA, Shard, index_path, write_index
    from dfm_nb.data.shards import ShardWriter, samples_of

    folder.mkdir()
    names = [f"rank0-{n:06d}.tar" for n in range(-(-samples // SHARD_SAMPLES))]
    first = ShardWriter(folder / names[0])
    for n in range(8):
        latent, text = torch.zeros(1, 16, 1, 8, 8), torch.zeros(1, 4, 384)
        first.add(EncodedClip(f"sample-{n:09d}", latent, text, {"latent_shape": [16, 1, 8, 8], "text_tokens": 4}))
    first.close()
    real, draws = samples_of(folder / names[0]), np.random.default_rng(0)
    tables, shards, tars = [], [], {}
    for number, name in enumerate(tqdm(names, "shards", disable=None)):
        (folder / name).touch()
        os.truncate(folder / name, SHARD_SAMPLES * SAMPLE_BYTES)
        tars[name] = {"bytes": SHARD_SAMPLES * SAMPLE_BYTES, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        rows = np.arange(number * SHARD_SAMPLES, min((number + 1) * SHARD_SAMPLES, samples))
        keys = pc.binary_join_element_wise("sample", pc.utf8_lpad(pa.array(rows).cast(pa.string()), 9, "0"), "-")
        columns = {"shard": np.full(len(rows), number), "offset": rows % SHARD_SAMPLES * SAMPLE_BYTES}
        columns |= {"t": draws.choice([1, 3], len(rows)), "text_tokens": draws.integers(4, 40, len(rows))}
        columns |= {side: draws.choice(SIDES, len(rows)) for side in "hw"} | {"size": np.full(len(rows), SAMPLE_BYTES)}
        for row, entry in enumerate(real if number == 0 else []):
            for column, value in zip(("t", "h", "w", "offset", "size"), (1, 8, 8, entry.offset, entry.size)):
                columns[column][row] = value
        voxels = columns["t"] * columns["h"] * columns["w"]
        shards.append(Shard(name, len(rows), int(voxels.sum()), int(voxels.max())))
        numbers = [pa.array(columns[f.name].astype(f.type.to_pandas_dtype())) for f in list(SCHEMA)[1:]]
        tables.append(pa.table([keys.cast(pa.large_string()), *numbers], schema=SCHEMA))
    write_index(index_path(folder, "train"), tables, shards, [])
    save_file({"text_emb": torch.zeros(1, 1, 384)}, folder / "text_empty.safetensors")
    about = {kind: {"name": "none"} for kind in ("source", "tokenizer", "text_encoder")}
    counts = {"train": samples, "val": 0, "test": 0, "dropped": 0, "dropped_by_reason": {}}
    statistics = {"latent_mean": [0.0] * 16, "latent_std": [1.0] * 16}
    write_manifest(folder, {**about, **statistics, "counts": counts, "psnr_db": {}, "drops": []}, tars)
    return index_path(folder, "train").stat().st_size


def open_rank(folder: str) -> dict[str, float]:
    """On one rank, a fresh process: seconds, and MiB by which its resident memory grows."""
    from dfm_nb.config import Config
    from dfm_nb.data.order import PackOrder
    from dfm_nb.data.stores import ShardStore
    from dfm_nb.packs.packs import PackSettings

    settings, before = PackSettings(Config()), report.resident_mib()
    found: dict[str, float] = {}
    orders = []
    found["open"] = timed(lambda: orders.append(PackOrder(ShardStore(folder), settings, 4096, 100, lanes=0)))
    found["memory of open"] = report.resident_mib() - before
    (order,) = orders
    found["first pack"] = timed(order.next)
    rounds = 2 * len(order.lanes)
    for _ in range(rounds):  # so that every lane has a window and a full buffer
        order.next()
    found["memory with packs"] = report.resident_mib() - before
    found["a pack"] = timed(lambda: [order.next() for _ in range(rounds + 200)]) / (rounds + 200)
    state = json.loads(json.dumps(order.state()))
    found["restore, and a pack"] = timed(lambda: (order.restore(state), order.next()))
    return found


def measure_index(sizes: list[int], rounds: int) -> list[dict]:
    """The index's curves; memory in MiB, the file in bytes."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="growth_") as place:
        for size in sizes:
            folder = Path(place) / "data"
            ((index_bytes),) = run_ranks(1, write_generated, folder, size, timeout_s=3600)
            runs = [run_ranks(1, open_rank, str(folder), timeout_s=3600)[0] for _ in range(rounds)]
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for name, value in (middle | {"index": index_bytes}).items():
                found.setdefault(name, []).append(value)
            shutil.rmtree(folder)
    units = {name: "MiB" if "memory" in name else "bytes" if name == "index" else "s" for name in found}
    return [curve("index", name, sizes, costs) | {"unit": units[name]} for name, costs in found.items()]


# ---- sequence length ---------------------------------------------------------------------------------------------


def sequence_rank(sizes: list[int], rounds: int, single: bool) -> tuple[list[float], list[float]]:
    """On one rank: (seconds, model FLOPs) of a training step by tokens.

    Seconds are medians of `rounds`, after one that does not count.
    """
    import torch

    from dfm_nb import config as cfg
    from dfm_nb import parallel
    from dfm_nb.config import counts
    from dfm_nb.training.batches import open_store, packed_loader
    from dfm_nb.training.trainer import Trainer

    torch.set_num_threads(1)
    parallel.init()
    steps, flops = [], []
    for tokens in sizes:
        given = "model.size=demo model.in_channels=16 model.text_dim=384 model.sigma_data=0.5 mixed_precision=fp32 "
        given += "dataset.mock=true dataset.packing_buffer_size=1 dataset.num_workers=0 train.global_batch_size=1 "
        sized = f"dataset.mock_latent_sizes=[[{tokens // PICTURE if single else 1},16,16]] "
        sized += f"dataset.task_encoder_seq_length={tokens} ema.sigma_rels=[] dataset.mock_text_tokens=12"
        overrides = (given + sized).split()
        config = cfg.resolve(None, overrides=overrides).config
        loader = packed_loader(config, open_store(config), 0, 1)
        steps.append((Trainer(config), loader.next_step()))
        (pack,) = steps[-1][1]
        lengths = [[b - a for a, b in zip(cu, cu[1:])][: len(pack.keys)] for cu in (pack.cu_q, pack.cu_kv)]
        assert sum(lengths[0]) == tokens and len(lengths[0]) == (1 if single else tokens // PICTURE)
        flops.append(float(counts.model_flops(config.model, *lengths)))
    each = [lambda t=t, p=p: t.step(p) for t, p in steps]
    medians(each, 1)
    return medians(each, rounds), flops


# ---- corpus size -------------------------------------------------------------------------------------------------


def write_corpus(path: Path, megabytes: float) -> int:
    """Write a JSONL of `megabytes` of text; returns the bytes written.

    The text is Python's own library and the installed packages, file by file, in pieces of 4,000 characters.
    """
    import sysconfig

    written, roots = 0, [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    with path.open("w", encoding="utf-8") as out:
        for root in roots:
            for file in sorted(root.rglob("*.py")):
                whole = file.read_text(encoding="utf-8", errors="ignore")
                for start in range(0, len(whole), 4000):
                    written += out.write(json.dumps({"text": whole[start : start + 4000]}) + "\n")
                    if written >= megabytes * 1e6:
                        return written
    raise ValueError(f"the installed Python holds {written / 1e6:.0f} MB of text, not the {megabytes:g} asked for")


def corpus_rank(sizes: list[int], rounds: int) -> list[float]:
    """On one rank: seconds of `dfm text preprocess` by megabytes."""
    from benchmarks.text_preprocess import train_tokenizer
    from dfm_nb.text.commands import main

    with tempfile.TemporaryDirectory(prefix="growth_") as place:
        folder = Path(place)
        write_corpus(folder / "for_tokenizer.jsonl", 4)
        train_tokenizer(folder / "tokenizer", folder / "for_tokenizer.jsonl", 8000)
        for size in sizes:
            write_corpus(folder / f"{size}.jsonl", size)

        def preprocess(size: int) -> None:
            ends = f"--input {folder}/{size}.jsonl --output-prefix {folder}/out{size}"
            argv = f"preprocess {ends} --tokenizer-model {folder}/tokenizer --workers 1 --append-eod".split()
            assert main(argv) == 0

        preprocess(sizes[0])  # imports and the tokenizer's file
        return medians([lambda s=s: preprocess(s) for s in sizes], rounds)


# ---- the whole ---------------------------------------------------------------------------------------------------


def curve(group: str, name: str, sizes: list[int], costs: list[float]) -> dict:
    """A measured curve with its fits."""
    k, c = report.exponent(sizes, costs)
    fixed, rate = report.fixed_and_growing(sizes, costs)
    found = {"group": group, "name": name, "sizes": sizes, "seconds": costs}
    return found | {"exponent": k, "factor": c, "fixed_s": fixed, "s_per_unit": rate}


def measure(group: str, sizes: list[int], rounds: int) -> list[dict]:
    """The curves of one group."""
    if group == "data":
        (costs,) = run_ranks(1, data_rank, sizes, rounds, timeout_s=1200)
        return [curve(group, name, sizes, costs[name]) for name in costs]
    if group == "index":
        return measure_index(sizes, rounds)
    if group == "corpus":
        return [curve(group, "text preprocess", sizes, run_ranks(1, corpus_rank, sizes, rounds, timeout_s=1200)[0])]
    curves = []
    for name, single in (("step on one clip", True), ("step on pictures", False)):
        ((costs, flops),) = run_ranks(1, sequence_rank, sizes, rounds, single, timeout_s=1200)
        more = {"flops": flops, "flops_exponent": report.exponent(sizes, flops)[0]}
        curves.append(curve(group, name, sizes, costs) | more)
    return curves


def text(curves: list[dict], about: dict, rounds: int) -> str:
    rows = []
    for c in curves:
        unit, what = c.get("unit", "s"), UNITS[c["group"]]
        rate = f"ms a {what.removesuffix('s')}" if unit == "s" else f"{unit} a thousand {what}"
        span = f"{c['sizes'][0]:,} to {c['sizes'][-1]:,} {UNITS[c['group']]}"
        more = f"{c['flops_exponent']:.2f}" if "flops_exponent" in c else ""
        costs = f"{c['seconds'][0]:.3g} to {c['seconds'][-1]:.3g}" + (unit != "s") * f" {unit}"
        line = f"{c['fixed_s']:.2g} {unit} + {1e3 * c['s_per_unit']:.3g} {rate}"
        rows.append([c["name"], span, costs, f"{c['exponent']:.2f}", more, line])
    head = ["cost", "size", "seconds, or as said", "exponent", "exponent of its FLOPs", "start-up and rate"]
    return (
        f"One thread, medians of {rounds} interleaved rounds (preparation: once).\n{report.sentence(about)}.\n\n"
        + report.table(head, rows)
    )


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__, rounds=3)
    parser.add_argument("--only", choices=list(SIZES), action="append", help="this group only; may be given again")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--largest", action="store_true", help="an index of 100 M samples, too: 8 GB of disk")
    args = parser.parse_args(argv)
    about, sizes = report.machine(), QUICK if args.quick else SIZES
    if args.largest:
        sizes = sizes | {"index": [*SIZES["index"], 10**8]}
    curves = []
    for group in tqdm(args.only or list(sizes), desc="groups", disable=None):
        curves += measure(group, sizes[group], args.rounds)
    result = {"machine": about, "rounds": args.rounds, "curves": curves}
    report.save("growth", result, text(curves, about, args.rounds), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
