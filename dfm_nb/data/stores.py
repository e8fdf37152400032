"""Random access to samples: through Energon's readers, or made up (`MockStore`)."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from dfm_nb.base.files import read_json
from dfm_nb.base.log import log
from dfm_nb.base.progress import tqdm
from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.base.seeds import generator_for
from dfm_nb.data.prepared_folder import STATISTICS, read_manifest
from dfm_nb.data.shards import Fits, decode_meta, decode_sample, read_record, record_path, widths
from dfm_nb.packs.packs import LatentStatistics

NO_CAPTION_TOKENS = 1  # a data set without text_empty.safetensors: one zero token stands for the empty caption
EMPTY_TEXT = "text_empty.safetensors"
FIRST_SAMPLES = 256  # whose statistics stand for a data set without a manifest


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
    meta = Path(path) / ".nv-meta"
    try:
        found = WebdatasetMeta.from_config(path=EPath(str(path)), split_part=split).shards
    except (EmptyDatasetError, AssertionError):
        return []
    except Exception as error:  # of YAML, of JSON, of Energon's types
        info = meta / ".info.json"
        bad = meta / "split.yaml" if isinstance((read_json(info) or {}).get("shard_counts"), dict) else info
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{bad} is damaged ({why}); restore it, or remove {meta} and {how_to_adopt(path)}") from None
    for shard in found:
        tar = Path(path) / shard.name
        size = tar.stat().st_size if tar.is_file() else 0
        if not 0 <= shard.count <= size // tarfile.BLOCKSIZE:  # a sample has a block at least
            raise ValueError(
                f"{tar} must hold {shard.count} samples, as .nv-meta says, and has {size} bytes; restore it"
            )
    return found


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
        self._manifest = read_manifest(Path(path), STATISTICS)
        self._shards = check_split(path, split)
        self._local = threading.local()
        self._open = lambda parts=None: ShardInfosITarReader(root, self._shards, part_filter=parts)
        self._cache: OrderedDict[int, EncodedClip] = OrderedDict()
        self._cache_room, self._lock = cache_bytes, threading.Lock()
        self._rows: list[int] = []  # of each sample, its number among all that Energon counts
        self.keys: list[str] = []
        self._grids: list[tuple[int, int, int]] = []
        self.dropped: list[tuple[str, str]] = []
        self._first_bad: str | None = None
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
        # only `dfm adopt` measures samples into its records; a prepared folder's need not be opened
        adopted = (self._manifest or {}).get("source") == {"name": "adopted"}
        hidden = not progress or len(reader) < 5000
        with tqdm(total=len(reader), desc=f"index {self.split}", disable=hidden) as bar:
            for shard in self._shards:
                record = read_record(Path(self.path), shard.name) if adopted else None
                measured = (record or {}).get("measured")
                for row in range(start, start + shard.count):
                    bar.update()
                    try:
                        raw = self._raw(row, reader)
                        key = raw["__key__"]
                        if measured is not None and key not in measured:
                            continue  # it cannot be used: the manifest names it and says why
                        size = self._size(raw, row) if measured is None else measured[key][:3]
                    except SampleError as error:
                        self.dropped.append((error.reason, error.detail))
                        continue
                    except TypeError:
                        path = record_path(Path(self.path), shard.name)
                        raise ValueError(f"{path} is damaged; remove it and {how_to_adopt(self.path)}") from None
                    self._rows.append(row)
                    self.keys.append(key)
                    self._grids.append((size[0], size[1], size[2]))
                start += shard.count

    def _size(self, raw: dict, row: int) -> Sequence[int]:
        """Latent T, H, W: as the .json says, or of the latent itself."""
        said = decode_meta(raw.get("json"), raw["__key__"]).get("latent_shape")
        return (said or cook(self._raw(row)).latent.shape)[-3:]

    def _raw(self, row: int, reader=None) -> dict:
        """Energon's raw sample; SampleError where its tar is damaged."""
        try:
            raw = dict((reader or self._reader())[row])
        except Exception as error:  # what tarfile and Energon's reader make of a damaged tar
            n, shard = row, iter(self._shards)
            while n >= (here := next(shard)).count:
                n -= here.count
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise SampleError("damaged_tar", f"sample {n} of {self.path}/{here.name} cannot be read: {why}") from None
        raw["__key__"] = raw["__key__"].encode(errors="backslashreplace").decode()  # so that every key can be printed
        return raw

    def _read_statistics(self, progress: bool) -> None:
        root = Path(self.path)
        manifest, empty = self._manifest, _stored_empty_text(root)
        votes = widths(self._readable())
        if not votes:
            first = self._first_bad or (self.dropped[0][1] if self.dropped else "there is none")
            raise ValueError(f"{self.path}: no sample of its {self.split!r} split can be used; the first: {first}")
        known = len(manifest["latent_mean"]) if manifest else None, empty.shape[1] if empty is not None else None
        # most of the first samples, and what the folder says of them
        self.channels, self.text_dim = max(votes, key=lambda v: (v[0] == known[0], v[1] == known[1], votes[v]))
        if manifest:
            if self.channels != known[0]:
                raise ValueError(
                    f"{root / 'manifest.json'} has the mean of {known[0]} channels and the latents have "
                    f"{self.channels}; restore it"
                )
            self.statistics = LatentStatistics.from_manifest(manifest)
        else:  # shards from elsewhere: the first samples speak for all
            clips = list(itertools.islice(self._good(), FIRST_SAMPLES))
            if progress:
                log.warning(
                    "%s has no manifest.json: the latents' mean and std are those of its first %d samples, and "
                    "generation will not know its tokenizer; %s",
                    *(root, len(clips), how_to_adopt(root)),
                )
            flat = torch.cat([clip.latent[0].float().flatten(1) for clip in clips], 1)
            mean, std = flat.mean(1), flat.std(1).clamp_min(1e-6)
            self.statistics = LatentStatistics(mean, std)
        self.empty_text = read_empty_text(root, self.text_dim)

    def _readable(self) -> Iterator[EncodedClip]:
        """Samples that are good in themselves, whatever the others are."""
        for index, row in enumerate(self._rows):
            try:
                yield cook(self._raw(row), Fits(grid=self._grids[index]))
            except SampleError as error:
                self._first_bad = self._first_bad or error.detail

    def _good(self) -> Iterator[EncodedClip]:
        for index in range(len(self)):
            with contextlib.suppress(SampleError):  # it is named when its turn comes
                yield self.read(index)

    def grid(self, index: int) -> tuple[int, int, int]:
        return self._grids[index]

    def read(self, index: int) -> EncodedClip:
        with self._lock:
            if index in self._cache:
                return self._cache[index]
        clip = cook(self._raw(self._rows[index]), Fits(self.channels, self.text_dim, self._grids[index]))
        size = clip.latent.nbytes + clip.text_emb.nbytes
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
        raise ValueError(
            f"{root / EMPTY_TEXT} must be as wide as the captions, {text_dim}; it is {found.shape[1]}; restore it"
        )
    return found


def _stored_empty_text(root: Path) -> torch.Tensor | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

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


def cook(raw: dict, fits: Fits | None = None) -> EncodedClip:
    """Energon's raw sample (bytes by part) to an `EncodedClip`, without running code from it."""
    parts = {part: raw[part] for part in ("pth", "pickle", "json") if part in raw}
    return decode_sample(parts, raw["__key__"], fits)


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
        self.dropped: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return self._length

    def grid(self, index: int) -> tuple[int, int, int]:
        return self.sizes[index % len(self.sizes)]

    def read(self, index: int) -> EncodedClip:
        g = generator_for("mock", index)
        latent = torch.randn(1, self.channels, *self.grid(index), generator=g).bfloat16()
        text = torch.randn(1, self.text_tokens, self.text_dim, generator=g).bfloat16()
        return EncodedClip(f"mock{index:06d}", latent, text, {"fps": 24})


SampleStore = EnergonStore | MockStore
"""Random access to the samples of a split: `len`, `grid(i)` (latent T, H, W), `read(i)`, statistics and empty text."""
