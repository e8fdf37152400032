"""One process's work: source items -> pixels -> latents and text embeddings -> shards, all stages at the same time.

Reader threads decode and resize ahead; the caller's thread runs the tokenizer on batches of equal shape; one thread
encodes captions and writes.

- Batches are formed within a shard from what arrives in item order, so a shard's bytes do not depend on what was done
  before it, nor on timing.
- A shard is finished when its record `.dfm/<shard>.json` exists: it is written after the tar got its name.
- An unusable item is a drop with a key, a reason and a detail; an item's clips before the fault are kept. Parts of
  a kept sample's file or captions that are missing are recorded in the same form, as lost.
- Memory is bounded for any length of source, shard or video: `AHEAD_BYTES` of pixels read ahead,
  `HELD_PIXELS` waiting for a full batch, two slices of `SLICE_BYTES` of latents and `CAPTIONS_BYTES` of embeddings.
"""

import itertools
import math
import threading
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dfm_nb.base import video
from dfm_nb.base.files import Json, sha256, write_json
from dfm_nb.base.geometry import LATENT_CHANNELS, floor_frames, latent_size
from dfm_nb.base.records import Clip, Content, EncodedClip, SampleError, Source, TextEncoder, Tokenizer
from dfm_nb.data import shards
from dfm_nb.data.captioning import EDITS, LEFT_OUT, MIRRORED, SIDE, Edit, caption_keys, captions_of, tag_captions
from dfm_nb.data.shard_plan import ShardPlan, Stock, owner_of

# Limits of memory: see above.
AHEAD_BYTES = 256 << 20
HELD_PIXELS = 1 << 25
SLICE_BYTES = 64 << 20
SLICE_SAMPLES = 256  # so that small samples are written while the next are encoded
CAPTIONS_BYTES = 256 << 20
MUCH_CROPPED = 0.05
"""Share of a picture's area; a sample that loses more is named."""
BATCH_PIXELS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Least pixels of a tokenizer batch: 2 pictures of 512 px, or 64 on a GPU; halved if memory is short.

Larger batches are slower on a CPU, because their activations do not fit into the cache."""


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What is read and how.

    short_side : px that pictures are fitted to; None keeps sizes. fit : see `video.resize`.
    workers : number of threads. edits : by key. tag_captions : further captions to make of a clip's tags.
    flip : whether training also has each clip mirrored. stock : stored samples that are used instead of encoding.
    on_item : called when an item is done, or with a number of them.
    """

    source: Source
    short_side: int | None = None
    upscale: bool = False
    workers: int = 2
    edits: Mapping[str, Edit] = field(default_factory=dict)
    tag_captions: int = 0
    flip: bool = False
    fit: str = "crop"
    stock: Stock | None = None
    on_item: Callable[..., object] = lambda *_: None

    def edited(self, clip: Clip) -> Clip | SampleError:
        """The clip with its edited caption and captions made of its tags, without duplicates; or why it is excluded."""
        edit = self.edits.get(clip.key) or Edit(key=clip.key)
        if edit.left_out:
            return SampleError(LEFT_OUT, f"{clip.key} is set aside in {EDITS}")
        of_tags = tag_captions(clip.tags, self.tag_captions, clip.key)
        _, *more = dict.fromkeys([clip.caption, *clip.more_captions, *of_tags])
        caption = edit.caption or clip.caption
        return replace(clip, caption=caption, more_captions=[c for c in more if c != caption], tags=[])

    def mirrored(self, clip: Clip) -> Clip | SampleError:
        """The mirror image of an edited clip, with the same captions; its key can be edited, too."""
        key = f"{clip.key}{MIRRORED}"
        for caption in (clip.caption, *clip.more_captions):
            if SIDE.search(caption):
                said = f"{key} is not made: a caption mentions left or right: {caption}"
                return SampleError("not_mirrored", said)
        given = [frames[:, :, ::-1] for frames in clip.given]
        return self.edited(replace(clip, key=key, video=clip.video[:, :, ::-1], given=given))

    def reworded(self, key: str, index: int) -> Json | SampleError:
        """The current captions of the item's sample `key`, as its .json has them; or why it has none.

        Pixels are read only if the source cannot give captions alone.
        """
        own = key.removesuffix(MIRRORED) if self.flip else key
        try:
            captions = self.source.captions(index)
            if captions is None:
                clip = next(clip for clip in self.source.read(index) if clip.key == own)
            else:
                (caption, *more), tags = captions
                blank = np.zeros((1, 1, 1, 3), np.uint8)
                clip = Clip(own, blank, caption, 1.0, self.source.name, more_captions=more, tags=tags)
            result = self.edited(clip)
            if isinstance(result, Clip) and own != key:
                result = self.mirrored(result)
            return caption_keys(result) if isinstance(result, Clip) else result
        except SampleError as error:
            return error

    def fitted(self, clip: Clip) -> Clip:
        """The clip cut to 1 + 4k frames and resized at most once."""
        t, h, w, _ = clip.video.shape
        try:
            size = video.fit_size(h, w, self.short_side or max(16, min(h, w)), self.upscale)
        except SampleError as error:
            raise SampleError(error.reason, f"{clip.key}: {error.detail}") from None
        frames = clip.video[: floor_frames(t)]
        if size != (h, w):
            frames = video.resize(frames, *size, self.fit)
        lost = clip.lost
        share = video.cropped_share(h, w, size)
        if self.fit != "pad" and share > MUCH_CROPPED:
            said = f"{share:.0%} of its {w}x{h} px are cut off, so that sides are multiples of 16; keep all: --fit pad"
            lost = {**lost, f"cropped_over_{MUCH_CROPPED:.0%}": said}
        given = [self.fitted(replace(clip, video=own, lost={}, given=[])) for own in clip.given]
        lost = dict(ChainMap(lost, *(own.lost for own in given)))
        return replace(clip, video=frames, original_size=(h, w), lost=lost, given=[own.video for own in given])


