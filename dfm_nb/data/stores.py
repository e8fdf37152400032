"""Random access to samples: by the index of a prepared folder, or made up (`MockStore`)."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dfm_nb.base import geometry
from dfm_nb.base.log import log
from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.base.seeds import generator_for
from dfm_nb.config.schema import TRAINED_SIZE
from dfm_nb.data.captioning import MIRRORED
from dfm_nb.data.edits import EDITS, LEFT_OUT, read_edits
from dfm_nb.data.prepared_folder import read_checksums, read_manifest
from dfm_nb.data.remote import RemoteFolder
from dfm_nb.data.sample_index import SampleIndex, Shard, index_path
from dfm_nb.data.shards import Fits, how_to_adopt, widths
from dfm_nb.packs.packs import LatentStatistics

NO_CAPTION_TOKENS = 1  # a data set without text_empty.safetensors: one zero token replaces the empty caption
EMPTY_TEXT = "text_empty.safetensors"
FIRST_SAMPLES = 256  # whose statistics are used for a data set without a manifest


def check_split(path: str | Path, split: str) -> None:
    """ValueError when the split has no samples."""
    if index_path(path, split).name not in read_checksums(Path(path)):
        raise ValueError(
            f"{path} has no samples in its {split!r} split; prepare it with --val-fraction above 0, or set "
            "dataset.use_train_split_for_val=true"
        )


class EnergonStore(SampleIndex):
    """The samples of one split of a prepared folder: its index, and what reads them.

    Parameters
    ----------
    path : folder with `checksums.json`. split : "train", "val" or "test". cache_bytes : decoded samples kept in memory.
    remote : fetches the shards, if `path` is the folder that mirrors a server's.

    Attributes
    ----------
    dropped : (reason, detail) of unusable samples that are in no manifest. shards : see `SampleIndex`.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        cache_bytes: int = 1 << 30,
        progress: bool = False,
        remote: RemoteFolder | None = None,
    ):
        if (Path(path) / ".nv-meta" / "sample_loader.py").is_file():
            raise ValueError(f"{path}/.nv-meta/sample_loader.py is code, which reading data must not run: remove it")
        check_split(path, split)
        super().__init__(path, split, here=remote is None)
        left_out = {key for key, edit in read_edits(self.folder).items() if edit.left_out}
        self._left_out = left_out | {f"{key}{MIRRORED}" for key in left_out}
        if progress and left_out:
            log.info("%s sets aside %d samples of all splits", self.folder / EDITS, len(left_out))
        self._remote, self._cache_room, self._lock = remote, cache_bytes, threading.Lock()
        self._cache: dict[int, EncodedClip] = {}
        self._read_statistics(read_manifest(self.folder), progress)

    def _read_statistics(self, manifest: dict[str, Any] | None, progress: bool) -> None:
        root, faults, empty = self.folder, [detail for _, detail in self.dropped], _stored_empty_text(self.folder)
        channels = len(manifest["latent_mean"]) if manifest else None
        found = widths(self._usable(Fits(), faults), channels, None if empty is None else empty.shape[1])
        if found is None:
            first = faults[0] if faults else "there is none"
            raise ValueError(f"{root}: no sample of its {self.split!r} split can be used; the first: {first}")
        self.channels, self.text_dim = found
        if manifest:
            if self.channels != channels:
                raise ValueError(f"{root}/manifest.json has {channels} channels, latents {self.channels}; restore it")
            self.statistics = LatentStatistics.from_manifest(manifest)
        else:  # third-party shards: the first samples are taken as typical
            clips = list(itertools.islice(self._usable(Fits(self.channels, self.text_dim), faults), FIRST_SAMPLES))
            if progress:
                log.warning(
                    "%s has no manifest.json: the latents' mean and std are those of its first %d samples, and "
                    "generation will not know its tokenizer; %s",
                    *(root, len(clips), how_to_adopt(root)),
                )
            latents = torch.cat([clip.latent[0].float().flatten(1) for clip in clips], 1)
            self.statistics = LatentStatistics(latents.mean(1), latents.std(1).clamp_min(1e-6))
        self.empty_text = read_empty_text(root, self.text_dim)

    def _usable(self, fits: Fits, faults: list[str]) -> Iterator[EncodedClip]:
        """Samples in order; what is wrong with one that cannot be used is added to `faults`."""
        for index in range(len(self)):
            try:
                yield self._read(index, fits._replace(grid=self.grid(index)))
            except SampleError as error:
                faults.append(error.detail)

    def _read(self, index: int, fits: Fits) -> EncodedClip:
        entry = self.entry(index)
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
        return self._read(index, fits)  # another process has just evicted it

    def read(self, index: int) -> EncodedClip:
        if (kept := self._cache.get(index)) is not None:
            return kept
        clip = self._read(index, Fits(self.channels, self.text_dim, self.grid(index)))
        size = sum(tensor.nbytes for tensor in (clip.latent, clip.text_emb, *clip.more_text))
        with self._lock:
            if index not in self._cache and size <= self._cache_room:
                self._cache[index] = clip
                self._cache_room -= size
        return clip


