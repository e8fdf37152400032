"""`dfm evaluate`: does a checkpoint generate what its captions say, and does it look like the data?

Without `--dataset` the prompts ask for attribute combinations that training on the synthetic set never showed: half of
them a colour that never had that pattern. A classifier looks for the attributes, by argmax and by confidence, also
in real renders, as drawn and through the tokenizer (the upper bound for any model). `--wordings` adds prompts in words
that training did not use, `--distances` the kernel distance and recall to real renders.

With `--dataset` the prompts are captions of its samples. The kernel distance (KID) to real samples is shown
next to that between two sets of real samples. Of a prepared folder, copies of training samples are counted.

`--all-checkpoints` measures each checkpoint of a run against a prepared folder and recommends one
(`dfm_nb.generation.run_verdict`).

Clips add temporal consistency and wing motion, next to those of real ones. The same flags give the same figures, with
95 % intervals. Choose settings on `--part development`, report `test` once.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dfm_nb import parallel
from dfm_nb.base import plugins, video
from dfm_nb.base.argv import NPROC, guard, quietly
from dfm_nb.base.files import write_atomically
from dfm_nb.base.options import option
from dfm_nb.base.verb import Report, Verb
from dfm_nb.evaluation import features, reference
from dfm_nb.evaluation.comparison import EvaluationResult, against, copies
from dfm_nb.evaluation.reference import ShardReference
from dfm_nb.evaluation.retrieval import WAYS
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.run_verdict import MeasurementOptions, like, over_checkpoints


class EvaluateOptions(MeasurementOptions, Verb):
    """Measure a checkpoint against captions and real samples."""

    prog, epilog, module = "dfm evaluate", NPROC, "dfm_nb.evaluate"
    all_checkpoints: bool = option(False, "recommend a checkpoint of the run, measured on --dataset, a prepared folder")
    part: Literal["development", "test"] = option("development", "choose on development, report test")
    wordings: int = option(0, "images for each wording that training did not use", ge=0)
    distances: bool = option(False, "kernel distance and recall to real renders")
    num_clips: int = option(16, "clips to generate; 9 frames each without --dataset", ge=0)
    max_frames: int = option(9, "clips of --dataset are cut to this many frames", ge=1)
    output: str | None = option(None, "JSON file", output=True)
    contact_sheet: str | None = option(None, "PNG file", output=True)

    @quietly()
    def run(self) -> EvaluationResult:
        """The requested evaluation; writes the output files."""
        result = over_checkpoints(self) if self.all_checkpoints else one_checkpoint(self)
        if self.contact_sheet:
            video.write_png(self.contact_sheet, result.contact_sheet())
        if self.output:
            write_atomically(Path(self.output), json.dumps(result.values, indent=1).encode())
        return result

    def report(self, result: EvaluationResult) -> Report:
        return Report(result.values, str(result))


def evaluate_model(checkpoint_path: str | os.PathLike, **flags: Any) -> EvaluationResult:
    """Measure a checkpoint against captions and real samples.

    Parameters
    ----------
    checkpoint_path : a run folder, an `iter_*` folder or an exported file.
    **flags : the other flags of `dfm evaluate` with underscores (`dataset`, `split`, `num_prompts`, `num_clips`,
        `num_steps`, `guidance`, `output`, `contact_sheet`, ...).

    ValueError, FileNotFoundError : wrong input; the message has the fix.

    >>> evaluate_model("runs/pretrain", num_prompts=16, num_clips=0).table  # doctest: +SKIP
    """
    return EvaluateOptions(checkpoint_path=os.fspath(checkpoint_path), **flags).run()


EXAM = "butterflies"
"""The plug-in of `dfm_nb.exams` that asks without `--dataset`, and judges data with attributes."""
NOT_MEASURED = {
    "kernel_distance": "distances need 4 or more real samples: raise --num-prompts or --num-clips, or add samples",
    "retrieval": f"retrieval needs {WAYS} samples: raise --num-prompts or --num-clips",
    "memorised": "copies are told by two or more held-out samples of one size: a prepared folder, --split val or test",
}


def one_checkpoint(options: EvaluateOptions) -> EvaluationResult:
    network = features.Features(parallel.device()) if options.dataset or options.distances else None
    pipe, result = options.open(options.checkpoint_path), EvaluationResult()

    def generate(wanted: Sequence[dict[str, Any]]) -> list[Generated]:
        samples = options.generated(pipe, wanted)
        shown = 24 if samples[0].request.num_video_frames == 1 else 8
        result.samples.extend((s.frames, s.request.prompt) for s in samples[:shown])
        return samples

    def answers(prompts: Sequence[str], frames: int, fps: float) -> list[np.ndarray]:
        size = {"height": options.size_px, "width": options.size_px, "num_video_frames": frames, "fps": fps}
        return [s.frames for s in generate([{"prompt": prompt, **size} for prompt in prompts])]

    def exam() -> Any:
        return plugins.find("exams", EXAM)(answers, pipe.round_trip, options.part, options.size_px)

    if options.dataset is None:
        counts = {"images": options.num_prompts, "clips": options.num_clips}
        result.values |= exam().unseen(counts, options.wordings, network)
    else:
        assert network is not None
        tokenizer = pipe.manifest["tokenizer"]
        opened = reference.open_reference(
            options.dataset, options.split, pipe.decode_stored, tokenizer, options.size_px
        )
        images, clips, failed = reference.choose(
            opened, 2 * options.num_prompts, 2 * options.num_clips, options.max_frames, options.seed
        )
        if not images and not clips:
            raise ValueError(f"{options.dataset} has no such samples; raise --num-prompts or --num-clips")
        result.values["dataset"] = {"name": options.dataset, "split": options.split, "unreadable": failed}
        to_model = functools.partial(pipe.statistics.to_model, sigma_data=pipe.sigma_data)
        judge = exam() if any(r.attributes for r in (*images, *clips)) and EXAM in plugins.names("exams") else None
        for kind, real in (("images", images), ("clips", clips)):
            if real:
                judged: Any = functools.partial(judge.judged, kind) if judge else lambda *nothing: {}
                result.values[kind], samples = against(
                    real, lambda some: generate(like(some)), network, judged, pipe.round_trip
                )
                if isinstance(opened, ShardReference) and options.split != "train":
                    result.values[kind] |= copies(samples, options.dataset, options.split, to_model)
                lacking = {name: why for name, why in NOT_MEASURED.items() if name not in result.values[kind]}
                result.values[kind]["not_measured"] = lacking
    return result


def main(argv: list[str] | None = None) -> int:
    code = EvaluateOptions.main(argv)
    parallel.shutdown()
    return code


if __name__ == "__main__":
    raise SystemExit(guard(main))
