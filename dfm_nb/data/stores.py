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

from dfm_nb.base.log import log
from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.base.seeds import generator_for
from dfm_nb.data.shards import parse_meta, read_record
from dfm_nb.packs.packs import LatentStatistics

NO_CAPTION_TOKENS = 1  # a data set without text_empty.safetensors: one zero token stands for the empty caption
FIRST_SAMPLES = 256  # whose statistics stand for a data set without a manifest


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


def how_to_adopt(path: str | Path) -> str:
    """The end of a sentence about a folder of shards that someone else wrote."""
    return f"`dfm adopt {path} --tokenizer NAME --text-encoder NAME` makes it whole"


def shards_of(path: str | Path, split: str) -> list:
    """Energon's `ShardInfo`s (name, count) of a split; empty when it has none.

    Raises
    ------
    FileNotFoundError : the folder has no whole `.nv-meta`. ValueError : Energon cannot read it.
    """
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
    from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta

    if not (Path(path) / ".nv-meta").is_dir():
        raise FileNotFoundError(
            f"{path} is not a prepared data set: it has no .nv-meta folder; make one with `dfm prepare "
            f"--output-dir {path}`; if shards of another writer are there, {how_to_adopt(path)}"
        )
    try:
        return WebdatasetMeta.from_config(path=EPath(str(path)), split_part=split).shards
    except (EmptyDatasetError, AssertionError, KeyError):
        return []


def check_split(path: str | Path, split: str) -> list:
    """`shards_of`, where an empty split is a ValueError."""
    found = shards_of(path, split)
    if not sum(shard.count for shard in found):
        raise ValueError(
            f"{path} has no samples in its {split!r} split; prepare it with --val-fraction above 0, or set "
            "dataset.use_train_split_for_val=true"
        )
    return found


class EnergonStore:
    """The samples of one split of a prepared folder, through Energon's metadata, splits and tar reader.

    Parameters
    ----------
    path : folder with `.nv-meta`. split : "train", "val" or "test". cache_bytes : decoded samples kept in memory.
    """

    def __init__(self, path: str | Path, split: str = "train", cache_bytes: int = 1 << 30, progress: bool = False):
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader

        self.path, self.split = str(path), split
        root = EPath(self.path)
        if (root / ".nv-meta" / "sample_loader.py").is_file():
            raise ValueError(
                f"{path}/.nv-meta/sample_loader.py is code, and reading data must run none: remove it "
                "(its parts are read as .pth, .pickle and .json)"
            )
        self._shards = check_split(path, split)
        self._local = threading.local()
        self._open = lambda parts=None: ShardInfosITarReader(root, self._shards, part_filter=parts)
        self._cache: OrderedDict[int, EncodedClip] = OrderedDict()
        self._cache_room, self._lock = cache_bytes, threading.Lock()
        self._rows: list[int] = []  # of each sample, its number among all that Energon counts
        self.keys: list[str] = []
        self._grids: list[tuple[int, int, int]] = []
        self._index(progress)
        listing = json.dumps([[s.name, s.count] for s in self._shards] + [split])
        self.fingerprint = hashlib.sha256((listing + "".join(self.keys)).encode()).hexdigest()[:16]
        self._read_statistics(progress)

    def __len__(self) -> int:
        return len(self.keys)

    def _reader(self):
        if not hasattr(self._local, "reader"):  # Energon's reader keeps an open file: one per thread
            self._local.reader = self._open()
        return self._local.reader

    def _index(self, progress: bool) -> None:
        """Keys and latent sizes: as `dfm adopt` measured them, else from the .json parts, else from the latents."""
        reader, start = self._open(lambda part: part == "json"), 0
        adopted = (Path(self.path) / "manifest.json").is_file()
        hidden = not progress or len(reader) < 5000
        with tqdm(total=len(reader), desc=f"index {self.split}", disable=hidden) as bar:
            for shard in self._shards:
                record = read_record(Path(self.path), shard.name) if adopted else None
                measured = (record or {}).get("measured")
                for row in range(start, start + shard.count):
                    raw = reader[row]
                    key = raw["__key__"]
                    bar.update()
                    if measured is None:
                        size = (parse_meta(raw.get("json", b"")).get("latent_shape") or self._latent_shape(row))[-3:]
                    elif key in measured:
                        size = measured[key][:3]
                    else:
                        continue  # it cannot be used: the manifest names it and says why
                    self._rows.append(row)
                    self.keys.append(key)
                    self._grids.append((size[0], size[1], size[2]))
                start += shard.count

    def _latent_shape(self, row: int) -> Sequence[int]:
        """Of a sample whose .json has none."""
        try:
            return cook(self._reader()[row]).latent.shape
        except SampleError as error:
            raise ValueError(f"{error.detail}; {how_to_adopt(self.path)} and leaves out what cannot be used") from None

    def _read_statistics(self, progress: bool) -> None:
        root = Path(self.path)
        manifest = root / "manifest.json"
        first = self.read(0)
        self.channels, self.text_dim = first.latent.shape[1], first.text_emb.shape[-1]
        if manifest.is_file():
            self.statistics = LatentStatistics.from_manifest(json.loads(manifest.read_text()))
        else:  # shards from elsewhere: the first samples speak for all
            count = min(len(self), FIRST_SAMPLES)
            if progress:
                log.warning(
                    "%s has no manifest.json: the latents' mean and std are those of its first %d samples, and "
                    "generation will not know its tokenizer; %s",
                    *(root, count, how_to_adopt(root)),
                )
            flat = torch.cat([self.read(i).latent[0].float().flatten(1) for i in range(count)], 1)
            mean, std = flat.mean(1), flat.std(1).clamp_min(1e-6)
            self.statistics = LatentStatistics(mean, std)
        self.empty_text = read_empty_text(root, self.text_dim)

    def grid(self, index: int) -> tuple[int, int, int]:
        return self._grids[index]

    def read(self, index: int) -> EncodedClip:
        with self._lock:
            if index in self._cache:
                return self._cache[index]
        clip = cook(self._reader()[self._rows[index]])
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
