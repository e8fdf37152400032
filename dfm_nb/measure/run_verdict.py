"""Samples that are measured: their options, the figures of a checkpoint against data, and those of every checkpoint of
a run with a recommended one. They are asked for as `dfm generate` does by default.
"""

import functools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dfm_nb import parallel
from dfm_nb.base import geometry
from dfm_nb.base.files import write_json
from dfm_nb.base.log import log
from dfm_nb.base.metrics import compared_loss, read_metrics, series
from dfm_nb.base.options import option
from dfm_nb.base.records import SampleError
from dfm_nb.checkpoints.folders import checkpoints_of, iteration_of
from dfm_nb.checkpoints.loading import recorded
from dfm_nb.checkpoints.tensor_files import CheckpointError
from dfm_nb.generation.clip_files import Generated, write_given
from dfm_nb.generation.pipeline import ModelOptions, Pipeline
from dfm_nb.generation.request import Request, Sampling, described
from dfm_nb.measure import features, reference, verdict
from dfm_nb.measure.distance import FEWEST_WAYS, compare
from dfm_nb.measure.diversity import copied, nearness, thumbnails
from dfm_nb.measure.reference import SEEN, Real, ShardReference, form_of
from dfm_nb.measure.results import EvaluationResult

MOST_PICTURES = 1_000
"""Held-out samples that a verdict holds in memory."""
DRIFT_SAMPLES = 16
ASKED = (500, 500)
TRAINING_ASKED = (64, 16)
"""Images and clips that are generated for the captions of the data, and for training captions beside unseen ones."""
MOST = f"all held-out ones of --dataset up to {ASKED[0]}"
SHOWN = {"images": 12, "clips": 3}
NAMED = 5
OWN = " at their own frames, size and rate"
NOT_MEASURED = {
    "kernel_distance": "a distance needs 4 samples: raise --num-prompts or --num-clips, or prepare's --val-fraction",
    "retrieval": f"retrieval needs {FEWEST_WAYS} pictures: do the same",
    "copies": "copies are told by two or more unseen samples of a prepared folder",
}


class MeasurementOptions(Sampling, ModelOptions):
    """A checkpoint or a run, and the data whose captions it samples."""

    checkpoint_path: str = option(help="run folder, iter_* folder or exported file", flags=("--checkpoint",))
    dataset: str | None = option(None, "folder or source NAME[:SPEC] to compare with", flags=("--dataset-path",))
    split: str | None = option(None, "split of a prepared folder: train, val or test; default: val, test or train")
    num_prompts: int | None = option(None, f"images to generate; default: {MOST}; 64 otherwise", ge=0)
    num_clips: int | None = option(None, f"clips to generate; default: {MOST}; 16 without --dataset", ge=0)
    max_frames: int | None = option(None, "clips of --dataset are cut to this many frames; default: not cut", ge=1)
    size_px: int | None = option(None, "side in px; of a source the short side; default: as the checkpoint recommends")
    seed: int = option(1, "seed of the starting noise and of the choice of real samples")

    def amounts(self, images: int, clips: int) -> tuple[int, int]:
        """Numbers of images and clips; those given are the default."""
        return (
            images if self.num_prompts is None else self.num_prompts,
            clips if self.num_clips is None else self.num_clips,
        )

    def side_px(self, pipe: Pipeline) -> int:
        """`size_px`, or the short side that the checkpoint recommends."""
        usual = pipe.recommended
        return self.size_px or min(usual.get("height", 64), usual.get("width", 64))

    def generated(self, pipe: Pipeline, wanted: Iterable[dict]) -> list[Generated]:
        """A sample for each of these fields of `Request`; the i-th depends on the seed, i and these alone."""
        names = (*Sampling.model_fields, "seed")
        common = {name: value for name, value in self.chosen.items() if name in names}
        requests = [Request(**{"index": i, **common, **one}) for i, one in enumerate(wanted)]
        # Enough to fill a batch of small pictures (not measured); results depend on it only by rounding.
        done = dict(pipe.run(requests, batch_size=32, progress=True))
        return [done[i] for i in sorted(done)]

    def frames(self, pipe: Pipeline, wanted: Iterable[dict]) -> list[np.ndarray]:
        """The same, uint8 [T, H, W, 3] each."""
        return _frames(self.generated(pipe, wanted))


