"""Samples that are measured: their options, the figures of a checkpoint against data, and those of every checkpoint of
a run with a recommended one. They are asked for as `dfm generate` does by default.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
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
from dfm_nb.measure.comparison import EvaluationResult, compare
from dfm_nb.measure.diversity import copied, nearness, thumbnails
from dfm_nb.measure.reference import SEEN, Real, ShardReference, form_of
from dfm_nb.measure.retrieval import FEWEST_WAYS

MOST_PICTURES = 1_000
"""Held-out samples that a verdict holds in memory."""
DRIFT_SAMPLES = 16
ASKED, TRAINING_ASKED = (500, 500), (64, 16)
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
        return images if self.num_prompts is None else self.num_prompts, (
            clips if self.num_clips is None else self.num_clips
        )

    def side_px(self, pipe: Pipeline) -> int:
        """`size_px`, or the short side that the checkpoint recommends."""
        return self.size_px or min(pipe.recommended.get(side, 64) for side in ("height", "width"))

    def generated(self, pipe: Pipeline, wanted: Iterable[dict[str, Any]]) -> list[Generated]:
        """A sample for each of these fields of `Request`; the i-th depends on the seed, i and these alone."""
        common = {name: value for name, value in self.chosen.items() if name in (*Sampling.model_fields, "seed")}
        requests = [Request(**{"index": i, **common, **one}) for i, one in enumerate(wanted)]
        # Enough to fill a batch of small pictures (not measured); results depend on it only by rounding.
        done = dict(pipe.run(requests, batch_size=32, progress=True))
        return [done[i] for i in range(len(requests))]

    def frames(self, pipe: Pipeline, wanted: Iterable[dict[str, Any]]) -> list[np.ndarray]:
        """The same, uint8 [T, H, W, 3] each."""
        return [sample.frames for sample in self.generated(pipe, wanted)]


def over_data(
    options: MeasurementOptions, pipe: Pipeline, network: features.Features, exam: Callable[[], Any] | None
) -> EvaluationResult:
    """Measure a checkpoint against `dataset`: by unseen captions and, of a prepared folder, also by those of training.

    Samples that `dfm generate` by default makes of other frames, size or rate than their real ones have are made and
    measured a second time, with those. exam : opens the judge of samples with attributes, if there is one.
    """
    assert options.dataset is not None
    result, asked, tokenizer = EvaluationResult(), list[Request](), pipe.manifest["tokenizer"]
    opened = reference.open_reference(
        options.dataset, options.split, pipe.decode_stored, tokenizer, options.side_px(pipe)
    )
    images, clips, faults = reference.choose(opened, *options.amounts(*ASKED), options.max_frames, options.seed)
    sets, held_out = {"images": images, "clips": clips}, [r.frames for r in (*images, *clips)]
    if opened.training:
        training = ShardReference(options.dataset, "train", pipe.decode_stored, tokenizer)
        amounts = options.amounts(*TRAINING_ASKED)
        images, clips, more = reference.choose(training, *amounts, options.max_frames, options.seed)
        sets, faults = {"training images": images, "training clips": clips, **sets}, [*faults, *more]
        if len(held_out) > 1:
            near_real = nearness(thumbnails(held_out), opened.training.thumbnails)
    if not any(sets.values()):
        raise ValueError(f"{options.dataset} has no such samples; raise --num-prompts or --num-clips")
    judge = exam() if exam and any(r.attributes for real in sets.values() for r in real) else None
    for name, real in ((name, real) for name, real in sets.items() if real):
        kind, unseen = name.rpartition(" ")[2], bool(opened.training) and name in SHOWN
        usual = [asked_for(pipe, r, options.max_frames) | {"index": i} for i, r in enumerate(real)]
        made = {name: (samples := options.generated(pipe, usual))}
        asked += [s.request for s in samples]
        shape = ("num_video_frames", "height", "width")
        sizes = [{"fps": r.fps, **dict(zip(shape, r.frames.shape))} for r in real]
        differ = [i for i, s in enumerate(samples) if sizes[i].items() - s.request.model_dump(include=sizes[i]).items()]
        if differ:
            again = dict(zip(differ, options.generated(pipe, [usual[i] | sizes[i] for i in differ])))
            made[name + OWN] = [again.get(i, s) for i, s in enumerate(samples)]
        others = sets[f"training {kind}"] if unseen else ()
        of_real, of_others = ([network(r.shown) for r in some] for some in (real, others))
        shown = {"as_drawn": [r.frames for r in real], "decoded": [pipe.round_trip(r.frames) for r in real]}
        coded = [network(frames) for frames in shown["decoded"]]
        for key, of_key in made.items():
            found: dict[str, Any] = {"samples": len(real), "network": features.NAME, "unseen": unseen}
            frames = [s.frames for s in of_key]
            if judge:
                found |= judge.judged(kind, frames, [r.attributes for r in real], shown)
            found |= compare([network(f) for f in frames], of_real, coded, of_others)
            if opened.training and len(held_out) > 1:
                near = nearness(thumbnails(frames), opened.training.thumbnails)
                found["copies"] = asdict(copied(near, near_real)) | {"real": copied(near_real, near_real).value}
            lacking = {m: why for m, why in NOT_MEASURED.items() if m not in found and key in SHOWN}
            result.values[key] = found | {"not_measured": lacking}
        beside = "what is given, " * any(r.given for r in real)
        of_name = f"{'unseen ' * unseen}{name}: {beside}yours ({form_of(real)})"
        title = f"{of_name}, and what dfm generate makes of the caption".capitalize()
        pairs = [([*r.given, r.shown, s.frames], r.caption) for r, s in zip(real, samples)]
        result.samples[title] = pairs[: SHOWN[kind]]
    result.values["dataset"] = about = _about(options, opened, faults, asked)
    about["notes"].append(f"Compared with yours {form_of([r for real in sets.values() for r in real])}")
    if opened.training and (said := _other_data(opened, pipe)):
        about["notes"].append(said)
    return result


def _other_data(opened: ShardReference, pipe: Pipeline) -> str:
    """A sentence if a checkpoint was trained on other data than these; else empty."""
    same = opened.store.manifest.get("latent_mean") == pipe.manifest.get("latent_mean")
    return "" if same else "The checkpoint was trained on other data: `training` and `unseen` are splits of these"


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="dfm_nb-given-")


def asked_for(pipe: Pipeline, real: Real, max_frames: int | None = None) -> dict[str, Any]:
    """The prompt of a real sample and, for a model that takes them, what is given beside it.

    max_frames : what the user allows.
    """
    asked: dict[str, Any] = {"prompt": real.caption}
    if pipe.config.generation.given:
        asked["given"] = write_given(Path(tempfile.mkdtemp(dir=_scratch().name), "given"), real.given, real.fps)
    if max_frames and Request(**asked).completed(pipe.config).num_video_frames > max_frames:
        asked["num_video_frames"] = geometry.floor_frames(max_frames)
    return asked


def _about(
    options: MeasurementOptions,
    opened: ShardReference | reference.SourceReference,
    faults: Sequence[SampleError],
    asked: Sequence[Request],
) -> dict[str, Any]:
    """What was measured against, what was left out, and how samples were asked for."""
    seen = {reason: [fault.detail for fault in faults if fault.reason == reason] for reason in SEEN}
    count, name = sum(map(len, seen.values())), options.dataset
    notes = [f"Asked for as `dfm generate` does by default: {described(asked)}"]
    if opened.split == "train" and options.split is None:
        notes.append(
            f"{name} has nothing held out (prepare holds some of 20 samples or more), so these are captions "
            "of training: they show what is memorised"
        )
    if count:
        told = "; ".join([detail for details in seen.values() for detail in details][:NAMED])
        notes.append(f"{count} samples of {opened.split} are not unseen and were left out: {told}")
    return {"name": name, "split": opened.split, "unreadable": len(faults) - count, **seen, "notes": notes}


def over_checkpoints(options: MeasurementOptions) -> EvaluationResult:
    """Measure each checkpoint of a run against a prepared folder; `verdict.json` and `.png` go to the run folder.

    Raises
    ------
    ValueError : no checkpoint can be read, or the data are not a prepared folder with held-out pictures.
    """
    run, result = Path(options.checkpoint_path), EvaluationResult()
    if not (folders := checkpoints_of(run)):
        raise ValueError(f"--all-checkpoints needs a run folder with checkpoints; {run} has none; train first")
    prepared = bool(options.dataset) and (Path(str(options.dataset)) / ".nv-meta").is_dir()
    split = options.split or (reference.held_out(str(options.dataset)) if prepared else None)
    if not prepared or split in (None, "train"):
        raise ValueError(
            f"--all-checkpoints needs --dataset, a prepared folder, and a --split that is held out (val or test); got "
            f"{options.dataset} and {split}"
        )
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
            read = pipe.decode_stored, pipe.manifest["tokenizer"]
            opened = [ShardReference(str(options.dataset), name, *read) for name in (split, "train")]
            training = opened[0].training
            assert training
            if said := _other_data(opened[0], pipe):
                log.warning("%s, and so are copies and the verdict", said)
            chosen, faults = zip(*(_pictures(one, options.seed) for one in opened))
            half = options.amounts(64, 0)[0] // 2
            pictures = [list({r.caption: r for r in real}.values())[:half] for real in chosen]
            held_out, train, every = ([r.frames for r in real] for real in (*pictures, chosen[0]))
            network = features.Features(parallel.device())
            judge = verdict.Judge(held_out, train, every, training.thumbnails, network, pipe.round_trip)
            base = base_samples(options, pipe)
        asked = options.generated(pipe, [asked_for(pipe, r) for real in pictures for r in real])
        made, half, iteration = [sample.frames for sample in asked], len(pictures[0]), iteration_of(folder)
        row = judge.figures(iteration, made[:half], made[half:]) | {"val_loss": losses.get(iteration)}
        if base:
            row["drift"] = judge.drift(base[1], options.frames(pipe, base[0]))
        for title, videos, real in (("training", made[half:], pictures[1]), ("unseen", made, pictures[0])):
            pairs = [([r.frames, m[:1]], r.caption) for m, r in zip(videos, real)]
            result.samples[f"Iteration {iteration:,}: {title} captions"] = pairs[: SHOWN["images"] // 2]
        rows.append(row)
    if judge is None:
        raise ValueError(f"all {len(folders)} checkpoints of {run} are damaged; take another run")
    about = _about(options, opened[0], [fault for some in faults for fault in some], [s.request for s in asked])
    about["notes"].append("Compared with yours after crop and tokenizer")
    result.values |= {"dataset": about, "checkpoints": rows, "verdict": judge.verdict(rows)}
    if (run / "config.yaml").is_file():
        write_json(run / "verdict.json", result.values, indent=1)
        verdict.plot(result.values, run / "verdict.png")
    return result


def _pictures(opened: ShardReference, seed: int) -> tuple[list[Real], list[SampleError]]:
    """Pictures of a split, or first frames if it has only clips, and the faults of those left out."""
    images, _, faults = reference.choose(opened, MOST_PICTURES, 0, 1, seed)
    if not images:
        _, images, faults = reference.choose(opened, 0, MOST_PICTURES, 1, seed)
    return images, faults


def base_samples(options: MeasurementOptions, pipe: Pipeline) -> tuple[list[dict[str, Any]], list[np.ndarray]] | None:
    """For a fine-tuned run: requests for its base's validation prompts, and the base's samples of them."""
    path = pipe.config.checkpoint.pretrained
    record = pipe.source.base if pipe.source else None
    place = record or path
    if not place:
        return None
    try:
        base = options.open(recorded(place, path) if isinstance(place, dict) else place)
    except FileNotFoundError as error:
        log.warning("%s; drift from checkpoint.pretrained is not measured", error)
        return None
    if not (prompts := base.config.validation.prompts):
        return None
    requests = [{"prompt": prompts[i % len(prompts)], "num_video_frames": 1} for i in range(DRIFT_SAMPLES)]
    return requests, options.frames(base, requests)
