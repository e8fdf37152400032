"""`dfm inspect DIR`: what a folder of shards holds, whether it is intact, and how it looks.

The shards may also be of another writer: tars of `.pth`, `.pickle` and `.json` samples. No code from the data is run,
and nothing is changed but the contact sheet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dfm_nb.base import files, geometry, plugins, video
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.log import legible
from dfm_nb.base.progress import tqdm
from dfm_nb.base.records import EncodedClip, SampleError, Tokenizer
from dfm_nb.data import shards
from dfm_nb.data.encoding import to_frames
from dfm_nb.data.prepared_folder import CHECKSUMS, MEND, read_checksums, read_manifest
from dfm_nb.data.sample_index import SampleIndex, index_path
from dfm_nb.data.shard_plan import SPLITS
from dfm_nb.data.shards import Fits, SampleEntry, find_shards, how_to_adopt

NAMED = 10  # keys and faults of one kind that are spelled out


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="dfm inspect", description="Show and check a folder of shards, or one shard.")
    p.add_argument("folder", help="folder, or a .tar")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    p.add_argument("--verify", action="store_true", help="decode every sample and recheck every checksum")
    p.add_argument("--contact-sheet", help="PNG to write; default contact_sheet.png in the folder")
    p.add_argument("--samples", type=int, default=24, help="pictures on the contact sheet; 0 for none")
    p.add_argument("--tokenizer", help="that decodes the latents, for shards without a manifest")
    p.add_argument("--tokenizer-path", "--tokenizer-cache-dir", dest="tokenizer_path", help="its file or folder")
    return p


def scan(tars: list[Path], progress: bool) -> tuple[list[SampleEntry], list[str]]:
    """Samples of all readable tars, and a sentence for each tar that is not."""
    entries, faults = [], []
    for tar in tqdm(tars, "scan", unit="shard", disable=not progress or len(tars) < 20):
        try:
            entries += shards.samples_of(tar)
        except ValueError as error:
            faults.append(str(error))
    return entries, faults


def measure(folder: Path, entries: list[SampleEntry]) -> None:
    """Put the sizes of the indexes into `meta`: NeMo DFM's script writes a clip's frames as its height."""
    sizes = {_place(i.entry(n)): (*i.grid(n), i.text_tokens(n)) for i in _indexes(folder) for n in range(len(i))}
    for entry in entries:
        if found := sizes.get(_place(entry)):
            size = zip(("num_frames", "image_height", "image_width"), geometry.pixel_size(*found[:3]))
            entry.meta.update(size, text_tokens=found[3])


def _indexes(folder: Path) -> list[SampleIndex]:
    listed = read_checksums(folder) if (folder / CHECKSUMS).is_file() else {}
    return [SampleIndex(folder, split) for split in SPLITS if index_path(folder, split).name in listed]


def size_of(meta: dict) -> str:
    """Frames, height and width of a sample in px, `9x64x64`; `?` for what its .json does not say."""
    return "x".join(str(meta.get(k, "?")) for k in ("num_frames", "image_height", "image_width"))


def describe(place: Path, tars: list[Path], entries: list[SampleEntry], manifest: dict | None) -> dict:
    """Counts, sizes and token statistics from headers, .json parts and the manifest."""
    if manifest and manifest["source"] == {"name": "adopted"}:
        measure(tars[0].parent if place.is_file() else place, entries)
    text = [e.meta["text_tokens"] for e in entries if isinstance(e.meta.get("text_tokens"), int)]
    repeated = [k for k, n in Counter(e.key for e in entries).items() if n > 1]
    out: dict = {
        "folder": str(place),
        "shards": len(tars),
        "samples": len(entries),
        "bytes": sum(t.stat().st_size for t in tars),
        "sizes": dict(Counter(size_of(e.meta) for e in entries).most_common(12)),
        "parts": dict(Counter("+".join(sorted(e.extensions)) for e in entries)),
        "captions": len({e.meta["caption"] for e in entries if isinstance(e.meta.get("caption"), str)}),
        "duplicate_keys": repeated[:NAMED],
    }
    if text:
        out["text_tokens"] = {"min": min(text), "median": int(np.median(text)), "max": max(text)}
    if manifest:
        wanted = ("source", "tokenizer", "text_encoder", "counts", "psnr_db", "latent_mean", "latent_std", "drops")
        out |= {k: manifest[k] for k in wanted if k in manifest}
    return out


# ---- checks -------------------------------------------------------------------------------------------------------


def check_files(folder: Path, tars: list[Path]) -> list[str]:
    """Shards and indexes against their listed sizes and checksums; the other files were checked with the manifest."""
    faults, listed = [], read_checksums(folder)
    for name in listed:
        try:
            files.check(folder, listed, [name], MEND.format(folder))
        except ValueError as error:
            faults.append(str(error))
    found = [t.relative_to(folder).as_posix() for t in tars]
    return faults + [f"{name} is not in {folder / CHECKSUMS}" for name in found if name not in listed]


def check_indexes(folder: Path, entries: list[SampleEntry], manifest: dict | None) -> list[str]:
    """What the splits' indexes say against the shards themselves."""
    try:
        indexes = _indexes(folder)
    except ValueError as error:
        return [str(error)]
    faults = []
    named = {drop["key"] for drop in manifest["drops"]} if manifest else set()
    for index in indexes:
        grids = {_place(index.entry(i)): index.grid(i) for i in range(len(index))}
        tars = {folder / shard.name for shard in index.shards}
        own = [e for e in entries if e.shard in tars and e.key not in named]
        right = [e for e in own if (grid := grids.get(_place(e))) and list(grid) == _grid_of(e, grid)]
        if wrong := len(own) - len(right) - len(index.dropped) or len(grids) - len(right):
            path = index_path(folder, index.split)
            faults.append(f"{path} is wrong for {wrong} samples; write it again: dfm index {folder}")
    return faults


