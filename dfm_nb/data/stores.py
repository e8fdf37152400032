"""Random access to samples: through Energon's readers, or made up (`MockStore`)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from dfm_nb.base.records import EncodedClip
from dfm_nb.base.seeds import generator_for
from dfm_nb.packs.packs import LatentStatistics

NO_CAPTION_TOKENS = 1  # a data set without text_empty.safetensors: one zero token stands for the empty caption


class SampleStore(Protocol):
    """Random access to the samples of a split."""

    fingerprint: str
    statistics: LatentStatistics
    empty_text: torch.Tensor  # [L, D]
    channels: int
    text_dim: int

    def __len__(self) -> int: ...
    def grid(self, index: int) -> tuple[int, int, int]:
        """Latent T, H, W."""
        ...

    def read(self, index: int) -> EncodedClip: ...


class EnergonStore:
    """The samples of one split of a prepared folder, through Energon's metadata, splits and tar reader.

    Parameters
    ----------
    path : folder with `.nv-meta`. split : "train", "val" or "test". cache_bytes : decoded samples kept in memory.
    """

    def __init__(self, path: str | Path, split: str = "train", cache_bytes: int = 1 << 30, progress: bool = False):
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
        from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
        from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta

        self.path, self.split = str(path), split
        root = EPath(self.path)
        if not (root / ".nv-meta").is_dir():
            raise FileNotFoundError(
                f"{path} is not a prepared data set: it has no .nv-meta folder; make one with `dfm prepare "
                f"--output-dir {path}` or, for existing shards, `energon prepare {path}`"
            )
        if (root / ".nv-meta" / "sample_loader.py").is_file():
            raise ValueError(
                f"{path}/.nv-meta/sample_loader.py is code, and reading data must run none: remove it "
                "(its parts are read as .pth, .pickle and .json)"
            )
        try:
            meta = WebdatasetMeta.from_config(path=root, split_part=split)
        except (EmptyDatasetError, AssertionError, KeyError):
            raise ValueError(
                f"{path} has no samples in its {split!r} split; prepare it with --val-fraction above 0, or set "
                "dataset.use_train_split_for_val=true"
            ) from None
        self._local = threading.local()
        self._open = lambda parts=None: ShardInfosITarReader(root, meta.shards, part_filter=parts)
        self._length = len(self._open())
        if self._length == 0:
            raise ValueError(f"{path} has no samples in its {split!r} split")
        self._cache: OrderedDict[int, EncodedClip] = OrderedDict()
        self._cache_room, self._lock = cache_bytes, threading.Lock()
        self.keys, self._grids = self._index(progress)
        listing = json.dumps([[s.name, s.count] for s in meta.shards] + [split])
        self.fingerprint = hashlib.sha256((listing + "".join(self.keys)).encode()).hexdigest()[:16]
        self._read_statistics()

    def __len__(self) -> int:
        return self._length

    def _reader(self):
        if not hasattr(self._local, "reader"):  # Energon's reader keeps an open file: one per thread
            self._local.reader = self._open()
        return self._local.reader

    def _index(self, progress: bool) -> tuple[list[str], list[tuple[int, int, int]]]:
        """Keys and latent sizes: from the .json parts, or from the latents of data sets that do not say."""
        reader = self._open(lambda part: part == "json")
        keys, grids = [], []
        for i in tqdm(range(self._length), desc=f"index {self.split}", disable=not progress or self._length < 5000):
            raw = reader[i]
            meta = json.loads(raw.get("json", b"{}"))
            keys.append(raw["__key__"])
            shape = meta.get("latent_shape")
            t, h, w = (shape or self.read(i).latent.shape)[-3:]
            grids.append((t, h, w))
        return keys, grids

    def _read_statistics(self) -> None:
        root = Path(self.path)
        manifest = root / "manifest.json"
        first = self.read(0)
        self.channels, self.text_dim = first.latent.shape[1], first.text_emb.shape[-1]
        if manifest.is_file():
            self.statistics = LatentStatistics.from_manifest(json.loads(manifest.read_text()))
        else:  # shards from elsewhere: the first samples speak for all
            latents = [self.read(i).latent[0].float().flatten(1) for i in range(min(self._length, 256))]
            flat = torch.cat(latents, 1)
            mean, std = flat.mean(1), flat.std(1).clamp_min(1e-6)
            self.statistics = LatentStatistics(mean, std)
        self.empty_text = read_empty_text(root, self.text_dim)

    def grid(self, index: int) -> tuple[int, int, int]:
        return self._grids[index]

    def read(self, index: int) -> EncodedClip:
        with self._lock:
            if index in self._cache:
                return self._cache[index]
        clip = cook(self._reader()[index])
        size = clip.latent.nbytes + clip.text_emb.nbytes
        with self._lock:
            if index not in self._cache and size <= self._cache_room:
                self._cache[index] = clip
                self._cache_room -= size
        return clip


def read_empty_text(root: Path, text_dim: int) -> torch.Tensor:
    """The stored embedding [L, D] of the empty caption; one zero token for data sets that have none."""
    path = root / "text_empty.safetensors"
    if path.is_file():
        from safetensors.torch import load_file

        return load_file(path)["text_emb"][0]
    return torch.zeros(NO_CAPTION_TOKENS, text_dim, dtype=torch.bfloat16)


def cook(raw: dict) -> EncodedClip:
    """Energon's raw sample (bytes by part) to an `EncodedClip`, without running code from it."""
    from dfm_nb.data.shards import decode_sample

    parts = {part: raw[part] for part in ("pth", "pickle", "json") if part in raw}
    return decode_sample(parts, raw["__key__"])


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
        self.text_tokens, self.channels, self.text_dim = text_tokens, channels, text_dim
        self._length = length
        self.fingerprint = f"mock-{self.sizes}-{text_tokens}-{channels}-{text_dim}-{length}"
        self.statistics = LatentStatistics(torch.zeros(channels), torch.ones(channels))
        self.empty_text = torch.zeros(2, text_dim, dtype=torch.bfloat16)

    def __len__(self) -> int:
        return self._length

    def grid(self, index: int) -> tuple[int, int, int]:
        return self.sizes[index % len(self.sizes)]

    def read(self, index: int) -> EncodedClip:
        g = generator_for("mock", index)
        latent = torch.randn(1, self.channels, *self.grid(index), generator=g).bfloat16()
        text = torch.randn(1, self.text_tokens, self.text_dim, generator=g).bfloat16()
        return EncodedClip(f"mock{index:06d}", latent, text, {"fps": 24})
