"""One dial: `train.minutes` and the samples determine the settings that users would otherwise have to choose.

Two steps, each of which returns values with their reasons:

1. `of_data`, before anything is built: pack length, network, noise levels.
2. `of_rate`, after some iterations were timed and discarded: the number of iterations, and when to validate and save.

A value that the user has set is kept. The derived values are written to the run's `config.yaml`, and a resumed run
keeps them: it is then like any other run with these numbers, so it resumes exactly.

    20 minutes, 210 pictures of 96 px, two CPU cores, 0.12 s a step
    of_data -> packs of 768 tokens, the network `demo` or the weights of `BASE`, P_mean -0.28
    of_rate -> 9,392 iterations, a validation and a checkpoint every 1,174
"""

import math
import time
from operator import attrgetter
from typing import Any

import numpy as np

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.geometry import PX_PER_LATENT
from dfm_nb.base.log import log
from dfm_nb.base.pretrained import packaged, weights_path
from dfm_nb.checkpoints import folders, loading
from dfm_nb.config import counts
from dfm_nb.config.schema import marked
from dfm_nb.data.stores import SampleStore
from dfm_nb.parallel.groups import everyones, layout_of
from dfm_nb.training.batches import data_folder, packed_loader
from dfm_nb.training.report import epoch_tokens, expected
from dfm_nb.training.trainer import Trainer
from dfm_nb.training.validation import CAPTIONS

ROUNDS = 8
"""Validations and checkpoints of a run, evenly spaced: enough to see where the validation loss rises."""
OVERHEAD = 0.06  # share of the time for validation losses and checkpoints
SAMPLING = 0.25  # at most, for the samples of validations, which are fewer then: of clips alone one takes 10 s
OVERTIME = 1.1  # if the machine slows down, the run stops here and saves; the same command resumes it
PROBE = 0.03  # share of the time for timing iterations; longer would not be more exact
FEWEST, MOST = 5, 100  # timed iterations
CLIP_SHARE = 0.25  # of the work, while pictures outnumber clips (benchmarks/results/own_pictures.md)
FIRST_SHARE = 0.3  # of a clip's loss, else its first frame is a mesh (benchmarks/results/clip_first_frame.md)
BASE = "drawings"
"""The packaged weights that a run starts from where they fit (benchmarks/results/own_pictures.md)."""
BASE_PASSES = 100  # with fewer, fewer training captions come back than from scratch
CLIP_PASSES = 150  # the same where there are clips, of which the base has seen none
CPU_TOKENS, GPU_TOKENS = 768, 8192
"""Of a pack: fewer do not keep the kernels busy; more make fewer steps in the time, and not better ones."""


def settings(resolved: cfg.Resolved, store: SampleStore, world_size: int, started: float) -> cfg.Resolved:
    """All of them; called by every rank. `started`: `time.monotonic()` when the run began."""
    chosen = of_data(resolved, store, world_size)
    if chosen.is_free("train.train_iters"):
        chosen = of_rate(chosen, store, started)
    c = chosen.config
    tokens = c.train.train_iters * c.train.global_batch_size * c.dataset.task_encoder_seq_length
    from_base = c.checkpoint.pretrained != resolved.config.checkpoint.pretrained
    needed = BASE_PASSES if store.most_frames() == 1 else CLIP_PASSES
    if not from_base or tokens >= needed * np.concatenate(epoch_tokens(c, store)).sum():
        return chosen
    why = f"these are fewer than {needed} passes, too few for a start from {BASE}"
    log.info("Training starts from scratch: %s", why)
    scratch = resolved.dialled({"checkpoint.pretrained": (None, why)})
    # the network may be smaller, so its iterations are timed too
    return settings(scratch, store, world_size, started)


