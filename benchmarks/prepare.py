"""Preparation: images a second and bytes a sample against one image at a time; peak memory by number of images.

    python benchmarks/prepare.py [--images 240] [--baseline-images 40] [--rounds 3] [--memory]

The baseline is what the reference describes: an image is opened, resized twice and encoded alone. Its caption is padded
to 512 tokens and encoded alone, the padded embedding is pickled, and a WebDataset writer appends the sample. Both use
the same tokenizer and text encoder, the same files and the same threads, interleaved in one process; loading the models
is not counted. Text sizes are also counted for a T5-11B-sized embedding (1,024 values a token; random weights, as only
the size matters). `--memory` instead runs whole preparations of 1,000 and 10,000 images.
Writes benchmarks/results/prepare.{json,md}.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import webdataset as wds
from PIL import Image

from benchmarks import report
from dfm_nb.butterflies import synthetic
from dfm_nb.data import shards
from dfm_nb.data.encoding import Encoders, Reading, encode_shards, to_pixels
from dfm_nb.data.shard_plan import ShardPlans
from dfm_nb.data.sources import folder as folder_source
from dfm_nb.data.text_encoders import minilm
from dfm_nb.data.tokenizers.pca import PCATokenizer

PAD = 512
T5_WIDTH = 1024


def make_files(place: Path, count: int, size_px: int) -> None:
    """JPEGs a quarter larger than the short side they will have, with captions."""
    for i in range(count):
        (clip,) = synthetic.build(num_images=count, num_clips=0, size_px=-(-size_px * 5 // 4 // 16) * 16).read(i)
        Image.fromarray(clip.video[0]).save(place / f"{i:05d}.jpg", quality=92)
        (place / f"{i:05d}.txt").write_text(clip.caption)


@torch.no_grad()
def one_at_a_time(files: list[Path], out: Path, tokenizer, encoder, size_px: int) -> None:
    with wds.ShardWriter(str(out / "base-%06d.tar"), maxcount=10_000, verbose=0) as writer:
        for path in files:
            image = Image.open(path).convert("RGB")
            scale = size_px / min(image.size)
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
            image = image.resize((image.width // 16 * 16, image.height // 16 * 16), Image.Resampling.BICUBIC)
            latent = tokenizer.encode(to_pixels(np.array(image)[None])[None]).bfloat16()
            tokens = encoder.tokenizer(
                [path.with_suffix(".txt").read_text()],
                padding="max_length",
                max_length=PAD,
                truncation=True,
                return_tensors="pt",
            )
            text = encoder.model(**tokens).last_hidden_state
            text = (text * tokens["attention_mask"][..., None]).bfloat16()
            meta = {"image_height": image.height, "image_width": image.width}
            writer.write({"__key__": path.stem, "pth": latent, "pickle": pickle.dumps(text), "json": meta})


def ours(source, out: Path, tokenizer, encoder, size_px: int, pad: int | None = None) -> None:
    (out / shards.RECORDS).mkdir()
    plans = ShardPlans(map(source.item_key, range(len(source))), 0.0, 0.0).share(0, 1)
    encoders = Encoders(tokenizer, encoder, pad_text_tokens=pad)
    encode_shards(plans, Reading(source, size_px), encoders, out)


def bytes_of(out: Path, samples: int) -> float:
    return sum(t.stat().st_size for t in out.glob("*.tar")) / samples


class Wide:
    """As long as MiniLM's embeddings, as wide as T5-11B's."""

    def __init__(self, encoder):
        self.encoder = encoder

    def encode(self, captions):
        ids = self.encoder.tokenizer(captions)["input_ids"]
        return [torch.randn(len(i), T5_WIDTH).bfloat16() for i in ids]


def compare(size_px: int, args, encoder) -> dict:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "in").mkdir()
        make_files(root / "in", args.images, size_px)
        source = folder_source.build(str(root / "in"))
        files = [source.root / f for f in source.files][: args.baseline_images]
        tokenizer = PCATokenizer.fit(
            to_pixels(next(source.read(i)).video[:, : size_px // 8 * 8, : size_px // 8 * 8]) for i in range(40)
        )
        times: dict[str, list[float]] = {"ours": [], "baseline": []}
        for round_ in range(args.rounds):
            for name, work in (
                ("baseline", lambda o: one_at_a_time(files, o, tokenizer, encoder, size_px)),
                ("ours", lambda o: ours(source, o, tokenizer, encoder, size_px)),
            ):
                out = root / f"{name}{round_}"
                out.mkdir()
                started = time.perf_counter()
                work(out)
                times[name].append((time.perf_counter() - started) / (args.images if name == "ours" else len(files)))
        sizes = {"ours": bytes_of(root / "ours0", args.images), "baseline": bytes_of(root / "baseline0", len(files))}
        for name, pad in (("ours_t5", None), ("baseline_t5", PAD)):
            (root / name).mkdir()
            ours(source, root / name, tokenizer, Wide(encoder), size_px, pad)
            sizes[name] = bytes_of(root / name, args.images)
    speed = {k: 1 / statistics.median(v) for k, v in times.items()}
    return {
        "short_side_px": size_px,
        "images_per_s": speed,
        "faster": speed["ours"] / speed["baseline"],
        "seconds_per_image": times,
        "bytes_per_sample": sizes,
        "bytes_ratio_minilm": sizes["ours"] / sizes["baseline"],
        "bytes_ratio_t5": sizes["ours_t5"] / sizes["baseline_t5"],
    }


MEASURE = """
import resource, sys
from dfm_nb import prepare
prepare.main(sys.argv[1:])
print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_memory(images: int) -> dict:
    """Peak resident memory of one whole preparation, in MiB, and its wall time."""
    with tempfile.TemporaryDirectory() as place:
        flags = f"--source synthetic --num-images {images} --num-clips 0 --short-side 32 --output-dir {place}/d"
        started = time.monotonic()
        said, _ = report.of_process(["-c", MEASURE, *flags.split()])
        peak = int(said.rsplit("PEAK", 1)[1]) / 1024
    return {"images": images, "peak_mib": round(peak, 1), "wall_s": round(time.monotonic() - started, 1)}


