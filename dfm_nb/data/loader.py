"""Shards to packs: the order is a plan that can be resumed exactly and in any layout.

- The sequence of packs is a function of (data set, seed, capacity, buffer size) alone: not of ranks, workers, restarts
  or time. Step i takes packs [i*n, (i+1)*n), and data-parallel rank r takes every dp-th of them.
- Noise level, noise and caption dropout of a sample are a function of (seed, epoch, key).
- The whole state is small (`PackPlan.state`): an epoch, a cursor, the waiting samples.
- Every sample is used once an epoch.
- A sample that cannot be used is left out, named and counted in `Pack.dropped`; all others stay where they are.

Energon's splits are used, but not its loader: that keeps its place inside worker processes, and with
packing its place is not exact (docs/decisions/0002). `examples/energon_loader.py` gives it the same samples and packs.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.base.seeds import generator_for
from dfm_nb.data.stores import SampleStore
from dfm_nb.packs.packer import Packer
from dfm_nb.packs.packs import Pack, PackSettings, blank_draw, draw_sample, pack_draws
from dfm_nb.packs.patches import check_divides

PREFETCH_STEPS = 2


class PackPlan:
    """The endless global sequence of packs, as lists of (epoch, sample index); see the module's guarantees."""

    def __init__(
        self, store: SampleStore, settings: PackSettings, capacity: int, buffer_size: int, shuffle: bool = True
    ):
        self.store, self.settings, self.shuffle = store, settings, shuffle
        self._volume = settings.patch_temporal * settings.patch_spatial**2
        self._no_room: set[int] = set()
        for index in store.larger_than((capacity + 1) * self._volume - 1):
            if _can_be_read(store, index):
                raise ValueError(
                    f"a pack must hold the longest sample: sample {index} has {self._tokens(index)} tokens and a pack "
                    f"{capacity} (train.micro_batch_size * dataset.task_encoder_seq_length); set "
                    f"dataset.task_encoder_seq_length={self._tokens(index)} or more"
                )
            self._no_room.add(index)  # its size is a lie: it takes no room, and is named when its turn comes
        self.capacity = capacity
        self.packer = Packer(capacity, buffer_size)
        self.epoch = self.cursor = self.samples = self.tokens = 0
        self._order: tuple[int, torch.Tensor] | None = None

    def _tokens(self, index: int) -> int:
        t, h, w = self.store.grid(index)
        return 0 if index in self._no_room else t * h * w // self._volume

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
            yield (self.epoch, index), self._tokens(index)

    def next(self) -> list[tuple[int, int]]:
        items = self.packer.next(self._stream())
        self.samples += len(items)
        self.tokens += sum(self._tokens(i) for _, i in items)
        return items

    def state(self) -> dict:
        """JSON-able; `restore` of it continues with the next pack."""
        waiting = [[e, i] for (e, i), _ in self.packer.waiting]
        return {
            "fingerprint": self.store.fingerprint,
            "capacity": self.capacity,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "waiting": waiting,
            "samples": self.samples,
            "tokens": self.tokens,
        }

    def restore(self, state: dict) -> None:
        if state["fingerprint"] not in self.store.known_as:
            raise ValueError(
                "the data set differs from the one the checkpoint was trained on, so its place in the data has no "
                "meaning; use the same dataset.path, or start anew with checkpoint.pretrained=<checkpoint>"
            )
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self.samples, self.tokens = state["samples"], state["tokens"]
        self.packer.waiting = [((e, i), self._tokens(i)) for e, i in state["waiting"]]


def _can_be_read(store: SampleStore, index: int) -> bool:
    try:
        store.read(index)
    except SampleError:
        return False
    return True


class PackBuilder:
    """From a plan's entry to a `Pack`: reads, adds noise, packs. Safe to call from several threads."""

    def __init__(self, store: SampleStore, settings: PackSettings):
        self.store, self.settings = store, settings

    def build(self, items: list[tuple[int, int]], capacity: int | None) -> Pack:
        draws, dropped = [], []
        for epoch, index in items:
            try:
                clip = self.store.read(index)
                self._check_divides(clip)
            except SampleError as error:
                dropped.append((error.reason, error.detail))
                continue
            draws.append(draw_sample(clip, epoch, self.settings, self.store.statistics, self.store.empty_text))
        if draws:
            pack = pack_draws(draws, self.settings, capacity)
        else:
            blank = blank_draw(self.settings, self.store.channels, self.store.empty_text)
            pack = pack_draws([blank], self.settings, capacity)
            pack.loss_mask[:] = False
            pack.keys, pack.grids = [], []
        pack.dropped = dropped
        return pack

    def _check_divides(self, clip: EncodedClip) -> None:
        try:
            check_divides(clip.latent[0], self.settings.patch_spatial, self.settings.patch_temporal)
        except ValueError as error:
            raise SampleError("odd_size", f"sample {clip.key}: {error}") from None


class PackedLoader:
    """Yields, for each optimizer step, the `Pack`s of one data-parallel rank; builds the next ones in threads.

    Parameters
    ----------
    packs_per_step : global number of packs of a step (global_batch_size / micro_batch_size).
    num_workers : threads that read and pack ahead; 0 builds in the caller.
    """

    def __init__(self, plan: PackPlan, packs_per_step: int, dp_rank: int = 0, dp_size: int = 1, num_workers: int = 1):
        assert packs_per_step % dp_size == 0, (packs_per_step, dp_size)
        self.plan, self.builder = plan, PackBuilder(plan.store, plan.settings)
        self.packs_per_step, self.dp_rank, self.dp_size = packs_per_step, dp_rank, dp_size
        self._pool = ThreadPoolExecutor(num_workers, "pack") if num_workers else None
        self._ahead: deque[tuple[list[Callable[[], Pack]], dict]] = deque()  # what gives each pack; the state after it
        self._depth = PREFETCH_STEPS if num_workers else 1
        self._state = plan.state()

    def _plan_step(self) -> None:
        entries = [self.plan.next() for _ in range(self.packs_per_step)]
        own = entries[self.dp_rank :: self.dp_size]
        self._ahead.append(([self._build(items) for items in own], self.plan.state()))

    def _build(self, items: list[tuple[int, int]]) -> Callable[[], Pack]:
        """What gives the pack: at once in the caller, or as soon as a thread has built it."""
        if self._pool is None:
            return functools.partial(self.builder.build, items, self.plan.capacity)
        return self._pool.submit(self.builder.build, items, self.plan.capacity).result

    def next_step(self) -> list[Pack]:
        while len(self._ahead) < self._depth:
            self._plan_step()
        jobs, state = self._ahead.popleft()
        packs = [job() for job in jobs]
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
