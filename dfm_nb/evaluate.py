"""`dfm evaluate`: does a checkpoint draw what its captions say? Measured on the synthetic set's controlled attributes.

Enters: a checkpoint. Leaves: for unseen attribute combinations the share of samples in which a classifier, itself checked on real renders
first, finds the asked colour, background and pattern, each with its 95 % Wilson interval and chance level; for clips the wing motion.
Cost: one generation of `--num-prompts` samples; the classifier is fitted once and kept.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from dfm_nb import parallel, video
from dfm_nb.argv import ArgumentParser, guard
from dfm_nb.attributes import AttributeClassifier, chance, wing_motion
from dfm_nb.generate import Pipeline, Request
from dfm_nb.runs import write_atomically
from dfm_nb.sources import synthetic

FPS = 12.0
MEASURED = ("colour", "background", "pattern")


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % Wilson score interval of a share."""
    p, n = successes / trials, trials
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def load_classifier(cache: Path | None, size_px: int) -> AttributeClassifier:
    """Fitted on renders, or read from `cache`."""
    if cache is not None and cache.is_file():
        return AttributeClassifier.load(cache)
    classifier = AttributeClassifier().fit(seed=0, size_px=size_px)
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        classifier.save(cache)
    return classifier


def real_accuracy(classifier: AttributeClassifier, size_px: int, count: int = 200) -> dict[str, float]:
    """The classifier on fresh real renders: what it can find at best."""
    source = synthetic.build(num_images=count, num_clips=0, size_px=size_px, seed=987_654)
    clips = [next(source.read(i)) for i in range(count)]
    return classifier.accuracy([c.video for c in clips], [c.attributes for c in clips])


def unseen_attributes(count: int, motion: str) -> list[dict[str, str]]:
    """`count` distinct attribute sets whose (colour, pattern, background) training never showed."""
    triples, out = synthetic.unseen_combinations(), []
    most = len(triples) * len(synthetic.SPECIES)
    if not 0 < count <= most:
        raise ValueError(
            f"there are {most} unseen combinations to draw; got {count}; use --num-prompts {most} or fewer"
        )
    for i in range(count):
        turn = i // len(triples)
        species = synthetic.SPECIES[(i + turn) % len(synthetic.SPECIES)]
        posture = synthetic.POSTURES[(i // 3 + turn) % len(synthetic.POSTURES)]
        out.append({**triples[i % len(triples)], "species": species, "posture": posture, "motion": motion})
    return out


def requests(count: int, frames: int, args) -> tuple[list[Request], list[dict[str, str]]]:
    combinations = unseen_attributes(count, "still" if frames == 1 else "flapping")
    drawn = [
        Request(
            prompt=synthetic.caption_for(c, template=i), index=i, height=args.size_px, width=args.size_px, seed=args.seed,
            num_video_frames=frames, fps=FPS, num_steps=args.num_steps, guidance=args.guidance, sampler=args.sampler,
            negative_prompt=args.negative_prompt,
            guidance_interval=tuple(args.guidance_interval) if args.guidance_interval else None,
        )
        for i, c in enumerate(combinations)
    ]  # fmt: skip
    return drawn, combinations


def score(videos: list[np.ndarray], wanted: list[dict[str, str]], classifier: AttributeClassifier) -> dict:
    """Share, interval and chance per attribute; mean wing motion of clips."""
    found, at_random, n = classifier.predict(videos), chance(), len(videos)
    out: dict = {"samples": n}
    for name in MEASURED:
        hits = sum(f[name] == w[name] for f, w in zip(found, wanted))
        low, high = wilson(hits, n)
        out[name] = {"accuracy": hits / n, "low": low, "high": high, "chance": at_random[name]}
    if len(videos[0]) > 1:
        motions = [wing_motion(v) for v in videos]
        real = [
            wing_motion(synthetic.render(w, i, *videos[0].shape[1:3], len(videos[0])))
            for i, w in enumerate(wanted[:16])
        ]
        out["wing_motion"] = {"mean": float(np.mean(motions)), "real_clips": float(np.mean(real))}
    return out


def parse(argv: list[str] | None):
    p = ArgumentParser(prog="dfm evaluate", description="Measure a checkpoint against its captions (synthetic set).")
    p.add_argument("--checkpoint-path", required=True)
    p.add_argument("--num-prompts", type=int, default=64)
    p.add_argument("--num-clips", type=int, default=16, help="clips of 9 frames, drawn as well; 0 for none")
    p.add_argument("--size-px", type=int, default=64)
    p.add_argument("--num-steps", type=int, default=18)
    p.add_argument("--guidance", type=float, default=2.0)
    p.add_argument("--guidance-interval", type=float, nargs=2, metavar=("LOW", "HIGH"))
    p.add_argument("--negative-prompt", default="")
    p.add_argument("--sampler", default="heun")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--ema", default="auto", help="auto, none or a stored length")
    p.add_argument("--classifier-cache", help="file that keeps the fitted classifier")
    p.add_argument("--output", help="JSON file")
    p.add_argument("--contact-sheet", help="PNG file")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    ema = None if args.ema == "none" else args.ema if args.ema == "auto" else float(args.ema)
    pipe = Pipeline.from_checkpoint(args.checkpoint_path, ema)
    classifier = load_classifier(Path(args.classifier_cache) if args.classifier_cache else None, args.size_px)
    result: dict = {"classifier_on_real_renders": real_accuracy(classifier, args.size_px)}
    sheet: list[tuple[np.ndarray, str]] = []
    for kind, count, frames in (("images", args.num_prompts, 1), ("clips", args.num_clips, 9)):
        if not count:
            continue
        drawn, wanted = requests(count, frames, args)
        done = dict(pipe.run(drawn, batch_size=32, progress=True))
        videos = [done[i].frames for i in range(count)]
        result[kind] = score(videos, wanted, classifier)
        sheet += [(v, r.prompt) for v, r in zip(videos, drawn)][: 24 if frames == 1 else 6]
    if args.contact_sheet:
        video.write_png(
            args.contact_sheet, video.contact_sheet([v for v, _ in sheet], [c for _, c in sheet], columns=8)
        )
    if args.output:
        write_atomically(Path(args.output), json.dumps(result, indent=1).encode())
    print(table(result))
    parallel.shutdown()
    return 0


def table(result: dict) -> str:
    """Markdown: what was found against what was asked."""
    real = result["classifier_on_real_renders"]
    lines = [
        "| what | attribute | found as asked | 95 % interval | chance | classifier on real renders |",
        "|---|---|---|---|---|---|",
    ]
    for kind in ("images", "clips"):
        for name in MEASURED if kind in result else ():
            r = result[kind][name]
            lines.append(
                f"| {result[kind]['samples']} {kind} | {name} | {r['accuracy']:.1%} | {r['low']:.1%} - {r['high']:.1%} "
                f"| {r['chance']:.1%} | {real[name]:.1%} |"
            )
    if "wing_motion" in result.get("clips", {}):
        m = result["clips"]["wing_motion"]
        lines.append(f"\nWing motion of the clips: {m['mean']:.3f} (real clips: {m['real_clips']:.3f}; a still: 0).")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(guard(main))
