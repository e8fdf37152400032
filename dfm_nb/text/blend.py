"""The loader over a blend of text corpora: megatron-core's GPTDataset, packed, blended, split over ranks, resumable.

The order of samples is megatron-core's own: a function of the seed, the blend and the number of samples, not of ranks
or workers. A loader started with `consumed_samples` yields the samples that the uninterrupted one would have. The
caches of megatron's indices are keyed by these and by the corpora's sizes and modification times.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import DataLoader, Dataset

from dfm_nb.base.files import UNLIMITED, is_foreign, plain, temporary_of
from dfm_nb.base.log import log
from dfm_nb.base.run import turn
from dfm_nb.text.check import ONE_EOD, require_alike
from dfm_nb.text.indexed import Index, read_meta
from dfm_nb.text.input import corpora_sha256
from dfm_nb.text.mixture import SPLITS, Blend, BlendCorpus, apply_strategy, token_counts

OWN_CACHE = Path("~/.cache/dfm_nb/blends")


@dataclass(frozen=True)
class TokenizerIds:
    """The tokenizer attributes that GPTDataset needs. `pad` None: megatron uses -1, which no token has."""

    vocab_size: int
    eod: int
    pad: int | None = None
    name: str = ""

    @property
    def unique_identifiers(self) -> dict[str, object]:
        return {"class": type(self).__name__, "name": self.name, "vocab_size": self.vocab_size, "eod": self.eod}

    @classmethod
    def of_blend(cls, blend: Blend) -> "TokenizerIds":
        """From the `.meta.json` files that `preprocess` wrote next to corpora that are alike.

        Raises
        ------
        ValueError : there is no `.meta.json`, or there is no EOD token
        """
        meta = next(filter(None, map(read_meta, blend.prefixes())), None)
        if meta is None:
            raise ValueError("the corpora have no .meta.json; pass tokenizer=TokenizerIds(vocab_size, eod)")
        if meta["eod_id"] is None:
            raise ValueError(f"packing needs an end-of-document token; {meta['tokenizer']} has none")
        return cls(max(meta["vocab_size"], meta["max_id"] + 1), meta["eod_id"], None, meta["tokenizer_sha256"])


def build_datasets(
    blend: Blend,
    seq_length: int,
    num_samples: tuple[int, int, int],
    tokenizer: TokenizerIds | None = None,
    split: str | None = None,
    cache_dir: str | None = None,
    seed: int = 1234,
    **settings: bool,
) -> dict[str, Dataset | None]:
    """Data sets of `train`, `validation` and `test` (None if absent).

    All ranks must call it, within a process group (`parallel.init()` creates one for a single rank).

    Parameters
    ----------
    seq_length : tokens of a sample
    num_samples : of train, validation and test. The order depends on them: 160 samples do not begin with those of 80,
        so ask for those of the whole run from the start, and end earlier or resume with `consumed_samples`
    tokenizer : by default the one that `preprocess` recorded
    cache_dir : on a disk that all ranks see; by default `.blend_cache` next to the first corpus. What another user
        made is not read: it is built again in `~/.cache/dfm_nb/blends`
    split : "969,30,1" cuts each training corpus as Megatron's --split does, where validation and test have no corpora
    settings : of megatron's GPTDatasetConfig. `reset_position_ids` starts positions from 0 after an EOD,
        `reset_attention_mask` hides the documents before it, `eod_mask_loss` leaves the EOD out of the loss

    Each item is a dict: `tokens`, `labels`, `position_ids` int64 [seq_length], `loss_mask` float32 [seq_length],
    `attention_mask` bool [1, seq_length, seq_length] (True: hidden), and `dataset_id` where there are several corpora.
    """
    assert dist.is_initialized(), "call parallel.init() first"
    for difference in require_alike(blend.prefixes(), but=ONE_EOD):
        log.warning("the corpora of the blend may differ: %s", difference)
    tokenizer = tokenizer or TokenizerIds.of_blend(blend)
    counts = token_counts(blend)
    for prefix, tokens in counts.items():
        if not 0 < seq_length < tokens:
            raise ValueError(f"seq_length must be 1 to below the tokens of each corpus; {prefix} has {tokens}")
    if blend[0].dataset_weight is None:
        blend = apply_strategy(blend, "proportional", counts)
    if split and blend == blend.train:
        _require_tokens(blend, seq_length, num_samples, split)
        chosen: dict[str, object] = {"blend": _pair(blend.train), "split": split}
    else:
        chosen = {"blend_per_split": [_pair(blend.corpora(s)) for s in SPLITS]}
    usual = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    made_of = {**usual, **settings, **chosen, "random_seed": seed, "sequence_length": seq_length}
    key = json.dumps([corpora_sha256(blend.prefixes()), num_samples, tokenizer.unique_identifiers, made_of])
    base = Path(cache_dir).resolve() if cache_dir else Path(blend[0].dataset_prefix).absolute().parent / ".blend_cache"

    def build(cache: Path) -> list[Dataset | None]:
        config = GPTDatasetConfig(path_to_cache=str(cache), tokenizer=tokenizer, **made_of)
        return BlendedMegatronDatasetBuilder(GPTDataset, list(num_samples), lambda: True, config).build()

    final, building = _cache(base, hashlib.sha256(key.encode()).hexdigest()[:16])
    if building:
        first = dist.get_rank() == 0
        with turn(building / "lock", "") if first else contextlib.nullcontext():
            build(building)
            dist.barrier()  # rank 0 leaves the build while the others still open its arrays
            if first and final.exists():  # another run has built the same
                shutil.rmtree(building)
            elif first:
                building.rename(final)
        dist.barrier()
    return dict(zip(SPLITS, build(final)))


def _cache(base: Path, name: str) -> tuple[Path, Path | None]:
    """The folder of the indices and, unless it is there, the one to build them in, which is renamed to it when whole.

    Rank 0 names them: modification times of the corpora, and so `name`, may differ on other nodes.

    Raises
    ------
    ValueError : on all ranks, if one does not see rank 0's folder, or an index in it is no array
    """
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        final = _ours(base / name)
        base = final.parent
        building = None
        if not final.exists():
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_killed(base)
            building = temporary_of(final)
            building.mkdir(mode=0o700)
        shared = [(final, building, _damaged(final))]
    dist.broadcast_object_list(shared)
    final, building, fault = shared[0]
    seen: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(seen, (building or final).is_dir())
    if not all(seen):
        where = f"{final.parent} must be on a disk that all ranks see"
        fault = f"{where}; rank {seen.index(False)} does not; pass a cache_dir of yours"
    if fault:
        raise ValueError(fault)
    return final, building


def _ours(final: Path) -> Path:
    """The folder, or if another user made it, or its place a link, one of its name in our own cache."""
    linked = final.parent.is_symlink() and is_foreign(final.parent)
    if not (linked or is_foreign(final, *final.glob("*"))):
        return final
    own = OWN_CACHE.expanduser() / final.name
    log.warning("%s is another user's and is not read; the indices are in %s", final, own)
    return own


def _remove_killed(base: Path) -> None:
    """Remove what killed builds left: folders of our form whose lock nobody holds."""
    for lock in base.glob(f".{'[0-9a-f]' * 16}.{'[0-9a-f]' * 8}.tmp/lock"):
        with contextlib.suppress(OSError), FileLock(lock, blocking=False, fallback_to_soft=False):  # Timeout is one
            shutil.rmtree(lock.parent)


def _damaged(cache: Path) -> str:
    """What is wrong with the first index that is no plain array, which numpy would unpickle; "" if none is."""
    for path in sorted(cache.glob("*.npy")):
        try:
            np.lib.format.open_memmap(plain(path, None, UNLIMITED), mode="r")
        except (ValueError, OSError) as error:
            return f"{path} must be an array of numbers ({error}); delete the folder {cache}"
    return ""


def _require_tokens(blend: Blend, seq_length: int, num_samples: tuple[int, int, int], split: str) -> None:
    """ValueError for a split that leaves a part too short for one sample, which megatron would build for ever."""
    given = re.findall(r"[.0-9]+", split)
    if len(given) > 3:
        raise ValueError(f"split must have a share each for training, validation and test; got {split!r}")
    shares = np.array([*map(float, given), 0.0, 0.0, 0.0])[:3]
    for prefix in blend.prefixes():
        documents = Index.open(prefix).document_tokens()
        bounds = np.rint(np.cumsum([0, *shares]) / max(shares.sum(), 1e-9) * len(documents)).astype(int)
        for name, wanted, first, end in zip(SPLITS, num_samples, bounds, bounds[1:]):
            tokens = documents[first:end].sum()
            if wanted and tokens <= seq_length:
                fix = f"it needs over {seq_length} (seq_length); change the split, or ask for no samples of {name}"
                raise ValueError(f"split {split} leaves {name} {tokens} tokens of {prefix}; {fix}")


def _pair(corpora: list[BlendCorpus]) -> tuple[list[str], list[float | None] | None] | None:
    """Prefixes and weights in megatron's form: no corpus of weight 0, and no weights for a single corpus."""
    weights = {c.dataset_prefix: c.dataset_weight for c in corpora if c.dataset_weight}
    if not weights:
        return None
    return list(weights), list(weights.values()) if len(weights) > 1 else None