@dataclass(frozen=True)
class Stored:
    """A sample whose latents are stored; `key` and `captions` are its new ones."""

    sample: EncodedClip
    key: str
    captions: Json


Result = Clip | Stored | SampleError


@dataclass(eq=False)
class _Line:
    """Clips of one item that were read and not yet taken; None marks the item's end."""

    index: int
    waiting: deque[Result | None] = field(default_factory=deque)


def _bytes(result: Result | None) -> int:
    if isinstance(result, Stored):
        return _latent_bytes(result)
    return sum(frames.nbytes for frames in (result.video, *result.given)) if isinstance(result, Clip) else 0


class ReadAhead:
    """The clips of items in order, while threads read further ones: `with ReadAhead(reading, items) as ahead:`.

    The first item in line may always continue, so a small budget slows reading but cannot block it.
    """

    def __init__(self, reading: Reading, items: Iterable[int]):
        self.reading = reading
        # One slow item (a long video) must not stop the other workers, so many items per worker
        # are read ahead of it; AHEAD_BYTES limits their memory.
        self._window = 16 * reading.workers
        self._todo = iter(items)
        self._pool = ThreadPoolExecutor(reading.workers, "read")
        self._turn = threading.Condition()
        self._lines: deque[_Line] = deque()
        self._held_bytes = 0
        self._stopped = False
        self.contents = dict[int, Content | None]()

    def take(self, count: int) -> Iterator[tuple[int, Result]]:
        """(index, result) of all clips of the next `count` items."""
        for _ in range(count):
            for item in itertools.islice(self._todo, self._window - len(self._lines)):
                line = _Line(int(item))
                with self._turn:
                    self._lines.append(line)
                self._pool.submit(self._read, line)
            line = self._lines[0]
            while (result := self._next(line)) is not None:
                yield line.index, result
            with self._turn:
                self._lines.popleft()
                self._turn.notify_all()
            self.reading.on_item()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_exc: object) -> None:
        """Stop reading and wait for the threads."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        self._pool.shutdown(cancel_futures=True)

    def _next(self, line: _Line) -> Result | None:
        with self._turn:
            self._turn.wait_for(lambda: line.waiting)
            result = line.waiting.popleft()
            self._held_bytes -= _bytes(result)
            self._turn.notify_all()
            return result

    def _put(self, line: _Line, result: Result | None) -> bool:
        """Hand a result over, after waiting for room; False when nobody wants it any more."""

        def has_room() -> bool:  # the head may always hold one, else others could block it for ever
            return self._stopped or self._held_bytes < AHEAD_BYTES or (self._lines[0] is line and not line.waiting)

        with self._turn:
            self._turn.wait_for(has_room)
            self._held_bytes += _bytes(result)
            line.waiting.append(result)
            self._turn.notify_all()
            return not self._stopped

    def _read(self, line: _Line) -> None:
        source = self.reading.source
        key = source.item_key(line.index)
        given = False
        try:
            content = source.content(line.index)
            self.contents[line.index] = content
            stored = self.reading.stock.samples(content) if self.reading.stock else []
            for ending, sample in stored:
                said = self.reading.reworded(f"{key}{ending}", line.index)
                if not self._put(line, said if isinstance(said, SampleError) else Stored(sample, key + ending, said)):
                    return
            for clip in () if stored else source.read(line.index):
                given = True
                result = self.reading.edited(clip)  # an excluded clip does not end the item
                if not self._put(line, self.reading.fitted(result) if isinstance(result, Clip) else result):
                    return
            if not (given or stored):
                raise SampleError("no_clips", f"{key} gave no clip")
            if content is None:  # of a file that was fetched and hashed meanwhile
                self.contents[line.index] = source.content(line.index, hashed=True)
        except SampleError as error:
            self._put(line, error)
        except Exception as error:  # one item must not end a long run; it is counted and reported like any other fault
            self._put(line, SampleError("unreadable", f"{key} cannot be read: {type(error).__name__}: {error}"))
        self._put(line, None)


# ---- encoding ------------------------------------------------------------------------------------


def to_pixels(frames: np.ndarray | Tensor) -> Tensor:
    """uint8 [..., T, H, W, 3] -> float32 [..., 3, T, H, W] in [-1, 1]."""
    return torch.as_tensor(frames).movedim(-1, -4).float().div_(127.5).sub_(1)


def to_frames(pixels: Tensor) -> np.ndarray:
    """float [..., 3, T, H, W] in [-1, 1] and beyond -> uint8 [..., T, H, W, 3]; inverse of `to_pixels`."""
    return ((pixels.float().cpu().clamp(-1, 1) + 1) * 127.5).round().byte().movedim(-4, -1).numpy()


class LatentEncoder:
    """The latents of a batch of frames; a batch that is too large for the device is halved, and later ones with it."""

    def __init__(self, tokenizer: Tokenizer, device: str = "cpu"):
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.batch_pixels = BATCH_PIXELS.get(self.device.type, BATCH_PIXELS["cuda"])

    @torch.no_grad()
    def __call__(self, frames: Tensor) -> Tensor:
        """uint8 [B, T, H, W, 3] -> bfloat16 [B, 16, t, h, w] on the CPU."""
        try:
            return self.tokenizer.encode(to_pixels(frames.to(self.device))).bfloat16().cpu()
        except torch.OutOfMemoryError:
            if len(frames) == 1:
                _, t, h, w, _ = frames.shape
                raise ValueError(f"memory is short for {t}x{h}x{w} px; lower --short-side or --clip-frames") from None
        torch.cuda.empty_cache()
        self.batch_pixels = max(1, self.batch_pixels // 2)
        half = len(frames) // 2
        return torch.cat((self(frames[:half]), self(frames[half:])))


@dataclass(frozen=True)
class Encoders:
    """What turns pixels and captions into numbers; `pad_text_tokens` is a length that embeddings are padded to."""

    latents: LatentEncoder
    text_encoder: TextEncoder
    pad_text_tokens: int | None = None


class ShardSlice:
    """Consecutive samples of a shard on their way to the writer, encoded in batches of equal shape.

    Attributes
    ----------
    latents : of each sample, its own and those of what is given; all are there after `flush`.
    """

    def __init__(self, encode: LatentEncoder):
        self.encode = encode
        self.latents = list[list[Any]]()
        self.latent_bytes = 0
        self.metas = list[dict]()
        self.drops = list[dict]()
        self.texts = dict[str, Tensor]()  # stored embeddings by caption
        # frames that wait for a full batch
        self._groups: dict[tuple, list[tuple[tuple[int, int], np.ndarray]]] = {}

    def add(self, clip: Clip | Stored) -> None:
        self.latent_bytes += _latent_bytes(clip)
        if isinstance(clip, Clip):
            self.latents.append([None] * (1 + len(clip.given)))
            for number, frames in enumerate((clip.video, *clip.given)):
                self._add((len(self.metas), number), frames)
            self.metas.append(describe(clip))
            return
        stored = clip.sample
        texts = (text[0] for text in (stored.text_emb, *stored.more_text))
        self.texts.update(zip(captions_of(stored.meta), texts))
        self.latents.append([stored.latent, *stored.given])
        kept = {name: value for name, value in stored.meta.items() if not name.startswith("more_")}
        self.metas.append({**kept, "key": clip.key, **clip.captions})

    def _add(self, place: tuple[int, int], frames: np.ndarray) -> None:
        shape = frames.shape
        self._groups.setdefault(shape, []).append((place, frames))
        pixels = {s: len(group) * math.prod(s) // 3 for s, group in self._groups.items()}
        if pixels[shape] >= self.encode.batch_pixels:
            self._flush(shape)
        elif sum(pixels.values()) > HELD_PIXELS:  # many shapes, none of which fills a batch
            self._flush(max(pixels, key=pixels.__getitem__))

    def flush(self) -> None:
        for shape in list(self._groups):
            self._flush(shape)

    def _flush(self, shape: tuple) -> None:
        places, frames = zip(*self._groups.pop(shape))
        latents = self.encode(torch.from_numpy(np.stack(frames)))
        for (position, number), latent in zip(places, latents):
            self.latents[position][number] = latent[None].clone()


def describe(clip: Clip) -> dict:
    """The sample's `.json`, but for what the encoders add."""
    t, h, w, _ = clip.video.shape
    original_height, original_width = clip.original_size or (h, w)
    meta = {
        "key": clip.key,
        **caption_keys(clip),
        "image_height": h,
        "image_width": w,
        "num_frames": t,
        "fps": clip.fps,
        "source": clip.source,
        "attributes": clip.attributes,
        "original_height": original_height,
        "original_width": original_width,
    }
    if clip.lost:
        meta["lost"] = clip.lost
    if clip.weight != 1:
        meta["weight"] = clip.weight
    if clip.given:
        meta["given_shapes"] = [list(latent_size(*frames.shape[:3])) for frames in clip.given]
    return meta


