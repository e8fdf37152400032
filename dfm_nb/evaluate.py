"""`dfm evaluate`: does a checkpoint draw what its captions say, and does it look like the data?

Enters: a checkpoint and, for distances, `--dataset` (a prepared folder, or a source as `dfm prepare` takes it).
Leaves: a table and JSON with, each with its 95 % interval,
- the share of samples in which a classifier finds the asked colour, background and pattern (Wilson), beside the same share of real renders, as
  they are and through the tokenizer: what the classifier, and what a perfect model could reach;
- with `--dataset`: Frechet distance (FID) and kernel distance (KID) of the samples drawn from its captions to other real samples, beside the
  same distance between two sets of real samples (what a perfect model would get); for clips of their middle frames (bootstrap);
- for clips the temporal consistency (`frechet.temporal_consistency`) and the wing motion, beside those of real clips.
Guarantees: without `--dataset` the prompts are attribute combinations that training on the synthetic set never showed; with it they are the
captions of its samples. The same flags give the same figures.
Cost: one generation of `--num-prompts` images and `--num-clips` clips; 200 real images and 100 real clips, which are drawn, encoded and decoded for the
classifier (some ten seconds); a twentieth of a second a frame for the features.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dfm_nb import parallel
from dfm_nb.base import video
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.files import write_atomically
from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation import features, frechet, reference
from dfm_nb.evaluation.judge import AttributeClassifier, chance, wing_motion
from dfm_nb.evaluation.reference import Real
from dfm_nb.generate import Request
from dfm_nb.generation.pipeline import Pipeline

FPS = 12.0
MEASURED = ("colour", "background", "pattern")
REAL_RENDERS = {"images": 200, "clips": 100}


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a share."""
    p, n = successes / trials, trials
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def real_accuracy(
    classifier: AttributeClassifier,
    round_trip: Callable[[np.ndarray], np.ndarray],
    kind: str,
    count: int,
    size_px: int,
    frames: int,
    seed: int,
) -> dict[str, dict]:
    """The classifier on `count` fresh real "images" or "clips" of at most `frames`: `as_drawn`, and `decoded` by a tokenizer, as of a perfect model.

    round_trip : a video uint8 [T, H, W, 3] through the tokenizer, encoded and decoded.
    """
    counts = {"num_images": 0, "num_clips": 0, f"num_{kind}": count}
    source = synthetic.build(size_px=size_px, seed=seed, square=True, **counts)
    real = [next(source.read(i)) for i in range(len(source))]
    attributes = [c.attributes for c in real]
    videos = [c.video[:frames] for c in real]
    decoded = [round_trip(v) for v in tqdm(videos, desc=f"real {kind}", leave=False, disable=None)]
    return {"as_drawn": classifier.accuracy(videos, attributes), "decoded": classifier.accuracy(decoded, attributes)}


# ---- prompts --------------------------------------------------------------------------------------------------------


