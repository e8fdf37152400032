"""`pca`: a causal 4x8x8 video tokenizer in closed form, 16 channels, no download.

The first frame is coded by a PCA of its 8x8 RGB blocks (192 values), every following group of 4 frames by a PCA of its
4x8x8 blocks (768 values). Latents are whitened: on the fitting set every channel has mean 0 and variance 1. Interface
and shapes are those of Cosmos CV4x8x8. `encode(decode(z)) == z` to rounding, and fitting is deterministic.

Its file `tokenizer.safetensors` holds, for `image` and `video`: mean [n], basis [16, n] (orthonormal rows) and scale
[16] (standard deviations).
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import torch
from einops import rearrange, repeat
from safetensors.torch import save

from dfm_nb.base.files import write_atomically
from dfm_nb.base.geometry import FRAMES_PER_LATENT, LATENT_CHANNELS, PX_PER_LATENT
from dfm_nb.checkpoints.tensor_files import open_safetensors

CARRIED = True
CHANNELS = LATENT_CHANNELS
SPATIAL = PX_PER_LATENT
TEMPORAL = FRAMES_PER_LATENT
FRAMES = {"image": 1, "video": TEMPORAL}
"""Of a block, by kind."""
NAMES = tuple(f"{kind}.{part}" for kind, part in product(FRAMES, ("mean", "basis", "scale")))
"""Of its tensors."""
STEPS = 4  # latents that are decoded at a time
SMALLEST_SCALE = 1e-4  # of a direction without variance (tiny sets), so that whitening stays invertible
FILE_NAME = "tokenizer.safetensors"
_FORMAT = "dfm_nb.pca.1"


def _blocks(video: torch.Tensor, kind: str) -> torch.Tensor:
    """[B, 3, T, H, W] -> [B, t, h, w, n], n = 192 of an image and 768 of a video."""
    blocks = "b c (t s) (h p) (w q) -> b t h w (c s p q)"
    return rearrange(video, blocks, s=FRAMES[kind], p=SPATIAL, q=SPATIAL)


def sha256_of(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of names and contents."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].cpu().numpy().tobytes())
    return digest.hexdigest()


def read_tensors(file: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a tokenizer's file; FileNotFoundError or ValueError when it is none."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {kind} tokenizer at {file}; pass a data set or checkpoint that has one")
    tensors, about = open_safetensors(file)
    return {name: tensor.clone() for name, tensor in tensors.items()}, about


class _Moments:
    """Running mean and covariance of rows, in float64."""

    def __init__(self, size: int):
        self.count = 0
        self.total = torch.zeros(size, dtype=torch.float64)
        self.second = torch.zeros(size, size, dtype=torch.float64)

    def add(self, rows: torch.Tensor) -> None:
        rows = rows.reshape(-1, rows.shape[-1]).double()
        self.count += len(rows)
        self.total += rows.sum(0)
        self.second += rows.T @ rows

    def principal(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """mean [n], leading directions [16, n], standard deviations [16]."""
        mean = self.total / self.count
        covariance = self.second / self.count - torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(covariance)  # ascending
        basis = vectors.flip(-1).T[:CHANNELS]
        sign = basis.sum(1).sign()  # eigenvectors have none: fix one
        basis = basis * sign.where(sign != 0, 1.0)[:, None]
        scale = values.flip(-1)[:CHANNELS].clamp_min(0).sqrt().clamp_min(SMALLEST_SCALE)
        return mean.float(), basis.float().contiguous(), scale.float()


class PCATokenizer:
    """See the module. tensors : `image.mean`, `image.basis`, `image.scale` and the same for `video`."""

    name = "pca"

    def __init__(self, tensors: dict[str, torch.Tensor], device: str = "cpu"):
        self.tensors = {k: v.float().to(device) for k, v in tensors.items()}

    @classmethod
    def fit(cls, videos: Iterable[torch.Tensor]) -> "PCATokenizer":
        """Fit to videos [3, T, H, W] in [-1, 1], T = 1 + 4k; later frames also teach the image basis.

        Without any clip the video basis is the image basis held still, so that still clips come out right.
        """
        moments = {kind: _Moments(3 * frames * SPATIAL**2) for kind, frames in FRAMES.items()}
        for video in videos:
            video = video[None]
            for t in range(0, video.shape[2], TEMPORAL):
                moments["image"].add(_blocks(video[:, :, t : t + 1], "image"))
            if video.shape[2] > 1:
                moments["video"].add(_blocks(video[:, :, 1:], "video"))
        image = moments["image"].principal()
        if moments["video"].count:
            clip = moments["video"].principal()
        else:
            mean, basis, scale = image
            still = "... (c p) -> ... (c s p)"
            mean = repeat(mean, still, c=3, s=TEMPORAL)
            basis = repeat(basis, still, c=3, s=TEMPORAL)
            # a direction that is held for 4 frames is twice as long
            clip = mean, basis / TEMPORAL**0.5, scale * TEMPORAL**0.5
        return cls({name: x.contiguous() for name, x in zip(NAMES, image + clip)})

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """[B, 3, 1 + 4k, H, W] in [-1, 1] -> float32 [B, 16, 1 + k, H/8, W/8]."""
        video = video.float()
        parts = [self._project(video[:, :, :1], "image")]
        if video.shape[2] > 1:
            parts.append(self._project(video[:, :, 1:], "video"))
        return rearrange(torch.cat(parts, 1), "b t h w c -> b c t h w").contiguous()

    def _project(self, video: torch.Tensor, kind: str) -> torch.Tensor:
        p = self.tensors
        return (_blocks(video, kind) - p[f"{kind}.mean"]) @ (p[f"{kind}.basis"] / p[f"{kind}.scale"][:, None]).T

    def _lift(self, codes: torch.Tensor, kind: str) -> torch.Tensor:
        """The inverse of `_project`, on [B, 16, t, h, w]."""
        p = self.tensors
        codes = rearrange(codes, "b c t h w -> b t h w c")
        blocks = (codes * p[f"{kind}.scale"]) @ p[f"{kind}.basis"] + p[f"{kind}.mean"]
        pixels = "b t h w (c s p q) -> b c (t s) (h p) (w q)"
        return rearrange(blocks, pixels, s=FRAMES[kind], p=SPATIAL, q=SPATIAL, c=3)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, 16, 1 + k, h, w] -> float32 [B, 3, 1 + 4k, 8h, 8w], in [-1, 1] where the input was."""
        return torch.cat(list(self.decode_windows(latents)), 2)

    def decode_windows(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """`decode` in pieces along time: the first frame, then those of 4 latents at a time."""
        latents = latents.float()
        yield self._lift(latents[:, :, :1], "image")
        for start in range(1, latents.shape[2], STEPS):
            yield self._lift(latents[:, :, start : start + STEPS], "video")

    def save(self, path: str | Path) -> None:
        """Write the tokenizer's file; `path` may be a folder."""
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        write_atomically(path, save(self.tensors, metadata={"format": _FORMAT}))

    def identity(self) -> dict:
        """Name and a hash of the content, equal for equal tokenizers wherever they are stored."""
        return {"name": self.name, "version": _FORMAT, "sha256": sha256_of(self.tensors)}


fit = PCATokenizer.fit


def build(path: str | Path | None = None, device: str = "cpu") -> PCATokenizer:
    """Load from a file, or from a data set or checkpoint folder that holds `tokenizer.safetensors`."""
    if path is None:
        raise ValueError("the pca tokenizer is fitted to data: pass its data set (or its tokenizer.safetensors)")
    file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
    tensors, _ = read_tensors(file, "pca")
    if set(tensors) != set(NAMES):
        raise ValueError(f"{file} is not a pca tokenizer: it holds {', '.join(sorted(tensors)[:4])} ...")
    return PCATokenizer(tensors, device)
