"""Reads colour, background and pattern off a picture, and measures wing motion: the judge of models on synthetic data.

Enters: uint8 [T, H, W, 3] of any size. Leaves: one dict of names per picture, or the share that matches what was asked.
Guarantees: fitted only on real renders (blurred, noised and block-compressed, as a small tokenizer's decoder leaves
them), never on a model's output; the same seed gives the same weights; a clip is judged by the mean over its frames,
and every picture together with its mirror image.
Cost: `fit` draws 7,200 pictures and trains about 20,000 weights, some thirty seconds on one core; `predict` is
under a millisecond a frame.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dfm_nb.sources import synthetic

HEADS: dict[str, tuple[str, ...]] = {
    "colour": synthetic.COLOURS,
    "background": synthetic.BACKGROUNDS,
    "pattern": synthetic.PATTERNS,
}
VERSION = 3  # of the pictures that `fit` draws and of how it trains; one of another version is fitted again
INPUT_PX = 64
MAX_FRAMES = 5  # of a clip that are looked at
_BEAT_FRAMES = 9  # of the clips that `fit` takes frames from: a beat, from open wings to nearly open ones


class _Net(nn.Module):
    """[N, 3, 64, 64] in [-1, 1] -> logits of all heads, concatenated [N, 16]."""

    CHANNELS = (3, 16, 32, 48)

    def __init__(self) -> None:
        super().__init__()
        pairs = list(zip(self.CHANNELS, self.CHANNELS[1:]))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False) for i, o in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o in pairs)
        self.head = nn.Linear(2 * sum(self.CHANNELS[2:]), sum(map(len, HEADS.values())))

    def forward(self, x: Tensor) -> Tensor:
        pooled = []
        for level, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            x = F.relu(norm(conv(x)))
            if level:  # spots are small: the second level sees them best
                pooled += [x.mean((2, 3)), x.amax((2, 3))]
        return self.head(torch.cat(pooled, 1))


def _fresh_net(seed: int) -> _Net:
    """Weights drawn from `seed`, the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _Net().eval()


