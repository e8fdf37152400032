"""The preparation driver: `dfm prepare`, or `torchrun ... -m dfm_nb.prepare`.

Enters: a source of captioned images and clips. Leaves: a folder of shards (see `shards`) that `manifest.json` completes.
Guarantees
- Which sample goes into which shard is planned from the source, the number of ranks and the flags (`shard_plan`); a shard is the unit of work, so
  after a kill at any instant `--resume` redoes only unfinished shards and the result is byte for byte that of an uninterrupted run.
- Every sample that is dropped is counted under a reason and named in the manifest.
- A folder that holds anything else is never written into; two preparations of one folder take turns.
Cost: the encoders; see `encoding`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tqdm import tqdm

from dfm_nb import __version__
from dfm_nb.base import plugins
from dfm_nb.base.argv import USER_ERRORS, ArgumentParser, end_with_parent, guard
from dfm_nb.base.files import replacing, write_atomically
from dfm_nb.base.log import log, start_logging
from dfm_nb.base.records import SampleError, Source
from dfm_nb.data import shards
from dfm_nb.data.encoding import Geometry, ReadAhead, encode_shards, read_record, to_pixels
from dfm_nb.data.shard_plan import balanced_ranges, evenly, plan_all, plan_shards, split_of, splits_of

__all__ = ["balanced_ranges", "main", "plan_shards", "preflight", "split_of"]

FORMAT_VERSION = 1
FIT_ITEMS = 1500  # items the pca tokenizer is fitted to, evenly spaced over the training split
PSNR_ITEMS = 64
PATIENCE = timedelta(days=30)  # ranks wait for each other: for the fit, and at the end
T = TypeVar("T")


# ---- flags --------------------------------------------------------------------------------------------------------


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="dfm prepare", description="Encode captioned images and clips into WebDataset shards.")
    p.add_argument("--source", default="synthetic", help="NAME or NAME:SPEC; " + ", ".join(plugins.names("sources")))
    p.add_argument("--output-dir", required=True)
    p.add_argument("--tokenizer", default="pca", help=", ".join(plugins.names("tokenizers")))
    p.add_argument("--text-encoder", default="minilm", help=", ".join(plugins.names("text_encoders")))
    p.add_argument(
        "--tokenizer-cache-dir",
        "--tokenizer-path",
        dest="tokenizer_path",
        help="its file, folder or hub cache; without it pca is fitted to the data",
    )
    p.add_argument(
        "--t5-cache-dir", "--text-encoder-path", dest="text_encoder_path", help="its folder, hub cache or hub id"
    )
    p.add_argument(
        "--short-side", type=int, help="px; default 512 with cosmos_cv, else 64; synthetic draws at this size"
    )
    p.add_argument(
        "--tile-px",
        type=int,
        help="cosmos_cv: encode in overlapping tiles of this many px a side; default whole frames",
    )
    p.add_argument("--upscale", action="store_true", help="also enlarge smaller images")
    p.add_argument("--limit", type=int, help="only the first N items")
    p.add_argument("--num-images", type=int, help="synthetic: images to draw")
    p.add_argument("--num-clips", type=int, help="synthetic: clips to draw")
    p.add_argument("--seed", type=int, help="synthetic: seed")
    p.add_argument("--background", help="colour behind transparent images: a name or #rrggbb")
    p.add_argument("--image-column", help="table: column with image bytes, paths or URLs")
    p.add_argument("--caption-column", help="table: column with captions")
    p.add_argument("--clip-frames", type=int, help="videos: frames per clip, 1 + 4k")
    p.add_argument("--fps", type=float, help="videos: frames per second to sample")
    p.add_argument("--stride", type=int, help="videos: frames from one clip's start to the next")
    p.add_argument("--val-fraction", type=float, default=0.05, help="of the items, by a hash of their keys")
    p.add_argument("--test-fraction", type=float, default=0.0, help="likewise")
    p.add_argument("--shard-size", type=int, default=250, help="items per shard: the unit of work and of resuming")
    p.add_argument("--max-text-tokens", type=int, default=512, help="longer captions are cut")
    p.add_argument("--pad-text-tokens", type=int, help="pad embeddings to this length, for readers that need it")
    p.add_argument("--workers", type=int, help="threads that read and resize; default: the cores, 2 to 16 a process")
    p.add_argument("--device", help="default: each process its own cuda device where there are any, else cpu")
    p.add_argument("--resume", action="store_true", help="go on with an unfinished output folder")
    p.add_argument("--overwrite", action="store_true", help="delete the preparation that the output folder holds")
    return p


def parse(argv: list[str] | None):
    args = parser().parse_args(argv)
    for name in ("val_fraction", "test_fraction"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} must be at least 0 and below 1; got {getattr(args, name)}")
    if args.val_fraction + args.test_fraction >= 1:
        raise ValueError("--val-fraction and --test-fraction leave nothing for training; lower them")
    for name in ("shard_size", "limit", "max_text_tokens", "pad_text_tokens", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} must be at least 1; got {getattr(args, name)}")
    if args.short_side is not None and args.short_side < 16:
        raise ValueError(f"--short-side must be at least 16 px; got {args.short_side}")
    for kind, name in (("tokenizers", args.tokenizer), ("text_encoders", args.text_encoder)):
        plugins.load(kind, name)
    if args.tile_px is not None and args.tokenizer != "cosmos_cv":
        raise ValueError(f"--tile-px is for --tokenizer cosmos_cv; {args.tokenizer} needs no tiles")
    if args.resume and args.overwrite:
        raise ValueError("--resume keeps what the folder holds and --overwrite deletes it; pass one of them")
    return args


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


SOURCE_FLAGS = (
    "num_images",
    "num_clips",
    "seed",
    "background",
    "image_column",
    "caption_column",
    "clip_frames",
    "fps",
    "stride",
)


def open_source(args) -> Source:
    """The source the flags describe; ValueError names flags that it has no use for."""
    name, _, spec = args.source.partition(":")
    build = plugins.load("sources", name).build
    options = {flag: getattr(args, flag) for flag in SOURCE_FLAGS if getattr(args, flag) is not None}
    known = build.__code__.co_varnames[: build.__code__.co_argcount + build.__code__.co_kwonlyargcount]
    strange = [_flag(o) for o in options if o not in known]
    if strange:
        usable = ", ".join(_flag(f) for f in SOURCE_FLAGS if f in known)
        raise ValueError(f"--source {name} has no use for {', '.join(strange)}; it takes {usable or 'no such flags'}")
    if "size_px" in known:
        options["size_px"] = short_side(args)
    source = build(spec or None, **options)
    if len(source) == 0:
        raise ValueError(f"--source {args.source} has no items: there is nothing to prepare")
    return source


def short_side(args) -> int:
    return args.short_side or (512 if args.tokenizer == "cosmos_cv" else 64)


def geometry_of(args) -> Geometry:
    drawn_to_size = args.source.partition(":")[0] == "synthetic"
    return Geometry(None if drawn_to_size else short_side(args), args.upscale)


def item_keys(source: Source, limit: int | None) -> list[str]:
    keys = [source.item_key(i) for i in range(min(len(source), limit or len(source)))]
    if len(set(keys)) < len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise ValueError(f"the source names two items {twice!r}; keys must be unique: rename or remove one of them")
    return keys


# ---- ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The processes of this preparation; gloo among them, as encoders do not communicate."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def start(cls) -> Ranks:
        number = lambda name, default: int(os.environ.get(name, default))  # noqa: E731
        ranks = cls(number("RANK", 0), number("WORLD_SIZE", 1), number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1))
        if ranks.world > 1 and not dist.is_initialized():
            if os.environ.get("TORCHELASTIC_RUN_ID"):
                end_with_parent()
            dist.init_process_group("gloo", timeout=PATIENCE)
        return ranks

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def first(self, function: Callable[[], T]) -> T:
        """`function()` on rank 0; all get its result. A user's mistake is said once, and ends all ranks."""
        if self.world == 1:
            return function()
        shared: list = [None, None]
        error = None
        if self.rank == 0:
            try:
                shared[0] = function()
            except USER_ERRORS as fault:
                error, shared[1] = fault, True
        dist.broadcast_object_list(shared, src=0)
        if error is not None:
            raise error
        if shared[1]:
            raise SystemExit(2)
        return shared[0]

    def device(self, asked: str | None) -> str:
        if asked:
            return asked
        if not torch.cuda.is_available():
            return "cpu"
        index = self.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return f"cuda:{index}"