def _place(entry: SampleEntry) -> tuple:
    return entry.shard, entry.key, entry.offset, entry.size


def _grid_of(entry: SampleEntry, default: tuple[int, int, int]) -> list[int]:
    return list((entry.meta.get("latent_shape") or default)[-3:])


def common(entries: Iterable[SampleEntry], manifest: dict | None) -> Fits:
    """What the samples have in common: as the manifest and most of the first ones say."""
    votes = shards.widths(readable(entries))
    known = len(manifest["latent_mean"]) if manifest else None
    return Fits(*max(votes, key=lambda v: (v[0] == known, votes[v]))) if votes else Fits()


def readable(entries: Iterable[SampleEntry], fits: Fits | None = None) -> Iterator[EncodedClip]:
    for entry in entries:
        with contextlib.suppress(SampleError):  # counted and named by --verify
            yield entry.read(fits)


def check_samples(entries: list[SampleEntry], fits: Fits, progress: bool, named: Collection[str] = ()) -> list[str]:
    """What is wrong with each sample that training would leave out; but for `named` keys."""
    faults = []
    entries = [e for e in entries if e.key not in named]
    for entry in tqdm(entries, "verify", unit="sample", disable=not progress):
        try:
            entry.read(fits)
        except SampleError as error:
            faults.append(f"{entry.shard.name}: {error.detail}")
    counts = Counter(e.key for e in entries)
    return faults + [f"the key {key} occurs {n} times" for key, n in counts.items() if n > 1]


# ---- the contact sheet --------------------------------------------------------------------------------------------


def build_tokenizer(folder: Path, manifest: dict | None, name: str | None, path: str | None) -> Tokenizer | None:
    """The tokenizer of the shards; None when it is unknown or not on this machine.

    From beside the shards only one that is made of tensors is taken: TorchScript runs its code, so it comes from
    `path` or the hub's cache.
    """
    place = path or (folder if (folder / "tokenizer.safetensors").is_file() else None)
    recorded = manifest["tokenizer"]["name"] if manifest else None
    if name and recorded and name != recorded and not path:
        place = None  # the file beside the shards is another tokenizer's
    name = name or recorded
    if name is None:
        return _recognised(place) if place else None
    module = plugins.load("tokenizers", name)
    if place is not None and not path:
        plugins.check_carried(module, name, folder, "--tokenizer-path")
    if place is None and hasattr(module, "fit"):
        return None  # it was fitted to the data, so there is no other file of it
    return module.build(place)


def _recognised(place: str | Path) -> Tokenizer:
    """The tokenizer whose file it is, among those that travel with data sets."""
    carried = {n: m for n, m in plugins.load_all("tokenizers").items() if getattr(m, "CARRIED", False)}
    for module in carried.values():
        with contextlib.suppress(ValueError):
            return module.build(place)
    raise ValueError(f"{place} is no file of {' or '.join(carried)}; name its tokenizer with --tokenizer")


@torch.no_grad()
def decoded(clip: EncodedClip, tokenizer: Tokenizer) -> np.ndarray:
    """uint8 [T, H, W, 3]."""
    return to_frames(tokenizer.decode(clip.latent.float())[0])


def false_colours(clip: EncodedClip) -> np.ndarray:
    """The latent's three strongest directions as colours, eight pixels a latent pixel; uint8 [T, H, W, 3]."""
    z = clip.latent[0].float()
    rows = z.flatten(1).T
    rows = rows - rows.mean(0)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    codes = rows @ vectors[:, -3:].flip(1)
    codes = codes / codes.std(0).clamp_min(1e-6) * 50 + 128
    picture = codes.clamp(0, 255).byte().reshape(*z.shape[1:], 3)
    return picture.repeat_interleave(8, 1).repeat_interleave(8, 2).numpy()


