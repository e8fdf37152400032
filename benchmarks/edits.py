"""Edits of butterflies that training never showed: is the change made, and does the rest stay?

    python benchmarks/edits.py RUN --sheet edits.png

The same edits are asked for with their own picture, without one and with the next edit's picture. Real ones are the
edited scenes, drawn and through the tokenizer.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from dfm_nb import Pipeline
from dfm_nb.base import video
from dfm_nb.base.records import Clip
from dfm_nb.butterflies import synthetic
from dfm_nb.butterflies.attributes import MEASURED, shares, stored_thresholds
from dfm_nb.butterflies.judge import AttributeClassifier
from dfm_nb.generation.clip_files import write_given
from dfm_nb.generation.request import Request


def results(pipe: Pipeline, clips: list[Clip], folder: Path, **settings: float) -> dict[str, list[np.ndarray]]:
    """Videos by what was given."""
    own = [write_given(folder / clip.key, clip.given, clip.fps) for clip in clips]
    arms = {"its picture": own, "no picture": [()] * len(own), "another edit's picture": own[1:] + own[:1]}
    videos = {}
    for name, given in arms.items():
        how = settings if any(given) else settings | {"given_guidance": 1.0}
        asked = [Request(c.caption, i, given=g, fps=c.fps, **how) for i, (c, g) in enumerate(zip(clips, given))]
        done = dict(pipe.run(asked, progress=True))
        videos[name] = [done[i].frames for i in range(len(clips))]
    real = [clip.video for clip in clips]
    return videos | {
        "real, through the tokenizer": [pipe.round_trip(v) for v in real],
        "real": real,
        "real, of another edit": real[1:] + real[:1],
    }


def table(videos: dict[str, list[np.ndarray]], wanted: list[dict[str, str]]) -> str:
    """Confident shares with intervals, shares by argmax, and the mean share of each kept attribute."""
    judge, lines = AttributeClassifier.load(), list[str]()
    for name, some in videos.items():
        found = shares(judge, some, wanted, stored_thresholds("images"))
        cells = []
        for measure in ("change", "rest", "change and rest"):
            sure, argmax = found[measure]["sure"], found[measure]["argmax"]["share"]
            cells.append("{share:.0%} ({low:.0%} - {high:.0%})".format(**sure) + f", {argmax:.0%}")
        right = [[p[m] == w[m] for m in MEASURED if m != w["changed"]] for p, w in zip(judge.predict(some), wanted)]
        lines.append(f"| {name} | {' | '.join(cells)} | {np.mean(right):.0%} |")
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint")
    p.add_argument("--num-edits", type=int, default=200)
    p.add_argument("--seed", type=int, default=42, help="of the edits; training has 0, settings are chosen with others")
    p.add_argument("--guidance", type=float, default=2.0)
    p.add_argument("--given-guidance", type=float, default=1.0)
    p.add_argument("--sheet", help="PNG: given, result and real")
    args = p.parse_args()
    source = synthetic.build("edits,unseen,square", args.num_edits, 0, seed=args.seed)
    clips = [clip for i in range(len(source)) for clip in source.read(i)]
    pipe = Pipeline.from_checkpoint(args.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        how = dict(guidance=args.guidance, given_guidance=args.given_guidance)
        videos = results(pipe, clips, Path(folder), num_video_frames=1, height=64, width=64, **how)
    print(table(videos, [c.attributes for c in clips]))
    for changed in synthetic.EDITS:
        which = [i for i, c in enumerate(clips) if c.attributes["changed"] == changed]
        own = {f"its picture, {changed} of {len(which)}": [videos["its picture"][i] for i in which]}
        print(table(own, [clips[i].attributes for i in which]))
    if args.sheet:
        rows = [([c.given[0], v, c.video], c.caption) for c, v in zip(clips[:20], videos["its picture"])]
        video.write_png(Path(args.sheet), video.contact_sheet({"Given, result, real": rows}, columns=15))


if __name__ == "__main__":
    main()
