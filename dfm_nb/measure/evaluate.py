"""`dfm evaluate`: does a checkpoint generate what its captions say, and does it look like the data?

Without `--dataset` the prompts ask for attribute combinations that training on the synthetic set never showed: half of
them a colour that never had that pattern. A classifier looks for the attributes, by argmax and by confidence, also
in real renders, as drawn and through the tokenizer (the upper bound for any model). `--wordings` adds prompts in words
that training did not use, `--distances` the kernel distance and recall to real renders.

With `--dataset` the prompts are captions of its samples, asked for as `dfm generate` does by default. Where the real
sample has another size or rate, the figures with those stand beside them. Of a prepared folder, captions of training
are measured, too; held-out samples whose caption or picture training has are left out, and copies are counted.
`--contact-sheet` shows pairs of a real sample and a generated one.

`--all-checkpoints` measures each checkpoint of a run against a prepared folder and recommends one
(`measure/run_verdict.py`).

Clips add temporal consistency and wing motion, next to those of real ones. The same flags give the same figures, with
95 % intervals. Choose settings on `--part development`, report `test` once.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dfm_nb import parallel
from dfm_nb.base import files, plugins, video
from dfm_nb.base.argv import NPROC, quietly
from dfm_nb.base.log import log
from dfm_nb.base.options import option
from dfm_nb.base.verb import FileVerb, Report
from dfm_nb.checkpoints import folders
from dfm_nb.measure import features
from dfm_nb.measure.results import EvaluationResult
from dfm_nb.measure.run_verdict import MeasurementOptions, over_checkpoints, over_data


class EvaluateOptions(MeasurementOptions, FileVerb):
    """Measure a checkpoint against captions and real samples."""

    prog = "dfm evaluate"
    epilog = NPROC
    module = "dfm_nb.evaluate"
    all_checkpoints: bool = option(
        False, "recommend a checkpoint by --dataset, a prepared folder, and captions of training"
    )
    part: Literal["development", "test"] = option("development", "choose on development, report test")
    wordings: int = option(0, "images for each wording that training did not use", ge=0)
    distances: bool = option(False, "kernel distance and recall to real renders")
    output: str | None = option(None, "JSON file", output=True)
    contact_sheet: str | None = option(None, "PNG file: samples, with --dataset beside the real ones", output=True)

    @quietly()
    def run(self) -> EvaluationResult:
        """The requested evaluation; writes the output files."""
        for name in (self.contact_sheet, self.output):
            if name:
                files.check_free(Path(name), self.overwrite, mark=files.MARK)
        result = over_checkpoints(self) if self.all_checkpoints else one_checkpoint(self)
        if self.contact_sheet:
            video.write_png(self.contact_sheet, result.contact_sheet())
        if self.output:
            files.write_json(Path(self.output), result.values | {"made_by": files.MARK}, indent=1)
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


def one_checkpoint(options: EvaluateOptions) -> EvaluationResult:
    pipe = options.open(options.checkpoint_path)
    result = EvaluationResult()
    side_px = options.side_px(pipe)

    def answers(prompts: Sequence[str], frames: int, fps: float) -> list[np.ndarray]:
        size = {"height": side_px, "width": side_px, "num_video_frames": frames, "fps": fps}
        videos = options.frames(pipe, [{"prompt": prompt, **size} for prompt in prompts])
        shown = result.samples.setdefault("", [])
        most = 24 if frames == 1 else 8
        for sample, prompt in zip(videos[:most], prompts):
            shown.append(([sample], prompt))
        return videos

    def exam() -> Any:
        return plugins.find("exams", EXAM)(answers, pipe.round_trip, options.part, side_px)

    if options.dataset:
        return over_data(options, pipe, exam if EXAM in plugins.names("exams") else None)
    source = folders.source_of(pipe.manifest).get("name", "synthetic")
    if source != "synthetic":
        log.warning(
            f"the data of this model come from {source}, and without --dataset it is asked for {EXAM}: "
            f"give --dataset {pipe.config.dataset.path or 'FOLDER'}"
        )
    network = features.Features(parallel.device()) if options.distances else None
    images, clips = options.amounts(64, 16)
    result.values |= exam().unseen({"images": images, "clips": clips}, options.wordings, network)
    return result


def main(argv: list[str] | None = None) -> int:
    code = EvaluateOptions.main(argv)
    parallel.shutdown()
    return code
