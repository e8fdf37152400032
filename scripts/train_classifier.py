"""Train the classifier of five attributes of butterflies (`butterflies.judge`), and measure it.

    python scripts/train_classifier.py                 # and its thresholds
    python scripts/train_classifier.py --thresholds    # only the thresholds, of the existing classifier

It is trained on stills, and on random frames of wing beats whose probabilities are multiplied, so that it learns to
abstain on a frame without information, such as closed wings. Most samples are degraded as by a small tokenizer: a noisy
linear code of blocks of 8 x 8 pixels and, after the first frame, of 4 frames; blur, contrast, tint, grain. It never
sees the output of a model or a tokenizer.

The result is deterministic for a number of threads. It takes 19 minutes on one core of a shared machine.
"""

import argparse
import functools
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from dfm_nb.butterflies import synthetic
from dfm_nb.butterflies.exam import (
    FRAMES,
    MEASURED,
    MOTION,
    THRESHOLDS,
    Attributes,
    Renders,
    Sure,
    Videos,
    shares,
    stored_thresholds,
)
from dfm_nb.butterflies.judge import ASSET, HEADS, AttributeClassifier, Net, product, to_input
from dfm_nb.data.encoding import to_frames, to_pixels
from dfm_nb.offline import residual

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "attribute_classifier.json"
SIZES_PX = {64: 0.7, 96: 0.15, 128: 0.15}
GROUPS = ((0, 1), (1, 5), (5, 9))  # frames that a causal tokenizer encodes together
MOST_FRAMES = 5  # frames of a clip in a batch
UNSURE_SHARE = 0.02  # share of the real renders through the tokenizer that fall below a threshold
WORN = 0.6  # share of the samples that go through the block code
SETTINGS = {"stills": 10000, "clips": 4000, "epochs": 9, "seed": 0}
HELD_OUT = 400  # stills and clips to measure with
SURE_RENDERS = 2000  # stills and clips that give thresholds
SURE_SEED = 12_000_000
RATE = 6e-3
BATCH = 48


def draw(count: int, frames: int, seed: int) -> tuple[Tensor, Tensor]:
    """uint8 [count, frames, 3, 64, 64] of random combinations, seen and unseen, and their labels [count, 5]."""
    rng = np.random.default_rng([seed, count, frames])
    pictures, labels = [], []
    for _ in tqdm(range(count), desc=f"render samples of {frames} frame(s)", disable=None):
        chosen = [int(rng.integers(len(values))) for values in HEADS.values()]
        attributes = {name: values[i] for (name, values), i in zip(HEADS.items(), chosen)}
        size = int(rng.choice(list(SIZES_PX), p=list(SIZES_PX.values())))
        video = synthetic.render(attributes, int(rng.integers(2**63)), *synthetic.image_size(rng, size), frames)
        pictures.append(((to_input(video) + 1) * 127.5).round().byte())
        labels.append(chosen)
    return torch.stack(pictures), torch.tensor(labels)


def _dct(n: int) -> Tensor:
    """Orthonormal DCT-II matrix [n, n]."""
    k, x = torch.arange(n)[:, None], torch.arange(n)[None]
    m = torch.cos(torch.pi * (2 * x + 1) * k / (2 * n)) * (2 / n) ** 0.5
    m[0] /= 2**0.5
    return m


