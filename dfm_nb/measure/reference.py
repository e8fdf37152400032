"""Real samples to measure against, of a prepared folder or of a source as `dfm prepare` takes it.

A prepared folder has no pixels. Samples are compared with the files that it was made of, where these are here and have
not changed, else with its latents, decoded by the checkpoint's tokenizer. The choice depends only on the seed;
unreadable samples are skipped and counted, and so are held-out samples whose caption or picture training has too: they
are not unseen.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from dfm_nb.base import geometry, plugins, video
from dfm_nb.base.log import tqdm
from dfm_nb.base.records import EncodedClip, SampleError, Source
from dfm_nb.data.shard_plan import owner_of
from dfm_nb.data.shards import how_to_adopt, read_record
from dfm_nb.data.stores import ShardStore, has_split
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.measure.diversity import SAME, thumbnails

MOST_COMPARED = 5_000
"""Training samples among which captions, pictures and copies are looked for."""
SEEN = ("seen_caption", "seen_picture")
"""Reasons for which a held-out sample is not unseen."""


@dataclass
class Real:
    """frames uint8 [T, H, W, 3], T = 1 + 4k and H, W divisible by 16, with what is known of them.

    given : the same of the pictures and clips that are given beside it.
    original : what its file shows, neither cropped nor through a tokenizer, of about that size; None: it is not here.
    """

    frames: np.ndarray
    caption: str
    fps: float
    attributes: dict[str, str] = field(default_factory=dict)
    given: list[np.ndarray] = field(default_factory=list)
    original: np.ndarray | None = None

    @property
    def shown(self) -> np.ndarray:
        """What samples are compared with."""
        return self.frames if self.original is None else self.original


def form_of(real: Sequence[Real]) -> str:
    """How they are shown, for a title or a note."""
    decoded = sum(one.original is None for one in real)
    if not decoded:
        return "as they are"
    if decoded == len(real):
        return "after crop and tokenizer"
    return f"{decoded} of {len(real)}, whose files are not here or have changed, after crop and tokenizer"


def _uncropped(frames: np.ndarray, like: np.ndarray) -> np.ndarray:
    """All of these frames, so large that `like` was cut from them."""
    _, height, width, _ = frames.shape
    scale = max(like.shape[1] / height, like.shape[2] / width)
    return video.resize(frames[: len(like)], max(1, round(height * scale)), max(1, round(width * scale)))


class Originals:
    """What the samples of a prepared folder were made of, by the manifest and the shards' records."""

    def __init__(self, store: ShardStore):
        self.store = store
        self.items: dict[str, int] = {}
        self.record = functools.cache(functools.partial(read_record, store.folder))
        arguments = store.manifest.get("arguments") or {}
        name, spec = plugins.source_and_spec(str(arguments.get("source")))
        if spec and Path(spec).exists():  # no server
            # the folder's author may not choose other files of this machine
            flags = {f: arguments[f] for f in plugins.flags("sources") if f in arguments and f != "allow_outside"}
            with contextlib.suppress(ValueError, OSError):
                options = plugins.options_of("sources", name, plugins.all_flags()(**flags).changed())
                self.source = plugins.load("sources", name).build(spec, **options)
                self.items = {self.source.item_key(i): i for i in range(len(self.source))}

    def read(self, index: int, like: np.ndarray) -> np.ndarray | None:
        """A sample's, uint8 [T, H, W, 3] with the T of `like`; None where the file is not here or has other content."""
        entry = self.store.entry(index)
        owner = owner_of(entry.key, self.items)
        record = self.record(entry.shard.name)
        stored = record and record.contents.get(owner)
        if not stored or owner not in self.items:
            return None
        item = self.items[owner]
        with contextlib.suppress(SampleError, OSError):
            content = self.source.content(item)
            if content and content.sha256 == stored.sha256:
                for clip in self.source.read(item):
                    if clip.key == entry.key:
                        return _uncropped(clip.video, like)
        return None


class Training:
    """What training samples show: captions, and thumbnails of pictures and of the first frames of clips."""

    def __init__(self, store: ShardStore, decode: Callable[[torch.Tensor], np.ndarray]):
        self.captions: dict[str, str] = {}
        self.keys: list[str] = []
        frames = []
        for index in tqdm(range(min(len(store), MOST_COMPARED)), "training samples", unit="sample", leave=False):
            try:
                clip = store.read(index)
            except SampleError:
                continue  # training reports it
            self.captions |= dict.fromkeys(self.texts(clip), clip.key)
            self.keys.append(clip.key)
            frames.append(decode(clip.latent[0][:, :1]))  # tokenizers are causal
        self.thumbnails = thumbnails(frames)

    @staticmethod
    def texts(clip: EncodedClip) -> list[str]:
        """All captions of a sample; case and spaces do not matter."""
        captions = (clip.meta.get("caption"), *(clip.meta.get("more_captions") or ()))
        return [" ".join(caption.casefold().split()) for caption in captions if isinstance(caption, str)]

    def check(self, clip: EncodedClip, frames: np.ndarray) -> None:
        """SampleError if training has this held-out sample's caption or picture."""
        if not clip.given:  # "make it red" beside another picture is another request
            for text in self.texts(clip):
                if text in self.captions:
                    raise SampleError("seen_caption", f"{clip.key} has a caption of {self.captions[text]}")
        distances = np.linalg.norm(self.thumbnails - thumbnails([frames]), axis=1)
        if distances.min() <= SAME:
            raise SampleError("seen_picture", f"{clip.key} has the picture of {self.keys[distances.argmin()]}")