def over_data(options: MeasurementOptions, pipe: Pipeline, exam: Callable[[], Any] | None) -> EvaluationResult:
    """Measure a checkpoint against `dataset`: by unseen captions and, of a prepared folder, also by those of training.

    Samples that `dfm generate` by default makes of other frames, size or rate than their real ones have are made and
    measured a second time, with those. exam : opens the judge of samples with attributes, if there is one.
    """
    assert options.dataset is not None
    network = features.Features(parallel.device())
    opened = reference.open_reference(options.dataset, options.split, pipe, options.side_px(pipe))
    images, clips, faults = reference.choose(opened, *options.amounts(*ASKED), options.max_frames, options.seed)
    sets = {"images": images, "clips": clips}
    nearest = None
    if opened.training:
        held_out = _frames(images + clips)
        if len(held_out) > 1:
            nearest = nearness(thumbnails(held_out), opened.training.thumbnails)
        training = ShardReference(options.dataset, "train", pipe)
        amounts = options.amounts(*TRAINING_ASKED)
        images, clips, more = reference.choose(training, *amounts, options.max_frames, options.seed)
        sets = {"training images": images, "training clips": clips, **sets}
        faults += more
    every = list(chain(*sets.values()))
    if not every:
        raise ValueError(f"{options.dataset} has no such samples; raise --num-prompts or --num-clips")
    judge = exam() if exam and any(real.attributes for real in every) else None
    result = EvaluationResult()
    requests: list[Request] = []
    for name, real in sets.items():
        if not real:
            continue
        kind = name.rpartition(" ")[2]
        unseen = bool(opened.training) and name in SHOWN
        usual = [asked_for(pipe, r, options.max_frames) | {"index": i} for i, r in enumerate(real)]
        samples = options.generated(pipe, usual)
        requests += [sample.request for sample in samples]
        made = {name: samples}
        own = {}
        for i, (r, sample) in enumerate(zip(real, samples)):
            frames, height, width, _ = r.frames.shape
            size = {"num_video_frames": frames, "height": height, "width": width, "fps": r.fps}
            if sample.request.model_dump(include=set(size)) != size:
                own[i] = usual[i] | size
        if own:
            again = dict(zip(own, options.generated(pipe, own.values())))
            made[name + OWN] = [again.get(i, sample) for i, sample in enumerate(samples)]
        drawn = _frames(real)
        decoded = list(map(pipe.round_trip, drawn))
        others = sets[f"training {kind}"] if unseen else []
        of_real = [network(r.shown) for r in real]
        of_decoded = list(map(network, decoded))
        of_others = [network(r.shown) for r in others]
        for key, of_key in made.items():
            videos = _frames(of_key)
            measures: dict = {"samples": len(real), "network": features.NAME, "unseen": unseen}
            if judge:
                attributes = [r.attributes for r in real]
                measures |= judge.judged(kind, videos, attributes, {"as_drawn": drawn, "decoded": decoded})
            measures |= compare(list(map(network, videos)), of_real, of_decoded, of_others)
            if nearest is not None and opened.training:
                near = nearness(thumbnails(videos), opened.training.thumbnails)
                measures["copies"] = copied(near, nearest) | {"real": copied(nearest, nearest)["value"]}
            lacking = {m: why for m, why in NOT_MEASURED.items() if key in SHOWN and m not in measures}
            result.values[key] = measures | {"not_measured": lacking}
        seen = "unseen " if unseen else ""
        given = "what is given, " if any(r.given for r in real) else ""
        title = f"{seen}{name}: {given}yours ({form_of(real)}), and what dfm generate makes of the caption"
        shown = []
        for r, sample in zip(real[: SHOWN[kind]], samples):
            shown.append(([*r.given, r.shown, sample.frames], r.caption))
        result.samples[title.capitalize()] = shown
    about = _about(options, opened, faults, requests)
    about["notes"].append(f"Compared with yours {form_of(every)}")
    if opened.training:
        about["notes"] += _other_data(opened, pipe)
    result.values["dataset"] = about
    return result


def _other_data(opened: ShardReference, pipe: Pipeline) -> list[str]:
    """A sentence if a checkpoint was trained on other data than these."""
    if opened.store.manifest.get("latent_mean") == pipe.manifest.get("latent_mean"):
        return []
    return ["The checkpoint was trained on other data: `training` and `unseen` are splits of these"]


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="dfm_nb-given-")


def asked_for(pipe: Pipeline, real: Real, max_frames: int | None = None) -> dict:
    """The prompt of a real sample and, for a model that takes them, what is given beside it.

    max_frames : what the user allows.
    """
    settings: dict = {"prompt": real.caption}
    if pipe.config.samples.given:
        folder = tempfile.mkdtemp(dir=_scratch().name)
        settings["given"] = write_given(Path(folder, "given"), real.given, real.fps)
    if max_frames and Request(**settings).completed(pipe.config).num_video_frames > max_frames:
        settings["num_video_frames"] = geometry.floor_frames(max_frames)
    return settings


def _about(
    options: MeasurementOptions,
    opened: ShardReference | reference.SourceReference,
    faults: Sequence[SampleError],
    requests: Sequence[Request],
) -> dict:
    """What was measured against, what was left out, and how samples were asked for."""
    seen: dict[str, list] = {reason: [] for reason in SEEN}
    for fault in faults:
        if fault.reason in seen:
            seen[fault.reason].append(fault.detail)
    details = list(chain(*seen.values()))
    notes = [f"Asked for as `dfm generate` does by default: {described(requests)}"]
    if opened.split == "train" and options.split is None:
        notes.append(
            f"{options.dataset} has nothing held out (prepare holds some of 20 samples or more), so these are captions "
            "of training: they show what is memorised"
        )
    if details:
        left_out = f"{len(details)} samples of {opened.split} are not unseen and were left out"
        notes.append(f"{left_out}: {'; '.join(details[:NAMED])}")
    return {
        "name": options.dataset,
        "split": opened.split,
        "unreadable": len(faults) - len(details),
        **seen,
        "notes": notes,
    }


