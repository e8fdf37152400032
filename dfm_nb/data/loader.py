"""Shards to packs: the order is a plan that can be resumed exactly and in any layout (`pack_plan`).

- The sequence of packs is a function of (data set, seed, and the settings of packing) alone: not of ranks, workers,
  restarts or time. Of each step's packs, data-parallel rank r takes every dp-th.
- Noise level, noise and caption dropout of a sample are a function of (seed, epoch, key).
- The whole state is small (`StepPlan.state`): of each lane an epoch, a cursor, the waiting samples.
- Every sample is used once an epoch of its lane.
- A sample that cannot be used is left out, named and counted in `Pack.dropped`; all others stay where they are.

Energon's splits are used, but not its loader: that keeps its place inside worker processes, and with
packing its place is not exact (docs/decisions/0002). `examples/energon_loader.py` gives it the same samples and packs.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.data.pack_plan import Item, PackPlan, StepPlan
from dfm_nb.data.stores import SampleStore
from dfm_nb.packs.packs import Pack, PackSettings, blank_draw, draw_sample, pack_draws
from dfm_nb.packs.patches import check_divides

PREFETCH_STEPS = 2


class PackBuilder:
    """From a plan's entry to a `Pack`: reads, adds noise, packs. Safe to call from several threads."""

    def __init__(self, store: SampleStore, settings: PackSettings):
        self.store, self.settings = store, settings

    def build(self, items: list[Item], capacity: int | None) -> Pack:
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
    balance_steps : of how many steps the packs are dealt anew, so that those of a step are like in work; 1: none.
    num_workers : threads that read and pack ahead; 0 builds in the caller.
    """

    def __init__(
        self,
        plan: PackPlan,
        packs_per_step: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 1,
        balance_steps: int = 1,
    ):
        assert packs_per_step % dp_size == 0, (packs_per_step, dp_size)
        self.plan, self.builder = plan, PackBuilder(plan.store, plan.settings)
        self.steps = StepPlan(plan, packs_per_step, balance_steps)
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self._pool = ThreadPoolExecutor(num_workers, "pack") if num_workers else None
        self._ahead: deque[tuple[list[Callable[[], Pack]], dict]] = deque()  # what gives each pack; the state after it
        self._depth = PREFETCH_STEPS if num_workers else 1
        self._state = self.steps.state()

    def _plan_step(self) -> None:
        own = self.steps.next()[self.dp_rank :: self.dp_size]
        self._ahead.append(([self._build(items) for items in own], self.steps.state()))

    def _build(self, items: list[Item]) -> Callable[[], Pack]:
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
        self.steps.restore(state)
        self._state = state

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
