"""Shards to packs, in an order that can be resumed exactly and in any layout (`order`).

- The sequence of packs is a function of (data set, seed, the settings of packing, whether packs have one shape) alone:
  not of ranks, workers, restarts or time. Of each step's packs, data-parallel rank r takes every dp-th.
- Noise level, noise, caption and caption dropout of a sample are a function of (seed, epoch, key).
- The whole state is small (`StepOrder.state`): of each lane an epoch, a cursor, the waiting samples.
- Every sample is used once an epoch of its lane, or as often as its weight says.
- An unusable sample is skipped, reported and counted in `Pack.dropped`; all others keep their positions.

Energon's splits are used, but not its loader: that keeps its place inside worker processes, and with
packing its place is not exact (docs/decisions, 0002). `examples/energon_loader.py` gives it the same samples and packs.
"""

import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from dfm_nb.base.records import SampleError
from dfm_nb.data.order import PackOrder, StepOrder
from dfm_nb.packs.packer import PackItem
from dfm_nb.packs.packs import Pack, blank_pack, draw_sample, pack_draws, pinned

PREFETCH_STEPS = 2  # one to use next, and one being built meanwhile


def build_pack(order: PackOrder, items: list[PackItem]) -> Pack:
    """Read the samples of a pack, add noise, and pack them. Safe to call from several threads."""
    store = order.store
    draws = []
    dropped = []
    for item in items:
        try:
            clip = store.read(item.sample)
            draws.append(draw_sample(clip, item.epoch, order.settings, store.empty_text))
        except SampleError as error:
            dropped.append((error.reason, error.detail))
    if draws:
        pack = pack_draws(draws, order.settings, order.capacity)
    else:
        pack = blank_pack(order.settings, store.channels, store.empty_text, order.capacity)
    tensors: dict[str, Any] = {
        name: pinned(value) for name, value in vars(pack).items() if isinstance(value, torch.Tensor)
    }
    return replace(pack, **tensors, dropped=dropped)


class PackedLoader:
    """Yields, for each optimizer step, the `Pack`s of one data-parallel rank; builds the next ones in threads.

    Parameters
    ----------
    packs_per_step : global number of packs of a step (global_batch_size / micro_batch_size).
    balance_steps : number of steps whose packs are regrouped, so that each step has packs of similar work; 1: none.
    num_workers : threads that read and pack ahead; 0 builds in the caller.
    """

    def __init__(
        self,
        order: PackOrder,
        packs_per_step: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int,
        balance_steps: int = 1,
    ):
        assert packs_per_step % dp_size == 0, (packs_per_step, dp_size)
        self.order = order
        self.steps = StepOrder(order, packs_per_step, balance_steps)
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._pool = ThreadPoolExecutor(num_workers, "pack") if num_workers else None
        # what gives each pack; the state after it
        self._ahead: deque[tuple[list[Callable[[], Pack]], dict]] = deque()
        self._depth = PREFETCH_STEPS if num_workers else 0
        self._state = self.steps.state()

    def _build(self, items: list[PackItem]) -> Callable[[], Pack]:
        """What gives the pack: at once in the caller, or as soon as a thread has built it."""
        if self._pool is None:
            return functools.partial(build_pack, self.order, items)
        return self._pool.submit(build_pack, self.order, items).result

    def next_step(self) -> list[Pack]:
        # the step that is due, and those that are kept ahead
        while len(self._ahead) <= self._depth:
            own = self.steps.next()[self.dp_rank :: self.dp_size]
            self._ahead.append(([self._build(items) for items in own], self.steps.state()))
        jobs, state = self._ahead.popleft()
        packs = [job() for job in jobs]
        self._state = state
        return packs

    def state(self) -> dict:
        """The order's state after the last step that `next_step` returned (not what was read ahead)."""
        return self._state

    def restore(self, state: dict) -> None:
        self._ahead.clear()
        self.steps.restore(state)
        self._state = self.steps.state()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
