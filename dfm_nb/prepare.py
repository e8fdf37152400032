"""The preparation driver: `dfm prepare`, or `torchrun ... -m dfm_nb.prepare`.

Enters: a source of captioned images and clips. Leaves: a folder of shards (see `shards`) that `manifest.json` completes.
Guarantees
- Which sample goes into which shard is planned from the source, the number of ranks and the flags; a shard is the unit of work, so after a
  kill at any instant `--resume` redoes only unfinished shards and the result is byte for byte that of an uninterrupted run.
- Every sample that is dropped is counted under a reason and named in the manifest.
- Memory does not grow with the data set: it is bounded by a shard and the read-ahead.
Cost: the encoders; reading and resizing run in threads, writing overlaps the next shard, equal captions are encoded once per shard.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tqdm import tqdm

from dfm_nb import __version__, plugins, shards, video
from dfm_nb.argv import ArgumentParser, guard
from dfm_nb.records import Clip, EncodedClip, SampleError, Source
from dfm_nb.runs import log, start_logging, write_atomically

FORMAT = 1
FIT_ITEMS = 1500  # items the pca tokenizer is fitted to, evenly spaced over the training split
PSNR_ITEMS = 64


@dataclass(frozen=True)
class ShardPlan:
    """One shard: its file name, its split and the source items that go into it."""

    name: str
    split: str
    items: tuple[int, ...]


def balanced_ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous ranges whose sizes differ by at most one, larger ones last: 834 over 4 is 208, 208, 209, 209."""
    base, extra = divmod(count, parts)
    out, start = [], 0
    for part in range(parts):
        stop = start + base + (part >= parts - extra)
        out.append((start, stop))
        start = stop
    return out


def split_of(key: str, val_fraction: float, test_fraction: float) -> str:
    """train, val or test from a hash of the item's key: stable when the source grows or the ranks change."""
    u = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "val" if u < val_fraction else "test" if u < val_fraction + test_fraction else "train"


def plan_shards(
    keys: list[str], rank: int, world: int, shard_size: int, val_fraction: float, test_fraction: float
) -> list[ShardPlan]:
    """The shards of one rank. A source of 20 items or more always has a validation item when a fraction was asked for."""
    splits = [split_of(k, val_fraction, test_fraction) for k in keys]
    if val_fraction > 0 and len(keys) >= 20 and "val" not in splits:
        splits[min(range(len(keys)), key=lambda i: hashlib.sha256(keys[i].encode()).digest())] = "val"
    start, stop = balanced_ranges(len(keys), world)[rank]
    plans: list[ShardPlan] = []
    for split in ("train", "val", "test"):
        items = [i for i in range(start, stop) if splits[i] == split]
        for first in range(0, len(items), shard_size):
            name = f"rank{rank}-{len(plans):06d}.tar"
            plans.append(ShardPlan(name, split, tuple(items[first : first + shard_size])))
    return plans


# ---- one shard ----------------------------------------------------------------------------------------------------