def unseen_attributes(count: int, motion: str) -> list[dict[str, str]]:
    """`count` distinct attribute sets whose (colour, pattern, background) training never showed."""
    triples, out = synthetic.unseen_combinations(), []
    most = len(triples) * len(synthetic.SPECIES)
    if not 0 < count <= most:
        raise ValueError(
            f"there are {most} unseen combinations to draw; got {count}; use --num-prompts {most} or fewer"
        )
    for i in range(count):
        turn, place = divmod(i, len(triples))
        species = synthetic.SPECIES[(place + turn) % len(synthetic.SPECIES)]  # another one in every turn
        posture = synthetic.POSTURES[(i // 3 + turn) % len(synthetic.POSTURES)]
        out.append({**triples[place], "species": species, "posture": posture, "motion": motion})
    return out


def _settings(args) -> dict:
    """What all requests share."""
    return {
        "seed": args.seed,
        "num_steps": args.num_steps,
        "guidance": args.guidance,
        "sampler": args.sampler,
        "schedule": args.schedule,
        "negative_prompt": args.negative_prompt,
        "guidance_interval": tuple(args.guidance_interval) if args.guidance_interval else None,
        "autoguidance": args.autoguidance,
    }


def requests(count: int, frames: int, args) -> tuple[list[Request], list[dict[str, str]]]:
    """Unseen combinations as prompts, and what they ask for."""
    combinations = unseen_attributes(count, "still" if frames == 1 else "flapping")
    size = {"height": args.size_px, "width": args.size_px, "num_video_frames": frames, "fps": FPS}
    drawn = [
        Request(prompt=synthetic.caption_for(c, template=i), index=i, **size, **_settings(args))
        for i, c in enumerate(combinations)
    ]
    return drawn, combinations


def requests_like(reals: list[Real], args) -> list[Request]:
    """The captions of real samples, at their sizes, lengths and frame rates."""
    return [
        Request(
            prompt=r.caption,
            index=i,
            height=r.frames.shape[1],
            width=r.frames.shape[2],
            num_video_frames=len(r.frames),
            fps=r.fps,
            **_settings(args),
        )
        for i, r in enumerate(reals)
    ]


# ---- measures -------------------------------------------------------------------------------------------------------


def score(videos: list[np.ndarray], wanted: list[dict[str, str]], classifier: AttributeClassifier) -> dict:
    """Share, interval, chance and what was found for each value asked, per attribute; mean wing motion of clips."""
    found, at_random, n = classifier.predict(videos), chance(), len(videos)
    out: dict = {"samples": n}
    for name in MEASURED:
        by_value: dict[str, dict[str, int]] = {}
        for (asked, saw), count in sorted(Counter((w[name], f[name]) for f, w in zip(found, wanted)).items()):
            by_value.setdefault(asked, {})[saw] = count
        hits = sum(saw.get(asked, 0) for asked, saw in by_value.items())
        low, high = wilson(hits, n)
        out[name] = {"accuracy": hits / n, "low": low, "high": high, "chance": at_random[name], "found": by_value}
    if len(videos[0]) > 1:
        motions = [wing_motion(v) for v in videos]
        real = [
            wing_motion(synthetic.render(w, i, *videos[0].shape[1:3], len(videos[0])))
            for i, w in enumerate(wanted[:16])
        ]
        out["wing_motion"] = {"mean": float(np.mean(motions)), "real_clips": float(np.mean(real))}
    return out


def _frames_features(videos: list[np.ndarray], network: features.FeatureNetwork) -> list[np.ndarray]:
    """[T, D] of each video."""
    return [network(v) for v in videos]


def distances(
    drawn: list[np.ndarray], asked: list[np.ndarray], others: list[np.ndarray], network: features.FeatureNetwork
) -> dict:
    """FID and KID of samples to `others`, and of the real samples whose captions were drawn to the same `others`.

    Parameters
    ----------
    drawn, asked, others : videos uint8 [T, H, W, 3]; `asked` and `others` are disjoint and real.
    """
    per_clip = [_frames_features(videos, network) for videos in (drawn, asked, others)]
    ours, same, other = (np.stack([f[len(f) // 2] for f in videos]) for videos in per_clip)
    out: dict = {"samples": len(ours), "real_samples": len(other), "network": network.name}
    out["frechet_distance"] = frechet.frechet_estimate(ours, other).record()
    out["frechet_distance_real"] = frechet.frechet_distance(same, other)
    out["kernel_distance"] = frechet.kernel_estimate(ours, other).record()
    out["kernel_distance_real"] = frechet.kernel_distance(same, other)
    if min(map(len, drawn)) > 1:
        ours_t, same_t = ([frechet.temporal_consistency(f) for f in videos] for videos in per_clip[:2])
        out["temporal_consistency"] = frechet.mean_estimate(np.array(ours_t)).record()
        out["temporal_consistency_real"] = float(np.mean(same_t))
    return out


# ---- the command ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None):
    p = ArgumentParser(prog="dfm evaluate", description="Measure a checkpoint against captions and real samples.")
    p.add_argument("--checkpoint-path", "--checkpoint", dest="checkpoint_path", required=True)
    p.add_argument(
        "--dataset",
        "--dataset-path",
        dest="dataset",
        help="prepared folder or NAME[:SPEC] of a source; its captions are drawn, and distances measured",
    )
    p.add_argument("--split", default="val", help="of a prepared folder: train, val or test")
    p.add_argument("--features", default="efficientnet_lite0", help=f"of {', '.join(features.NETWORKS)}")
    p.add_argument("--features-path", help="file, folder or hub id of the feature network's weights")
    p.add_argument("--num-prompts", type=int, default=64, help="images")
    p.add_argument("--num-clips", type=int, default=16, help="clips of 9 frames, drawn as well; 0 for none")
    p.add_argument("--max-frames", type=int, default=9, help="clips of --dataset are cut to this many frames")
    p.add_argument("--size-px", type=int, default=64, help="side of what is drawn; short side of a source's samples")
    p.add_argument("--num-steps", type=int, default=18)
    p.add_argument("--guidance", type=float, default=2.0)
    p.add_argument("--guidance-interval", type=float, nargs=2, metavar=("LOW", "HIGH"))
    p.add_argument("--negative-prompt", default="")
    p.add_argument("--autoguidance-checkpoint", help="and the next: as in dfm generate")
    p.add_argument("--autoguidance", type=float, metavar="W")
    p.add_argument("--sampler", default="heun", help="and the next: as in dfm generate")
    p.add_argument("--schedule", default="karras")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--ema", default="auto", help="auto, none or a stored length")
    p.add_argument("--mixed-precision", choices=("bf16", "fp32"), help="arithmetic; by default that of the training")
    p.add_argument("--tokenizer-path", help="tokenizer file or folder")
    p.add_argument("--text-encoder-path", help="text encoder folder")
    p.add_argument("--output", help="JSON file")
    p.add_argument("--contact-sheet", help="PNG file")
    return p.parse_args(argv)


class Evaluation:
    """One run of the command: what was measured so far, and some samples for the contact sheet."""

    def __init__(self, args, pipe: Pipeline):
        self.args, self.pipe = args, pipe
        self.result: dict = {}
        self.sheet: list[tuple[np.ndarray, str]] = []

    @functools.cached_property
    def classifier(self) -> AttributeClassifier:
        return AttributeClassifier.load()

    def _score(self, kind: str, videos: list[np.ndarray], wanted: list[dict[str, str]]) -> dict:
        longest = max(map(len, videos))
        real = real_accuracy(
            self.classifier,
            lambda v: self.pipe.decode(self.pipe.encode_pixels(v)),
            kind,
            REAL_RENDERS[kind],
            self.args.size_px,
            longest,
            seed=987_654,
        )
        return score(videos, wanted, self.classifier) | {"real_renders": real}

    def _draw(self, drawn: list[Request]) -> list[np.ndarray]:
        done = dict(self.pipe.run(drawn, batch_size=32, progress=True))
        videos = [done[i].frames for i in range(len(drawn))]
        many = 24 if drawn[0].num_video_frames == 1 else 6
        self.sheet += list(zip(videos, (r.prompt for r in drawn)))[:many]
        return videos

    def unseen(self) -> None:
        """Attribute combinations that training never showed."""
        for kind, count, frames in (("images", self.args.num_prompts, 1), ("clips", self.args.num_clips, 9)):
            if count:
                drawn, wanted = requests(count, frames, self.args)
                self.result[kind] = self._score(kind, self._draw(drawn), wanted)

    def against(self, network: features.FeatureNetwork) -> None:
        """The captions of `--dataset`, and distances to its samples."""
        args, pipe = self.args, self.pipe
        opened = reference.open_reference(
            args.dataset, args.split, pipe.decode_stored, pipe.manifest["tokenizer"], args.size_px
        )
        images, clips, failed = reference.draw(
            opened, 2 * args.num_prompts, 2 * args.num_clips, args.max_frames, args.seed
        )
        self.result["dataset"] = {"name": args.dataset, "split": args.split, "unreadable": failed}
        for kind, found, flag in (("images", images, "--num-prompts"), ("clips", clips, "--num-clips")):
            if not found:
                continue
            if len(found) < 4:
                raise ValueError(f"{args.dataset} has {len(found)} {kind}; distances need 4 or more; set {flag} 0")
            asked, others = found[: len(found) // 2], found[len(found) // 2 :]
            videos = self._draw(requests_like(asked, args))
            attributes = [r.attributes for r in asked]
            measured = {"samples": len(videos)}
            if all(set(MEASURED) <= set(a) for a in attributes):
                measured |= self._score(kind, videos, attributes)
            measured |= distances(videos, [r.frames for r in asked], [r.frames for r in others], network)
            self.result[kind] = measured
        if not images and not clips:
            raise ValueError(f"{args.dataset} has none of the samples asked for; raise --num-prompts or --num-clips")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    ema = None if args.ema == "none" else args.ema if args.ema == "auto" else float(args.ema)
    network = features.build(args.features, args.features_path, parallel.device()) if args.dataset else None
    pipe = Pipeline.from_checkpoint(
        args.checkpoint_path,
        ema,
        tokenizer_path=args.tokenizer_path,
        text_encoder_path=args.text_encoder_path,
        guide=args.autoguidance_checkpoint,
        mixed_precision=args.mixed_precision,
    )
    run = Evaluation(args, pipe)
    if network is None:
        run.unseen()
    else:
        run.against(network)
    if args.contact_sheet:
        pictures, captions = zip(*run.sheet)
        video.write_png(args.contact_sheet, video.contact_sheet(list(pictures), list(captions), columns=8))
    if args.output:
        write_atomically(Path(args.output), json.dumps(run.result, indent=1).encode())
    print(table(run.result))
    parallel.shutdown()
    return 0


def table(result: dict) -> str:
    """Markdown: what was found against what was asked, and distances."""
    kinds = [k for k in ("images", "clips") if k in result]
    lines: list[str] = []
    if any(_attributes(result[k]) for k in kinds):
        lines += _attribute_rows(result, kinds)
        if by_value := _value_lines(result, kinds):
            lines += ["", *by_value]
    if any("frechet_distance" in result[k] for k in kinds):
        lines += ["", *_distance_rows(result, kinds)]
    if "wing_motion" in result.get("clips", {}):
        m = result["clips"]["wing_motion"]
        lines.append(f"\nWing motion of the clips: {m['mean']:.3f} (real clips: {m['real_clips']:.3f}; a still: 0).")
    return "\n".join(lines)


def _attributes(of_kind: dict) -> list[str]:
    """Those that were measured on images or on clips."""
    return [name for name in MEASURED if name in of_kind]


def _attribute_rows(result: dict, kinds: list[str]) -> list[str]:
    lines = [
        "| what | attribute | found as asked | 95 % interval | chance | real renders | real renders through the tokenizer |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        for name in _attributes(result[kind]):
            r, real = result[kind][name], result[kind]["real_renders"]
            lines.append(
                f"| {result[kind]['samples']} {kind} | {name} | {r['accuracy']:.1%} | {r['low']:.1%} - {r['high']:.1%} "
                f"| {r['chance']:.1%} | {real['as_drawn'][name]:.1%} | {real['decoded'][name]:.1%} |"
            )
    return lines


def _value_lines(result: dict, kinds: list[str]) -> list[str]:
    """A sentence for every attribute that was not always found: how often, by the value asked for."""
    lines = []
    for kind in kinds:
        for name in _attributes(result[kind]):
            found = result[kind][name].get("found")  # not in files of earlier versions
            if found and result[kind][name]["accuracy"] < 1:
                parts = (f"{asked} {saw.get(asked, 0)} of {sum(saw.values())}" for asked, saw in found.items())
                lines.append(f"{kind.capitalize()}, {name} by what was asked: {', '.join(parts)}.")
    return lines


def _distance_rows(result: dict, kinds: list[str]) -> list[str]:
    lines = ["| what | measure | samples against real | 95 % interval | real against real |", "|---|---|---|---|---|"]
    rows = (
        ("frechet_distance", "Frechet distance", 1, ".1f"),
        ("kernel_distance", "kernel distance x 1000", 1000, ".1f"),
        ("temporal_consistency", "temporal consistency", 1, ".4f"),
    )
    for kind in kinds:
        r = result[kind]
        for key, title, factor, form in rows:
            if key in r:
                value, low, high = (format(r[key][k] * factor, form) for k in ("value", "low", "high"))
                real = format(r[key + "_real"] * factor, form)
                what = f"{r['samples']} {kind} ({r['network']})"
                lines.append(f"| {what} | {title} | {value} | {low} - {high} | {real} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(guard(main))
