"""Real samples to measure against, of a prepared folder or of a source as `dfm prepare` takes it.

A prepared folder has no pixels. Its latents are decoded by the checkpoint's tokenizer, so distances to them measure the
network and not the tokenizer. The choice depends only on the seed; unreadable samples are skipped and counted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import numpy as np
import torch

from dfm_nb.base import geometry, plugins, video
from dfm_nb.base.progress import tqdm
from dfm_nb.base.records import SampleError
from dfm_nb.data.shards import how_to_adopt
from dfm_nb.data.stores import ShardStore


@dataclass
class Real:
    """frames uint8 [T, H, W, 3], T = 1 + 4k and H, W divisible by 16, with what is known of them."""

    frames: np.ndarray
    caption: str
    fps: float
    attributes: dict[str, str] = field(default_factory=dict)


class ShardReference:
    """Samples of one split of a folder of shards, decoded.

    Parameters
    ----------
    decode : stored latent float32 [C, T, H, W] -> uint8 frames. tokenizer : what the checkpoint's manifest says of
        its own.
    """

    def __init__(self, folder: str, split: str, decode: Callable[[torch.Tensor], np.ndarray], tokenizer: dict):
        self.store, self.decode = ShardStore(folder, split), decode
        own = self.store.manifest["tokenizer"]
        if any(own.get(k) != tokenizer.get(k) for k in ("name", "sha256")):
            raise ValueError(
                f"--dataset {folder} was encoded by the tokenizer {own['name']}, not by the checkpoint's "
                f"{tokenizer['name']}; give the source instead, or prepare it with that tokenizer"
            )

    def __len__(self) -> int:
        return len(self.store)

    def is_clip(self, index: int) -> bool | None:
        """Whether a sample is a clip; None where only reading it tells."""
        return self.store.grid(index)[0] > 1

    def read(self, index: int) -> Real:
        clip = self.store.read(index)
        meta = clip.meta
        if not isinstance(meta.get("caption"), str):
            raise ValueError(f"{clip.key} of {self.store.folder} must have a caption; give --dataset the source")
        return Real(self.decode(clip.latent[0]), meta["caption"], clip.fps, meta.get("attributes") or {})


class SourceReference:
    """Samples of a source, brought to `short_side` px."""

    def __init__(self, spec: str, short_side: int):
        name, rest = plugins.source_and_spec(spec)
        self.source, self.short_side = plugins.load("sources", name).build(rest or None), short_side

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
        height, width = video.fit_size(height, width, self.short_side, upscale=True)
        return Real(video.resize(frames, height, width), clip.caption, clip.fps, clip.attributes)


def stored_latents(folder: str, split: str, grid: tuple[int, int, int], most: int) -> torch.Tensor:
    """The first `most` latents of one size (T, H, W) of a split, float32 [n, C, T, H, W], as they are stored."""
    store, found = ShardStore(folder, split), []
    of_size = [i for i in range(len(store)) if store.grid(i) == grid]
    for index in tqdm(of_size[:most], desc=f"{split} latents", unit="sample", leave=False, disable=None):
        try:
            found.append(store.read(index).latent[0].float())
        except SampleError:
            continue  # counted where samples are chosen
    return torch.stack(found) if found else torch.empty(0, store.channels, *grid)


def open_reference(
    spec: str, split: str, decode: Callable[[torch.Tensor], np.ndarray], tokenizer: dict, short_side: int
) -> ShardReference | SourceReference:
    """The samples that `--dataset` names; ValueError or FileNotFoundError says what is wrong with it."""
    if (Path(spec) / ".nv-meta").is_dir():
        return ShardReference(spec, split, decode, tokenizer)
    name = plugins.source_and_spec(spec)[0]
    if name in plugins.names("sources") or plugins.is_module_name(name):
        return SourceReference(spec, short_side)
    raise FileNotFoundError(
        f"--dataset {spec} is neither a prepared folder (it has no .nv-meta) nor one of the sources "
        f"{', '.join(plugins.names('sources'))}; if shards of another writer are there, {how_to_adopt(spec)}"
    )


def choose(
    reference: ShardReference | SourceReference, images: int, clips: int, max_frames: int, seed: int
) -> tuple[list[Real], list[Real], int]:
    """Up to `images` single frames and `clips` clips (cut to `max_frames`), and how many could not be read.

    The seed decides which, and their order.
    """
    left, failed = {False: images, True: clips}, 0  # by whether they are clips
    found: dict[bool, list[Real]] = {False: [], True: []}
    order = torch.randperm(len(reference), generator=torch.Generator().manual_seed(seed)).tolist()
    with tqdm(total=images + clips, desc="real samples", unit="sample") as bar:
        for index in itertools.takewhile(lambda _: any(left.values()), order):
            known = reference.is_clip(index)
            if known is not None and not left[known]:
                continue
            try:
                real = reference.read(index)
            except SampleError:
                failed += 1
                continue
            is_clip = len(real.frames) > 1
            if left[is_clip]:
                real.frames = real.frames[: geometry.floor_frames(max_frames)]
                found[is_clip].append(real)
                left[is_clip] -= 1
                bar.update()
    return found[False], found[True], failed