def of_data(resolved: cfg.Resolved, store: SampleStore, world_size: int) -> cfg.Resolved:
    """The settings that follow from the number and size of the samples, and from the kind of machine.

    resolved : as of `batches.with_data`.
    """
    minutes = resolved.config.train.minutes
    m = resolved.config.model
    device = parallel.device().type
    assert minutes is not None
    dp_size = world_size // layout_of(m).model_size
    spread = range(0, len(store), max(1, len(store) // 1000))
    side = float(np.median([PX_PER_LATENT * math.sqrt(math.prod(store.grid(i)[1:])) for i in spread]))
    voxels = int(store.voxels(np.arange(len(store))).max())
    largest = -(-voxels // (m.patch_temporal * m.patch_spatial**2))
    tokens = CPU_TOKENS if device == "cpu" else GPU_TOKENS
    # A choice between the recipes of these sizes: on two cores `demo` trains for five minutes (docs/results.md), `base`
    # for an hour and a half (docs/training.md). GPUs change size at the same time (not measured).
    short, long = ("demo", "base") if device == "cpu" else ("DiT-S", "DiT-B")
    size = short if minutes <= 60 else long
    octaves = math.log2(side / 64)
    stills, clips = epoch_tokens(resolved.config, store)
    weight = CLIP_SHARE / (1 - CLIP_SHARE) * stills.sum() / max(clips.sum(), 1)
    of_clips = f"so that {len(clips)} clips take {CLIP_SHARE:.0%} of the work beside {len(stills)} pictures"
    of_size = f"for sides of about {side:.0f} px (benchmarks/results/noise_levels.md)"
    values = {
        "model.size": (size, f"the largest size that learns in this time on a {device} device"),
        "model.P_mean": (round(-0.4 + 0.2 * octaves, 2), of_size),
        # Measured from 64 px (1.03 to 1.06) up; 0.8, below 22 px, limits the extrapolation to smaller pictures.
        "model.P_std": (round(max(0.8, 1.0 + 0.13 * octaves), 2), of_size),
        "dataset.task_encoder_seq_length": (
            -(-max(tokens, largest) // 256) * 256,  # a multiple of the tp * cp of usual layouts
            f"as the longest of {len(store)} samples has {largest} tokens, and {tokens} keep a {device} busy",
        ),
        "train.global_batch_size": (
            max(1 if m.student else 2, dp_size),
            f"a pack for each of {dp_size} data-parallel processes, at least two, or one for a student",
        ),
    }
    if len(clips):
        values["train.first_frame_share"] = FIRST_SHARE, "as the first frame of a clip is encoded alone"
    if weight < 1 and len(clips) < len(stills):
        values["dataset.clip_weight"] = round(max(weight, 0.001), 3), of_clips
    return _from_base(resolved, values, store)


def _from_base(resolved: cfg.Resolved, values: dict[str, tuple[Any, str]], store: SampleStore) -> cfg.Resolved:
    """With these values, and the weights of `BASE` if they fit: mostly stills, the same latents, no smaller network."""
    c = resolved.config
    scratch = resolved.dialled(values)
    folder = data_folder(c)
    chosen = not resolved.is_free("checkpoint.pretrained") or c.checkpoint.load or c.checkpoint.load_checkpoint
    encoded = folder and (folder / folders.MANIFEST).is_file()
    # it has seen no pairs; a start of clips alone was not measured
    pictures = 2 * len(store.of_kind(still=True)) > len(store) and not store.any_given
    if chosen or c.model.student or not pictures or not encoded or weights_path(BASE) != packaged(BASE):
        return scratch
    source = loading.find_weights(BASE)
    why = f"{BASE} has the latents of these pictures; checkpoint.pretrained=null starts from scratch"
    of_base = {"model.size": (source.config.model.size, f"the network of {BASE}"), "checkpoint.pretrained": (BASE, why)}
    start = resolved.dialled(values | of_base)
    larger = counts.parameter_count(scratch.config.model) > counts.parameter_count(start.config.model)
    ours = [k for k in marked("network") if k.startswith("model.") and k not in {"model.size", *values}]
    # the user has set another network
    other = any(start.get(k) != attrgetter(k)(source.config) for k in ours)
    if larger or other or loading.different_encoders(source.folder, folder):
        return scratch
    return start


def of_rate(resolved: cfg.Resolved, store: SampleStore, started: float) -> cfg.Resolved:
    """The settings that follow from the time an iteration takes; called by every rank.

    started : as for `settings`.
    """
    minutes = resolved.config.train.minutes
    assert minutes is not None
    seconds, tokens = _iteration(resolved.config, store, PROBE * 60 * minutes)
    # rank 0's clock decides, so that all ranks agree
    seconds, left = everyones((seconds, 60 * minutes - (time.monotonic() - started)))[0]
    left = max(left, ROUNDS * seconds)  # of very few minutes, the timing alone may use all
    sampling_s = seconds / tokens * _sampling(resolved.config, store)
    rounds = max(1, min(ROUNDS, int(left * SAMPLING / max(sampling_s, 1e-9))))
    # one that takes longer comes after the minutes
    sampled_s = min(sampling_s, left * SAMPLING / rounds)
    each = max(1, int((left * (1 - OVERHEAD) / rounds - sampled_s) / seconds))
    why = f"as an iteration takes {seconds:.3g} s, and the samples of a validation {sampling_s:.2g} s"
    if not resolved.config.model.student:
        log.info("%s", expected(resolved.config, store, rounds * each * tokens))
    return resolved.dialled(
        {
            "train.train_iters": (rounds * each, why),
            "train.eval_interval": (each, f"{rounds} validations"),
            "checkpoint.save_interval": (each, f"{rounds} checkpoints"),
            "train.exit_duration_s": (
                left + (OVERTIME - 1) * 60 * minutes,
                "with 10 % reserve, in case the machine slows down",
            ),
        }
    )


def _sampling(config: cfg.Config, store: SampleStore) -> float:
    """Work of a validation's samples as tokens of training; a forward, with and without the caption, is a third."""
    v = config.validation
    m = config.model
    each = float(store.voxels(slice(None)).mean()) / (m.patch_temporal * m.patch_spatial**2)
    steps = v.num_steps or config.generation.num_steps
    if not v.samples:
        return 0.0
    return (len(v.prompts) + CAPTIONS) * steps * 2 / 3 * each


def _iteration(config: cfg.Config, store: SampleStore, at_most_s: float) -> tuple[float, float]:
    """Seconds and tokens of one: the mean over some of a model that is then discarded; the first compiles."""
    trainer = Trainer(config, store.empty_text)
    loader = packed_loader(config, store, trainer.dp_rank, trainer.dp_size)

    def timed(iterations: int) -> float:
        begun = time.monotonic()
        for _ in range(iterations):
            trainer.step(loader.next_step())
        return (time.monotonic() - begun) / iterations

    try:
        timed(1)
        affordable = everyones(at_most_s / timed(FEWEST))[0]
        count = int(min(max(affordable, FEWEST), MOST))
        seconds = timed(count)
        return seconds, loader.state()["tokens"] / (1 + FEWEST + count)
    finally:
        loader.close()