def lost_text(encoder: TextEncoder, caption: str) -> dict[str, str]:
    """What an encoder's embedding of a caption lacks; {} for an encoder that cannot tell."""
    return dict(getattr(encoder, "lost", lambda caption: {})(caption))


def named(reads: Iterable[tuple[int, Result]], reading: Reading, flip: bool) -> Iterator[tuple[str, Result]]:
    """Each result with the key of its item; with `flip` a clip's mirror image after it, with its own key."""
    for index, result in reads:
        yield reading.source.item_key(index), result
        if flip and isinstance(result, Clip):
            yield f"{result.key}{MIRRORED}", reading.mirrored(result)


def _latent_bytes(result: Clip | Stored) -> int:
    """In bfloat16, with what is given."""
    if isinstance(result, Stored):
        return sum(z.nbytes for z in (result.sample.latent, *result.sample.given))
    voxels = sum(math.prod(latent_size(*frames.shape[:3])) for frames in (result.video, *result.given))
    return 2 * LATENT_CHANNELS * voxels


def slices_of(reads: Iterable[tuple[str, Result]], encode: LatentEncoder) -> Iterator[ShardSlice]:
    """A shard, slice by slice. `reads` gives results of this shard's items, with the keys of drops."""
    part = ShardSlice(encode)
    seen = set()
    for key, result in reads:
        if not isinstance(result, SampleError) and result.key in seen:
            result = SampleError("duplicate_key", f"{result.key} occurs twice; keys must be unique")
        if isinstance(result, SampleError):
            part.drops.append({"key": key, "reason": result.reason, "detail": result.detail})
            continue
        seen.add(result.key)
        part.add(result)
        if part.latent_bytes >= SLICE_BYTES or len(part.metas) >= SLICE_SAMPLES:
            part.flush()
            yield part
            part = ShardSlice(encode)
    part.flush()
    yield part


