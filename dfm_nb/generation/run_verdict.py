"""Samples that are measured: their options, and the figures of every checkpoint of a run with a recommended one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb import parallel
from dfm_nb.base.files import write_atomically
from dfm_nb.base.log import log
from dfm_nb.base.metrics import compared_loss, read_metrics, series
from dfm_nb.base.options import option
from dfm_nb.checkpoints.folders import checkpoints_of, iteration_of
from dfm_nb.checkpoints.tensor_files import CheckpointError
from dfm_nb.evaluation import reference, verdict
from dfm_nb.evaluation.comparison import EvaluationResult
from dfm_nb.evaluation.features import Features
from dfm_nb.evaluation.reference import Real
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.pipeline import ModelOptions, Pipeline
from dfm_nb.generation.request import Request, Sampling

MOST_PICTURES = 1_000
"""The samples of a split, held in memory, among which copies are searched."""
DRIFT_SAMPLES = 16


class MeasurementOptions(Sampling, ModelOptions):
    """A checkpoint or a run, and the data whose captions it samples."""

    checkpoint_path: str = option(help="run folder, iter_* folder or exported file", flags=("--checkpoint",))
    dataset: str | None = option(None, "folder or source NAME[:SPEC] to compare with", flags=("--dataset-path",))
    split: str = option("val", "split of a prepared folder: train, val or test")
    num_prompts: int = option(64, "images to generate; with --all-checkpoints for each, half training captions", ge=0)
    size_px: int = option(64, "side in px; for a source, the short side")
    seed: int = option(1, "seed of the starting noise and of the choice of real samples")

    def generated(self, pipe: Pipeline, wanted: Iterable[dict[str, Any]]) -> list[Generated]:
        """A sample for each of these fields of `Request`; the i-th depends on the seed, i and these alone."""
        common = {name: value for name, value in self.chosen.items() if name in (*Sampling.model_fields, "seed")}
        requests = [Request(index=i, **common, **one) for i, one in enumerate(wanted)]
        # Enough to fill a batch of small pictures (not measured); results depend on it only by rounding.
        done = dict(pipe.run(requests, batch_size=32, progress=True))
        return [done[i] for i in range(len(requests))]

    def frames(self, pipe: Pipeline, wanted: Iterable[dict[str, Any]]) -> list[np.ndarray]:
        """The same, uint8 [T, H, W, 3] each."""
        return [sample.frames for sample in self.generated(pipe, wanted)]


def like(real: Sequence[Real]) -> list[dict[str, Any]]:
    """Requests for samples with the captions, sizes, lengths and rates of these."""
    names = ("num_video_frames", "height", "width")
    return [{"prompt": r.caption, "fps": r.fps, **dict(zip(names, r.frames.shape))} for r in real]


def over_checkpoints(options: MeasurementOptions) -> EvaluationResult:
    """Measure each checkpoint of a run against a prepared folder; `verdict.json` and `.png` go to the run folder.

    Raises
    ------
    ValueError : no checkpoint can be read, or the data are not a prepared folder with held-out pictures.
    """
    run, result = Path(options.checkpoint_path), EvaluationResult()
    if not (folders := checkpoints_of(run)):
        raise ValueError(f"--all-checkpoints needs a run folder with checkpoints; {run} has none; train first")
    if not options.dataset or not (Path(options.dataset) / ".nv-meta").is_dir() or options.split == "train":
        raise ValueError(
            f"--all-checkpoints needs --dataset, a prepared folder, and a --split that is held out (val or test); got "
            f"{options.dataset} and {options.split}"
        )
    result.values["dataset"] = {"name": options.dataset, "split": options.split, "unreadable": 0}
    records = read_metrics(run)
    losses = dict(zip(*series(records, compared_loss({key for record in records for key in record}))))
    rows, judge, base = list[dict[str, Any]](), None, None
    for folder in folders:
        try:
            pipe = options.open(folder)
        except CheckpointError as error:
            log.warning("%s; it is skipped", error)
            continue
        if judge is None:
            chosen = [_pictures(options, pipe, split, result) for split in (options.split, "train")]
            pictures = [list({r.caption: r for r in real}.values())[: options.num_prompts // 2] for real in chosen]
            held_out, train, every, all_train = ([r.frames for r in real] for real in (*pictures, *chosen))
            network = Features(parallel.device())
            judge = verdict.Judge(held_out, train, every, all_train, network, pipe.round_trip)
            base = base_samples(options, pipe)
        made = options.frames(pipe, like([r for real in pictures for r in real]))
        half, iteration = len(pictures[0]), iteration_of(folder)
        row = judge.figures(iteration, made[:half], made[half:]) | {"val_loss": losses.get(iteration)}
        if base:
            row["drift"] = judge.drift(base[1], options.frames(pipe, base[0]))
        result.samples.extend((m, f"{iteration}: {r.caption}") for m, r in zip(made[:8], pictures[0]))
        rows.append(row)
    if judge is None:
        raise ValueError(f"all {len(folders)} checkpoints of {run} are damaged; take another run")
    result.values |= {"checkpoints": rows, "verdict": judge.verdict(rows)}
    if (run / "config.yaml").is_file():
        write_atomically(run / "verdict.json", json.dumps(result.values, indent=1).encode())
        verdict.plot(result.values, run / "verdict.png")
    return result


def _pictures(options: MeasurementOptions, pipe: Pipeline, split: str, result: EvaluationResult) -> list[Real]:
    """Pictures of a split, or first frames if it has only clips; `result` counts those that cannot be read."""
    assert options.dataset is not None
    opened = reference.ShardReference(options.dataset, split, pipe.decode_stored, pipe.manifest["tokenizer"])
    images, _, failed = reference.choose(opened, MOST_PICTURES, 0, 1, options.seed)
    if not images:
        _, images, failed = reference.choose(opened, 0, MOST_PICTURES, 1, options.seed)
    result.values["dataset"]["unreadable"] += failed
    return images


def base_samples(options: MeasurementOptions, pipe: Pipeline) -> tuple[list[dict[str, Any]], list[np.ndarray]] | None:
    """For a fine-tuned run: requests for its base's validation prompts, and the base's samples of them."""
    if not (path := pipe.config.checkpoint.pretrained):
        return None
    try:
        base = options.open(path)
    except FileNotFoundError as error:
        log.warning("%s; drift from checkpoint.pretrained is not measured", error)
        return None
    if not (prompts := base.config.validation.prompts):
        return None
    requests = [{"prompt": prompts[i % len(prompts)], "num_video_frames": 1} for i in range(DRIFT_SAMPLES)]
    return requests, options.frames(base, requests)
