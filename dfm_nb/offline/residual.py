"""`residual`: the causal 4x8x8 PCA tokenizer plus a small convolutional network, 16 channels.

    z = normalise(pca.encode(x) + E(x))        x' = pca.decode(pca(z)) + D(z)

Video [B, 3, 1 + 4k, H, W] in [-1, 1] becomes latents [B, 16, 1 + k, H/8, W/8]. E and D work at 1/4 and 1/8 of the
resolution, the end of D at 1/2 and frame by frame. A quarter of the channels of every block comes from the step before
(a causal temporal shift), so what earlier frames have shown need not be sent again.

The weights travel with the package: 1.5 M parameters, 3.0 MB as float16. The encoder was trained on procedural
butterflies, the decoder on drawings too. An 8x8 block of a step of time costs about 2 M multiply-adds on the coarser
grids, encoding and decoding together, and 15 M on the grid of 1/2 (4 M for a lone frame).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from einops import rearrange
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from dfm_nb.base.files import parsed, write_atomically
from dfm_nb.offline import _fitting
from dfm_nb.offline.pca import CHANNELS, FILE_NAME, TEMPORAL, PCATokenizer, read_tensors, sha256_of

CARRIED = True
tune = _fitting.tune
ASSET = Path(__file__).with_suffix(".safetensors")
FINE = 4  # pixels a side of the finer of the two grids
NUMBERS = 3 * FINE**2  # of such a block in one frame
RADIUS_PX = 2
SPREAD_PX = 1.2
SPREAD = 0.15
"""Of the bilateral filter: reach, and standard deviations of its Gaussians, of places and of colours in [-1, 1]."""
_FORMAT = "dfm_nb.residual.1"


@dataclass(frozen=True)
class Shape:
    """The network's size: channels and numbers of blocks on the 1/8 grid, the 1/4 (`fine`) and the 1/2 (`finest`)."""

    width: int
    fine_width: int
    encoder_blocks: int
    decoder_blocks: int
    encoder_fine_blocks: int
    decoder_fine_blocks: int
    finest_width: int
    finest_blocks: int


def _shift(x: Tensor) -> Tensor:
    """[B, T, C, h, w]: the first quarter of the channels from the step before, zeros before the first."""
    quarter = x.shape[2] // 4
    before = F.pad(x[:, :-1, :quarter], (0, 0, 0, 0, 0, 0, 1, 0))
    return torch.cat((before, x[:, :, quarter:]), 2)


