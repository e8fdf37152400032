"""Classifies five attributes of a picture, and measures wing motion: the judge of models on synthetic data.

The classifier (85,000 packaged weights) was trained only on real renders, with blur, noise and block coding like a
small tokenizer's decoder; never on a model's output. `scripts/train_classifier.py` trains and measures it. A clip is
judged by the product of its frames' probabilities, so that a frame with closed wings can abstain, and every picture
together with its mirror image.
"""

import json
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dfm_nb.base.files import write_atomically
from dfm_nb.butterflies import synthetic

HEADS = {name: synthetic.ATTRIBUTES[name] for name in ("colour", "background", "pattern", "species", "posture")}
IN_THE_MIRROR = {"tilted left": "tilted right", "tilted right": "tilted left"}
ASSET = Path(__file__).with_suffix(".safetensors")
INPUT_PX = 64
MAX_FRAMES = 5  # number of a clip's frames to judge


class Net(nn.Module):
    """[N, 3, 64, 64] in [-1, 1] -> logits of all heads, concatenated [N, 26]."""

    CHANNELS = (3, 16, 32, 64, 96)

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        for i, o in zip(self.CHANNELS, self.CHANNELS[1:]):
            stride = 2 if self.convs else 1
            self.convs.append(nn.Conv2d(i, o, 3, stride, padding=1, bias=False))
            self.norms.append(nn.BatchNorm2d(o))
        self.head = nn.Linear(2 * sum(self.CHANNELS[2:]), sum(map(len, HEADS.values())))

    def forward(self, x: Tensor) -> Tensor:
        pooled = []
        for level, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            x = F.relu(norm(conv(x)))
            if level:  # spots are small: the second level detects them best
                pooled += [x.mean((2, 3)), x.amax((2, 3))]
        return self.head(torch.cat(pooled, 1))


def product(logits: Tensor, sample: Tensor, count: int, mirrored: Tensor) -> list[Tensor]:
    """Combine the frames of each sample: per head, sums of log-probabilities [count, names].

    logits : [N, 26] of N frames. sample : int64 [N], the sample of each frame, below `count`. mirrored : bool [N],
        mirrored frames, where left is right.
    """
    out = []
    for names, z in zip(HEADS.values(), logits.split(list(map(len, HEADS.values())), 1)):
        there = [names.index(IN_THE_MIRROR.get(name, name)) for name in names]
        z = torch.where(mirrored[:, None], z[:, there], z)
        out.append(z.new_zeros(count, z.shape[1]).index_add(0, sample, z.log_softmax(1)))
    return out


def to_input(frames: np.ndarray) -> Tensor:
    """uint8 [T, H, W, 3] -> float32 [T, 3, 64, 64] in [-1, 1]; long pictures are centre-cropped to 3:2 at most."""
    _, h, w, _ = frames.shape
    side = min(h, w) * 3 // 2
    top = max(0, (h - side) // 2)
    left = max(0, (w - side) // 2)
    frames = frames[:, top : top + side, left : left + side]
    size = (INPUT_PX, INPUT_PX)
    if frames.shape[1:3] != size:
        small = [Image.fromarray(np.ascontiguousarray(f)).resize(size, Image.Resampling.BOX) for f in frames]
        frames = np.stack([np.asarray(f) for f in small])
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 127.5 - 1


class AttributeClassifier:
    """Names colour, background, pattern, species and posture of synthetic butterflies.

    Parameters
    ----------
    net : a trained network; `load` reads the packaged one.
    identity : how it was trained, and the version of `drawing`.

    Examples
    --------
    >>> judge = AttributeClassifier.load()
    >>> judge.predict([frames])[0]
    {'colour': 'blue', 'background': 'sand', 'pattern': 'spots', 'species': 'monarch', 'posture': 'open'}
    """

    def __init__(self, net: Net, identity: dict) -> None:
        self.net = net.eval()
        self.identity = identity

    @torch.inference_mode()
    def probabilities(self, videos: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """By attribute, the probability of each name, float32 [N, names], for N uint8 [T, H, W, 3]."""
        rows: dict[str, list[Tensor]] = {name: [] for name in HEADS}
        for video in videos:
            evenly = np.linspace(0, len(video) - 1, min(MAX_FRAMES, len(video))).round().astype(int)
            x = to_input(video[evenly])
            mirrored = torch.arange(2 * len(x)) >= len(x)
            logits = self.net(torch.cat([x, x.flip(3)]))
            for name, z in zip(HEADS, product(logits, torch.zeros_like(mirrored, dtype=torch.int64), 1, mirrored)):
                rows[name].append(z.softmax(1))
        return {name: torch.cat(each).numpy() for name, each in rows.items()}

    def predict(self, videos: Sequence[np.ndarray]) -> list[dict[str, str]]:
        """The likeliest name of each attribute, for each uint8 [T, H, W, 3]."""
        best = {name: p.argmax(1) for name, p in self.probabilities(videos).items()}
        return [{name: HEADS[name][best[name][i]] for name in HEADS} for i in range(len(videos))]

    def save(self, path: str | Path) -> None:
        """Write the weights as safetensors, with the names of the classes."""
        meta = {"heads": json.dumps(HEADS), "identity": json.dumps(self.identity)}
        write_atomically(path, save(self.net.state_dict(), metadata=meta))

    @classmethod
    def load(cls, path: str | Path = ASSET) -> "AttributeClassifier":
        """Read a file of `save`; ValueError if it is for other attributes or drawings."""
        with safe_open(str(path), "pt") as file:
            meta = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}
        identity = json.loads(meta.get("identity", "{}"))
        if meta.get("heads") != json.dumps(HEADS) or identity.get("drawing") != synthetic.DRAWING:
            raise ValueError(f"{path} was trained for other attributes or drawings; use scripts/train_classifier.py")
        net = Net()
        net.load_state_dict(state)
        return cls(net, identity)


def wing_motion(video: np.ndarray) -> float:
    """Motion of a clip: mean absolute change from frame to frame, divided by the picture's spatial variation.

    0 for a still or a frozen clip; a wing beat gives 0.09 to 0.35. uint8 [T, H, W, 3] in.
    """
    if len(video) < 2:
        return 0.0
    x = torch.cat([to_input(f[None]) for f in video])
    x = F.avg_pool2d(x, 8)  # noise and block edges are not motion
    change = (x[1:] - x[:-1]).abs().mean()
    spread = (x - x.mean((2, 3), keepdim=True)).abs().mean()
    return float(change / spread.clamp_min(1e-3))
