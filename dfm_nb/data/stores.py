"""Random access to samples: of a prepared folder (`ShardStore`), or random ones (`MockStore`)."""

import contextlib
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from dfm_nb.base import geometry, seeds
from dfm_nb.base.files import Json
from dfm_nb.base.log import log
from dfm_nb.base.records import UNKNOWN_FPS, EncodedClip, SampleError
from dfm_nb.config.samples import SETTINGS, Anchors, Captions, Form, Kind, TrainingSamples, simhash
from dfm_nb.data.captioning import EDITS, LEFT_OUT, MIRRORED, captions_of, read_edits
from dfm_nb.data.prepared_folder import read_checksums, read_empty_text, read_manifest
from dfm_nb.data.remote import RemoteFolder
from dfm_nb.data.sample_index import SampleIndex, Shard, Sizes, index_path
from dfm_nb.data.shards import Fits, SampleEntry, how_to_adopt
from dfm_nb.packs.packs import LatentStatistics

# samples of a kind, stills or clips, whose rates and captions `training_samples` records
MOST_LOOKED_AT = 4_096
MOST_ANCHORS = 1_000  # 1 MB in each checkpoint with the states of `minilm`
READ_OF_SERVER = 16  # of a server: each may fetch a shard before training starts


def has_split(path: str | Path, split: str) -> bool:
    """Whether the split has samples."""
    return index_path(Path(path), split).name in read_checksums(Path(path))


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
        path = Path(path)
        if not has_split(path, split):
            raise ValueError(f"{path} has no {split!r} samples; prepare it with --{split}-fraction above 0")
        super().__init__(path, split, here=remote is None)
        left_out = {key for key, edit in read_edits(self.folder).items() if edit.left_out}
        self._left_out = left_out | {f"{key}{MIRRORED}" for key in left_out}
        if progress and left_out:
            log.info("%s sets aside %d samples of all splits", self.folder / EDITS, len(left_out))
        if progress and not remote:
            others = sorted({tar.name for tar in self.folder.glob("*.tar")} - self._listed.keys())
            if others:
                said = "%s has %d tars that are not of its preparation and are not used, such as %s"
                log.warning(said, path, len(others), others[0])
        self._remote = remote
        self._lock = threading.Lock()
        self._cache_room = self.cache_bytes
        self.most_looked_at = READ_OF_SERVER if remote else MOST_LOOKED_AT
        self._cache: dict[int, EncodedClip] = {}
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise ValueError(f"{path} has no manifest.json, so its latents' scale is unknown; {how_to_adopt(path)}")
        self.manifest = manifest
        self.statistics = LatentStatistics.from_manifest(manifest)
        self.channels = len(manifest["latent_mean"])
        self.empty_text = read_empty_text(self.folder)
        self.text_dim = self.empty_text.shape[1]
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

    def _usable(self, index: int) -> SampleEntry:
        """Position of a sample; SampleError if it is set aside."""
        entry = self.entry(index)
        if entry.key in self._left_out:
            raise SampleError(LEFT_OUT, f"{entry.key} is set aside in {EDITS}")
        return entry

    def _read(self, index: int) -> EncodedClip:
        entry = self._usable(index)
        grid = self.grid(index)
        given = int(self.voxels(np.array([index]))[0]) - math.prod(grid)
        fits = Fits(self.channels, self.text_dim, grid, given)
        if self._remote is None:
            return entry.read(fits)
        self._remote.provide(entry.shard)
        try:
            return entry.read(fits)
        except SampleError:
            if entry.shard.exists():
                raise
        return self._read(index)  # another process has evicted the shard meanwhile

    def meta(self, index: int) -> Json:
        """A sample's .json, without its tensors unless a server has them; SampleError if it cannot be used."""
        return self.read(index).meta if self._remote else self._usable(index).read_meta()

    def read(self, index: int) -> EncodedClip:
        kept = self._cache.get(index)
        if kept is not None:
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
        columns = dict(zip("thw", cycled.T)) | {"text_tokens": np.full(length, text_tokens)}
        super().__init__(columns, [Shard("mock", length, int(voxels.sum()), int(voxels.max()))])
        self.text_shape = text_tokens, text_dim
        self.channels = channels
        self.text_dim = text_dim
        self.fingerprint = f"mock-{grids}-{text_tokens}-{channels}-{text_dim}-{length}"
        self.contents: list[str] = []
        self.statistics = LatentStatistics(torch.zeros(channels), torch.ones(channels))
        self.empty_text = torch.zeros(2, text_dim, dtype=torch.bfloat16)
        self.dropped: list[tuple[str, str]] = []
        self.most_looked_at = MOST_LOOKED_AT

    def meta(self, index: int) -> Json:
        return {"fps": 24}

    def read(self, index: int) -> EncodedClip:
        g = seeds.generator_for("mock", index)
        latent = torch.randn(1, self.channels, *self.grid(index), generator=g).bfloat16()
        text = torch.randn(1, *self.text_shape, generator=g).bfloat16()
        return EncodedClip(f"mock{index:06d}", latent, text, {"fps": 24})


