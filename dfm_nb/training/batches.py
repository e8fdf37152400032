"""From settings to packed batches: the store of samples, how packs are made of them, and the loader."""

import math
from dataclasses import replace
from pathlib import Path

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.files import is_url
from dfm_nb.base.log import log
from dfm_nb.config import sizes
from dfm_nb.data.loader import PackedLoader
from dfm_nb.data.order import PackOrder
from dfm_nb.data.remote import local_folder, remote_folder
from dfm_nb.data.stores import MockStore, SampleStore, ShardStore, anchors, has_split, training_samples
from dfm_nb.packs.packs import LatentStatistics, PackSettings
from dfm_nb.parallel.groups import layout_of

TEXT_MULTIPLE, ROW_MULTIPLE = 64, 8
"""Packs pad text tokens and conditioning rows to these, so that shapes repeat and oneDNN reuses its kernels
(`benchmarks/results/packing.md`)."""

MOCK_TEXT_DIM = 1024  # T5-11B's


def pack_settings(config: cfg.Config, statistics: LatentStatistics) -> PackSettings:
    """How training turns samples into packs; lengths are padded to what the parallel layout needs."""
    layout = layout_of(config.model)
    return PackSettings(
        config,
        statistics.used_by(config.model.network),
        token_multiple=layout.token_multiple(),
        text_multiple=math.lcm(layout.text_multiple(), TEXT_MULTIPLE),
        row_multiple=ROW_MULTIPLE,
    )


def data_folder(config: cfg.Config) -> Path | None:
    """`dataset.path`, or the local folder that mirrors a server's."""
    d = config.dataset
    return None if d.path is None else local_folder(d.path, d.cache_dir, d.cache_gib)


def open_store(config: cfg.Config, split: str = "train") -> SampleStore:
    """The samples of `dataset.path`, or random ones with `dataset.mock`."""
    d = config.dataset
    # shapes of NeMo DFM's mock: at 32,768 tokens its latent [1, 256, 512] and text [512, 1024]
    if d.mock:
        m = config.model
        tokens = d.task_encoder_seq_length
        rows = max(1, math.isqrt(tokens // 2))
        whole = [m.patch_temporal, m.patch_spatial * rows, m.patch_spatial * (tokens // rows)]
        text_tokens = d.mock_text_tokens or min(512, -(-tokens // 16))
        channels = m.in_channels or sizes.LATENT_CHANNELS
        return MockStore(d.mock_latent_sizes or [whole], text_tokens, channels, m.text_dim or MOCK_TEXT_DIM)
    folder = data_folder(config)
    assert d.path is not None and folder is not None  # the configuration was checked
    remote = remote_folder(d.path, d.cache_dir, d.cache_gib) if is_url(d.path) else None
    t = config.train
    held_out = not d.use_train_split_for_val and has_split(folder, "val")
    validated = t.eval_iters and 0 < t.eval_interval <= t.train_iters
    if split == "train" and validated and not (held_out or d.use_train_split_for_val) and parallel.rank() == 0:
        log.warning(
            f"{folder} has no validation samples, so training samples are used, whose loss does not show "
            "overfitting; more items, or dfm prepare with a larger --val-fraction, give some"
        )
    if split == "val" and not held_out:
        split = "train"
    return ShardStore(folder, split, progress=parallel.rank() == 0, remote=remote)


def with_data(resolved: cfg.Resolved, store: SampleStore) -> cfg.Resolved:
    """With what the data set decides: the network's inputs, and what generation recommends."""
    inputs = {"model.in_channels": store.channels, "model.text_dim": store.text_dim}
    resolved = resolved.with_derived(inputs, "the data set")
    samples = training_samples(store, resolved.config.generation.of_samples())
    if resolved.config.generation.anchor == "nearest":
        samples.anchors = anchors(store)
    return replace(resolved, config=resolved.config.with_samples(samples))


def pack_capacity(config: cfg.Config) -> int:
    """Tokens in a pack."""
    return config.train.micro_batch_size * config.dataset.task_encoder_seq_length


def packed_loader(
    config: cfg.Config, store: SampleStore, dp_rank: int, dp_size: int, statistics: LatentStatistics | None = None
) -> PackedLoader:
    """This data-parallel rank's packs of each global batch. statistics : None for those of the data set."""
    d = config.dataset
    settings = pack_settings(config, statistics or store.statistics)
    order = PackOrder(
        store,
        settings,
        pack_capacity(config),
        d.packing_buffer_size,
        lanes=d.lanes,
        lane_window=d.lane_window,
        one_shape=parallel.device().type != "cpu",  # compiled layers and graphs are then made once
    )
    packs_per_step = config.train.global_batch_size // config.train.micro_batch_size
    return PackedLoader(order, packs_per_step, dp_rank, dp_size, d.num_workers, d.balance_steps)