class BatchSampler:
    """Sample numbers of this rank's micro-batches, in order.

    Sample k of the run goes to global batch k // (micro_batch_size * dp_size); each rank gets its share of it.
    An incomplete last global batch is left out. With micro-batches of 2 and 2 ranks:

        rank 0: [0, 1], [4, 5], ...
        rank 1: [2, 3], [6, 7], ...
    """

    def __init__(self, total: int, micro_batch_size: int, consumed_samples: int, dp_rank: int, dp_size: int):
        step = micro_batch_size * dp_size
        if consumed_samples % step:
            must = f"divide by micro_batch_size * dp_size, {step}"
            raise ValueError(f"consumed_samples must {must}; got {consumed_samples}")
        first = dp_rank * micro_batch_size  # of this rank, in a global batch
        self._size = micro_batch_size
        self._starts = range(consumed_samples + first, total - step + 1 + first, step)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(start, start + self._size)) for start in self._starts)


def batches(dataset: Dataset, micro_batch_size: int, consumed_samples: int = 0, num_workers: int = 0) -> DataLoader:
    """Batches of this rank of megatron's parallel state, starting at `consumed_samples` (the sum over all ranks)."""
    rank = mpu.get_data_parallel_rank()
    size = mpu.get_data_parallel_world_size()
    sampler = BatchSampler(len(dataset), micro_batch_size, consumed_samples, rank, size)  # type: ignore[arg-type]
    return DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, pin_memory=torch.cuda.is_available())
