"""Loader: samples a CPU second over prepared shards, dfm_nb against tarfile, webdataset and Energon's own loader.

    python benchmarks/loader.py [--samples 360] [--rounds 7]

It prepares a synthetic folder of 64 px pictures and clips. Then each reader reads the whole training split again and
again, interleaved, on one thread, from the page cache. Rates are by processor time, which other work on the machine
moves less than the clock.

The first table reads samples. All readers must give the same tensors and captions, which is checked first.
`webdataset` and `tarfile` unpickle as they come, so they may run code that a file names; dfm_nb and Energon (with
dfm_nb's decoder) do not. The second table goes on to what a training step takes: noise drawn, patches, positions,
packed to a capacity. It compares Energon's loader with dfm_nb's, which can be resumed in any layout.

Prints the tables and writes benchmarks/results/loader.{json,md}. Takes two to three minutes, most of it the
preparation and the imports.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pickle
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from benchmarks import report
from dfm_nb.config import Config
from dfm_nb.data.loader import PackedLoader
from dfm_nb.data.pack_plan import PackPlan
from dfm_nb.data.shards import SampleEntry, scan_shard
from dfm_nb.data.stores import EnergonStore
from dfm_nb.packs.packs import PackSettings

CAPACITY, BUFFER = 1024, 100
Sample = tuple[str, torch.Tensor, torch.Tensor, dict]
"""Key, latent [1, C, T, H, W], text [1, L, D], what the .json says."""


def prepare(folder: Path, samples: int) -> None:
    """A sixth of the items are clips."""
    clips = samples // 6
    argv = [
        "--source",
        "synthetic",
        "--num-images",
        str(samples - clips),
        "--num-clips",
        str(clips),
        "--short-side",
        "64",
        "--output-dir",
        str(folder),
    ]
    done = subprocess.run([sys.executable, "-m", "dfm_nb.prepare", *argv], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the preparation failed:\n{done.stderr[-2000:]}")


def shards_of(folder: Path) -> list[str]:
    """Paths of the training split's tars."""
    import yaml

    split = yaml.safe_load((folder / ".nv-meta" / "split.yaml").read_text())
    return [str(folder / name) for name in split["split_parts"]["train"]]


# ---- readers of samples: each call is one pass over the training split --------------------------------------------


def read_tarfile(shards: list[str]) -> Iterator[Sample]:
    for path in shards:
        with tarfile.open(path) as tar:
            parts: dict[str, bytes] = {}
            key = None
            for member in tar:
                name, _, extension = member.name.partition(".")
                if name != key and key is not None:
                    yield _plain(key, parts)
                    parts = {}
                key = name
                parts[extension] = tar.extractfile(member).read()
            if key is not None:
                yield _plain(key, parts)


def _plain(key: str, parts: dict[str, bytes]) -> Sample:
    latent = torch.load(io.BytesIO(parts["pth"]), weights_only=True)
    return key, latent, pickle.loads(parts["pickle"]), json.loads(parts["json"])


def read_webdataset(shards: list[str]) -> Iterator[Sample]:
    import webdataset

    for s in webdataset.WebDataset(shards, shardshuffle=False).decode():
        yield s["__key__"], s["pth"], s["pickle"], s["json"]


def energon_samples(folder: Path):
    """Energon's loader with our cooking and nothing behind it; one worker-less process, one batch a sample."""
    from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset

    from examples.energon_loader import cook_clip

    class Samples(DefaultTaskEncoder):
        decoder = None
        cookers = [Cooker(cook_clip)]

        def batch(self, samples):
            return samples

        def encode_batch(self, batch):
            return batch

    data = get_train_dataset(
        folder,
        worker_config=WorkerConfig.default_worker_config(0),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Samples(),
        repeat=False,
    )
    return get_savable_loader(data)


def read_energon(loader) -> Iterator[Sample]:
    for batch in loader:
        for s in batch:
            yield s.clip.key, s.clip.latent, s.clip.text_emb, s.clip.meta


def read_store(store: EnergonStore, seed: int) -> Iterator[Sample]:
    """In random order, as training does."""
    for i in torch.randperm(len(store), generator=torch.Generator().manual_seed(seed)).tolist():
        clip = store.read(i)
        yield clip.key, clip.latent, clip.text_emb, clip.meta


def read_entries(entries: list[SampleEntry], seed: int) -> Iterator[Sample]:
    """In random order, from offsets that one scan of the tars gave."""
    for i in torch.randperm(len(entries), generator=torch.Generator().manual_seed(seed)).tolist():
        clip = entries[i].read()
        yield clip.key, clip.latent, clip.text_emb, clip.meta


def digest(samples: Iterator[Sample]) -> str:
    """Of every sample's key, tensors and caption, in whatever order they came."""
    each = []
    for key, latent, text, meta in samples:
        content = hashlib.sha256(f"{key} {tuple(latent.shape)} {tuple(text.shape)} {meta['caption']}".encode())
        for tensor in (latent, text):
            content.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        each.append(content.hexdigest())
    return f"{len(each)} samples, " + hashlib.sha256("".join(sorted(each)).encode()).hexdigest()[:16]


# ---- readers of packs --------------------------------------------------------------------------------------------


def energon_packs_loader(folder: Path, settings: PackSettings):
    """Energon's savable loader with our task encoder; one worker-less process, a pack a batch."""
    from examples.energon_loader import pack_loader

    return pack_loader(folder, settings, CAPACITY, BUFFER, shuffle=True)