def reader_threads(args, ranks: Ranks) -> int:
    cores = len(os.sched_getaffinity(0)) // ranks.local_world
    return args.workers or max(2, min(16, cores))


# ---- the output folder --------------------------------------------------------------------------------------------


def identity(args, source: Source, world: int) -> dict:
    """What must be equal for a folder to be this preparation's."""
    settings = (
        "tokenizer",
        "text_encoder",
        "limit",
        "val_fraction",
        "test_fraction",
        "shard_size",
        "upscale",
        "max_text_tokens",
        "pad_text_tokens",
        "tile_px",
    )
    found = {
        "format": FORMAT_VERSION,
        "source": source.identity(),
        "short_side": short_side(args),
        "ranks": world,
        **{k: getattr(args, k) for k in settings},
    }
    if args.tokenizer == "pca" and args.tokenizer_path:
        found["tokenizer_sha256"] = plugins.load("tokenizers", "pca").build(args.tokenizer_path).identity()["sha256"]
    return json.loads(json.dumps(found))


def plan_of(folder: Path) -> dict | None:
    """The identity of the preparation that a folder holds, finished or not."""
    for path, pick in (
        (folder / shards.RECORDS / "plan.json", lambda d: d),
        (folder / "manifest.json", lambda d: d["plan"]),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return pick(json.loads(path.read_text()))
    return None


def check_folder(folder: Path, wanted: dict, args) -> bool:
    """True when the folder already holds all of this preparation; an error when it may not be written into."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--output-dir {folder} is a file; name a folder")
    held = plan_of(folder)
    if held is None:
        if folder.is_dir() and (any(folder.glob("*.tar")) or (folder / "manifest.json").exists()):
            raise FileExistsError(
                f"{folder} holds shards that dfm prepare did not make; choose another --output-dir or move them away"
            )
        return False
    if args.overwrite:
        return False
    differ = [k for k in sorted(wanted.keys() | held.keys()) if wanted.get(k) != held.get(k)]
    if differ:
        listed = "; ".join(f"{k}: {_brief(held.get(k))} there, {_brief(wanted.get(k))} now" for k in differ[:4])
        raise FileExistsError(
            f"{folder} already holds another data set ({listed}); choose another --output-dir or pass --overwrite"
        )
    if (folder / "manifest.json").is_file():
        return True
    if not args.resume:
        raise FileExistsError(
            f"{folder} holds an unfinished preparation; pass --resume to go on or --overwrite to start anew"
        )
    return False


def claim_folder(folder: Path, wanted: dict, args) -> bool:
    """`check_folder`, then make the folder ours; True when there is nothing left to do."""
    if check_folder(folder, wanted, args):
        return True
    if args.overwrite:
        _clear(folder)
    for leftover in folder.glob("rank*.tmp"):
        leftover.unlink(missing_ok=True)
    write_atomically(folder / shards.RECORDS / "plan.json", json.dumps(wanted).encode())
    return False


def _clear(folder: Path) -> None:
    """Delete what a preparation writes, the manifest first; the lock stays, as we hold it."""
    for name in ("manifest.json", "tokenizer.safetensors", "text_empty.safetensors", "contact_sheet.png"):
        (folder / name).unlink(missing_ok=True)
    for path in [*folder.glob("rank*-*.tar*"), *(folder / shards.RECORDS).glob("*.json")]:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / ".nv-meta", ignore_errors=True)


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Hold the folder; waits for another preparation of it to end. Does nothing where the file system has no locks."""
    records = folder / shards.RECORDS
    records.mkdir(parents=True, exist_ok=True)
    with (records / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another dfm prepare is at work in %s; waiting for it to end", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."


def agree_on_encoders(folder: Path, tokenizer, text_encoder) -> None:
    """The encoders of a resumed preparation must be those it began with."""
    path = folder / shards.RECORDS / "encoders.json"
    now = json.loads(json.dumps({"tokenizer": tokenizer.identity(), "text_encoder": text_encoder.identity()}))
    if not path.is_file():
        write_atomically(path, json.dumps(now).encode())
        return
    held = json.loads(path.read_text())
    for kind, value in now.items():
        if held.get(kind) != value:
            raise ValueError(
                f"{folder} was begun with another {kind.replace('_', ' ')} ({_brief(held.get(kind))} there, {_brief(value)} now); "
                "pass the same one or --overwrite"
            )


# ---- the tokenizer ------------------------------------------------------------------------------------------------


def fit_tokenizer(args, source: Source, keys: list[str], folder: Path, workers: int) -> None:
    """Fit pca to evenly spaced training items and save it beside the shards."""
    from dfm_nb.data.tokenizers.pca import PCATokenizer

    splits = splits_of(keys, args.val_fraction, args.test_fraction)
    chosen = evenly([i for i, s in enumerate(splits) if s == "train"], FIT_ITEMS)
    faults: list[SampleError] = []

    def pixels() -> Iterator[torch.Tensor]:
        ahead = ReadAhead(source, geometry_of(args), chosen, workers)
        given = False
        try:
            with tqdm(total=len(chosen), desc="fit pca", unit="item") as bar:
                for _, result in ahead.take(len(chosen), bar.update):
                    if isinstance(result, SampleError):
                        faults.append(result)
                    else:
                        given = True
                        yield to_pixels(result.clip.video)
        finally:
            ahead.close()
        if not given:
            raise ValueError(f"no sample of {args.source} could be used; the first: {faults[0].detail}")

    PCATokenizer.fit(pixels()).save(folder / "tokenizer.safetensors")


CARRIED = ("pca", "residual")
"""Tokenizers whose file is small: it lies beside the shards, and checkpoints take it along."""


def provide_tokenizer(args, source: Source, keys: list[str], folder: Path, workers: int) -> None:
    """A small tokenizer's file beside the shards: pca's fitted, or a copy of the one that was named or comes with the package."""
    if args.tokenizer not in CARRIED or (folder / "tokenizer.safetensors").exists():
        return
    if args.tokenizer == "pca" and not args.tokenizer_path:
        fit_tokenizer(args, source, keys, folder, workers)
    else:
        plugins.load("tokenizers", args.tokenizer).build(args.tokenizer_path).save(folder / "tokenizer.safetensors")


@torch.no_grad()
def reconstruction_psnr(args, source: Source, items: list[int], tokenizer, workers: int) -> dict[str, float]:
    """Mean peak signal-to-noise ratio (dB, peak 255) of decode(encode(x)) over items, images and clips apart."""
    by_kind: dict[str, list[float]] = {}
    ahead = ReadAhead(source, geometry_of(args), items, workers)
    try:
        for _, result in ahead.take(len(items)):
            if isinstance(result, SampleError):
                continue
            pixels = to_pixels(result.clip.video)[None]
            again = tokenizer.decode(tokenizer.encode(pixels)).float().cpu().clamp(-1, 1)
            error = ((again - pixels) * 127.5).square().mean().item()
            kind = "images" if pixels.shape[2] == 1 else "clips"
            by_kind.setdefault(kind, []).append(10 * math.log10(255**2 / max(error, 1e-8)))
    finally:
        ahead.close()
    return {kind: sum(v) / len(v) for kind, v in sorted(by_kind.items())}


# ---- the whole ----------------------------------------------------------------------------------------------------


def preflight(argv: list[str], nproc: int) -> None:
    """Say a mistake once and at once, before torchrun starts processes."""
    args = parse(argv)
    source = open_source(args)
    item_keys(source, args.limit)
    check_folder(Path(args.output_dir).expanduser(), identity(args, source, nproc), args)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    ranks = Ranks.start()
    start_logging(rank=ranks.rank)
    log.setLevel(logging.INFO)
    folder = Path(args.output_dir).expanduser()
    held = contextlib.ExitStack()
    try:
        with held:
            prepare(args, ranks, folder, held)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(f"there is no space left for {folder}; make room and go on with --resume") from None
    if ranks.world > 1:
        dist.destroy_process_group()
    return 0


def prepare(args, ranks: Ranks, folder: Path, held: contextlib.ExitStack) -> None:
    """This rank's part of the whole; rank 0 keeps the folder's lock in `held`."""

    def open_and_claim() -> bool:
        source = open_source(args)
        item_keys(source, args.limit)
        wanted = identity(args, source, ranks.world)
        if check_folder(folder, wanted, args):
            return True
        held.enter_context(turn(folder))
        return claim_folder(folder, wanted, args)

    if ranks.first(open_and_claim):
        if ranks.rank == 0:
            log.info("%s is already complete", folder)
        return
    source = open_source(args)
    keys = item_keys(source, args.limit)
    device, workers = ranks.device(args.device), reader_threads(args, ranks)
    if ranks.rank == 0:
        log.info("Rank 0 of %d processing %d samples", ranks.world, len(keys))
    ranks.first(lambda: provide_tokenizer(args, source, keys, folder, workers))
    tiles = {"tile_px": args.tile_px} if args.tile_px else {}
    tokenizer = plugins.load("tokenizers", args.tokenizer).build(
        folder if args.tokenizer in CARRIED else args.tokenizer_path, device=device, **tiles
    )
    text_encoder = plugins.load("text_encoders", args.text_encoder).build(
        args.text_encoder_path, device=device, max_tokens=args.max_text_tokens
    )
    with torch.no_grad():
        tokenizer.encode(torch.zeros(1, 3, 1, 64, 64))  # what is missing shows now, not after the first batch is read
    ranks.first(lambda: agree_on_encoders(folder, tokenizer, text_encoder))
    encode_rank(args, ranks, source, keys, folder, tokenizer, text_encoder, device, workers)
    ranks.barrier()
    ranks.first(lambda: complete_folder(args, ranks, source, keys, folder, tokenizer, text_encoder, workers))


def encode_rank(args, ranks: Ranks, source, keys, folder: Path, tokenizer, text_encoder, device, workers) -> None:
    """This rank's unfinished shards."""
    plans = plan_shards(keys, ranks.rank, ranks.world, args.shard_size, args.val_fraction, args.test_fraction)
    start, stop = balanced_ranges(len(keys), ranks.world)[ranks.rank]
    line = f"[INFO] Rank {ranks.rank} of {ranks.world} processing {stop - start} samples, from {start} to {stop}\n"
    os.write(1, line.encode())  # in one piece, as several ranks share the terminal
    todo = [p for p in plans if read_record(folder, p.name) is None]
    count = sum(len(p.items) for p in plans)
    done = count - sum(len(p.items) for p in todo)
    with tqdm(total=count, initial=done, desc="prepare", unit="item", disable=ranks.rank != 0) as bar:
        encode_shards(
            todo,
            source,
            geometry_of(args),
            tokenizer,
            text_encoder,
            folder,
            device=device,
            workers=workers,
            pad_text_tokens=args.pad_text_tokens,
            on_item=bar.update,
        )


def complete_folder(args, ranks: Ranks, source, keys, folder: Path, tokenizer, text_encoder, workers: int) -> None:
    """Merge the ranks' records; Energon's metadata; the manifest last."""
    plans = [
        p for rank in plan_all(keys, ranks.world, args.shard_size, args.val_fraction, args.test_fraction) for p in rank
    ]
    records = [read_record(folder, p.name) for p in plans]
    missing = [p.name for p, r in zip(plans, records) if r is None]
    if missing:
        raise ValueError(
            f"{folder} lacks {missing[0]} and {len(missing) - 1} other shards of other processes; all must write to one shared folder"
        )
    drops = [d for r in records for d in r["drops"]]
    full = [r for r in records if r["samples"]]
    if not full:
        first = drops[0]["detail"] if drops else "the source gave no clips"
        raise ValueError(f"no sample of {args.source} could be used ({len(drops)} dropped); the first: {first}")
    splits = {part: [r["name"] for r in full if r["split"] == part] for part in ("train", "val", "test")}
    mean, std = merged_statistics([r for r in full if r["split"] == "train"] or full)
    with replacing(folder / "text_empty.safetensors") as temporary:
        save_file({"text_emb": text_encoder.encode([""])[0][None].contiguous()}, temporary)
    shards.write_energon_metadata(folder, splits)
    of_item = splits_of(keys, args.val_fraction, args.test_fraction)
    held_out = next(s for s in ("val", "test", "train") if s in of_item)
    psnr = {}
    if args.tokenizer in ("pca", "residual"):  # others may have to fetch a decoder for this
        items = evenly([i for i, s in enumerate(of_item) if s == held_out], PSNR_ITEMS)
        psnr = reconstruction_psnr(args, source, items, tokenizer, workers)
    counts = {
        "items": len(keys),
        "samples": sum(r["samples"] for r in full),
        "dropped": len(drops),
        **{part: sum(r["samples"] for r in full if r["split"] == part) for part in splits},
        "dropped_by_reason": dict(Counter(d["reason"] for d in drops).most_common()),
        "text_tokens": sum(r["text_tokens"] for r in full),
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "dfm_nb": __version__,
        "source": source.identity(),
        "tokenizer": tokenizer.identity(),
        "text_encoder": text_encoder.identity(),
        "latent_mean": mean,
        "latent_std": std,
        "counts": counts,
        "psnr_db": {"split": held_out, **psnr},
        "drops": drops,
        "short_side": short_side(args),
        "ranks": ranks.world,
        "plan": identity(args, source, ranks.world),
        "arguments": {k: v for k, v in vars(args).items() if v is not None},
        "shards": [{k: r[k] for k in ("name", "split", "samples", "bytes", "sha256")} for r in full],
    }
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False).encode())
    report(manifest, folder)


def merged_statistics(records: list[dict]) -> tuple[list[float], list[float]]:
    """Per-channel mean and standard deviation from the shards' counts, sums and sums of squares."""
    count, total, squares = np.sum([r["latent_sums"] for r in records], axis=0)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 1e-12))
    return mean.tolist(), std.tolist()


def report(manifest: dict, folder: Path) -> None:
    counts, drops = manifest["counts"], manifest["drops"]
    for reason, n in counts["dropped_by_reason"].items():
        example = next(d for d in drops if d["reason"] == reason)
        log.warning("dropped %d sample(s), %s; for example %s", n, reason, example["detail"])
    psnr = ", ".join(f"{k} {v:.1f} dB" for k, v in manifest["psnr_db"].items() if isinstance(v, float))
    quality = f"; tokenizer PSNR on {manifest['psnr_db']['split']}: {psnr}" if psnr else ""
    log.info("%d samples in %d shards%s", counts["samples"], len(manifest["shards"]), quality)
    log.info("Webdataset shards saved to %s/", folder)


if __name__ == "__main__":
    raise SystemExit(guard(main))
