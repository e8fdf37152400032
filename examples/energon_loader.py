"""The samples and packs of training through Energon's loader, for users who already run one.

    python examples/energon_loader.py data/first --packs 3

Cooking and packing are the package's functions. Training itself uses `data.loader.PackedLoader`, whose order can be
resumed exactly and in another layout (docs/decisions/0002). Energon runs the code that `.nv-meta/dataset.yaml` names:
read that file first in a folder that somebody else made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dfm_nb.base.records import EncodedClip
from dfm_nb.config import Config
from dfm_nb.data.shards import GIVEN, MORE, PARTS, decode_sample
from dfm_nb.data.stores import ShardStore
from dfm_nb.packs.packer import fill
from dfm_nb.packs.packs import Pack, PackSettings, draw_sample, pack_draws


@dataclass
class ClipSample(Sample):
    """An `EncodedClip` with Energon's bookkeeping."""

    clip: EncodedClip


@stateless
def cook_clip(raw: dict) -> ClipSample:
    """Bytes by part -> sample; runs no code from the data, because the encoder's `decoder` is off."""
    return ClipSample(
        __key__=raw["__key__"],
        __restore_key__=raw["__restore_key__"],
        __subflavors__=raw.get("__subflavors__"),
        clip=decode_sample({part: raw[part] for part in (*PARTS, MORE, GIVEN) if part in raw}, raw["__key__"]),
    )


class PackEncoder(DefaultTaskEncoder):
    """Cooks samples, adds noise and packs them.

    Parameters
    ----------
    path : the prepared folder, for its statistics and empty caption.
    capacity : tokens per pack.
    """

    decoder = None
    cookers = [Cooker(cook_clip)]

    def __init__(self, path: str | Path, settings: PackSettings, capacity: int):
        super().__init__()
        store = ShardStore(path)
        self.settings, self.capacity = replace(settings, statistics=store.statistics), capacity
        self.empty_text = store.empty_text

    def _tokens(self, sample: ClipSample) -> int:
        return sum(z[0, 0].numel() for z in (sample.clip.latent, *sample.clip.given)) // self.settings.patch_volume

    @stateless
    def encode_sample(self, sample: ClipSample) -> ClipSample:
        return sample

    def select_samples_to_pack(self, samples: list[ClipSample]) -> list[list[ClipSample]]:
        """Assign every sample of the buffer to a pack; each pack has the oldest sample and those that fill it best."""
        groups, waiting = [], list(samples)
        while waiting:
            chosen = set(fill([self._tokens(s) for s in waiting], self.capacity))
            groups.append([s for i, s in enumerate(waiting) if i in chosen])
            waiting = [s for i, s in enumerate(waiting) if i not in chosen]
        return groups

    @stateless
    def pack_selected_samples(self, samples: list[ClipSample]) -> Pack:
        draws = [draw_sample(s.clip, 0, self.settings, self.empty_text) for s in samples]
        return pack_draws(draws, self.settings, self.capacity)

    # a batch is a list of packs, so that nothing is stacked

    @stateless
    def batch(self, samples: list[Pack]) -> list[Pack]:
        return samples

    @stateless
    def encode_batch(self, batch: list[Pack]) -> list[Pack]:
        return batch


def pack_loader(path: str | Path, settings: PackSettings, capacity: int, buffer: int = 20, shuffle: bool = False):
    """Energon's savable loader for a folder's training split, in this process; each batch is a list of one `Pack`."""
    data = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        shuffle_buffer_size=buffer if shuffle else None,
        max_samples_per_sequence=None,
        packing_buffer_size=buffer,
        task_encoder=PackEncoder(path, settings, capacity),
    )
    return get_savable_loader(data)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder that dfm prepare wrote")
    parser.add_argument("--packs", type=int, default=2, help="number of packs to show")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens per pack")
    args = parser.parse_args(argv)
    batches: Iterator[list[Pack]] = iter(pack_loader(args.folder, PackSettings(Config()), args.capacity))
    for _ in range(args.packs):
        (pack,) = next(batches)
        print(f"{len(pack.keys)} samples in {args.capacity} tokens: {', '.join(pack.keys)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