def energon_packs(folder: Path, settings: PackSettings):
    loader = iter(energon_packs_loader(folder, settings))

    def take(samples: int) -> tuple[int, int, int]:
        packs = []
        while sum(len(p.keys) for p in packs) < samples:
            packs += next(loader)
        return _sums(packs)

    return take


def our_packs(folder: Path, settings: PackSettings, threads: int, cache_bytes: int):
    plan = PackPlan(EnergonStore(folder, cache_bytes=cache_bytes), settings, CAPACITY, BUFFER)
    loader = PackedLoader(plan, packs_per_step=1, num_workers=threads)

    def take(samples: int) -> tuple[int, int, int]:
        packs = []
        while sum(len(p.keys) for p in packs) < samples:
            packs += loader.next_step()
        return _sums(packs)

    return take


def _sums(packs) -> tuple[int, int, int]:
    """(samples, useful tokens, packs)."""
    return sum(len(p.keys) for p in packs), sum(p.num_tokens for p in packs), len(packs)


# ---- measurement -------------------------------------------------------------------------------------------------


def interleaved(work: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Samples a second of processor time of each, `rounds` times in turn, after one round that does not count."""
    rates: dict[str, list[float]] = {name: [] for name in work}
    for r in tqdm(range(rounds + 1), desc="rounds", disable=None):
        for name, function in work.items():
            begun = time.process_time()
            count = function()
            if r:
                rates[name].append(count / (time.process_time() - begun))
    return rates


def compare(folder: Path, rounds: int) -> dict:
    shards, store, cached = shards_of(folder), EnergonStore(folder, cache_bytes=0), EnergonStore(folder)
    energon = energon_samples(folder)
    settings = PackSettings.of(Config(), seed=1)
    entries = [entry for path in shards for entry in scan_shard(Path(path))]
    readers: dict[str, Callable[[], Iterator[Sample]]] = {
        "tarfile, torch.load, pickle": lambda: read_tarfile(shards),
        "webdataset": lambda: read_webdataset(shards),
        "Energon's loader": lambda: read_energon(energon),
        "dfm_nb.data.shards, random order, from scanned offsets": lambda: read_entries(entries, 0),
        "dfm_nb store, random order, nothing cached": lambda: read_store(store, 0),
        "dfm_nb store, random order, from its cache": lambda: read_store(cached, 0),
    }
    digests = {name: digest(read()) for name, read in readers.items()}
    if len(set(digests.values())) > 1:
        raise RuntimeError(f"the readers do not give the same samples: {digests}")
    samples = interleaved({name: lambda read=read: sum(1 for _ in read()) for name, read in readers.items()}, rounds)
    n = len(store)
    takers = {
        "Energon's loader, our task encoder": energon_packs(folder, settings),
        "dfm_nb, nothing cached": our_packs(folder, settings, 0, 0),
        "dfm_nb, cached": our_packs(folder, settings, 0, 1 << 30),
    }
    useful = {name: take(n) for name, take in takers.items()}
    packs = interleaved({name: lambda take=take: take(n)[0] for name, take in takers.items()}, rounds)
    fill = {name: tokens / (count * CAPACITY) for name, (_, tokens, count) in useful.items()}
    return {
        "samples": n,
        "megabytes": sum(os.path.getsize(s) for s in shards) / 1e6,
        "digest": next(iter(digests.values())),
        "rates": samples,
        "pack_rates": packs,
        "pack_fill": fill,
    }


def text(result: dict) -> str:
    base = statistics.median(result["rates"]["webdataset"])
    rows = []
    for name, rates in result["rates"].items():
        middle, least, greatest = report.spread(rates)
        rows.append([name, f"{middle:,.0f}", f"{least:,.0f} to {greatest:,.0f}", f"{middle / base:.2f}"])
    pack_base = statistics.median(result["pack_rates"]["Energon's loader, our task encoder"])
    packs = []
    for name, rates in result["pack_rates"].items():
        middle, least, greatest = report.spread(rates)
        packs.append(
            [
                name,
                f"{middle:,.0f}",
                f"{least:,.0f} to {greatest:,.0f}",
                f"{middle / pack_base:.2f}",
                f"{result['pack_fill'][name]:.3f}",
            ]
        )
    return "\n".join(
        [
            f"{result['samples']} samples of a prepared synthetic folder ({result['megabytes']:.1f} MB of tars), "
            "one process, one thread, medians of",
            f"{result['rounds']} interleaved rounds over the whole split, by processor time. "
            f"All readers gave the same tensors and captions ({result['digest']}).",
            report.sentence(result["machine"]) + ".",
            "",
            report.table(["samples", "samples/CPU s", "range", "against webdataset"], rows),
            "",
            f"Samples drawn, patchified and packed to {CAPACITY:,} tokens (buffer {BUFFER}):",
            "",
            report.table(
                ["packs", "samples/CPU s", "range", "against Energon's loader", "useful tokens / capacity"], packs
            ),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=360)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", type=Path, help="a prepared folder to read instead of making one")
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="megatron|webdataset|torch")
    about = report.machine()
    with tempfile.TemporaryDirectory(prefix="loader_") as place:
        folder = args.data or Path(place) / "data"
        if args.data is None:
            prepare(folder, args.samples)
        result = {"machine": about, "rounds": args.rounds, **compare(folder, args.rounds)}
    report.save("loader", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
