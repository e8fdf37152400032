"""`dfm evaluate`: does a checkpoint generate what its captions say, and does it look like the data?

Without `--dataset` the prompts ask for attribute combinations that training on the synthetic set never showed: half of
them a colour that never had that pattern. A classifier looks for the attributes, by argmax and by confidence, also
in real renders, as drawn and through the tokenizer (the upper bound for any model). `--wordings` adds prompts in words
that training did not use, `--distances` the kernel distance and recall to real renders.

With `--dataset` the prompts are captions of its samples. The kernel distance (KID) to real samples is shown
next to that between two sets of real samples. Of a prepared folder, copies of training samples are counted.

`--all-checkpoints` measures each checkpoint of a run against a prepared folder and recommends one
(`dfm_nb.evaluation.verdict`). It writes `verdict.json` and `verdict.png` to the run folder.

Clips add temporal consistency and wing motion, next to those of real ones. The same flags give the same figures, with
95 % intervals. Choose settings on `--part development`, report `test` once.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dfm_nb import parallel
from dfm_nb.base import video
from dfm_nb.base.argv import NPROC, guard, quietly
from dfm_nb.base.files import write_atomically
from dfm_nb.base.log import log
from dfm_nb.base.metrics import compared_loss, read_metrics, series
from dfm_nb.base.options import option
from dfm_nb.butterflies.exam import Exam
from dfm_nb.checkpoints.tensor_files import CheckpointError
from dfm_nb.checkpoints.weights import checkpoints_of, iteration_of
from dfm_nb.evaluation import diversity, features, reference, verdict
from dfm_nb.evaluation.comparison import Measured, against, copies
from dfm_nb.evaluation.reference import PreparedFolder, Real
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request, Sampling, check_sampler


class EvaluateOptions(Sampling):
    """Measure a checkpoint against captions and real samples."""

    prog, epilog = "dfm evaluate", NPROC
    checkpoint_path: str = option(help="run folder, iter_* folder or exported file", flags=("--checkpoint",))
    dataset: str | None = option(None, "folder or source NAME[:SPEC] to compare with", flags=("--dataset-path",))
    split: str = option("val", "split of a prepared folder: train, val or test")
    all_checkpoints: bool = option(False, "recommend a checkpoint of the run, measured on --dataset, a prepared folder")
    part: Literal["development", "test"] = option("development", "choose on development, report test")
    wordings: int = option(0, "images for each wording that training did not use", ge=0)
    distances: bool = option(False, "kernel distance and recall to real renders")
    num_prompts: int = option(64, "images to generate; with --all-checkpoints for each, half training captions", ge=0)
    num_clips: int = option(16, "clips to generate; 9 frames each without --dataset", ge=0)
    max_frames: int = option(9, "clips of --dataset are cut to this many frames", ge=1)
    size_px: int = option(64, "side in px; for a source, the short side")
    autoguidance_checkpoint: str | None = option(None, "a weaker model that guidance steers away from")
    seed: int = option(1, "seed of the starting noise and of the choice of real samples")
    ema: str = option("auto", "auto, none or a stored length")
    mixed_precision: Literal["bf16", "fp32"] | None = option(None, "arithmetic; default: as in training")
    tokenizer_path: str | None = option(None, "tokenizer file or folder")
    text_encoder_path: str | None = option(None, "text encoder folder")
    output: str | None = option(None, "JSON file", output=True)
    contact_sheet: str | None = option(None, "PNG file", output=True)
    as_json: bool = option(False, "print JSON instead of tables", flag="--json")


def evaluate_model(checkpoint_path: str | os.PathLike, **flags: Any) -> Measured:
    """Measure a checkpoint against captions and real samples.

    Parameters
    ----------
    checkpoint_path : a run folder, an `iter_*` folder or an exported file.
    **flags : the other flags of `dfm evaluate` with underscores (`dataset`, `split`, `num_prompts`, `num_clips`,
        `num_steps`, `guidance`, `output`, `contact_sheet`, ...).

    ValueError, FileNotFoundError : wrong input; the message has the fix.

    >>> evaluate_model("runs/pretrain", num_prompts=16, num_clips=0).table  # doctest: +SKIP
    """
    return measure(EvaluateOptions(checkpoint_path=os.fspath(checkpoint_path), **flags))


@quietly()
def measure(asked: EvaluateOptions) -> Measured:
    """The requested evaluation; writes the output files."""
    found = over_checkpoints(asked) if asked.all_checkpoints else one_checkpoint(asked)
    if asked.contact_sheet:
        video.write_png(asked.contact_sheet, found.contact_sheet())
    if asked.output:
        write_atomically(Path(asked.output), json.dumps(found.values, indent=1).encode())
    return found


def open_pipeline(asked: EvaluateOptions, path: str | os.PathLike) -> Pipeline:
    return Pipeline.from_checkpoint(
        path,
        None if asked.ema == "none" else asked.ema if asked.ema == "auto" else float(asked.ema),
        tokenizer_path=asked.tokenizer_path,
        text_encoder_path=asked.text_encoder_path,
        guide=asked.autoguidance_checkpoint,
        mixed_precision=asked.mixed_precision,
    )


def generated(pipe: Pipeline, asked: EvaluateOptions, wanted: Iterable[dict[str, Any]]) -> list[Generated]:
    """A sample for each of these fields of `Request`; the i-th depends on the seed, i and these alone."""
    own = {name: getattr(asked, name) for name in asked.model_fields_set}
    check_sampler(pipe.recommended, "the checkpoint", own)
    given = pipe.recommended | own
    common = {name: value for name, value in given.items() if name in (*Sampling.model_fields, "seed")}
    requests = [Request(index=i, **common, **one) for i, one in enumerate(wanted)]
    done = dict(pipe.run(requests, batch_size=32, progress=True))
    return [done[i] for i in range(len(requests))]


def like(real: Sequence[Real]) -> list[dict[str, Any]]:
    """Requests for samples with the captions, sizes, lengths and rates of these."""
    names = ("num_video_frames", "height", "width")
    return [{"prompt": r.caption, "fps": r.fps, **dict(zip(names, r.frames.shape))} for r in real]


def one_checkpoint(asked: EvaluateOptions) -> Measured:
    network = features.Features(parallel.device()) if asked.dataset or asked.distances else None
    pipe, found = open_pipeline(asked, asked.checkpoint_path), Measured()

    def generate(wanted: Sequence[dict[str, Any]]) -> list[Generated]:
        samples = generated(pipe, asked, wanted)
        shown = 24 if samples[0].request.num_video_frames == 1 else 8
        found.samples.extend((s.frames, s.request.prompt) for s in samples[:shown])
        return samples

    def answers(prompts: Sequence[str], frames: int) -> list[np.ndarray]:
        size = {"height": asked.size_px, "width": asked.size_px, "num_video_frames": frames}
        return [s.frames for s in generate([{"prompt": prompt, **size} for prompt in prompts])]

    def round_trip(frames: np.ndarray) -> np.ndarray:
        return pipe.decode(pipe.encode_pixels(frames))

    exam = Exam(answers, round_trip, asked.part, asked.size_px)
    if asked.dataset is None:
        counts = {"images": asked.num_prompts, "clips": asked.num_clips}
        distances = functools.partial(diversity.against_renders, network=network) if network else None
        found.values |= exam.unseen(counts, asked.wordings, distances)
    else:
        assert network is not None
        tokenizer = pipe.manifest["tokenizer"]
        opened = reference.open_reference(asked.dataset, asked.split, pipe.decode_stored, tokenizer, asked.size_px)
        images, clips, failed = reference.choose(
            opened, 2 * asked.num_prompts, 2 * asked.num_clips, asked.max_frames, asked.seed
        )
        if not images and not clips:
            raise ValueError(f"{asked.dataset} has no such samples; raise --num-prompts or --num-clips")
        found.values["dataset"] = {"name": asked.dataset, "split": asked.split, "unreadable": failed}
        to_model = functools.partial(pipe.statistics.to_model, sigma_data=pipe.sigma_data)
        for kind, real in (("images", images), ("clips", clips)):
            if real:
                judged = functools.partial(exam.judged, kind)
                found.values[kind], samples = against(
                    real, lambda some: generate(like(some)), network, judged, round_trip
                )
                if isinstance(opened, PreparedFolder) and asked.split != "train":
                    found.values[kind] |= copies(samples, asked.dataset, asked.split, to_model)
    return found


MOST_PICTURES = 1_000
"""The samples of a split, held in memory, among which copies are searched."""
DRIFT_SAMPLES = 16


def over_checkpoints(asked: EvaluateOptions) -> Measured:
    """Figures for each checkpoint of a run, and the recommended one."""
    run, found = Path(asked.checkpoint_path), Measured()
    if not (folders := checkpoints_of(run)):
        raise ValueError(f"--all-checkpoints needs a run folder with checkpoints; {run} has none; train first")
    if not asked.dataset or not (Path(asked.dataset) / ".nv-meta").is_dir() or asked.split == "train":
        raise ValueError(
            f"--all-checkpoints needs --dataset, a prepared folder, and a --split that is held out (val or test); got "
            f"{asked.dataset} and {asked.split}"
        )
    records = read_metrics(run)
    losses = dict(zip(*series(records, compared_loss({key for record in records for key in record}))))
    rows, judge, base = list[dict[str, Any]](), None, None
    for folder in folders:
        try:
            pipe = open_pipeline(asked, folder)
        except CheckpointError as error:
            log.warning("%s; it is skipped", error)
            continue
        if judge is None:
            judge, pictures = _judge(asked, pipe, found)
            base = _base(asked, pipe)
        made = [s.frames for s in generated(pipe, asked, like([r for real in pictures for r in real]))]
        half, iteration = len(pictures[0]), iteration_of(folder)
        row = judge.figures(iteration, made[:half], made[half:]) | {"val_loss": losses.get(iteration)}
        if base:
            now = [s.frames for s in generated(pipe, asked, base[0])]
            row["drift"] = judge.drift(base[1], now)
        found.samples.extend((m, f"{iteration}: {r.caption}") for m, r in zip(made[:8], pictures[0]))
        rows.append(row)
    if judge is None:
        raise ValueError(f"all {len(folders)} checkpoints of {run} are damaged; take another run")
    found.values |= {"checkpoints": rows, "verdict": judge.verdict(rows)}
    if (run / "config.yaml").is_file():
        write_atomically(run / "verdict.json", json.dumps(found.values, indent=1).encode())
        verdict.plot(found.values, run / "verdict.png")
    return found


def _judge(asked: EvaluateOptions, pipe: Pipeline, found: Measured) -> tuple[verdict.Judge, list[list[Real]]]:
    """The judge of samples, and the held-out and training pictures whose captions are sampled, no caption twice."""
    all_pictures, failed = [], 0
    for split in (asked.split, "train"):
        assert asked.dataset is not None
        opened = reference.PreparedFolder(asked.dataset, split, pipe.decode_stored, pipe.manifest["tokenizer"])
        images, _, images_failed = reference.choose(opened, MOST_PICTURES, 0, 1, asked.seed)
        if not images:  # a folder of clips: their first frames
            _, images, images_failed = reference.choose(opened, 0, MOST_PICTURES, 1, asked.seed)
        all_pictures.append(images)
        failed += images_failed
    found.values["dataset"] = {"name": asked.dataset, "split": asked.split, "unreadable": failed}
    pictures = [list({r.caption: r for r in images}.values())[: asked.num_prompts // 2] for images in all_pictures]
    (held_out, train), (every, all_train) = ([[r.frames for r in x] for x in some] for some in (pictures, all_pictures))
    network = features.Features(parallel.device())
    judge = verdict.Judge(held_out, train, every, all_train, network, lambda f: pipe.decode(pipe.encode_pixels(f)))
    return judge, pictures


def _base(asked: EvaluateOptions, pipe: Pipeline) -> tuple[list[dict[str, Any]], list[np.ndarray]] | None:
    """For a fine-tuned run: requests for its base's validation prompts, and the base's samples of them."""
    if not (path := pipe.config.checkpoint.pretrained):
        return None
    try:
        base = open_pipeline(asked, path)
    except FileNotFoundError as error:
        log.warning("%s; drift from checkpoint.pretrained is not measured", error)
        return None
    prompts, recommended = base.config.validation.prompts, base.recommended
    if not prompts:
        return None
    size = {name: recommended.get(name, asked.size_px) for name in ("height", "width")} | {"num_video_frames": 1}
    requests = [{"prompt": prompts[i % len(prompts)], **size} for i in range(DRIFT_SAMPLES)]
    return requests, [s.frames for s in generated(base, asked, requests)]


def main(argv: list[str] | None = None) -> int:
    asked = EvaluateOptions.parse(argv)
    found = measure(asked)
    print(json.dumps(found.values, indent=1) if asked.as_json else found)
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
