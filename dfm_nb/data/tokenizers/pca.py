"""`pca`: a causal 4x8x8 video tokenizer in closed form, 16 channels, no download.

The first frame is coded by a PCA of its 8x8 RGB blocks (192 values), every following group of 4 frames by a PCA of its
4x8x8 blocks (768 values). Latents are whitened: on the fitting set every channel has mean 0 and variance 1. Interface
and shapes are those of Cosmos CV4x8x8. `encode(decode(z)) == z` to rounding, and fitting is deterministic.

Its file `tokenizer.safetensors` holds, for `image` and `video`: mean [n], basis [16, n] (orthonormal rows) and scale
[16] (standard deviations).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from einops import rearrange
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from dfm_nb.base.files import write_atomically
from dfm_nb.base.geometry import FRAMES_PER_LATENT, LATENT_CHANNELS, PX_PER_LATENT, check_codable, check_latents

CARRIED = True
CHANNELS, SPATIAL, TEMPORAL = LATENT_CHANNELS, PX_PER_LATENT, FRAMES_PER_LATENT
FILE_NAME = "tokenizer.safetensors"
_FORMAT = "dfm_nb.pca.1"


def _image_blocks(frame: torch.Tensor) -> torch.Tensor:
    """[B, 3, 1, H, W] -> [B, h, w, 192]."""
    return rearrange(frame, "b c 1 (h p) (w q) -> b h w (c p q)", p=SPATIAL, q=SPATIAL)


def _video_blocks(frames: torch.Tensor) -> torch.Tensor:
    """[B, 3, 4k, H, W] -> [B, k, h, w, 768]."""
    return rearrange(frames, "b c (t s) (h p) (w q) -> b t h w (c s p q)", s=TEMPORAL, p=SPATIAL, q=SPATIAL)


def sha256_of(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of names and contents."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].numpy().tobytes())
    return digest.hexdigest()


class _Moments:
    """Running mean and covariance of rows, in float64."""

    def __init__(self, size: int):
        self.count, self.total = 0, torch.zeros(size, dtype=torch.float64)
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
        values, vectors = torch.linalg.eigh(covariance)
        basis = vectors.T.flip(0)[:CHANNELS]
        basis = basis * basis.sum(1).sign().where(basis.sum(1) != 0, 1.0)[:, None]  # eigenvectors have no sign: fix one
        # a direction without variance (tiny sets) keeps a finite scale, so that whitening stays invertible
        scale = values.flip(0)[:CHANNELS].clamp_min(0).sqrt().clamp_min(1e-4)
        return mean.float(), basis.float().contiguous(), scale.float()


class PCATokenizer:
    """See the module. tensors : `image.mean`, `image.basis`, `image.scale` and the same for `video`."""

    name = "pca"

    def __init__(self, tensors: dict[str, torch.Tensor], device: str = "cpu"):
        self.tensors = {k: v.float().cpu() for k, v in tensors.items()}
        self._on_device = {k: v.to(device) for k, v in self.tensors.items()}

    @classmethod
    def fit(cls, videos: Iterable[torch.Tensor]) -> PCATokenizer:
        """Fit to videos [3, T, H, W] in [-1, 1], T = 1 + 4k; later frames also teach the image basis.

        Without any clip the video basis is the image basis held still, so that still clips come out right.
        """
        image, clip = _Moments(3 * SPATIAL**2), _Moments(3 * TEMPORAL * SPATIAL**2)
        for v in videos:
            v = v[None]
            for t in range(0, v.shape[2], TEMPORAL):
                image.add(_image_blocks(v[:, :, t : t + 1]))
            if v.shape[2] > 1:
                clip.add(_video_blocks(v[:, :, 1:]))
        if image.count == 0:
            raise ValueError("the pca tokenizer needs at least one image to be fitted to; the source gave none")
        tensors = dict(zip(("image.mean", "image.basis", "image.scale"), image.principal()))
        if clip.count:
            parts = clip.principal()
        else:

            def still(x: torch.Tensor) -> torch.Tensor:
                pixels = rearrange(x, "... (c p) -> ... c 1 p", c=3)
                held = pixels.expand(*x.shape[:-1], 3, TEMPORAL, SPATIAL**2)
                return rearrange(held, "... c s p -> ... (c s p)")

            parts = (
                still(tensors["image.mean"]),
                still(tensors["image.basis"]) / TEMPORAL**0.5,
                tensors["image.scale"] * TEMPORAL**0.5,
            )
        tensors |= dict(zip(("video.mean", "video.basis", "video.scale"), (p.contiguous() for p in parts)))
        return cls(tensors)

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """[B, 3, 1 + 4k, H, W] in [-1, 1] -> float32 [B, 16, 1 + k, H/8, W/8]."""
        check_codable(video.shape)
        video = video.float()
        parts = [self._project("image", _image_blocks(video[:, :, :1]))[:, None]]
        if video.shape[2] > 1:
            parts.append(self._project("video", _video_blocks(video[:, :, 1:])))
        return rearrange(torch.cat(parts, 1), "b t h w c -> b c t h w").contiguous()

    def _project(self, kind: str, blocks: torch.Tensor) -> torch.Tensor:
        p = self._on_device
        return (blocks - p[f"{kind}.mean"]) @ (p[f"{kind}.basis"] / p[f"{kind}.scale"][:, None]).T

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, 16, 1 + k, h, w] -> float32 [B, 3, 1 + 4k, 8h, 8w], in [-1, 1] where the input was."""
        return torch.cat(list(self.decode_windows(latents)), 2)

    def decode_windows(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """`decode` in pieces along time: the first frame, then those of 4 latents at a time."""
        check_latents(latents.shape)
        z, p = rearrange(latents.float(), "b c t h w -> b t h w c"), self._on_device

        def lift(kind, codes):
            return (codes * p[f"{kind}.scale"]) @ p[f"{kind}.basis"] + p[f"{kind}.mean"]

        yield rearrange(lift("image", z[:, :1]), "b 1 h w (c p q) -> b c 1 (h p) (w q)", c=3, p=SPATIAL, q=SPATIAL)
        for start in range(1, z.shape[1], 4):
            yield rearrange(
                lift("video", z[:, start : start + 4]),
                "b t h w (c s p q) -> b c (t s) (h p) (w q)",
                c=3,
                s=TEMPORAL,
                p=SPATIAL,
                q=SPATIAL,
            )

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
        raise ValueError("the pca tokenizer is fitted to data: name its data set (or its tokenizer.safetensors)")
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no pca tokenizer at {file}; dfm prepare --tokenizer pca writes one")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file ({error}); name that of a data set or checkpoint") from None
    wanted = {f"{k}.{part}" for k in ("image", "video") for part in ("mean", "basis", "scale")}
    if set(tensors) != wanted:
        raise ValueError(f"{file} is not a pca tokenizer: it holds {', '.join(sorted(tensors)[:4])} ...")
    return PCATokenizer(tensors, device)