def sheet(entries: list[SampleEntry], fits: Fits, count: int, tokenizer: Tokenizer | None) -> np.ndarray | None:
    """Samples evenly over the shards with their captions; in false colours when there is no tokenizer."""
    count = min(count, len(entries))
    videos, captions = [], []
    for clip in readable((entries[i * len(entries) // count] for i in range(count)), fits):
        videos.append(false_colours(clip) if tokenizer is None else decoded(clip, tokenizer))
        captions.append(clip.meta.get("caption") or clip.key)
    return video.contact_sheet(videos, captions) if videos else None


# ---- what is printed ----------------------------------------------------------------------------------------------


def table(d: dict) -> str:
    lines = [f"{d['folder']}: {d['samples']:,} samples in {d['shards']} shards, {d['bytes'] / 2**20:.1f} MiB"]
    if d["samples"]:
        lines.append(f"  bytes a sample: {d['bytes'] // d['samples']:,}")
    lines.append("  frames x height x width: " + ", ".join(f"{k} ({n})" for k, n in d["sizes"].items()))
    lines.append("  parts: " + ", ".join(f"{k or 'none of ours'} ({n})" for k, n in d["parts"].items()))
    lines.append(f"  different captions: {d['captions']:,}")
    if "text_tokens" in d:
        t = d["text_tokens"]
        lines.append(f"  text tokens: {t['min']} to {t['max']}, median {t['median']}")
    if "counts" in d:
        c = d["counts"]
        lines.append(f"  splits: train {c['train']}, val {c['val']}, test {c['test']}; dropped {c['dropped']}")
        for reason, n in c["dropped_by_reason"].items():
            keys = [drop["key"] for drop in d["drops"] if drop["reason"] == reason]
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            lines.append(f"    {reason}: {n} ({', '.join(keys[:3])}{more})")
        named = (f"{k.replace('_', ' ')} {d[k]['name']}" for k in ("source", "tokenizer", "text_encoder"))
        lines.append("  " + ", ".join(named))
        psnr = ", ".join(f"{k} {v:.1f} dB" for k, v in d["psnr_db"].items() if type(v) is float)
        if psnr:
            lines.append(f"  tokenizer PSNR on {d['psnr_db'].get('split')}: {psnr}")
    else:
        lines.append(f"  no manifest.json, so encoders and statistics are unknown: {how_to_adopt(d['folder'])}")
    if d["duplicate_keys"]:
        lines.append("  keys that occur more than once: " + ", ".join(d["duplicate_keys"]))
    for fault in d.get("faults", []):
        lines.append(f"  FAULT: {fault}")
    if d.get("faults") == [] and d["verified"]:
        lines.append("  verified: every checksum and every sample is good")
    lines.append(f"  contact sheet: {d['contact_sheet']}")
    return legible("\n".join(lines))


def draw(args, folder: Path, entries: list[SampleEntry], fits: Fits, manifest: dict | None) -> str:
    """Write the contact sheet; returns where it is, or why there is none."""
    if not args.samples or not entries:
        return "none"
    note = ""
    try:
        tokenizer = build_tokenizer(folder, manifest, args.tokenizer, args.tokenizer_path)
    except FileNotFoundError as error:
        if args.tokenizer or args.tokenizer_path:
            raise
        tokenizer, note = None, f" (in false colours: {error})"
    picture = sheet(entries, fits, args.samples, tokenizer)
    if picture is None:
        return "none, as no sample can be read"
    if tokenizer is None and not note:
        note = " (in false colours, as the tokenizer is unknown: name it with --tokenizer and --tokenizer-path)"
    target = Path(args.contact_sheet).expanduser() if args.contact_sheet else folder / "contact_sheet.png"
    try:
        video.write_png(target, picture)
    except PermissionError:
        if args.contact_sheet:
            raise
        return f"none, as {folder} cannot be written; pass --contact-sheet OUT.png"
    return f"{target}{note}"


class Inspection(dict):
    """What was found: counts, sizes, statistics, `faults`; shown as the table of `dfm inspect`."""

    def __repr__(self) -> str:
        return table(self)


def inspect_dataset(folder: str | os.PathLike, **flags: Any) -> Inspection:
    """What a folder of shards, or one shard, holds. With `verify=True` its `faults` are those of every sample.

    Parameters
    ----------
    **flags : the flags of `dfm inspect` with underscores (`verify`, `samples`, `contact_sheet`, `tokenizer`, ...).

    >>> inspect_dataset("data", verify=True, samples=0)  # doctest: +SKIP
    """
    p = parser()
    return examine(p.read(p.words({"folder": folder, **flags})))


def examine(args: argparse.Namespace) -> Inspection:
    """What the command line asks for; writes the contact sheet."""
    if args.samples < 0:
        raise ValueError(f"--samples must not be negative; got {args.samples}")
    place = Path(args.folder).expanduser()
    tars = find_shards(place)
    folder = place if place.is_dir() else place.parent
    manifest = read_manifest(folder)
    entries, faults = scan(tars, progress=not args.json)
    fits = common(entries, manifest)
    found = describe(place, tars, entries, manifest) | {"verified": args.verify}
    if args.verify:
        if manifest and place.is_dir():
            faults += check_files(folder, tars)
        named = {drop["key"] for drop in manifest["drops"]} if manifest else set()  # adopted tars still hold them
        faults += check_samples(entries, fits, progress=not args.json, named=named)
        faults += check_indexes(folder, entries, manifest)
    if args.verify or faults:
        found["faults"] = faults
    found["contact_sheet"] = draw(args, folder, entries, fits, manifest)
    return Inspection(found)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    found = examine(args)
    print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else table(found))
    return 1 if found.get("faults") else 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