class ShardReference:
    """Samples of one split of a folder of shards, decoded; of a held-out split those that training does not have.

    pipe : of the checkpoint, with the tokenizer that decodes.
    """

    def __init__(self, folder: str, split: str, pipe: Pipeline):
        self.store = ShardStore(folder, split)
        self.split = split
        self.decode = pipe.decode_stored
        self.originals = Originals(self.store)
        own = self.store.manifest["tokenizer"]
        tokenizer = pipe.manifest["tokenizer"]
        if own.get("name") != tokenizer.get("name") or own.get("sha256") != tokenizer.get("sha256"):
            raise ValueError(
                f"--dataset {folder} was encoded by the tokenizer {own['name']}, not by the checkpoint's "
                f"{tokenizer['name']}; give the source instead, or prepare it with that tokenizer"
            )
        self.training = None
        if split != "train" and has_split(folder, "train"):
            self.training = Training(ShardStore(folder, "train"), self.decode)

    def __len__(self) -> int:
        return len(self.store)

    def is_clip(self, index: int) -> bool | None:
        """Whether a sample is a clip; None where only reading it tells."""
        return self.store.grid(index)[0] > 1

    def read(self, index: int) -> Real:
        clip = self.store.read(index)
        caption = clip.meta.get("caption")
        if not isinstance(caption, str):
            raise ValueError(f"{clip.key} of {self.store.folder} must have a caption; give --dataset the source")
        frames = self.decode(clip.latent[0])
        if self.training:
            self.training.check(clip, frames)
        given = [self.decode(z[0]) for z in clip.given]
        original = self.originals.read(index, frames)
        return Real(frames, caption, clip.fps, clip.meta.get("attributes") or {}, given, original)


@dataclass
class SourceReference:
    """Samples of a source, brought to `short_side` px."""

    source: Source
    short_side: int
    split = ""
    training = None

    def __len__(self) -> int:
        return len(self.source)

    def is_clip(self, index: int) -> bool | None:
        return None  # known once it is read

    def read(self, index: int) -> Real:
        clip = next(iter(self.source.read(index)), None)
        if clip is None:
            raise SampleError("empty", f"item {self.source.item_key(index)} gave nothing")
        frames = clip.video[: geometry.floor_frames(len(clip.video))]
        _, height, width, _ = frames.shape
        fitted = video.resize(frames, *video.fit_size(height, width, self.short_side, upscale=True))
        return Real(fitted, clip.caption, clip.fps, clip.attributes, clip.given, _uncropped(frames, fitted))


def held_out(folder: str) -> str:
    """The split to measure: val, else test, else train."""
    for split in ("val", "test", "train"):
        if has_split(folder, split):
            return split
    return "val"


def open_reference(spec: str, split: str | None, pipe: Pipeline, short_side: int) -> ShardReference | SourceReference:
    """The samples that `--dataset` names; ValueError or FileNotFoundError says what is wrong with it.

    split : None: as `held_out`.
    """
    if (Path(spec) / ".nv-meta").is_dir():
        return ShardReference(spec, split or held_out(spec), pipe)
    name, rest = plugins.source_and_spec(spec)
    sources = plugins.names("sources")
    if name in sources or plugins.is_module_name(name):
        return SourceReference(plugins.load("sources", name).build(rest or None), short_side)
    raise FileNotFoundError(
        f"--dataset {spec} is neither a prepared folder (it has no .nv-meta) nor one of the sources "
        f"{', '.join(sources)}; if shards of another writer are there, {how_to_adopt(spec)}"
    )


def choose(
    reference: ShardReference | SourceReference, images: int, clips: int, max_frames: int | None, seed: int
) -> tuple[list[Real], list[Real], list[SampleError]]:
    """Up to `images` single frames and `clips` clips (cut to `max_frames`), and the faults of those left out.

    The seed decides which, and their order.
    """
    left = {False: images, True: clips}  # by whether they are clips
    chosen: dict[bool, list[Real]] = {False: [], True: []}
    faults = []
    most_frames = max_frames and geometry.floor_frames(max_frames)
    generator = torch.Generator().manual_seed(seed)
    with tqdm(total=min(images + clips, len(reference)), desc="real samples", unit="sample") as bar:
        for index in torch.randperm(len(reference), generator=generator).tolist():
            if not any(left.values()):
                break
            known = reference.is_clip(index)
            if known is not None and not left[known]:
                continue
            try:
                real = reference.read(index)
            except SampleError as error:
                faults.append(error)
                continue
            is_clip = len(real.frames) > 1
            if left[is_clip]:
                real.frames = real.frames[:most_frames]
                if real.original is not None:
                    real.original = real.original[: len(real.frames)]
                chosen[is_clip].append(real)
                left[is_clip] -= 1
                bar.update()
        bar.total = bar.n  # all there are; a notebook shows a bar that is left before its end as a failure
    return chosen[False], chosen[True], faults
