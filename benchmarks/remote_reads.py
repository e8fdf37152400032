"""Training's reads from a server: bytes fetched over bytes used, with a small cache, and what it costs.

    python benchmarks/remote_reads.py [--images 3000] [--side 256] [--lanes 8] [--ranks 4] [--epochs 1]

A data set in shards of ten pictures is prepared, indexed and served over HTTP on this machine. One data-parallel rank
builds its packs as in training (`PackedLoader`, two threads), first from the folder, then from the server, in turn.
Samples are shuffled within windows of fifty. The cache holds as many shards as the windows of the rank's lanes need,
and six more; it begins empty, and one epoch shows what a data set too large to be kept would give. Bytes used are those
of the samples that the rank asked for. So a tar's own headers and samples of other ranks' lanes in a shard count as
waste.

Writes benchmarks/results/remote_reads.{json,md}.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from dfm_nb.config import Config
from dfm_nb.data.loader import PackedLoader
from dfm_nb.data.pack_plan import PackPlan
from dfm_nb.data.remote import RemoteFolder
from dfm_nb.data.stores import EnergonStore
from dfm_nb.packs.packs import PackSettings

SHARD, WINDOW, CAPACITY, BUFFER = 10, 50, 4096, 20


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


class Counting(EnergonStore):
    """Counts the bytes of the samples that are read, and keeps none in memory."""

    def __init__(self, *args, **kwargs):
        self.used_bytes = 0
        super().__init__(*args, cache_bytes=0, **kwargs)

    def read(self, index: int):
        self.used_bytes += sum(size for _, size in self._index.entry(index).parts.values())
        return super().read(index)


def epochs_of(store: Counting, args: argparse.Namespace) -> float:
    """Seconds in which the rank builds the packs of so many epochs."""
    plan = PackPlan(store, PackSettings.of(Config(), seed=1), CAPACITY, BUFFER, lanes=args.lanes, lane_window=WINDOW)
    loader = PackedLoader(plan, args.ranks, 0, args.ranks, num_workers=2)
    begun = time.perf_counter()
    while plan.epoch < args.epochs:
        loader.next_step()
    seconds = time.perf_counter() - begun
    loader.close()
    return seconds


def text(result: dict) -> str:
    r = result
    rows = [
        ["samples, shards, lanes, ranks", f"{r['samples']:,}, {r['shards']}, {r['lanes']}, {r['ranks']}"],
        ["cache, MiB; the rank's own shards, MiB", f"{r['cache_mib']:.1f}; {r['own_mib']:.1f}"],
        ["bytes used over the epochs, MiB", f"{r['used_mib']:.1f}"],
        ["bytes fetched / used", f"{r['fetched_mib'] / r['used_mib']:.3f}"],
        ["of these: tars' headers and padding", f"{r['tar_over_samples']:.3f}"],
        ["seconds from the folder, from the server", f"{r['folder_s']:.2f}, {r['server_s']:.2f}"],
    ]
    head = f"{r['epochs']} epoch(s), from an empty cache. {report.sentence(r['machine'])}."
    return f"{head}\n\n{report.table(['', ''], rows)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    from dfm_nb.prepare import prepare_dataset

    about = report.machine()
    with tempfile.TemporaryDirectory() as place:
        data = Path(place, "data")
        made = prepare_dataset(
            num_images=args.images, num_clips=0, short_side=args.side, shard_size=SHARD, val_fraction=0.0,
            tokenizer="pca", output_dir=data,
        )  # fmt: skip
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(data)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shard_bytes = max(s["bytes"] for s in made["shards"])
        shards_held = args.lanes // args.ranks * (-(-WINDOW // SHARD) + 1) + 6
        url = f"http://127.0.0.1:{server.server_port}"
        remote = RemoteFolder(url, Path(place, "cache"), shards_held * shard_bytes / 2**30)
        folder, served = Counting(data), Counting(remote.folder, remote=remote)
        opened = remote.fetched_bytes
        folder_s, server_s = epochs_of(folder, args), epochs_of(served, args)
        server.shutdown()
        tars = sum(s["bytes"] for s in made["shards"])
        parts = sum(size for i in range(len(folder)) for _, size in folder._index.entry(i).parts.values())
    mib = 2**20
    result = {
        "machine": about,
        "samples": made["counts"]["train"],
        "shards": len(made["shards"]),
        "lanes": args.lanes,
        "ranks": args.ranks,
        "epochs": args.epochs,
        "cache_mib": shards_held * shard_bytes / mib,
        "own_mib": tars / args.ranks / mib,
        "used_mib": served.used_bytes / mib,
        "fetched_mib": (remote.fetched_bytes - opened) / mib,
        "tar_over_samples": tars / parts,
        "folder_s": folder_s,
        "server_s": server_s,
    }
    report.save("remote_reads", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
