"""Shards to packs: Megatron-Energon reads and cooks, the order is a plan that can be resumed exactly and in any layout.

Enters: a folder with `.nv-meta` (or a mock), a split. Leaves: per optimizer step the `Pack`s of this data-parallel rank.
Guarantees
- The sequence of packs is a function of (data set, seed, capacity, buffer size) alone: not of ranks, workers, restarts or time.
  Step i takes packs [i*n, (i+1)*n), and data-parallel rank r takes every dp-th of them: any layout trains on the same packs.
- Noise level, noise and caption dropout of a sample are a function of (seed, epoch, key).
- The whole state is small (`PackPlan.state`): an epoch, a cursor, the waiting samples. Every sample is used once per epoch.
- Reading runs no code from the data. A sample that cannot be decoded is left out, named and counted in `Pack.dropped`.
Cost: planning about 0.1 ms a pack; decoding about 1 ms a sample, once if it fits the cache.

Energon's own loader keeps its place inside worker processes and is not exact with packing (docs/decisions/0002); its readers and splits are
used here, and `energon_encoder.DiffusionTaskEncoder` gives the same samples and packs to that loader.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Protocol

import torch
from tqdm import tqdm

from dfm_nb.diffusion import edm
from dfm_nb.packs.packer import Packer, grid_positions, patchify
from dfm_nb.parallel.groups import generator_for
from dfm_nb.base.records import EncodedClip, SampleError

NO_CAPTION_TOKENS = 1  # a data set without text_empty.safetensors: one zero token stands for the empty caption


@dataclass(frozen=True)
class PackSettings:
    """How samples become a pack; equal on all ranks.

    sigma_data : the standard deviation that latents are scaled to (after the data set's mean and std per channel).
    token_multiple, text_multiple, row_multiple : the packed lengths and the number of conditioning rows are padded to these, for a layout,
    or so that shapes come again: oneDNN makes a new kernel for every shape of a product in bfloat16.
    condition_frames_prob : chance that a clip's first latent frame is given clean and left out of the loss.
    """

    seed: int
    patch_spatial: int = 2
    patch_temporal: int = 1
    sigma_data: float = 0.5
    P_mean: float = -1.2
    P_std: float = 1.2
    caption_dropout: float = 0.1
    condition_frames_prob: float = 0.0
    token_multiple: int = 1
    text_multiple: int = 1
    row_multiple: int = 1


@dataclass
class Pack:
    """One packed sequence of S tokens from B samples, R conditioning rows, K text tokens. All tensors on the CPU.

    x0, noise : float32 [S, p]; sigma, fps : float32 [R]; row : int64 [S]; positions : float32 [S, 3]; loss_mask : bool [S];
    text : bfloat16 [K, D]; pool : float32 [R, K]. A last segment holds the padding, if any: its loss mask is False. Last rows may have no token.
    cu_q, cu_kv : segment bounds, also for the padding. grids[i] : (T, H, W) in patches of sample i.
    """

    x0: torch.Tensor
    noise: torch.Tensor
    sigma: torch.Tensor
    fps: torch.Tensor
    row: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    text: torch.Tensor
    pool: torch.Tensor
    cu_q: list[int]
    cu_kv: list[int]
    keys: list[str]
    grids: list[tuple[int, int, int]]
    dropped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of samples, without padding."""
        return sum(t * h * w for t, h, w in self.grids)


@dataclass(frozen=True)
class LatentStatistics:
    """From stored latents to what the network sees and back: every channel has mean 0 and standard deviation sigma_data.

    mean, std : float32 [C], of the data set's training split.
    """

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def from_manifest(cls, manifest: dict) -> LatentStatistics:
        mean, std = (torch.tensor(manifest[k]).float() for k in ("latent_mean", "latent_std"))
        return cls(mean, std.clamp_min(1e-6))

    def to_model(self, latent: torch.Tensor, sigma_data: float) -> torch.Tensor:
        """[C, T, H, W] as stored -> float32, normalised."""
        mean, std = (v[:, None, None, None] for v in (self.mean, self.std))
        return (latent.float() - mean) / std * sigma_data

    def from_model(self, latent: torch.Tensor, sigma_data: float) -> torch.Tensor:
        mean, std = (v[:, None, None, None] for v in (self.mean, self.std))
        return latent.float() / sigma_data * std + mean


@dataclass
class Draw:
    """One sample as the network will see it, before packing."""

    key: str
    latent: torch.Tensor  # float32 [C, T, H, W], normalised to sigma_data
    text: torch.Tensor  # [L, D]
    fps: float
    sigma: float
    noise: torch.Tensor  # float32 [C, T, H, W]
    clean_frames: int = 0


CLEAN_SIGMA = 0.002  # noise level announced for given frames: EDM's sigma_min


def draw_sample(
    clip: EncodedClip, epoch: int, settings: PackSettings, statistics: LatentStatistics, empty_text: torch.Tensor
) -> Draw:
    """Normalise a stored latent and draw its sigma, noise and caption dropout from (seed, epoch, key)."""
    g = generator_for(settings.seed, "draw", epoch, clip.key)
    normal, drop, give = torch.randn((), generator=g), torch.rand((), generator=g), torch.rand((), generator=g)
    latent = statistics.to_model(clip.latent[0], settings.sigma_data)
    frames = latent.shape[1]
    clean = int(frames > 1 and give < settings.condition_frames_prob)
    return Draw(
        key=clip.key,
        latent=latent,
        text=empty_text if drop < settings.caption_dropout else clip.text_emb[0],
        fps=float(clip.meta.get("fps") or 24),
        sigma=float(edm.sigma_from_normal(normal, settings.P_mean, settings.P_std)),
        noise=torch.randn(latent.shape, generator=g),
        clean_frames=clean,
    )


def pack_draws(draws: list[Draw], settings: PackSettings, capacity: int | None = None) -> Pack:
    """Put samples into one packed sequence, padded to `capacity` (or only to the layout's multiple when None).

    Samples are ordered by length, so that equal lengths are neighbours and one batched attention call serves them.
    """
    s, pt = settings.patch_spatial, settings.patch_temporal
    draws = sorted(draws, key=lambda d: (d.latent[0].numel(), d.latent.shape, len(d.text), d.key))
    x0, noise, positions, rows, mask, grids = [], [], [], [], [], []
    sigma, fps, row_text, lengths, text_lengths = [], [], [], [], []
    for i, d in enumerate(draws):
        _, t, h, w = d.latent.shape
        grid = (t // pt, h // s, w // s)
        tokens, per_frame = grid[0] * grid[1] * grid[2], grid[1] * grid[2]
        clean = d.clean_frames // pt * per_frame
        clean_noise = d.noise
        if clean:
            clean_noise = d.noise.clone()
            clean_noise[:, : d.clean_frames] = 0
            rows.append(torch.full((clean,), len(sigma)))
            sigma.append(CLEAN_SIGMA)
            fps.append(d.fps)
            row_text.append(i)
        rows.append(torch.full((tokens - clean,), len(sigma)))
        sigma.append(d.sigma)
        fps.append(d.fps)
        row_text.append(i)
        x0.append(patchify(d.latent, s, pt))
        noise.append(patchify(clean_noise, s, pt))
        positions.append(grid_positions(grid))
        mask.append(torch.arange(tokens) >= clean)
        grids.append(grid)
        lengths.append(tokens)
        text_lengths.append(len(d.text))
    texts = [d.text for d in draws]
    total, text_total = sum(lengths), sum(text_lengths)
    target = capacity if capacity is not None else -(-total // settings.token_multiple) * settings.token_multiple
    text_target = -(-text_total // settings.text_multiple) * settings.text_multiple
    padding = target - total
    assert padding >= 0, (total, capacity)
    if padding or text_target > text_total:
        if padding == 0:  # text alone is padded: the surplus text tokens belong to a segment without queries
            text_padding = text_target - text_total
        else:
            text_target = -(-(text_total + 1) // settings.text_multiple) * settings.text_multiple
            text_padding = text_target - text_total
            rows.append(torch.full((padding,), len(sigma)))
            sigma.append(settings.sigma_data)
            fps.append(24.0)
            row_text.append(len(draws))
            p = x0[0].shape[1]
            x0.append(torch.zeros(padding, p))
            noise.append(torch.zeros(padding, p))
            positions.append(torch.zeros(padding, 3))
            mask.append(torch.zeros(padding, dtype=torch.bool))
        lengths.append(padding)
        text_lengths.append(text_padding)
        texts.append(texts[0].new_zeros(text_padding, texts[0].shape[1]))
    cu_kv = [0]
    for n in text_lengths:
        cu_kv.append(cu_kv[-1] + n)
    cu_q = [0]
    for n in lengths:
        cu_q.append(cu_q[-1] + n)
    spare = -len(sigma) % settings.row_multiple  # rows without a token
    sigma += [settings.sigma_data] * spare
    fps += [24.0] * spare
    pool = torch.zeros(len(sigma), cu_kv[-1])
    for r, segment in enumerate(row_text):
        pool[r, cu_kv[segment] : cu_kv[segment + 1]] = 1 / text_lengths[segment]
    return Pack(
        x0=torch.cat(x0), noise=torch.cat(noise), sigma=torch.tensor(sigma), fps=torch.tensor(fps), row=torch.cat(rows),
        positions=torch.cat(positions), loss_mask=torch.cat(mask), text=torch.cat(texts), pool=pool,
        cu_q=cu_q, cu_kv=cu_kv, keys=[d.key for d in draws], grids=grids,
    )  # fmt: skip


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
            grids.append(tuple(shape[-3:]) if shape else tuple(self.read(i).latent.shape[-3:]))
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

    def __init__(self, sizes, text_tokens: int = 12, channels: int = 16, text_dim: int = 384, length: int = 1 << 16):
        self.sizes, self.text_tokens, self.channels, self.text_dim = (
            [tuple(s) for s in sizes],
            text_tokens,
            channels,
            text_dim,
        )
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


class PackPlan:
    """The endless global sequence of packs, as lists of (epoch, sample index); see the module's guarantees."""

    def __init__(
        self, store: SampleStore, settings: PackSettings, capacity: int, buffer_size: int, shuffle: bool = True
    ):
        self.store, self.settings, self.shuffle = store, settings, shuffle
        volume = settings.patch_temporal * settings.patch_spatial**2
        self._tokens = [t * h * w // volume for t, h, w in (store.grid(i) for i in range(len(store)))]
        longest = max(range(len(self._tokens)), key=self._tokens.__getitem__)
        if self._tokens[longest] > capacity:
            raise ValueError(
                f"a pack must hold the longest sample: sample {longest} has {self._tokens[longest]} tokens and a pack "
                f"{capacity} (train.micro_batch_size * dataset.task_encoder_seq_length); set "
                f"dataset.task_encoder_seq_length={self._tokens[longest]} or more"
            )
        self.capacity = capacity
        self.packer = Packer(capacity, buffer_size)
        self.epoch = self.cursor = self.samples = self.tokens = 0
        self._order: tuple[int, torch.Tensor] | None = None

    def _permutation(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            n = len(self.store)
            order = torch.arange(n)
            if self.shuffle:
                order = torch.randperm(n, generator=generator_for(self.settings.seed, "order", epoch))
            self._order = epoch, order
        return self._order[1]

    def _stream(self) -> Iterator[tuple]:
        while True:
            if self.cursor == len(self.store):
                self.epoch, self.cursor = self.epoch + 1, 0
            index = int(self._permutation(self.epoch)[self.cursor])
            self.cursor += 1
            yield (self.epoch, index), self._tokens[index]

    def next(self) -> list[tuple[int, int]]:
        items = self.packer.next(self._stream())
        self.samples += len(items)
        self.tokens += sum(self._tokens[i] for _, i in items)
        return items

    def state(self) -> dict:
        """JSON-able; `restore` of it continues with the next pack."""
        waiting = [[e, i] for (e, i), _ in self.packer.waiting]
        return {
            "fingerprint": self.store.fingerprint, "capacity": self.capacity, "epoch": self.epoch, "cursor": self.cursor,
            "waiting": waiting, "samples": self.samples, "tokens": self.tokens,
        }  # fmt: skip

    def restore(self, state: dict) -> None:
        if state["fingerprint"] != self.store.fingerprint:
            raise ValueError(
                "the data set differs from the one the checkpoint was trained on, so its place in the data has no meaning; "
                "use the same dataset.path, or start anew with checkpoint.pretrained=<checkpoint>"
            )
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self.samples, self.tokens = state["samples"], state["tokens"]
        self.packer.waiting = [((e, i), self._tokens[i]) for e, i in state["waiting"]]


class PackBuilder:
    """From a plan's entry to a `Pack`: reads, draws, packs. Safe to call from several threads."""

    def __init__(self, store: SampleStore, settings: PackSettings):
        self.store, self.settings = store, settings

    def build(self, items: list[tuple[int, int]], capacity: int | None) -> Pack:
        draws, dropped = [], []
        for epoch, index in items:
            try:
                clip = self.store.read(index)
            except SampleError as error:
                dropped.append((error.reason, error.detail))
                continue
            draws.append(draw_sample(clip, epoch, self.settings, self.store.statistics, self.store.empty_text))
        if not draws:
            raise ValueError(f"no sample of a whole pack could be read; the first: {dropped[0][1]}")
        pack = pack_draws(draws, self.settings, capacity)
        pack.dropped = dropped
        return pack


class PackedLoader:
    """Yields, for each optimizer step, the `Pack`s of one data-parallel rank; builds the next ones in threads.

    Parameters
    ----------
    packs_per_step : global number of packs of a step (global_batch_size / micro_batch_size).
    num_workers : threads that read and pack ahead; 0 builds in the caller.
    """

    def __init__(
        self,
        plan: PackPlan,
        packs_per_step: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 1,
        prefetch_steps: int = 2,
    ):
        assert packs_per_step % dp_size == 0, (packs_per_step, dp_size)
        self.plan, self.builder = plan, PackBuilder(plan.store, plan.settings)
        self.packs_per_step, self.dp_rank, self.dp_size = packs_per_step, dp_rank, dp_size
        self._pool = ThreadPoolExecutor(num_workers, "pack") if num_workers else None
        self._ahead: list[tuple[list[Future] | list[Callable[[], Pack]], dict]] = []
        self._depth = prefetch_steps if num_workers else 1
        self._state = plan.state()

    def _plan_step(self) -> None:
        entries = [self.plan.next() for _ in range(self.packs_per_step)]
        own = entries[self.dp_rank :: self.dp_size]
        state = self.plan.state()
        if self._pool is None:
            jobs = [lambda items=items: self.builder.build(items, self.plan.capacity) for items in own]
        else:
            jobs = [self._pool.submit(self.builder.build, items, self.plan.capacity) for items in own]
        self._ahead.append((jobs, state))

    def next_step(self) -> list[Pack]:
        while len(self._ahead) < self._depth:
            self._plan_step()
        jobs, state = self._ahead.pop(0)
        packs = [job.result() if isinstance(job, Future) else job() for job in jobs]
        self._state = state
        if self._pool is not None:
            self._plan_step()
        return packs

    def state(self) -> dict:
        """The plan's state after the last step that `next_step` returned (not what was read ahead)."""
        return self._state

    def restore(self, state: dict) -> None:
        self._ahead.clear()
        self.plan.restore(state)
        self._state = state

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