def read_empty_text(root: Path, text_dim: int) -> torch.Tensor:
    """The stored embedding [L, D] of the empty caption; one zero token for data sets that have none.

    Raises
    ------
    ValueError : the file is damaged, or of another width.
    """
    found = _stored_empty_text(root)
    if found is None:
        return torch.zeros(NO_CAPTION_TOKENS, text_dim, dtype=torch.bfloat16)
    if found.shape[1] != text_dim:
        raise ValueError(f"{root / EMPTY_TEXT} is {found.shape[1]} wide, the captions {text_dim}; restore it")
    return found


def _stored_empty_text(root: Path) -> torch.Tensor | None:
    path = root / EMPTY_TEXT
    if not path.is_file():
        return None
    try:
        found = load_file(path)["text_emb"]
        if found.ndim != 3 or 0 in found.shape or not (found.is_floating_point() and found.float().isfinite().all()):
            raise ValueError("it must be finite numbers [1, L, D]")
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it") from None
    return found[0]


class MockStore:
    """Random latents of settable sizes, without end: for speed measurements and tests without data.

    sizes : latent (T, H, W) that the samples cycle through.
    """

    def __init__(
        self,
        sizes: Iterable[Sequence[int]],
        text_tokens: int = 12,
        channels: int = 16,
        text_dim: int = 384,
        length: int = 1 << 16,
    ):
        self.sizes = [(t, h, w) for t, h, w in sizes]
        self.text_tokens, self.channels, self.text_dim, self._length = text_tokens, channels, text_dim, length
        self.fingerprint = f"mock-{self.sizes}-{text_tokens}-{channels}-{text_dim}-{length}"
        self.statistics = LatentStatistics(torch.zeros(channels), torch.ones(channels))
        self.empty_text = torch.zeros(2, text_dim, dtype=torch.bfloat16)
        self.dropped: list[tuple[str, str]] = []
        self.shards = [Shard("mock", length, voxels=1, largest=1)]

    def __len__(self) -> int:
        return self._length

    def larger_than(self, voxels: int) -> Iterator[int]:
        large = [i for i, size in enumerate(self.sizes[: self._length]) if math.prod(size) > voxels]
        return iter(sorted(large, key=lambda i: -math.prod(self.sizes[i])))

    def most_frames(self) -> int:
        return max(t for t, _, _ in self.sizes)

    def grid(self, index: int) -> tuple[int, int, int]:
        return self.sizes[index % len(self.sizes)]

    def voxels(self, samples: np.ndarray) -> np.ndarray:
        return np.prod(self.sizes, axis=1)[samples % len(self.sizes)]

    def read(self, index: int) -> EncodedClip:
        g = generator_for("mock", index)
        latent = torch.randn(1, self.channels, *self.grid(index), generator=g).bfloat16()
        text = torch.randn(1, self.text_tokens, self.text_dim, generator=g).bfloat16()
        return EncodedClip(f"mock{index:06d}", latent, text, {"fps": 24})


def usual_size(store: SampleStore) -> dict[str, Any]:
    """`TRAINED_SIZE` of most of 256 samples spread over the split; {} when no clip of that size can be generated.

    The fps is that of a clip, as pictures have none that a clip could take; None where there are pictures alone.
    """
    spread = range(0, len(store), max(1, len(store) // FIRST_SAMPLES))
    grids = [store.grid(i) for i in spread]
    frames, height, width = geometry.pixel_size(*Counter(grids).most_common(1)[0][0])
    if not (geometry.is_side(height) and geometry.is_side(width)):
        return {}
    fps = None
    with contextlib.suppress(SampleError, StopIteration):  # a bad sample is reported when its turn comes
        fps = store.read(next(i for i, (t, _, _) in zip(spread, grids) if t > 1)).meta.get("fps")
    return dict(zip(TRAINED_SIZE, (height, width, frames, fps and float(fps))))


SampleStore = EnergonStore | MockStore
"""Random access to the samples of a split: `len`, `grid(i)` (latent T, H, W), `read(i)`, statistics and empty text."""
