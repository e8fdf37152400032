"""`dfm evaluate`: does a checkpoint generate what its captions say, and does it look like the data?

Without `--dataset` the prompts ask for attribute combinations that training on the synthetic set never showed: half of
them a colour that never had that pattern. With it, they are the captions of its samples. The same flags give the same
figures, each with its 95 % interval:

- the share of samples in which a classifier finds the asked attributes, by argmax and where it is sure
  (`butterflies.attributes`). Beside it the same of real renders, as they are (what the classifier can do) and through
  the tokenizer (the upper bound for any model);
- with `--wordings`, the same for prompts in words that training did not use;
- with `--distances`, the kernel distance and recall to real renders;
- with `--dataset`, the kernel distance (KID) to real samples, beside that between two sets of real samples, which a
  perfect model would get; and of a prepared folder the share of samples that are nearer to a training
  sample than 99 % of the held-out ones are, so that copies are seen;
- for clips the temporal consistency and the wing motion, beside those of real clips.

There are two parts of unseen combinations and wordings: choose settings on `development`, report `test` once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dfm_nb import parallel
from dfm_nb.base import video
from dfm_nb.base.argv import NPROC, ArgumentParser, guard, quietly
from dfm_nb.base.files import write_atomically
from dfm_nb.butterflies import synthetic, wordings
from dfm_nb.butterflies.attributes import MEASURED, Renders, score, shares, stored_thresholds, unseen_attributes
from dfm_nb.butterflies.judge import AttributeClassifier
from dfm_nb.config.schema import TRAINED_SIZE
from dfm_nb.evaluation import distance, diversity, features, reference
from dfm_nb.evaluation.reference import Real
from dfm_nb.evaluation.table import rows, table
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import RECOMMENDED, Request

if TYPE_CHECKING:
    import pandas as pd

CLIP_FRAMES = 9
REAL_SEED = 987_654
MOST_STORED = 20_000
"""Latents of a split that copies are looked for in."""

HOW = tuple(name for name in RECOMMENDED if f"generation.{name}" not in TRAINED_SIZE)  # sizes are of the grid or data
SHARED = ("negative_prompt", "guidance_interval", "autoguidance", *HOW)
"""Flags of `dfm generate` that are flags here."""


def _shared(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in Request.given(args).items() if name in SHARED}


def requests(prompts: Sequence[str], frames: int, args: argparse.Namespace) -> list[Request]:
    """A request for each prompt."""
    size = {"height": args.size_px, "width": args.size_px, "num_video_frames": frames}
    own = {**size, "seed": args.seed, **_shared(args)}
    return [Request(prompt=prompt, index=i, **own) for i, prompt in enumerate(prompts)]


def requests_like(reals: list[Real], args: argparse.Namespace) -> list[Request]:
    """The captions of real samples, at their sizes, lengths and frame rates."""
    return [
        Request(
            prompt=r.caption,
            index=i,
            height=r.frames.shape[1],
            width=r.frames.shape[2],
            num_video_frames=len(r.frames),
            fps=r.fps,
            seed=args.seed,
            **_shared(args),
        )
        for i, r in enumerate(reals)
    ]


def parser() -> ArgumentParser:
    about = "Measure a checkpoint against captions and real samples."
    p = ArgumentParser(prog="dfm evaluate", description=about, epilog=NPROC)
    p.add_argument("--checkpoint-path", "--checkpoint", dest="checkpoint_path", required=True)
    p.add_argument("--dataset", "--dataset-path", dest="dataset", help="folder or source NAME[:SPEC] to compare to")
    p.add_argument("--split", default="val", help="of a prepared folder: train, val or test")
    p.add_argument("--part", choices=synthetic.PARTS, default="development", help="choose on development, report test")
    p.add_argument("--wordings", type=int, default=0, help="images for each form of wording that training did not use")
    p.add_argument("--distances", action="store_true", help="kernel distance and recall to real renders")
    p.add_argument("--num-prompts", type=int, default=64, help="images to generate")
    p.add_argument("--num-clips", type=int, default=16, help="clips to generate, of 9 frames without --dataset")
    p.add_argument("--max-frames", type=int, default=9, help="clips of --dataset are cut to this many frames")
    p.add_argument("--size-px", type=int, default=64, help="side in px; of a source's samples the short side")
    Request.add_flags(p, SHARED)
    p.add_argument("--autoguidance-checkpoint", help="a weaker model for guidance to lead away from")
    p.add_argument("--seed", type=int, default=1, help="of the starting noise, and of the choice of real samples")
    p.add_argument("--ema", default="auto", help="auto, none or a stored length")
    p.add_argument("--mixed-precision", choices=("bf16", "fp32"), help="arithmetic; by default that of the training")
    p.add_argument("--tokenizer-path", help="tokenizer file or folder")
    p.add_argument("--text-encoder-path", help="text encoder folder")
    p.add_argument("--output", help="JSON file")
    p.add_argument("--contact-sheet", help="PNG file")
    return p


def parse(argv: list[str] | None) -> argparse.Namespace:
    return parser().parse_args(argv)


class Evaluation:
    """One run of the command: what was measured so far, and some samples for the contact sheet."""

    def __init__(self, args: argparse.Namespace, pipe: Pipeline):
        self.args, self.pipe = args, pipe
        self.result: dict[str, Any] = {}
        self.sheet: list[tuple[np.ndarray, str]] = []  # pictures or clips, with their captions

    @functools.cached_property
    def classifier(self) -> AttributeClassifier:
        return AttributeClassifier.load()

    def unseen(self) -> None:
        """Attribute combinations that training never showed, in the words of training and in others."""
        a, network = self.args, features.Features() if self.args.distances else None
        for kind, count, frames in (("images", a.num_prompts, 1), ("clips", a.num_clips, CLIP_FRAMES)):
            if not count:
                continue
            wanted = unseen_attributes(count, "still" if frames == 1 else "flapping", a.part)
            prompts = [synthetic.caption_for(w, template=i) for i, w in enumerate(wanted)]
            videos = [g.frames for g in self._generate(requests(prompts, frames, a))]
            self.result[kind] = self._score(kind, videos, wanted)
            if network:
                self.result[kind]["distances"] = diversity.against_renders(self._renders_like(kind, videos), network)
        if a.wordings:
            wanted = unseen_attributes(a.wordings, "still", a.part)
            self.result["wordings"] = {
                form: self._worded([wordings.prompt(form, a.part, w, i) for i, w in enumerate(wanted)], wanted)
                for form in wordings.forms()
            }

    def _worded(self, prompts: list[str], wanted: list[dict[str, str]]) -> dict[str, Any]:
        videos = [g.frames for g in self._generate(requests(prompts, 1, self.args), shown=8)]
        found = shares(self.classifier, videos, wanted, stored_thresholds("images"))
        return {"samples": len(videos), **found["all three"]}

    def _renders_like(self, kind: str, videos: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """Equal numbers of samples and of real renders; those compared are drawn apart."""
        renders = self._renders(kind, max(map(len, videos)))
        n = min(len(videos), renders.half)
        return {
            "samples": videos[:n],
            "decoded": renders.decoded[:n],
            "as_drawn": renders.as_drawn[:n],
            "real": renders.as_drawn[renders.half :][:n],
        }

    def against(self, network: features.Features) -> None:
        """The captions of `--dataset`, and distances to its samples.

        Half of the real samples give the captions, the other half is what the distances are to.
        """
        args, pipe = self.args, self.pipe
        opened = reference.open_reference(
            args.dataset, args.split, pipe.decode_stored, pipe.manifest["tokenizer"], args.size_px
        )
        images, clips, failed = reference.choose(
            opened, 2 * args.num_prompts, 2 * args.num_clips, args.max_frames, args.seed
        )
        if not images and not clips:
            raise ValueError(f"{args.dataset} has none of the samples asked for; raise --num-prompts or --num-clips")
        self.result["dataset"] = {"name": args.dataset, "split": args.split, "unreadable": failed}
        for kind, found, flag in (("images", images, "--num-prompts"), ("clips", clips, "--num-clips")):
            if not found:
                continue
            if len(found) < 4:
                raise ValueError(
                    f"{args.dataset} has {len(found)} {kind}; distances need 4 or more; use --split train, or {flag} 0"
                )
            asked, others = found[: len(found) // 2], found[len(found) // 2 :]
            generated = self._generate(requests_like(asked, args))
            videos = [g.frames for g in generated]
            measured: dict[str, Any] = {"samples": len(videos), "real_samples": len(others), "network": features.NAME}
            attributes = [r.attributes for r in asked]
            if all(set(MEASURED) <= set(a) for a in attributes):
                measured |= self._score(kind, videos, attributes)
            sets = (videos, [r.frames for r in asked], [r.frames for r in others])
            measured |= distance.compare(*([network(v) for v in some] for some in sets))
            if isinstance(opened, reference.PreparedFolder) and args.split != "train":
                measured |= self._copies(generated)
            self.result[kind] = measured

    def _generate(self, asked: list[Request], shown: int = 24) -> list[Generated]:
        """Samples in the order of the requests; so many stills, or 8 clips, go on the sheet."""
        done = dict(self.pipe.run(asked, batch_size=32, progress=True))
        samples = [done[i] for i in range(len(asked))]
        shown = shown if asked[0].num_video_frames == 1 else 8
        self.sheet += [(g.frames, g.request.prompt) for g in samples[:shown]]
        return samples

    def _copies(self, generated: list[Generated]) -> dict[str, Any]:
        """Of the commonest size among the samples, how many are nearer to a training sample than real ones are."""
        grid, _ = Counter(g.request.latent_grid for g in generated).most_common(1)[0]
        ours = torch.stack([g.latent for g in generated if g.request.latent_grid == grid])
        train, held_out = (
            torch.stack([self.pipe.statistics.to_model(x, self.pipe.sigma_data) for x in found])
            if len(found)
            else found
            for found in (
                reference.stored_latents(self.args.dataset, split, grid, MOST_STORED)
                for split in ("train", self.args.split)
            )
        )
        if min(len(train), len(held_out)) < 2:
            return {}
        sets = [x.flatten(1).numpy() for x in (ours.float().cpu(), held_out, train)]
        found = {"share": diversity.memorised(*sets), "samples": len(ours)}
        return {"memorised": {**found, "training_samples": len(train), "held_out": len(held_out)}}

    def _score(self, kind: str, videos: list[np.ndarray], wanted: list[dict[str, str]]) -> dict[str, Any]:
        real, sure = self._renders(kind, max(map(len, videos))), stored_thresholds(kind)
        return score(videos, wanted, self.classifier, sure) | {"real_renders": real.shares(self.classifier, sure)}

    @functools.cache  # noqa: B019  (one evaluation a process)
    def _renders(self, kind: str, frames: int) -> Renders:
        through = lambda v: self.pipe.decode(self.pipe.encode_pixels(v))  # noqa: E731
        return Renders(through, kind, self.args.size_px, frames, self.args.part, REAL_SEED)


@dataclass(frozen=True)
class Measured:
    """What an evaluation found.

    values : by kind (`images`, `clips`), as `dfm evaluate --output` writes it.
    samples : some of the generated ones, uint8 [T, H, W, 3], with their captions.
    """

    values: dict[str, Any]
    samples: Sequence[tuple[np.ndarray, str]]

    @property
    def table(self) -> pd.DataFrame:
        """A row for each kind and measure, with its 95 % interval (`low`, `high`); see `evaluation.table.rows`."""
        import pandas as pd

        return pd.DataFrame(rows(self.values))

    def contact_sheet(self) -> np.ndarray:
        """uint8 [H, W, 3]."""
        pictures, captions = zip(*self.samples)
        return video.contact_sheet(pictures, captions, columns=8)

    def __str__(self) -> str:
        """Markdown."""
        return table(self.values)

    __repr__ = _repr_markdown_ = __str__


def evaluate_model(checkpoint_path: str | os.PathLike, **flags: Any) -> Measured:
    """Measure a checkpoint against captions and real samples.

    Parameters
    ----------
    checkpoint_path : a run folder, an `iter_*` folder or an exported file.
    **flags : the other flags of `dfm evaluate` with underscores (`dataset`, `split`, `num_prompts`, `num_clips`,
        `num_steps`, `guidance`, `output`, `contact_sheet`, ...).

    Raises
    ------
    ValueError, FileNotFoundError : one sentence with what must hold and how to mend it.

    >>> evaluate_model("runs/pretrain", num_prompts=16, num_clips=0).table  # doctest: +SKIP
    """
    p = parser()
    return measure(p.read(p.words({"checkpoint_path": checkpoint_path, **flags})))


@quietly()
def measure(args: argparse.Namespace) -> Measured:
    """What the command line asks for; writes the files that it names."""
    ema = None if args.ema == "none" else args.ema if args.ema == "auto" else float(args.ema)
    network = features.Features(parallel.device()) if args.dataset else None
    pipe = Pipeline.from_checkpoint(
        args.checkpoint_path,
        ema,
        tokenizer_path=args.tokenizer_path,
        text_encoder_path=args.text_encoder_path,
        guide=args.autoguidance_checkpoint,
        mixed_precision=args.mixed_precision,
    )
    vars(args).update(pipe.recommended | {n: v for n, v in _shared(args).items() if n in HOW})
    run = Evaluation(args, pipe)
    if network is None:
        run.unseen()
    else:
        run.against(network)
    found = Measured(run.result, run.sheet)
    if args.contact_sheet:
        video.write_png(args.contact_sheet, found.contact_sheet())
    if args.output:
        write_atomically(Path(args.output), json.dumps(found.values, indent=1).encode())
    return found


def main(argv: list[str] | None = None) -> int:
    print(measure(parse(argv)))
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
