"""The content of shards: counts, faults and pictures; also of third-party shards. Read only."""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dfm_nb import display
from dfm_nb.base import files, geometry, plugins
from dfm_nb.base.log import tqdm
from dfm_nb.base.records import EncodedClip, SampleError, Tokenizer
from dfm_nb.data import shards
from dfm_nb.data.captioning import captions_of
from dfm_nb.data.encoding import to_frames
from dfm_nb.data.prepared_folder import CHECKSUMS, MEND, read_checksums, read_empty_text, read_manifest
from dfm_nb.data.sample_index import SampleIndex, index_path
from dfm_nb.data.shard_plan import evenly
from dfm_nb.data.shards import SPLITS, Fits, SampleEntry

NAMED = 10
"""Keys that are spelled out."""


class InspectedShards:
    """The samples of a folder of shards, or of one tar, from headers and .json parts alone.

    entries : of all readable tars. faults : a sentence for each unreadable tar. manifest : None if there is none.
    """

    def __init__(self, place: Path, progress: bool = False):
        self.place = place
        self.tars = shards.find_shards(place)
        self.folder = place if place.is_dir() else place.parent
        self.manifest = read_manifest(self.folder)
        self.entries: list[SampleEntry] = []
        self.faults: list[str] = []
        self.progress = progress
        for tar in tqdm(self.tars, "scan", unit="shard", disable=not progress or len(self.tars) < 20):
            try:
                self.entries += shards.samples_of(tar)
            except ValueError as error:
                self.faults.append(str(error))
        if self.manifest and self.manifest["source"] == {"name": "adopted"}:
            self._measure()

    def _measure(self) -> None:
        """Take the sizes in `meta` from the indexes: NeMo DFM's script writes a clip's frames as its height."""
        metas = {entry: entry.meta for entry in self.entries}
        for index in self._indexes:
            tokens = index.text_tokens(slice(None)).tolist()
            for n in range(len(index)):
                meta = metas.get(index.entry(n), {})
                frames, height, width = geometry.pixel_size(*index.grid(n))
                meta.update(num_frames=frames, image_height=height, image_width=width)
                meta.update(text_tokens=tokens[n])

    @functools.cached_property
    def _listed(self) -> dict[str, Any]:
        return read_checksums(self.folder) if (self.folder / CHECKSUMS).is_file() else {}

    @property
    def _indexes(self) -> list[SampleIndex]:
        return [SampleIndex(self.folder, s) for s in SPLITS if index_path(self.folder, s).name in self._listed]

    def describe(self) -> dict[str, Any]:
        """Counts, sizes and token statistics from headers, .json parts and the manifest."""
        metas = [e.meta for e in self.entries]
        tokens = [meta.get("text_tokens") for meta in metas]
        text = [n for n in tokens if isinstance(n, int) and 0 <= n < 1 << 31]
        captions = set(itertools.chain.from_iterable(map(captions_of, metas)))
        keys = Counter(entry.key for entry in self.entries)
        about: dict[str, Any] = {
            "folder": str(self.place),
            "shards": len(self.tars),
            "samples": len(self.entries),
            "bytes": sum(t.stat().st_size for t in self.tars),
            "sizes": dict(Counter(map(size_of, metas)).most_common()),
            "parts": dict(Counter("+".join(sorted(e.extensions)) for e in self.entries)),
            "given": sum(bool(m.get("given_shapes")) for m in metas),
            "captions": len(captions - {None, ""}),
            "duplicate_keys": [key for key, n in keys.items() if n > 1][:NAMED],
        }
        if text:
            about["text_tokens"] = {"min": min(text), "median": int(np.median(text)), "max": max(text)}
        wanted = "source captions_from tokenizer text_encoder counts psnr_db latent_mean latent_std drops lost".split()
        return about | {k: v for k, v in (self.manifest or {}).items() if k in wanted}

    # ---- checks ----------------------------------------------------------------------------------

    def verify(self) -> list[str]:
        """Faults, after computing every checksum, decoding every sample and comparing every index."""
        checked = self._files() if self.manifest and self.place.is_dir() else []
        return [*checked, *self._samples(), *self._compared()]

    @functools.cached_property
    def _dropped(self) -> set[str]:
        """Keys of samples that the manifest lists as dropped; adopted tars still contain them."""
        return {drop["key"] for drop in (self.manifest or {"drops": ()})["drops"]}

    @functools.cached_property
    def fits(self) -> Fits:
        """The sizes that all samples must have, from the files next to them."""
        if self.manifest is None:
            return Fits()
        return Fits(len(self.manifest["latent_mean"]), read_empty_text(self.folder).shape[1])

    def _files(self) -> Iterator[str]:
        """Shards and indexes; the other files were checked with the manifest."""
        for name in self._listed:
            try:
                files.check(self.folder, self._listed, [name], MEND.format(self.folder))
            except ValueError as error:
                yield str(error)
        bounds = {tar: [0] for tar in self.tars}  # of samples
        for entry in self.entries:
            bounds[entry.shard][-1:] = [entry.offset, entry.offset + entry.size]
        for tar, offsets in bounds.items():
            name = tar.relative_to(self.folder).as_posix()
            index = tar.with_name(f"{tar.name}.idx")
            if name not in self._listed:
                yield f"{name} is not in {self.folder / CHECKSUMS}"
            held = index.read_bytes() if index.is_file() else None
            if shards.has_energon_metadata(self.folder) and held != np.array(offsets, "<u8").tobytes():
                yield f"{index} is missing or damaged, and Energon cannot open the shard; restore it"

    def _samples(self) -> Iterator[str]:
        entries = [e for e in self.entries if e.key not in self._dropped]
        for entry in tqdm(entries, "verify", unit="sample", disable=not self.progress):
            try:
                entry.read(self.fits)
            except SampleError as error:
                yield f"{entry.shard.name}: {error.detail}"
        counts = Counter(e.key for e in entries)
        yield from (f"the key {key} occurs {n} times" for key, n in counts.items() if n > 1)

    def _compared(self) -> Iterator[str]:
        """Differences between the splits' indexes and the shards."""
        try:
            indexes = self._indexes
        except ValueError as error:
            yield str(error)
            return
        for index in indexes:
            grids = {index.entry(i): index.grid(i) for i in range(len(index))}
            tars = {self.folder / shard.name for shard in index.shards}
            own = [e for e in self.entries if e.shard in tars and e.key not in self._dropped]
            right = 0
            for entry in own:
                grid = grids.get(entry)
                if grid is not None:
                    right += list(grid) == list((entry.meta.get("latent_shape") or grid)[-3:])
            wrong = len(own) - right - len(index.dropped) or len(grids) - right
            if wrong:
                path = index_path(self.folder, index.split)
                yield f"{path} is wrong for {wrong} samples; write it again: dfm adopt {self.folder} --reindex"

    # ---- pictures --------------------------------------------------------------------------------

    def tokenizer(self, name: str | None = None, path: str | None = None) -> Tokenizer | None:
        """The tokenizer of the shards; None if it is unknown or not on this machine.

        A tokenizer next to the shards is only used if it consists of tensors: TorchScript runs code, so it must come
        from `path` or the hub's cache.
        """
        own = plugins.is_module_name(name)  # typed
        name = name or (self.manifest["tokenizer"]["name"] if self.manifest else None)
        if name is None:
            if path:
                raise ValueError(f"shards without a manifest do not say whose file {path} is; name it with --tokenizer")
            return None
        module, place = plugins.load_saved(
            "tokenizers", name, path or (None if own else plugins.carried(name, self.folder))
        )
        # a tokenizer fitted to the data has no other file
        return None if place is None and hasattr(module, "fit") else module.build(place)

    def chosen(self, count: int) -> list[int]:
        """Stills and clips in proportion, the fewer at least a sixth, each evenly over the shards."""
        clips = list[int]()
        stills = list[int]()
        for i, entry in enumerate(self.entries):
            (clips if (entry.meta.get("num_frames") or 1) > 1 else stills).append(i)
        few, many = sorted((clips, stills), key=len)
        places = max(count * len(few) // max(len(self.entries), 1), min(count // 6, len(few)))
        return sorted([*evenly(few, places), *evenly(many, count - places)])

    def sheet(self, count: int, tokenizer: Tokenizer | None) -> np.ndarray | None:
        """`chosen` samples with their captions; in false colours without a tokenizer."""
        shown = []
        for i in self.chosen(count):
            with contextlib.suppress(SampleError):  # counted and named by --verify
                clip = self.entries[i].read(self.fits)
                shown.append((pictures(clip, tokenizer), clip.meta.get("caption") or clip.key))
        return display.contact_sheet({"": shown}) if shown else None


def size_of(meta: dict) -> str:
    """Frames, height and width of a sample in px, `9x64x64`; `?` for values that its .json lacks."""
    return "x".join(str(meta.get(k, "?")) for k in ("num_frames", "image_height", "image_width"))


@torch.no_grad()
def pictures(clip: EncodedClip, tokenizer: Tokenizer | None) -> list[np.ndarray]:
    """What is given with a sample and then the sample, uint8 [T, H, W, 3]; in false colours without a tokenizer."""
    latents = (*clip.given, clip.latent)
    if tokenizer is None:
        return [false_colours(z[0].float()) for z in latents]
    return [to_frames(tokenizer.decode(z.float())[0]) for z in latents]


def false_colours(z: torch.Tensor) -> np.ndarray:
    """The three strongest directions of a latent [C, T, H, W] as colours, eight pixels a latent pixel."""
    rows = z.flatten(1).T  # [t h w, C]
    rows = rows - rows.mean(0)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    codes = rows @ vectors[:, -3:].flip(1)
    codes = codes / codes.std(0).clamp_min(1e-6) * 50 + 128
    picture = codes.clamp(0, 255).byte().reshape(*z.shape[1:], 3)
    return picture.repeat_interleave(8, 1).repeat_interleave(8, 2).numpy()