def over_checkpoints(options: MeasurementOptions) -> EvaluationResult:
    """Measure each checkpoint of a run against a prepared folder; `verdict.json` and `.png` go to the run folder.

    Raises
    ------
    ValueError : no checkpoint can be read, or the data are not a prepared folder with held-out pictures.
    """
    run = Path(options.checkpoint_path)
    folders = checkpoints_of(run)
    if not folders:
        raise ValueError(f"--all-checkpoints needs a run folder with checkpoints; {run} has none; train first")
    dataset = options.dataset or ""
    split = options.split
    prepared = bool(dataset) and Path(dataset, ".nv-meta").is_dir()
    if prepared and split is None:
        split = reference.held_out(dataset)
    if not prepared or split is None or split == "train":
        raise ValueError(
            "--all-checkpoints needs --dataset, a prepared folder, and a --split that is held out (val or test); got "
            f"{options.dataset} and {split}"
        )
    records = read_metrics(run)
    losses = dict(zip(*series(records, compared_loss(set().union(*records)))))
    result = EvaluationResult()
    rows = []
    judge = None
    for folder in folders:
        try:
            pipe = options.open(folder)
        except CheckpointError as error:
            log.warning("%s; it is skipped", error)
            continue
        if judge is None:
            opened = ShardReference(dataset, split, pipe)
            training = ShardReference(dataset, "train", pipe)
            assert opened.training
            for sentence in _other_data(opened, pipe):
                log.warning("%s, and so are copies and the verdict", sentence)
            every, faults = _pictures(opened, options.seed)
            trained, more = _pictures(training, options.seed)
            faults += more
            half = options.amounts(64, 0)[0] // 2
            unseen = _one_a_caption(every)[:half]
            seen = _one_a_caption(trained)[:half]
            judge = verdict.Judge(
                _frames(unseen),
                _frames(seen),
                _frames(every),
                opened.training.thumbnails,
                features.Features(parallel.device()),
                pipe.round_trip,
            )
            base = base_samples(options, pipe)
        samples = options.generated(pipe, [asked_for(pipe, real) for real in unseen + seen])
        made = _frames(samples)
        of_training = made[len(unseen) :]
        iteration = iteration_of(folder)
        row = judge.figures(iteration, made[: len(unseen)], of_training)
        row["val_loss"] = losses.get(iteration)
        if base:
            row["drift"] = judge.drift(base[1], options.frames(pipe, base[0]))
        for title, videos, real in (("training", of_training, seen), ("unseen", made, unseen)):
            pairs = [([r.frames, frames[:1]], r.caption) for frames, r in zip(videos, real)]
            result.samples[f"Iteration {iteration:,}: {title} captions"] = pairs[: SHOWN["images"] // 2]
        rows.append(row)
    if judge is None:
        raise ValueError(f"all {len(folders)} checkpoints of {run} are damaged; take another run")
    about = _about(options, opened, faults, [sample.request for sample in samples])
    about["notes"].append("Compared with yours after crop and tokenizer")
    result.values |= {"dataset": about, "checkpoints": rows, "verdict": judge.verdict(rows)}
    if (run / "config.yaml").is_file():
        write_json(run / "verdict.json", result.values, indent=1)
        verdict.plot(result.values, run / "verdict.png")
    return result


def _one_a_caption(real: Iterable[Real]) -> list[Real]:
    return list({one.caption: one for one in real}.values())


def _frames(samples: Iterable[Real | Generated]) -> list[np.ndarray]:
    return [sample.frames for sample in samples]


def _pictures(opened: ShardReference, seed: int) -> tuple[list[Real], list[SampleError]]:
    """Pictures of a split, or first frames if it has only clips, and the faults of those left out."""
    images, _, faults = reference.choose(opened, MOST_PICTURES, 0, 1, seed)
    if not images:
        _, images, faults = reference.choose(opened, 0, MOST_PICTURES, 1, seed)
    return images, faults


def base_samples(options: MeasurementOptions, pipe: Pipeline) -> tuple[list[dict], list[np.ndarray]] | None:
    """For a fine-tuned run: requests for its base's validation prompts, and the base's samples of them."""
    path = pipe.config.checkpoint.pretrained
    record = pipe.source.base if pipe.source else None
    if not (record or path):
        return None
    try:
        base = options.open(recorded(record, path) if record else str(path))
    except FileNotFoundError as error:
        log.warning("%s; drift from checkpoint.pretrained is not measured", error)
        return None
    prompts = base.config.validation.prompts
    if not prompts:
        return None
    requests = [{"prompt": prompts[i % len(prompts)], "num_video_frames": 1} for i in range(DRIFT_SAMPLES)]
    return requests, options.frames(base, requests)