def compress_blocks(x: Tensor, keep: int, keep_frames: int | None) -> Tensor:
    """A linear autoencoder of [T, 3, H, W]: the lowest `keep` x `keep` DCT coefficients of each 8 x 8 block.

    keep_frames : number of coefficients along T.
    """
    t, c, h, w = x.shape
    m = _dct(8)[:keep].to(x)
    low = m.T @ m  # projection of a block's columns
    blocks = x.reshape(t, c, h // 8, 8, w // 8, 8).permute(0, 1, 2, 4, 3, 5)
    x = (low @ blocks @ low).permute(0, 1, 2, 4, 3, 5).reshape(t, c, h, w)
    if keep_frames is not None:
        m = _dct(t)[:keep_frames].to(x)
        x = torch.einsum("st,tchw->schw", m.T @ m, x)
    return x


def coded(x: Tensor, generator: torch.Generator) -> Tensor:
    """A still or a clip [T, 3, 64, 64] after a noisy block code of random strength."""
    out = []
    for start, stop in GROUPS[: 1 if len(x) == 1 else None]:
        group = x[start:stop]
        keep, keep_frames = (int(torch.randint(a, b, (1,), generator=generator)) for a, b in ((3, 7), (1, 3)))
        noise = 0.3 * torch.rand((), generator=generator) * torch.randn(group.shape, generator=generator)
        out.append(compress_blocks(group + noise, keep, keep_frames if len(group) > 1 else None))
    return torch.cat(out)


def worn(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Frames [N, 3, 64, 64], half of them mirrored, a quarter blurred, all with some contrast, tint and grain.

    Returns the frames, and bool [N]: which are mirrored.
    """
    chance = torch.rand(2, len(x), 1, 1, 1, generator=generator)
    x = torch.where(chance[0] < 0.5, x.flip(3), x)
    x = torch.where(chance[1] < 0.25, F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1), x)
    gain = 1 + 0.1 * torch.randn(len(x), 1, 1, 1, generator=generator)
    tint = 0.05 * torch.randn(len(x), 3, 1, 1, generator=generator)
    grain = 0.1 * torch.rand(len(x), 1, 1, 1, generator=generator) * torch.randn(x.shape, generator=generator)
    return (x * gain + tint + grain).clamp(-1, 1), chance[0].flatten() < 0.5


def batch_of(
    sets: list[tuple[Tensor, Tensor]], rows: list[Tensor], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Frames [N, 3, 64, 64], which are mirrored [N], the sample of each [N], labels [samples, 5], of those rows."""
    frames: list[Tensor] = []
    sample: list[int] = []
    labels: list[Tensor] = []
    for (pictures, names), chosen in zip(sets, rows):
        for i in chosen:
            x = pictures[i].float() / 127.5 - 1
            if torch.rand((), generator=generator) < WORN:
                x = coded(x, generator)
            if len(x) > 1:
                some = torch.randperm(len(x), generator=generator)
                x = x[some[: torch.randint(1, MOST_FRAMES + 1, (), generator=generator)]]
            sample += [len(labels)] * len(x)
            labels.append(names[i])
            frames.append(x)
    return *worn(torch.cat(frames), generator), torch.tensor(sample), torch.stack(labels)


def train(stills: int, clips: int, epochs: int, seed: int) -> Net:
    """A network trained on `stills` pictures and `clips` wing beats, mixed in every batch in that proportion."""
    torch.manual_seed(seed)
    net, generator = Net().train(), torch.Generator().manual_seed(seed)
    sets = [draw(stills, 1, seed), draw(clips, FRAMES["clips"], seed + 1)]
    steps = (stills + clips) // BATCH
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps * epochs)
    for _ in tqdm(range(epochs), desc="train", unit="epoch", disable=None):
        orders = [torch.randperm(len(x), generator=generator).tensor_split(steps) for x, _ in sets]
        for rows in zip(*orders):
            x, mirrored, sample, labels = batch_of(sets, list(rows), generator)
            said = product(net(x), sample, len(labels), mirrored)
            losses = [F.cross_entropy(z, labels[:, i], label_smoothing=0.02) for i, z in enumerate(said)]
            loss = sum(losses, torch.zeros(()))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    return net


_tokenizer = functools.cache(residual.build)


@torch.no_grad()
def round_trip(video: np.ndarray) -> np.ndarray:
    """uint8 [T, H, W, 3] through the `residual` tokenizer."""
    tokenizer = _tokenizer()
    return to_frames(tokenizer.decode(tokenizer.encode(to_pixels(video)[None]))[0])


def thresholds(classifier: AttributeClassifier, videos: Videos, wanted: Attributes) -> Sure:
    """The probability of the right value that 98 % of these reach, and the order statistics of its interval."""
    said = classifier.probabilities(videos)
    of_right = {name: np.sort([p[HEADS[name].index(w[name])] for p, w in zip(said[name], wanted)]) for name in MEASURED}
    below, n = UNSURE_SHARE * len(videos), len(videos)
    spread = 1.96 * math.sqrt(below * (1 - UNSURE_SHARE))
    ranks = {"low": below - spread, "value": below, "high": below + spread}
    return {k: {m: float(p[min(n - 1, max(0, round(r)))]) for m, p in of_right.items()} for k, r in ranks.items()}


def accuracy(classifier: AttributeClassifier, videos: Videos, wanted: Attributes) -> dict[str, float]:
    """Share of pictures whose likeliest name is right, per attribute, and for `all` together."""
    found = shares(classifier.probabilities(videos), wanted, stored_thresholds("images"))
    right = {name: found[name]["argmax"]["share"] for name in HEADS}
    return right | {"all": found["all five"]["argmax"]["share"]}


def store_thresholds(classifier: AttributeClassifier) -> None:
    """Write `thresholds.json`: from renders of any combination, through the tokenizer."""
    found = {}
    rng = np.random.default_rng(SURE_SEED)
    for kind, motion in MOTION.items():
        wanted = [{name: str(rng.choice(values)) for name, values in HEADS.items()} for _ in range(SURE_RENDERS)]
        bar = tqdm(enumerate(wanted), total=SURE_RENDERS, desc=f"thresholds of {kind}", disable=None)
        videos = [
            round_trip(synthetic.render(w | {"motion": motion}, SURE_SEED + i, 64, 64, FRAMES[kind])) for i, w in bar
        ]
        found[kind] = thresholds(classifier, videos, wanted)
    THRESHOLDS.write_text(json.dumps(found, indent=1) + "\n")


def measure(classifier: AttributeClassifier) -> dict[str, dict[str, float]]:
    """Accuracy on fresh stills and clips, as drawn and through the `residual` tokenizer."""
    out = {}
    for kind in MOTION:
        real = Renders(round_trip, kind, 64, "development", 31, HELD_OUT)
        for name, videos in (("as drawn", real.real["as_drawn"]), ("decoded", real.real["decoded"])):
            out[f"{kind} {name}"] = accuracy(classifier, videos[HELD_OUT:], real.wanted[HELD_OUT:])
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--thresholds", action="store_true", help="only the thresholds of the existing classifier")
    args = p.parse_args()
    if args.thresholds:
        return store_thresholds(AttributeClassifier.load())
    began = time.monotonic()
    classifier = AttributeClassifier(train(**SETTINGS), {**SETTINGS, "drawing": synthetic.DRAWING})
    seconds = round(time.monotonic() - began)
    classifier.save(ASSET)
    store_thresholds(classifier)
    result = {
        "settings": classifier.identity,
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "held_out": HELD_OUT,
        "accuracy": measure(classifier),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
