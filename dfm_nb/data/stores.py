"""Random access to samples: of a prepared folder (`ShardStore`), or random ones (`MockStore`)."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dfm_nb.base import geometry, seeds, simhash
from dfm_nb.base.log import log
from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.data.captioning import MIRRORED
from dfm_nb.data.edits import EDITS, LEFT_OUT, read_edits
from dfm_nb.data.prepared_folder import read_checksums, read_empty_text, read_manifest
from dfm_nb.data.remote import RemoteFolder
from dfm_nb.data.sample_index import SampleIndex, Shard, Sizes, index_path
from dfm_nb.data.shards import Fits, decode_meta, how_to_adopt
from dfm_nb.packs.packs import LatentStatistics

SPREAD_SAMPLES = 256  # samples that `usual_sizes` counts
CAPTION_SAMPLES = 4_096  # whose captions are recorded with their sizes
READ_OF_SERVER = 16  # of these, samples read for their rates: each may fetch a shard before training starts


def has_split(path: str | Path, split: str) -> bool:
    """Whether the split has samples."""
    return index_path(path, split).name in read_checksums(Path(path))


class ShardStore(SampleIndex):
    """The samples of one split of a prepared folder.

    Parameters
    ----------
    path : folder with `checksums.json`. split : "train", "val" or "test".
    remote : fetches the shards, if `path` is the folder that mirrors a server's.

    Attributes
    ----------
    dropped : (reason, detail) of unusable samples that are in no manifest. shards : see `SampleIndex`.
    """

    cache_bytes = 1 << 30
    """Of decoded samples that are kept in memory."""

    def __init__(
        self, path: str | Path, split: str = "train", progress: bool = False, remote: RemoteFolder | None = None
    ):
        if not has_split(path, split):
            raise ValueError(f"{path} has no {split!r} samples; prepare it with --{split}-fraction above 0")
        super().__init__(path, split, here=remote is None)
        left_out = {key for key, edit in read_edits(self.folder).items() if edit.left_out}
        self._left_out = left_out | {f"{key}{MIRRORED}" for key in left_out}
        if progress and left_out:
            log.info("%s sets aside %d samples of all splits", self.folder / EDITS, len(left_out))
        if progress and not remote:
            others = sorted({tar.name for tar in self.folder.glob("*.tar")} - read_checksums(self.folder).keys())
            if others:
                said = "%s has %d tars that are not of its preparation and are not used, such as %s"
                log.warning(said, path, len(others), others[0])
        self._remote, self._cache_room, self._lock = remote, self.cache_bytes, threading.Lock()
        self.most_peeks = READ_OF_SERVER if remote else SPREAD_SAMPLES
        self._cache: dict[int, EncodedClip] = {}
        if (manifest := read_manifest(self.folder)) is None:
            raise ValueError(f"{path} has no manifest.json, so its latents' scale is unknown; {how_to_adopt(path)}")
        self.manifest, self.statistics = manifest, LatentStatistics.from_manifest(manifest)
        self.empty_text = read_empty_text(self.folder)
        self.channels, self.text_dim = len(manifest["latent_mean"]), self.empty_text.shape[1]
        self._check_first()

    def _check_first(self) -> None:
        """ValueError if no sample can be used."""
        faults = [detail for _, detail in self.dropped]
        for index in range(len(self)):
            try:
                self.read(index)
                return
            except SampleError as error:
                faults.append(error.detail)
        first = faults[0] if faults else "there is none"
        raise ValueError(f"{self.folder}: no sample of its {self.split!r} split can be used; the first: {first}")

    def _read(self, index: int) -> EncodedClip:
        entry, grid = self.entry(index), self.grid(index)
        given = int(self.voxels(np.array([index]))[0]) - math.prod(grid)
        fits = Fits(self.channels, self.text_dim, grid, given)
        if entry.key in self._left_out:
            raise SampleError(LEFT_OUT, f"{entry.key} is set aside in {EDITS}")
        if self._remote is None:
            return entry.read(fits)
        self._remote.provide(entry.shard)
        try:
            return entry.read(fits)
        except SampleError:
            if entry.shard.exists():
                raise
        return self._read(index)  # another process has evicted the shard meanwhile

    def captions(self, index: int) -> list[str]:
        """All captions of a sample, without its tensors; none if a server has them."""
        entry = self.entry(index)
        if self._remote or entry.key in self._left_out:
            return []
        meta = decode_meta(entry.parts().get("json"), entry.key)
        return [caption for caption in (meta.get("caption"), *(meta.get("more_captions") or ())) if caption]

    def read(self, index: int) -> EncodedClip:
        if (kept := self._cache.get(index)) is not None:
            return kept
        clip = self._read(index)
        size = sum(tensor.nbytes for tensor in (clip.latent, clip.text_emb, *clip.more_text, *clip.given))
        with self._lock:
            if index not in self._cache and size <= self._cache_room:
                self._cache[index] = clip
                self._cache_room -= size
        return clip


class MockStore(Sizes):
    """Random latents of given sizes, for speed measurements and tests without data.

    sizes : latent (T, H, W) of the samples, repeated in this order.
    """

    split = "train"

    def __init__(
        self, sizes: Iterable, text_tokens: int = 12, channels: int = 16, text_dim: int = 384, length: int = 1 << 16
    ):
        grids = [(t, h, w) for t, h, w in sizes]
        cycled = np.resize(np.array(grids), (length, 3))
        voxels = cycled.prod(1)
        super().__init__(dict(zip("thw", cycled.T)), [Shard("mock", length, int(voxels.sum()), int(voxels.max()))])
        self.text_tokens, self.channels, self.text_dim = text_tokens, channels, text_dim
        self.fingerprint = f"mock-{grids}-{text_tokens}-{channels}-{text_dim}-{length}"
        self.contents: list[str] = []
        self.statistics = LatentStatistics(torch.zeros(channels), torch.ones(channels))
        self.empty_text = torch.zeros(2, text_dim, dtype=torch.bfloat16)
        self.dropped: list[tuple[str, str]] = []
        self.most_peeks = 1  # all have one rate

    def captions(self, index: int) -> list[str]:
        return []

    def read(self, index: int) -> EncodedClip:
        g = seeds.generator_for("mock", index)
        latent = torch.randn(1, self.channels, *self.grid(index), generator=g).bfloat16()
        text = torch.randn(1, self.text_tokens, self.text_dim, generator=g).bfloat16()
        return EncodedClip(f"mock{index:06d}", latent, text, {"fps": 24})


def usual_sizes(store: SampleStore, num_video_frames: int | None = None) -> dict[str, Any]:
    """`generation.height`, `width`, `num_video_frames` and `fps` of the kind, stills or clips, with more samples, and
    `generation.other.*` of the other one; `sizes` are those of all samples, and `captions` of some of each size.

    The most frequent size among 256 samples of the kind, and the most frequent rate among those. A kind without samples
    of a size that can be generated gets the other kind's; {} if neither has any.

    num_video_frames : the user's recommendation; its kind comes first.
    """
    kinds = list[tuple[int, dict[str, Any]]]()
    for still in (True, False):
        samples, of_grid = store.of_kind(still), defaultdict[tuple[int, int, int], list[int]](list)
        for i in samples[:: max(1, len(samples) // SPREAD_SAMPLES)].tolist():
            if all(map(geometry.is_side, geometry.pixel_size(*store.grid(i))[1:])):
                of_grid[store.grid(i)].append(i)
        if of_grid:
            grid, alike = max(of_grid.items(), key=lambda item: len(item[1]))
            size, rates = geometry.pixel_size(*grid), Counter[float]()
            for i in alike[:: -(-len(alike) // store.most_peeks)]:
                with contextlib.suppress(SampleError):  # a bad sample is reported when its turn comes
                    rates[store.read(i).fps] += 1
            fps = [rate for rate, _ in rates.most_common(1)]
            sides = Counter[str]()
            for each, n in store.sizes(samples).items():
                _, height, width = each.split("x")
                sides[f"{width}x{height}"] += n
            kind: dict[str, Any] = dict(zip(("num_video_frames", "height", "width", "fps"), (*size, *fps)))
            kind["sizes"] = [side for side, _ in sides.most_common()]
            if len(sides) > 1 and any(captions := _captions_of_sizes(store, samples, kind["sizes"])):
                kind["captions"] = captions
            kinds.append((len(samples), kind))
    asked = num_video_frames and num_video_frames == 1  # None: either
    kinds.sort(key=lambda kind: (asked is not None and (kind[1]["num_video_frames"] == 1) != asked, -kind[0]))
    groups = zip(("generation", "generation.other"), (kinds * 2)[:2])
    return {f"{group}.{name}": value for group, (_, kind) in groups for name, value in kind.items()}


def _captions_of_sizes(store: SampleStore, samples: np.ndarray, sizes: list[str]) -> list[str]:
    """The encoded captions of samples of each size, evenly among `samples`; none of sizes that cannot be generated."""
    told: dict[str, list[str]] = {size: [] for size in sizes}
    for i in samples[:: -(-len(samples) // CAPTION_SAMPLES)].tolist():
        _, *sides = geometry.pixel_size(*store.grid(i))
        if all(map(geometry.is_side, sides)):
            with contextlib.suppress(SampleError):
                told["{1}x{0}".format(*sides)] += store.captions(i)
    return list(map(simhash.encoded, told.values()))


SampleStore = ShardStore | MockStore
"""Random access to the samples of a split: `len`, `grid(i)` (latent T, H, W), `read(i)`, statistics and empty text."""