# ---- writing -------------------------------------------------------------------------------------


def latent_sums(latent: Tensor) -> np.ndarray:
    """Count, sum and sum of squares of each channel of [1, C, T, H, W]; float64 [3, C]."""
    z = latent[0].double().flatten(1)
    return np.stack([np.full(len(z), z.shape[1]), z.sum(1).numpy(), z.square().sum(1).numpy()])


class OpenShard(shards.ShardWriter):
    """A shard in the making."""

    def __init__(self, folder: Path, plan: ShardPlan, encoders: Encoders):
        super().__init__(folder / plan.name)
        self.encoders = encoders
        self.record = shards.ShardRecord(name=plan.name, split=plan.split, texts=plan.texts)
        # of this shard alone: what a caption is batched with must not depend on where a run was
        # resumed
        self.known: dict[str, Tensor] = {}

    def write(self, part: ShardSlice) -> None:
        """Write the samples of a slice; equal captions are encoded once."""
        if sum(t.nbytes for t in self.known.values()) > CAPTIONS_BYTES:
            self.known.clear()
        self.known.update(part.texts)
        encoder = self.encoders.text_encoder
        missing = sorted(set(itertools.chain(*map(captions_of, part.metas))) - self.known.keys())
        if missing:
            self.known.update(zip(missing, encoder.encode(missing)))
        for meta, (latent, *given) in zip(part.metas, part.latents):
            captions = captions_of(meta)
            text, *more = map(self.known.__getitem__, captions)
            meta |= {"latent_shape": list(latent.shape[1:]), "text_tokens": len(text)}
            lost = dict(ChainMap(meta.get("lost", {}), *(lost_text(encoder, caption) for caption in captions)))
            self.record.lost += [
                {"key": meta["key"], "reason": reason, "detail": said} for reason, said in lost.items()
            ]
            if more:
                meta["more_text_tokens"] = [len(t) for t in more]
            padding = max(0, (self.encoders.pad_text_tokens or 0) - len(text))
            # further captions are of our own readers alone
            padded = F.pad(text, (0, 0, 0, padding))[None]
            self.add(EncodedClip(meta["key"], latent, padded, meta, [t[None] for t in more], given))
            self.record.latent_sums += latent_sums(latent)
            self.record.text_tokens += sum(map(len, (text, *more)))
        self.record.drops += part.drops

    def finish(self, contents: dict[str, Content | None]) -> None:
        """Close the shard and write its record; contents : of its items, by key."""
        record = self.record
        record.sha256, record.bytes = self.close()
        record.samples = self.samples
        record.latent_sums = np.array(record.latent_sums).tolist()
        record.contents = contents
        path = shards.record_path(self.path.parent, record.name)
        path.parent.mkdir(exist_ok=True)
        write_json(path, record.model_dump())