SampleStore = ShardStore | MockStore
"""Random access to the samples of a split: `len`, `grid(i)` (latent T, H, W), `meta(i)`, `read(i)`, statistics and
empty text."""


def training_samples(store: SampleStore, recommended: Json) -> TrainingSamples:
    """What the samples of a store have: of each kind, stills and clips, the most frequent size and its usual rate.

    Captions of up to 4,096 samples a kind are kept with the form of their samples, if there are several forms; what
    these cannot tell is counted and reported. A kind without samples of a size that can be generated is left out.

    recommended : settings of `generation` as the user gave them: the kind of these frames comes first, and captions get
    them.
    """
    kinds = []
    looked_at = 0
    told = defaultdict[tuple[Form, bool], list[str]](list)
    asked = recommended.get("num_video_frames")
    for still in (True, False):
        samples = store.of_kind(still)
        sides = Counter[str]()
        counts = store.sizes(samples)
        usable = [size for size in counts if all(map(geometry.is_side, size[1:]))]
        if not usable:
            continue
        usual = max(usable, key=counts.__getitem__)
        rates = defaultdict[tuple[int, ...], Counter[float]](Counter)
        for i in samples[:: -(-len(samples) // store.most_looked_at)].tolist():
            with contextlib.suppress(SampleError):  # a bad sample is reported when its turn comes
                meta = store.meta(i)
                size = geometry.pixel_size(*store.grid(i))
                fps = float(meta.get("fps") or UNKNOWN_FPS)
                rates[size][fps] += 1
                if size in usable and (asked is None or (asked == 1) == still):
                    form = Form.model_validate({**dict(zip(SETTINGS, (*size, fps))), **recommended})
                    told[form, bool(meta.get("given_shapes"))] += filter(None, captions_of(meta))
                    looked_at += 1
        for (_, height, width), n in counts.items():
            sides[f"{width}x{height}"] += n
        of_usual = rates[usual] or sum(rates.values(), Counter({UNKNOWN_FPS: 0}))
        fps = of_usual.most_common(1)[0][0]
        kind = {**dict(zip(SETTINGS, (*usual, fps))), "sizes": [side for side, _ in sides.most_common()]}
        kinds.append((len(samples), Kind.model_validate(kind)))
    kinds.sort(key=lambda kind: (asked is not None and kind[1].still != (asked == 1), -kind[0]))
    captions = []
    if len(told) > 1 or any(given for _, given in told):
        _report_untold(told, len(store) - looked_at)
        for (form, given), texts in sorted(told.items(), key=lambda item: -len(item[1])):
            if texts:
                captions.append(Captions(**dict(form), given=given, simhash=simhash(texts)))
    return TrainingSamples(kinds=[kind for _, kind in kinds], captions=captions, given=store.any_given)


def anchors(store: SampleStore) -> Anchors | None:
    """The captions of a store with the means of their states; None for more than `MOST_ANCHORS` samples (of a server:
    than are looked at), and for pairs, whose captions say what to change.
    """
    most = min(MOST_ANCHORS, store.most_looked_at)
    if len(store) > most or store.any_given:
        log.info("Prompts get no training caption before them: it is for up to %d samples, no pairs", most)
        return None
    means = {}
    for i in range(len(store)):
        with contextlib.suppress(SampleError):  # a bad sample is reported when its turn comes
            clip = store.read(i)
            for caption, states in zip(captions_of(clip.meta), (clip.text_emb, *clip.more_text)):
                if caption:
                    means[caption] = states[0].float().mean(0).numpy()
    return Anchors.of(means) if means else None


def _report_untold(told: Mapping[tuple[Form, bool], list[str]], others: int) -> None:
    """Say for how many captions the samples differ in form. others : samples without a record."""
    shared = defaultdict[str, Counter[Form]](Counter)
    for (form, _), captions in told.items():  # whether pictures are given does not matter here
        for caption in captions:
            shared[simhash([caption])][form] += 1
    several = sum(len(uses) > 1 for uses in shared.values())
    if several:
        log.info("%d captions have samples of several sizes, lengths or rates; they get the most frequent", several)
    if others:
        log.info("%d samples were not looked at or cannot be generated in their size; prompts may get another", others)