@dataclass
class Geometry:
    """How pixels are fitted: short side in px (None: as they are), sides floored to multiples of 16, T to 1 + 4k."""

    short_side: int | None
    upscale: bool

    def fit(self, clip: Clip) -> tuple[Clip, tuple[int, int]]:
        """The clip resized once, and its original (height, width)."""
        t, h, w, _ = clip.video.shape
        short = self.short_side or min(h, w)
        try:
            size = video.fit_size(h, w, short, multiple=16, upscale=self.upscale)
        except SampleError as error:
            raise SampleError(error.reason, f"{clip.key}: {error.detail}") from None
        frames = clip.video[: 1 + (t - 1) // 4 * 4]
        if size != (h, w):
            frames = video.resize(frames, *size)
        return Clip(clip.key, frames, clip.caption, clip.fps, clip.source, clip.attributes), (h, w)


Read = list[tuple[Clip, tuple[int, int]]] | SampleError


def read_item(source: Source, index: int, geometry: Geometry) -> Read:
    """All clips of an item, fitted; a fault of any of them as a value, because threads must not lose it."""
    try:
        return [geometry.fit(clip) for clip in source.read(index)]
    except SampleError as error:
        return error


def read_ahead(
    source: Source, items, geometry: Geometry, pool: ThreadPoolExecutor, window: int
) -> Iterator[tuple[int, Read]]:
    """`read_item` of each item in order, `window` of them in flight."""
    waiting: deque[tuple[int, Future]] = deque()
    for index in items:
        waiting.append((index, pool.submit(read_item, source, index, geometry)))
        if len(waiting) >= window:
            i, future = waiting.popleft()
            yield i, future.result()
    while waiting:
        i, future = waiting.popleft()
        yield i, future.result()


def to_pixels(frames: np.ndarray) -> torch.Tensor:
    """uint8 [T, H, W, 3] -> float32 [3, T, H, W] in [-1, 1]."""
    return torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 127.5 - 1


class Encoder:
    """Clips of a shard to `EncodedClip`s: batches of equal shape through the tokenizer, distinct captions through the text encoder."""

    def __init__(self, tokenizer, text_encoder, batch_pixels: int, device: str, pad_text_tokens: int | None = None):
        self.tokenizer, self.text_encoder, self.device = tokenizer, text_encoder, device
        self.batch_pixels, self.pad_text_tokens = batch_pixels, pad_text_tokens

    @torch.no_grad()
    def _flush(self, group: list[tuple[int, Clip]], latents: dict[int, torch.Tensor]) -> None:
        batch = torch.stack([to_pixels(c.video) for _, c in group]).to(self.device)
        codes = self.tokenizer.encode(batch).bfloat16().cpu()
        latents.update((position, z[None].clone()) for (position, _), z in zip(group, codes))
        group.clear()

    def encode(self, reads: Iterator[tuple[int, Read]], source: Source, bar) -> tuple[list[EncodedClip], list[dict]]:
        groups: dict[tuple, list[tuple[int, Clip]]] = {}
        latents: dict[int, torch.Tensor] = {}
        metas: list[dict] = []
        drops: list[dict] = []
        for index, result in reads:
            bar.update()
            if isinstance(result, SampleError):
                drops.append({"key": source.item_key(index), "reason": result.reason, "detail": result.detail})
                continue
            for clip, original in result:
                position, shape = len(metas), clip.video.shape
                metas.append(self._meta(clip, original))
                group = groups.setdefault(shape, [])
                group.append((position, clip))
                if len(group) * math.prod(shape) >= self.batch_pixels * 3:
                    self._flush(group, latents)
        for group in groups.values():
            if group:
                self._flush(group, latents)
        texts = self.text_encoder.encode([m["caption"] for m in metas]) if metas else []
        samples = []
        for position, (meta, text) in enumerate(zip(metas, texts)):
            meta |= {"latent_shape": list(latents[position].shape[1:]), "text_tokens": len(text)}
            samples.append(EncodedClip(meta["key"], latents[position], self._pad(text)[None], meta))
        return samples, drops

    def _pad(self, text: torch.Tensor) -> torch.Tensor:
        missing = (self.pad_text_tokens or 0) - len(text)
        return torch.nn.functional.pad(text, (0, 0, 0, missing)) if missing > 0 else text

    @staticmethod
    def _meta(clip: Clip, original: tuple[int, int]) -> dict:
        t, h, w, _ = clip.video.shape
        return {
            "key": clip.key, "caption": clip.caption, "image_height": h, "image_width": w, "num_frames": t, "fps": clip.fps,
            "source": clip.source, "attributes": clip.attributes, "original_height": original[0], "original_width": original[1],
        }  # fmt: skip


def finish_shard(folder: Path, plan: ShardPlan, samples: list[EncodedClip], drops: list[dict]) -> None:
    """Write the tar, then its record; a shard without its record is not finished."""
    digest, size = shards.write_shard(folder / plan.name, samples) if samples else (None, 0)
    sums = np.zeros((3, 16))
    for s in samples:
        z = s.latent[0].double().flatten(1)
        sums[:, : len(z)] += np.stack([np.full(len(z), z.shape[1]), z.sum(1).numpy(), z.square().sum(1).numpy()])
    record = {
        "name": plan.name, "split": plan.split, "samples": len(samples), "bytes": size, "sha256": digest, "drops": drops,
        "latent_sums": sums.tolist(), "text_tokens": int(sum(s.text_emb.shape[1] for s in samples)),
    }  # fmt: skip
    write_atomically(_record_path(folder, plan.name), json.dumps(record).encode())


def _record_path(folder: Path, name: str) -> Path:
    return folder / shards.RECORDS / f"{name}.json"


def is_finished(folder: Path, plan: ShardPlan) -> bool:
    path = _record_path(folder, plan.name)
    if not path.is_file():
        return False
    record = json.loads(path.read_text())
    tar = folder / plan.name
    return record["samples"] == 0 or (tar.is_file() and tar.stat().st_size == record["bytes"])


# ---- the whole ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None):
    p = ArgumentParser(prog="dfm prepare", description="Encode captioned images and clips into WebDataset shards.")
    p.add_argument("--source", default="synthetic", help="NAME or NAME:SPEC; " + ", ".join(plugins.names("sources")))
    p.add_argument("--output-dir", required=True)
    p.add_argument("--tokenizer", default="pca", help=", ".join(plugins.names("tokenizers")))
    p.add_argument("--text-encoder", default="minilm", help=", ".join(plugins.names("text_encoders")))
    p.add_argument(
        "--tokenizer-cache-dir", "--tokenizer-path", dest="tokenizer_path", help="its file, folder or hub cache"
    )
    p.add_argument("--t5-cache-dir", "--text-encoder-path", dest="text_encoder_path", help="folder or hub cache")
    p.add_argument(
        "--short-side", type=int, help="px; default 512 with cosmos_cv, else 64; synthetic draws at this size"
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
    p.add_argument("--val-fraction", type=float, default=0.05)
    p.add_argument("--test-fraction", type=float, default=0.0)
    p.add_argument("--shard-size", type=int, default=250, help="items per shard: the unit of work and of resuming")
    p.add_argument("--max-text-tokens", type=int, default=512)
    p.add_argument("--pad-text-tokens", type=int, help="pad embeddings to this length, for readers that need it")
    p.add_argument("--workers", type=int, default=2, help="threads that read and resize")
    p.add_argument("--device", help="default: cuda when there is one")
    p.add_argument("--resume", action="store_true", help="go on with an unfinished output folder")
    p.add_argument("--overwrite", action="store_true", help="delete what the output folder holds")
    args = p.parse_args(argv)
    for name in ("val_fraction", "test_fraction"):
        if not 0 <= getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 0 and below 1; got {getattr(args, name)}")
    if args.shard_size < 1 or (args.limit is not None and args.limit < 1):
        p.error("--shard-size and --limit must be at least 1")
    return args


SOURCE_FLAGS = {
    "num_images": "num_images", "num_clips": "num_clips", "seed": "seed", "background": "background",
    "image_column": "image_column", "caption_column": "caption_column", "clip_frames": "clip_frames", "fps": "fps",
    "stride": "stride",
}  # fmt: skip


def open_source(args) -> Source:
    name, _, spec = args.source.partition(":")
    module = plugins.load("sources", name)
    options = {option: getattr(args, flag) for flag, option in SOURCE_FLAGS.items() if getattr(args, flag) is not None}
    if name == "synthetic":
        options["size_px"] = short_side(args)
    try:
        source = module.build(spec or None, **options)
    except TypeError as error:
        raise ValueError(f"--source {name} does not take these flags: {error}") from None
    if len(source) == 0:
        raise ValueError(f"--source {args.source} has no items: there is nothing to prepare")
    return source


def short_side(args) -> int:
    return args.short_side or (512 if args.tokenizer == "cosmos_cv" else 64)


@dataclass
class Rank:
    rank: int
    world: int

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def start_ranks() -> Rank:
    """gloo among torchrun's processes: only for barriers and errors, encoders do not communicate."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return Rank(int(os.environ.get("RANK", "0")), world)


def identity(args, source: Source, world: int) -> dict:
    """What must be equal for `--resume` to go on with a folder."""
    settings = ("tokenizer", "text_encoder", "limit", "val_fraction", "test_fraction", "shard_size", "upscale",
                "max_text_tokens", "pad_text_tokens")  # fmt: skip
    return {
        "format": FORMAT, "source": source.identity(), "short_side": short_side(args), "ranks": world,
        **{k: getattr(args, k) for k in settings},
    }  # fmt: skip


def claim_folder(folder: Path, wanted: dict, args) -> bool:
    """Make or check the output folder; True when it is already complete."""
    plan_file, manifest = folder / shards.RECORDS / "plan.json", folder / "manifest.json"
    if args.overwrite and folder.exists():
        for name in [p.name for p in folder.iterdir() if _is_ours(p)]:
            target = folder / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--output-dir {folder} is a file; name a folder")
    if plan_file.is_file():
        found = json.loads(plan_file.read_text())
        differ = [k for k in wanted if json.loads(json.dumps(wanted[k])) != found.get(k)]
        if differ:
            listed = "; ".join(f"{k}: {_brief(found.get(k))} there, {_brief(wanted[k])} now" for k in differ[:4])
            raise FileExistsError(
                f"{folder} already holds another data set ({listed}); choose another --output-dir or pass --overwrite"
            )
        if manifest.is_file():
            return True
        if not args.resume:
            raise FileExistsError(
                f"{folder} holds an unfinished preparation; pass --resume to go on or --overwrite to start anew"
            )
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        return False
    if folder.exists() and any(folder.glob("*.tar")):
        raise FileExistsError(f"{folder} holds shards that dfm prepare did not make; choose another --output-dir")
    (folder / shards.RECORDS).mkdir(parents=True, exist_ok=True)
    write_atomically(plan_file, json.dumps(wanted).encode())
    return False


def _is_ours(path: Path) -> bool:
    names = {
        ".nv-meta",
        shards.RECORDS,
        "manifest.json",
        "tokenizer.safetensors",
        "text_empty.safetensors",
        "contact_sheet.png",
    }
    return path.name in names or path.suffix in (".tar", ".tmp", ".idx")


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."


def fit_tokenizer(args, source: Source, geometry: Geometry, keys: list[str], folder: Path) -> None:
    """Fit pca to evenly spaced training items and save it beside the shards."""
    from dfm_nb.tokenizers.pca import PCATokenizer

    items = [i for i, k in enumerate(keys) if split_of(k, args.val_fraction, args.test_fraction) == "train"]
    chosen = [items[i * len(items) // min(FIT_ITEMS, len(items))] for i in range(min(FIT_ITEMS, len(items)))]

    faults: list[SampleError] = []

    def pixels():
        with ThreadPoolExecutor(args.workers) as pool:
            for _, read in tqdm(read_ahead(source, chosen, geometry, pool, 8), "fit pca", len(chosen), unit="item"):
                if isinstance(read, SampleError):
                    faults.append(read)
                else:
                    yield from (to_pixels(clip.video) for clip, _ in read)
        if len(faults) == len(chosen):
            raise ValueError(f"no sample of {args.source} could be used; the first: {faults[0].detail}")

    PCATokenizer.fit(pixels()).save(folder / "tokenizer.safetensors")


def build_tokenizer(args, folder: Path, device: str):
    module = plugins.load("tokenizers", args.tokenizer)
    return module.build(args.tokenizer_path or (folder if args.tokenizer == "pca" else None), device=device)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    me = start_ranks()
    start_logging(rank=me.rank)
    log.setLevel(logging.INFO)
    folder = Path(args.output_dir).expanduser()
    source = open_source(args)
    count = min(len(source), args.limit or len(source))
    keys = [source.item_key(i) for i in range(count)]
    complete = claim_folder(folder, identity(args, source, me.world), args) if me.rank == 0 else False
    if me.world > 1:
        shared = [complete]
        dist.broadcast_object_list(shared, src=0)
        complete = shared[0]
    if complete:
        log.info("%s is already complete", folder)
        return 0
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    drawn_to_size = args.source.partition(":")[0] == "synthetic"
    geometry = Geometry(None if drawn_to_size else short_side(args), args.upscale)
    text_module = plugins.load("text_encoders", args.text_encoder)
    text_encoder = text_module.build(args.text_encoder_path, device=device, max_tokens=args.max_text_tokens)
    if (
        me.rank == 0
        and args.tokenizer == "pca"
        and not args.tokenizer_path
        and not (folder / "tokenizer.safetensors").exists()
    ):
        fit_tokenizer(args, source, geometry, keys, folder)
    me.barrier()
    tokenizer = build_tokenizer(args, folder, device)
    encode_rank(
        args,
        me,
        source,
        keys,
        folder,
        geometry,
        Encoder(tokenizer, text_encoder, 1 << 24, device, args.pad_text_tokens),
    )
    me.barrier()
    if me.rank == 0:
        complete_folder(args, me, source, keys, folder, geometry, tokenizer, text_encoder)
    me.barrier()
    if me.world > 1:
        dist.destroy_process_group()
    return 0


def encode_rank(args, me: Rank, source: Source, keys, folder: Path, geometry: Geometry, encoder: Encoder) -> None:
    """This rank's unfinished shards."""
    plans = plan_shards(keys, me.rank, me.world, args.shard_size, args.val_fraction, args.test_fraction)
    if me.rank == 0:
        log.info("Rank 0 of %d processing %d samples", me.world, len(keys))
    start, stop = balanced_ranges(len(keys), me.world)[me.rank]
    print(f"[INFO] Rank {me.rank} of {me.world} processing {stop - start} samples, from {start} to {stop}", flush=True)
    todo = [p for p in plans if not is_finished(folder, p)]
    bar = tqdm(total=sum(len(p.items) for p in plans), desc="prepare", unit="item", disable=me.rank != 0)
    bar.update(bar.total - sum(len(p.items) for p in todo))
    with ThreadPoolExecutor(args.workers, "read") as readers, ThreadPoolExecutor(1, "write") as writer:
        written: Future | None = None
        for plan in todo:
            reads = read_ahead(source, plan.items, geometry, readers, 4 * args.workers)
            samples, drops = encoder.encode(reads, source, bar)
            if written is not None:
                written.result()
            written = writer.submit(finish_shard, folder, plan, samples, drops)
        if written is not None:
            written.result()
    bar.close()


def complete_folder(args, me: Rank, source, keys, folder: Path, geometry, tokenizer, text_encoder) -> None:
    """Merge the ranks' records; Energon's metadata; the manifest last."""
    plans = [
        plan
        for rank in range(me.world)
        for plan in plan_shards(keys, rank, me.world, args.shard_size, args.val_fraction, args.test_fraction)
    ]
    records = [json.loads(_record_path(folder, p.name).read_text()) for p in plans]
    drops = [d for r in records for d in r["drops"]]
    full = [r for r in records if r["samples"]]
    if not full:
        first = drops[0]["detail"] if drops else "the source gave no clips"
        raise ValueError(f"no sample of {args.source} could be used ({len(drops)} dropped); the first: {first}")
    splits = {part: [r["name"] for r in full if r["split"] == part] for part in ("train", "val", "test")}
    sums = np.sum([r["latent_sums"] for r in full if r["split"] == "train"] or [r["latent_sums"] for r in full], axis=0)
    mean = sums[1] / sums[0]
    std = np.sqrt(np.maximum(sums[2] / sums[0] - mean**2, 1e-12))
    save_file({"text_emb": text_encoder.encode([""])[0][None].contiguous()}, folder / "text_empty.safetensors")
    shards.write_energon_metadata(folder, splits)
    held_out = "val" if splits["val"] else "train"
    manifest = {
        "format": FORMAT, "dfm_nb": __version__, "source": source.identity(), "tokenizer": tokenizer.identity(),
        "text_encoder": text_encoder.identity(), "latent_mean": mean.tolist(), "latent_std": std.tolist(),
        "counts": {
            "items": len(keys), "samples": sum(r["samples"] for r in full), "dropped": len(drops),
            **{part: sum(r["samples"] for r in full if r["split"] == part) for part in splits},
            "dropped_by_reason": dict(Counter(d["reason"] for d in drops)),
        },
        "psnr_db": {"split": held_out, **reconstruction_psnr(source, keys, args, geometry, tokenizer, held_out)},
        "drops": drops, "short_side": short_side(args), "ranks": me.world,
        "shards": [{k: r[k] for k in ("name", "split", "samples", "bytes", "sha256")} for r in full],
    }  # fmt: skip
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    for reason, n in manifest["counts"]["dropped_by_reason"].items():
        example = next(d for d in drops if d["reason"] == reason)
        log.warning("dropped %d sample(s), %s; for example %s", n, reason, example["detail"])
    psnr = ", ".join(f"{k} {v:.1f} dB" for k, v in manifest["psnr_db"].items() if isinstance(v, float))
    log.info(
        "%d samples in %d shards; tokenizer PSNR on %s: %s", manifest["counts"]["samples"], len(full), held_out, psnr
    )
    log.info("Webdataset shards saved to %s/", folder)


@torch.no_grad()
def reconstruction_psnr(source, keys, args, geometry: Geometry, tokenizer, split: str) -> dict[str, float]:
    """Mean peak signal-to-noise ratio (dB, peak 255) of decode(encode(x)) over items of a split, images and clips apart."""
    items = [i for i, k in enumerate(keys) if split_of(k, args.val_fraction, args.test_fraction) == split]
    items = [items[i * len(items) // min(PSNR_ITEMS, len(items))] for i in range(min(PSNR_ITEMS, len(items)))]
    by_kind: dict[str, list[float]] = {}
    for i in items:
        read = read_item(source, i, geometry)
        for clip, _ in [] if isinstance(read, SampleError) else read:
            pixels = to_pixels(clip.video)[None]
            again = tokenizer.decode(tokenizer.encode(pixels)).float().cpu().clamp(-1, 1)
            error = ((again - pixels) * 127.5).square().mean().item()
            kind = "images" if clip.video.shape[0] == 1 else "clips"
            by_kind.setdefault(kind, []).append(10 * math.log10(255**2 / max(error, 1e-8)))
    return {kind: sum(v) / len(v) for kind, v in sorted(by_kind.items())}


if __name__ == "__main__":
    raise SystemExit(guard(main))