def encode_shards(plans: list[ShardPlan], reading: Reading, encoders: Encoders, folder: Path) -> None:
    """Make the planned shards in `folder`."""
    # only the current and the previous shard can be open
    unfinished: deque[OpenShard] = deque(maxlen=2)
    writer = ThreadPoolExecutor(1, "write")
    with ReadAhead(reading, itertools.chain.from_iterable(plan.items for plan in plans)) as ahead:
        try:
            last: Future = writer.submit(int)  # nothing yet
            for plan in plans:
                shard = OpenShard(folder, plan, encoders)
                unfinished.append(shard)
                # what is measured on held-out samples stays the same
                flip = reading.flip and plan.split == "train"
                for part in slices_of(named(ahead.take(len(plan.items)), reading, flip), encoders.latents):
                    # so at most two slices are held, and a shard with a failed slice is never
                    # finished
                    last.result()
                    last = writer.submit(shard.write, part)
                last.result()
                contents = {key: ahead.contents.pop(i, None) for key, i in _indices(plan, reading).items()}
                last = writer.submit(shard.finish, contents)
            last.result()
        finally:  # after an error: let running work end, and remove incomplete shards
            writer.shutdown(cancel_futures=True)
            for shard in unfinished:
                shard.abort()


# ---- captions alone ------------------------------------------------------------------------------