def _per_step(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a 2D module to every step of [B, T, C, h, w]."""
    return module(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Block(nn.Module):
    """x + conv(silu(conv(silu(shift(x))))).

    Without `in_time` nothing is shifted: the steps [B, T, C, h, w] are frames on their own.
    """

    def __init__(self, width: int, in_time: bool):
        super().__init__()
        self.in_time = in_time
        self.inner = nn.Conv2d(width, width, 3, padding=1)
        self.outer = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        seen = _shift(x) if self.in_time else x
        return x + _per_step(self.outer, F.silu(_per_step(self.inner, F.silu(seen))))


def _blocks(width: int, count: int, in_time: bool = True) -> nn.Sequential:
    return nn.Sequential(*(Block(width, in_time) for _ in range(count)))


class TwoKinds(nn.Module):
    """One convolution for the lone first frame and one for the groups of 4 frames after it.

    Of a clip of 9 frames, steps are frame 0, frames 1-4 and frames 5-8. A block of 4 x 4 pixels of all frames of a step
    is one vector.
    """

    def __init__(self, image: nn.Conv2d, video: nn.Conv2d):
        super().__init__()
        self.image = image
        self.video = video

    def forward(self, x: Tensor, before: str = "", after: str = "") -> Tensor:
        """[B, t, C, h, w] -> [B, t, C', h, w], by the step.

        before, after : patterns that make steps of pixels or pixels of steps; time is then the third axis there.
        """
        steps = []
        lone, groups = x.tensor_split([1], 2 if before else 1)
        for conv, frames, part in ((self.image, 1, lone), (self.video, TEMPORAL, groups)):
            sizes = {"s": frames, "p": FINE, "q": FINE}
            if not part.numel():  # a still has no groups
                continue
            if before:
                part = rearrange(part, before, **sizes)
            part = _per_step(conv, part)
            if after:
                part = rearrange(part, after, **sizes)
            steps.append(part)
        return torch.cat(steps, 2 if after else 1)


class Encoder(nn.Module):
    """E: what is added to the PCA's latents."""

    def __init__(self, shape: Shape):
        super().__init__()
        fine = shape.fine_width
        width = shape.width
        self.stem = TwoKinds(nn.Conv2d(NUMBERS, fine, 1), nn.Conv2d(NUMBERS * TEMPORAL, fine, 1))
        self.fine = _blocks(fine, shape.encoder_fine_blocks)
        self.down = nn.Conv2d(fine, width, 2, stride=2)
        self.coarse = _blocks(width, shape.encoder_blocks)
        self.head = nn.Conv2d(width, CHANNELS, 1)

    def forward(self, video: Tensor) -> Tensor:
        """[B, 3, T, H, W] -> [B, t, 16, H/8, W/8]."""
        x = self.fine(self.stem(video, before="b c (t s) (h p) (w q) -> b t (c s p q) h w"))
        return _per_step(self.head, F.silu(self.coarse(_per_step(self.down, x))))


class Decoder(nn.Module):
    """x' of the latents and of the PCA's reconstruction."""

    def __init__(self, shape: Shape):
        super().__init__()
        fine = shape.fine_width
        width = shape.width
        self.stem = TwoKinds(nn.Conv2d(CHANNELS, width, 3, padding=1), nn.Conv2d(CHANNELS, width, 3, padding=1))
        self.coarse = _blocks(width, shape.decoder_blocks)
        self.up = nn.ConvTranspose2d(width, fine, 2, stride=2)
        self.fine = _blocks(fine, shape.decoder_fine_blocks)
        self.head = TwoKinds(nn.Conv2d(fine, NUMBERS, 1), nn.Conv2d(fine, NUMBERS * TEMPORAL, 1))
        self.finest = Finest(fine, shape.finest_width, shape.finest_blocks) if shape.finest_blocks else None

    def forward(self, z: Tensor, base: Tensor) -> Tensor:
        """[B, t, 16, h, w] and the PCA's [B, 3, T, 8h, 8w] -> [B, 3, T, 8h, 8w]."""
        x = F.silu(self.fine(_per_step(self.up, self.coarse(self.stem(z)))))
        video = base + self.head(x, after="b t (c s p q) h w -> b c (t s) (h p) (w q)")
        return video if self.finest is None else self.finest(video, x)


class Finest(nn.Module):
    """The end of D, which takes away the noise of the coarser grids: blocks on 2 x 2 pixels of each frame by itself.

    They begin with a bilateral filter's frames, and add to them.
    """

    def __init__(self, fine: int, width: int, blocks: int):
        super().__init__()
        self.pixels = nn.Conv2d(2 * 3 * 4, width, 1)
        self.stem = TwoKinds(nn.Conv2d(fine, 4 * width, 1), nn.Conv2d(fine, 4 * TEMPORAL * width, 1))
        self.blocks = _blocks(width, blocks, in_time=False)
        self.head = nn.Conv2d(width, 3 * 4, 3, padding=1)

    def forward(self, video: Tensor, x: Tensor) -> Tensor:
        """[B, 3, T, 8h, 8w] and the fine grid's [B, t, fine, 2h, 2w] -> the frames [B, 3, T, 8h, 8w]."""
        first, *groups = x.split(1, 1)
        steps = [self._step(video[:, :, :1], first, self.stem.image)]
        # A step at a time: on this grid it has 48 times as many numbers as on the 1/8 grid.
        for group, frames in zip(groups, video[:, :, 1:].split(TEMPORAL, 2)):
            steps.append(self._step(frames, group, self.stem.video))
        return torch.cat(steps, 2)

    def _step(self, frames: Tensor, x: Tensor, stem: nn.Conv2d) -> Tensor:
        filtered = bilateral(frames)
        both = torch.cat((frames, filtered), 1)
        fine = rearrange(both, "b c s (h p) (w q) -> b s (c p q) h w", p=2, q=2)
        coarse = _per_step(stem, x)
        coarse = rearrange(coarse, "b 1 (c s p q) h w -> b s c (h p) (w q)", s=frames.shape[2], p=2, q=2)
        y = _per_step(self.head, F.silu(self.blocks(_per_step(self.pixels, fine) + coarse)))
        return filtered + rearrange(y, "b s (c p q) h w -> b c s (h p) (w q)", p=2, q=2)


def bilateral(video: Tensor) -> Tensor:
    """Each pixel the mean of those near it in place and in colour (Tomasi and Manduchi 1998), [B, 3, T, H, W] alike."""
    *_, height, width = video.shape
    padded = F.pad(video, (RADIUS_PX,) * 4 + (0, 0), "replicate")
    total = torch.zeros_like(video)
    weights = torch.zeros_like(video[:, :1])
    for y in range(2 * RADIUS_PX + 1):
        for x in range(2 * RADIUS_PX + 1):
            near = padded[..., y : y + height, x : x + width]
            distance = ((y - RADIUS_PX) ** 2 + (x - RADIUS_PX) ** 2) / (2 * SPREAD_PX**2)
            weight = torch.exp(-(near - video).square().sum(1, keepdim=True) / (2 * SPREAD**2) - distance)
            total = total + weight * near
            weights = weights + weight
    return total / weights


class ResidualTokenizer(nn.Module):
    """See the module. `mean` and `scale` [2, 16] (first frame, groups) whiten the latents of the training set.

    latents : with a tuned decoder, the sha256 of the tokenizer that it was tuned from, whose latents are the same.
    """

    name = "residual"
    mean: Tensor
    scale: Tensor

    def __init__(self, pca: PCATokenizer, shape: Shape):
        super().__init__()
        self.shape = shape
        self.pca = pca
        self.encoder = Encoder(shape)
        self.decoder = Decoder(shape)
        self.latents: str | None = None
        self.register_buffer("mean", torch.zeros(2, CHANNELS))
        self.register_buffer("scale", torch.ones(2, CHANNELS))

    def _statistics(self, steps: int) -> tuple[Tensor, Tensor]:
        """mean and scale as [1, 16, steps, 1, 1]."""
        kind = torch.arange(steps, device=self.mean.device).clamp(max=1)
        return self.mean[kind].T[None, :, :, None, None], self.scale[kind].T[None, :, :, None, None]

    def encode(self, video: Tensor) -> Tensor:
        """[B, 3, 1 + 4k, H, W] in [-1, 1] -> float32 [B, 16, 1 + k, H/8, W/8]."""
        video = video.float()
        z = self.pca.encode(video) + self.encoder(video).transpose(1, 2)
        mean, scale = self._statistics(z.shape[2])
        return (z - mean) / scale

    def decode(self, latents: Tensor) -> Tensor:
        """[B, 16, 1 + k, h, w] -> float32 [B, 3, 1 + 4k, 8h, 8w]."""
        mean, scale = self._statistics(latents.shape[2])
        z = latents.float() * scale + mean
        return self.decoder(z.transpose(1, 2), self.pca.decode(z))

    def tensors(self) -> dict[str, Tensor]:
        """What the file holds: the network as float16, the PCA and the statistics as float32."""
        stored = {}
        for name, value in (self.state_dict() | {f"pca.{k}": v for k, v in self.pca.tensors.items()}).items():
            if name.startswith(("encoder", "decoder")):
                value = value.half()
            stored[name] = value.detach().cpu().contiguous()
        return stored

    def save(self, path: str | Path) -> None:
        """Write the file (float16 weights); it is whole or absent."""
        about = json.dumps({"format": _FORMAT, "shape": asdict(self.shape), **self._tuned()})
        # one entry: the order of several is random
        write_atomically(path, save(self.tensors(), metadata={"dfm_nb": about}))

    def identity(self) -> dict:
        """Name and a hash of the content, equal for equal tokenizers wherever they are stored."""
        return {"name": self.name, "version": _FORMAT, "sha256": sha256_of(self.tensors()), **self._tuned()}

    def _tuned(self) -> dict[str, str]:
        return {"latents": self.latents} if self.latents else {}


def build(path: str | Path | None = None, device: str = "cpu") -> ResidualTokenizer:
    """The tokenizer.

    Parameters
    ----------
    path : a file written by `save`, or a folder that holds one as `tokenizer.safetensors` (a data
        set, a checkpoint) or under the shipped file's name; None for the one that comes with the package.
    """
    file = Path(path) if path is not None else ASSET
    if file.is_dir():
        carried = file / FILE_NAME
        file = carried if carried.is_file() else file / ASSET.name
    tensors, metadata = read_tensors(file, "residual")
    try:
        about = parsed(metadata.get("dfm_nb", "{}"))
        if about.get("format") != _FORMAT:
            raise ValueError(f"its format is {about.get('format')}")
        pca = {name[4:]: tensors.pop(name) for name in list(tensors) if name.startswith("pca.")}
        tokenizer = ResidualTokenizer(PCATokenizer(pca, device), Shape(**about["shape"]))
        tokenizer.latents = about.get("latents")
        tokenizer.load_state_dict(tensors)  # float16 to float32
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # it may come from anybody
        raise ValueError(f"{file} must be a tokenizer of format {_FORMAT}: {error!r}; take another copy") from None
    return tokenizer.to(device).requires_grad_(False).eval()