def _to_input(frames: np.ndarray) -> Tensor:
    """uint8 [T, H, W, 3] -> float32 [T, 3, 64, 64] in [-1, 1]; long pictures are centre-cropped to 3:2 at most."""
    _, h, w, _ = frames.shape
    side = min(h, w) * 3 // 2
    top, left = max(0, (h - side) // 2), max(0, (w - side) // 2)
    frames = frames[:, top : top + side, left : left + side]
    size = (INPUT_PX, INPUT_PX)
    if frames.shape[1:3] != size:
        small = [Image.fromarray(np.ascontiguousarray(f)).resize(size, Image.Resampling.BOX) for f in frames]
        frames = np.stack([np.asarray(f) for f in small])
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 127.5 - 1


def _look(video: np.ndarray) -> np.ndarray:
    """At most `MAX_FRAMES` frames, evenly spaced."""
    return video[np.linspace(0, len(video) - 1, min(MAX_FRAMES, len(video))).round().astype(int)]


def _block_dct(n: int = 8) -> Tensor:
    """Orthonormal DCT-II matrix [n, n]."""
    k, x = torch.arange(n)[:, None], torch.arange(n)[None]
    m = torch.cos(torch.pi * (2 * x + 1) * k / (2 * n)) * (2 / n) ** 0.5
    m[0] /= 2**0.5
    return m


def compress_blocks(x: Tensor, keep: int) -> Tensor:
    """Keep the `keep` x `keep` lowest DCT coefficients of each 8 x 8 block of [N, 3, H, W], as a linear autoencoder."""
    n, c, h, w = x.shape
    m = _block_dct()[:keep].to(x)
    low = m.T @ m  # projection of a block's columns
    blocks = x.reshape(n, c, h // 8, 8, w // 8, 8).permute(0, 1, 2, 4, 3, 5)
    return (low @ blocks @ low).permute(0, 1, 2, 4, 3, 5).reshape(n, c, h, w)


def degrade(x: Tensor, generator: torch.Generator) -> Tensor:
    """Faults of decoded pictures on a shuffled batch [N, 3, 64, 64].

    A quarter stays sharp, a quarter is mirrored, a quarter block-compressed, a quarter mirrored and blurred; all get a
    little contrast, tint and noise. Mixed within the batch, so that batch statistics describe the whole mix.
    """
    quarter, keep = len(x) // 4, int(torch.randint(3, 6, (1,), generator=generator))
    sharp, mirrored, packed, soft = (
        x[:quarter],
        x[quarter : 2 * quarter],
        x[2 * quarter : 3 * quarter],
        x[3 * quarter :],
    )
    soft = F.avg_pool2d(F.pad(soft.flip(3), (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    x = torch.cat([sharp, mirrored.flip(3), compress_blocks(packed, keep), soft])
    gain = 1 + 0.1 * torch.randn(len(x), 1, 1, 1, generator=generator)
    tint = 0.05 * torch.randn(len(x), 3, 1, 1, generator=generator)
    grain = 0.1 * torch.rand(len(x), 1, 1, 1, generator=generator) * torch.randn(x.shape, generator=generator)
    return (x * gain + tint + grain).clamp(-1, 1)


class AttributeClassifier:
    """Names the colour, background and pattern of synthetic butterflies.

    Examples
    --------
    >>> judge = AttributeClassifier().fit()
    >>> judge.predict([frames])[0]
    {'colour': 'blue', 'background': 'sand', 'pattern': 'spots'}
    """

    def __init__(self) -> None:
        self.net = _fresh_net(0)
        self.fitted = False
        self.identity: dict = {}

    def fit(self, seed: int = 0, num_samples: int = 7200, size_px: int = 64, epochs: int = 6) -> AttributeClassifier:
        """Train on `num_samples` renders of all combinations, half of them frames of clips; returns self.

        Parameters
        ----------
        seed : of the pictures, the weights and the order; the same seed gives the same classifier.
        size_px : base size at which pictures are drawn.
        """
        generator = torch.Generator().manual_seed(seed)
        self.net = _fresh_net(seed).train()
        if num_samples < 64 or epochs < 1:
            raise ValueError(f"fit needs at least 64 samples and one epoch; got {num_samples} and {epochs}")
        batch = 64
        inputs, labels = _training_set(seed, num_samples, size_px)
        steps = epochs * (num_samples // batch)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=6e-3, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
        for step in range(steps):
            if step % (num_samples // batch) == 0:
                order = torch.randperm(num_samples, generator=generator)
            rows = order[step * batch % (num_samples - num_samples % batch) :][:batch]
            logits = self.net(degrade(inputs[rows], generator)).split([len(v) for v in HEADS.values()], 1)
            loss = sum(F.cross_entropy(z, labels[rows, i], label_smoothing=0.02) for i, z in enumerate(logits))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        self.net.eval()
        self.fitted = True
        self.identity = {"seed": seed, "num_samples": num_samples, "size_px": size_px, "drawing": synthetic.DRAWING,
                         "version": VERSION}  # fmt: skip
        return self

    @torch.inference_mode()
    def predict(self, videos: Sequence[np.ndarray]) -> list[dict[str, str]]:
        """Colour, background and pattern of each uint8 [T, H, W, 3]."""
        if not self.fitted:
            raise ValueError("the attribute classifier must be fitted or loaded before it judges; call fit() or load()")
        out = []
        for video in videos:
            if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3:
                raise ValueError(f"a video must be uint8 [T, H, W, 3]; got {video.dtype} {list(video.shape)}")
            x = _to_input(_look(video))
            logits = self.net(torch.cat([x, x.flip(3)])).split([len(v) for v in HEADS.values()], 1)
            best = [int(z.log_softmax(1).mean(0).argmax()) for z in logits]
            out.append({name: values[i] for (name, values), i in zip(HEADS.items(), best)})
        return out

    def accuracy(self, videos: Sequence[np.ndarray], attributes: Sequence[dict[str, str]]) -> dict[str, float]:
        """Share of pictures whose attribute is the one given, per attribute, and `all` for the three at once."""
        if not len(videos) or len(videos) != len(attributes):
            raise ValueError(f"give one attribute dict per video; got {len(attributes)} and {len(videos)} videos")
        right = np.array([[p[n] == a[n] for n in HEADS] for p, a in zip(self.predict(videos), attributes)])
        return {n: float(right[:, i].mean()) for i, n in enumerate(HEADS)} | {"all": float(right.all(1).mean())}

    def save(self, path: str | Path) -> None:
        """Write the weights as safetensors, with the names they stand for."""
        meta = {"heads": json.dumps(HEADS), "identity": json.dumps(self.identity)}
        save_file(self.net.state_dict(), str(path), metadata=meta)

    @classmethod
    def load(cls, path: str | Path) -> AttributeClassifier:
        """Read what `save` wrote; ValueError when it is not that, or was made for other attributes."""
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} does not exist; fit() and save() an attribute classifier first")
        try:
            with safe_open(str(path), "pt") as file:
                meta, state = file.metadata() or {}, {k: file.get_tensor(k) for k in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file ({error})") from None
        if meta.get("heads") != json.dumps(HEADS):
            raise ValueError(f"{path} was fitted for other attributes; fit it again")
        judge = cls()
        judge.net.load_state_dict(state)
        judge.fitted, judge.identity = True, json.loads(meta["identity"])
        return judge


def chance() -> dict[str, float]:
    """Accuracy of guessing, per attribute and for all three at once."""
    each = {name: 1 / len(values) for name, values in HEADS.items()}
    return each | {"all": float(np.prod(list(each.values())))}


def _training_set(seed: int, num_samples: int, size_px: int) -> tuple[Tensor, Tensor]:
    """Inputs [N, 3, 64, 64] and labels [N, 3] of all combinations; every second is a frame out of a wing beat."""
    rng = np.random.default_rng([seed, num_samples, size_px])
    inputs, labels = [], []
    for i in range(num_samples):
        chosen = {name: int(rng.integers(len(values))) for name, values in HEADS.items()}
        attributes = {name: HEADS[name][k] for name, k in chosen.items()}
        attributes["species"] = synthetic.SPECIES[rng.integers(len(synthetic.SPECIES))]
        attributes["posture"] = synthetic.POSTURES[rng.integers(len(synthetic.POSTURES))]
        height, width = synthetic.image_size(rng, size_px)
        frames = _BEAT_FRAMES if i % 2 else 1
        only = int(rng.integers(frames))
        inputs.append(_to_input(synthetic.render(attributes, int(rng.integers(2**63)), height, width, frames, only)))
        labels.append(list(chosen.values()))
    return torch.cat(inputs), torch.tensor(labels)


def wing_motion(video: np.ndarray) -> float:
    """How much a clip moves: mean absolute change from frame to frame, over how much the picture varies in space.

    0 for a still or a frozen clip; a wing beat gives 0.09 to 0.35. uint8 [T, H, W, 3] in.
    """
    if len(video) < 2:
        return 0.0
    x = torch.cat([_to_input(f[None]) for f in video])
    x = F.avg_pool2d(x, 8)  # noise and block edges are not motion
    change = (x[1:] - x[:-1]).abs().mean()
    spread = (x - x.mean((2, 3), keepdim=True)).abs().mean()
    return float(change / spread.clamp_min(1e-3))
