"""The same samples and packs through Energon's own loader, for those who run one: `get_savable_loader(get_train_dataset(...))`.

Enters: Energon's raw samples. Leaves: `Pack`s. The project's own training uses `dataset.PackedLoader` instead, whose order can be resumed exactly
and in another layout (docs/decisions/0002); cooking, drawing and packing are the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.energon import Cooker, DefaultTaskEncoder, Sample, stateless

from dfm_nb.base.records import EncodedClip
from dfm_nb.data.stores import EnergonStore, cook
from dfm_nb.packs.packer import fill
from dfm_nb.packs.packs import Pack, PackSettings, draw_sample, pack_draws


@dataclass
class ClipSample(Sample):
    """An `EncodedClip` with Energon's bookkeeping."""

    clip: EncodedClip


@stateless
def cook_clip(raw: dict) -> ClipSample:
    """Bytes by part -> sample; runs no code from the data (the encoder's `decoder` is off)."""
    return ClipSample(
        __key__=raw["__key__"],
        __restore_key__=raw["__restore_key__"],
        __subflavors__=raw.get("__subflavors__"),
        clip=cook(raw),
    )


class DiffusionTaskEncoder(DefaultTaskEncoder):
    """Cooks, packs and draws for Energon's loader.

    Parameters
    ----------
    path : the prepared folder (its statistics and empty caption are used). capacity : tokens of a pack.
    """

    decoder = None
    cookers = [Cooker(cook_clip)]

    def __init__(self, path: str | Path, settings: PackSettings, capacity: int):
        super().__init__()
        store = EnergonStore(path)
        self.settings, self.capacity = settings, capacity
        self.statistics, self.empty_text = store.statistics, store.empty_text

    def _tokens(self, sample: ClipSample) -> int:
        volume = self.settings.patch_temporal * self.settings.patch_spatial**2
        return sample.clip.latent[0, 0].numel() // volume

    @stateless
    def encode_sample(self, sample: ClipSample) -> ClipSample:
        return sample

    def select_samples_to_pack(self, samples: list[ClipSample]) -> list[list[ClipSample]]:
        """Every sample of the buffer in a pack, the fullest packs first to last, oldest samples first."""
        groups, waiting = [], list(samples)
        while waiting:
            chosen = set(fill([self._tokens(s) for s in waiting], self.capacity))
            groups.append([s for i, s in enumerate(waiting) if i in chosen])
            waiting = [s for i, s in enumerate(waiting) if i not in chosen]
        return groups

    @stateless
    def pack_selected_samples(self, samples: list[ClipSample]) -> Pack:
        draws = [draw_sample(s.clip, 0, self.settings, self.statistics, self.empty_text) for s in samples]
        return pack_draws(draws, self.settings, self.capacity)

    @stateless
    def batch(self, samples: list[Pack]) -> list[Pack]:
        return samples

    @stateless
    def encode_batch(self, batch: list[Pack]) -> list[Pack]:
        return batch