def text(result: dict) -> str:
    head = ["short side", "ours", "one at a time, padded to 512", "faster"]
    head += ["bytes a sample, MiniLM", "ratio", "bytes a sample, T5-11B width", "ratio"]
    rows = []
    for r in result.get("sizes", []):
        s, b = r["images_per_s"], r["bytes_per_sample"]
        rates = [f"{s['ours']:.1f} images/s", f"{s['baseline']:.1f} images/s", f"{r['faster']:.1f}x"]
        minilm = [f"{b['ours']:,.0f} / {b['baseline']:,.0f}", f"{r['bytes_ratio_minilm']:.3f}"]
        t5 = [f"{b['ours_t5']:,.0f} / {b['baseline_t5']:,.0f}", f"{r['bytes_ratio_t5']:.3f}"]
        rows.append([f"{r['short_side_px']} px", *rates, *minilm, *t5])
    said = f"{report.sentence(result['machine'])}.\n\n{report.table(head, rows)}"
    if result.get("memory"):
        rows = [[f"{m['images']:,}", f"{m['peak_mib']:,.0f} MiB", f"{m['wall_s']:.0f} s"] for m in result["memory"]]
        said += "\n\n" + report.table(["images", "peak resident memory", "wall time"], rows)
    return said


def main() -> int:
    parser = report.arguments(__doc__, images=240, baseline_images=40, rounds=3)
    words = "only the memory of 1,000 and 10,000 images, added to the results there are"
    parser.add_argument("--memory", action="store_true", help=words)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    file, about = args.output_dir / "prepare.json", report.machine()
    result: dict = json.loads(file.read_text()) if file.exists() else {}
    result["machine"] = about
    if args.memory:
        result["memory"] = [peak_memory(n) for n in (1_000, 10_000)]
    else:
        encoder = minilm.build()
        result["sizes"] = [compare(px, args, encoder) for px in (64, 256, 512)]
    report.save("prepare", result, text(result), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