def rewrite_shard(plan: ShardPlan, reading: Reading, encoders: Encoders, folder: Path) -> bool:
    """Update the captions of a shard and drop what leaves it; False if it must be made from pixels.

    Latents and the embeddings of unchanged captions are copied. Dropped samples stay dropped.

    Raises
    ------
    ValueError : the shard is damaged.
    """
    path = shards.record_path(folder, plan.name)
    tar = folder / plan.name
    record = shards.read_record(folder, plan.name, whole=False)
    if record is None or plan.has(record):
        return False
    indices = _indices(plan, reading)
    contents = record.contents or dict.fromkeys(indices)
    entries = shards.samples_of(tar) if tar.is_file() else []
    rewords = record.texts < plan.texts
    # a kill came before its record
    if len(entries) != record.samples and (rewords or not plan.leaving):
        return False
    leaving = set(plan.leaving)
    # captions of what is gone from the source stay
    staying = []
    for entry in entries:
        owner = owner_of(entry.key, contents)
        if owner not in leaving:
            known = rewords and owner in indices
            staying.append((entry, reading.reworded(entry.key, indices[owner]) if known else entry.meta))
    drops = [drop for drop in record.drops if owner_of(drop["key"], contents) not in leaving]
    unchanged = len(staying) == len(entries) and all(_says(said, entry) for entry, said in staying)
    contents = {key: content for key, content in contents.items() if key not in leaving}

    def stored() -> Iterator[tuple[str, Result]]:
        for entry, said in staying:
            if isinstance(said, SampleError):
                # or it is the whole item's fault
                if all(drop["detail"] != said.detail for drop in drops):
                    yield entry.key, said
                    drops.append({"key": entry.key, "reason": said.reason, "detail": said.detail})
            else:
                yield entry.key, Stored(entry.read(), entry.key, said)

    left = len(plan.items)
    # after a kill the record may be of the older tar
    if unchanged and record.sha256 == (sha256(tar) if entries else None):
        now = {"texts": plan.texts, "contents": contents, "drops": drops}
        write_json(path, record.model_dump() | now)
    else:
        shard = OpenShard(folder, plan, encoders)
        try:
            shard.record.drops = list(drops)
            for part in slices_of(stored(), encoders.latents):
                shard.write(part)
                reading.on_item(len(part.metas))
            shard.finish(contents)
        finally:  # after an error, remove the incomplete shard
            shard.abort()
        left -= shard.samples
    reading.on_item(left)
    return True


def _indices(plan: ShardPlan, reading: Reading) -> dict[str, int]:
    """The items of a shard by key."""
    return {reading.source.item_key(int(index)): int(index) for index in plan.items}


def other_captions(plans: Iterable[ShardPlan], reading: Reading, folder: Path) -> Iterator[str]:
    """Keys of stored samples whose captions are now others."""
    for plan in plans:
        indices = _indices(plan, reading)
        tar = folder / plan.name
        for entry in shards.samples_of(tar) if tar.is_file() else ():
            owner = owner_of(entry.key, indices)
            said = reading.reworded(entry.key, indices[owner]) if owner in indices else entry.meta
            if isinstance(said, dict) and not _says(said, entry):
                yield entry.key


def _says(said: Json | SampleError, entry: shards.SampleEntry) -> bool:
    """Whether a sample has these captions already."""
    return isinstance(said, dict) and captions_of(said) == captions_of(entry.meta)
