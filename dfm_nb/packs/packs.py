"""How samples become one packed sequence: normalisation, noise, caption dropout, segments, rows and padding.

A pack is one long sequence of tokens. It is divided twice: into *segments*, which attend to themselves and to one text,
and into conditioning *rows*, which share a noise level and frame rate. A sample is one segment. It has one row, or two
if its first frames are given clean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import torch
import torch.nn.functional as F

from dfm_nb.base.records import EncodedClip
from dfm_nb.base.seeds import generator_for
from dfm_nb.diffusion import edm
from dfm_nb.packs.patches import grid_positions, patchify

if TYPE_CHECKING:
    from dfm_nb.config.schema import Config

CLEAN_SIGMA = 0.002
"""Noise level announced for given frames: EDM's sigma_min."""

PADDING_FPS = 24.0
"""Frame rate of rows without a sample; any positive number does."""


# ---- settings and normalisation ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackSettings:
    """What of the configuration decides about packs; equal on all ranks. The defaults stand in `config.schema` alone.

    token_multiple, text_multiple, row_multiple : tokens, text tokens and conditioning rows of a pack are padded to
    multiples of these. A layout may need it, and repeated shapes are faster: oneDNN makes a new kernel for every shape
    of a product in bfloat16.
    """

    seed: int
    patch_spatial: int
    patch_temporal: int
    sigma_data: float
    P_mean: float
    P_std: float
    caption_dropout: float
    condition_frames_prob: float
    variant: str = "dit"
    text_padding: int | None = None
    times: str = "logit-normal"
    shift_tokens: int | None = None
    token_multiple: int = 1
    text_multiple: int = 1
    row_multiple: int = 1

    @classmethod
    def of(cls, config: Config, **changes: Any) -> PackSettings:
        """Those of a configuration; `changes` are fields that differ from it."""
        settings = {
            "seed": config.rng.seed,
            "caption_dropout": config.train.caption_dropout,
            "condition_frames_prob": config.dataset.condition_frames_prob,
        }
        own = {f.name for f in fields(cls)}  # those of the network by their names there
        return cls(**({k: v for k, v in config.model if k in own} | settings | changes))


@dataclass(frozen=True)
class LatentStatistics:
    """From stored latents to what the network sees and back: channels of mean 0 and standard deviation sigma_data.

    mean, std : float32 [C], of the data set's training split.
    """

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def from_manifest(cls, manifest: dict) -> LatentStatistics:
        mean, std = (torch.tensor(manifest[k]).float() for k in ("latent_mean", "latent_std"))
        return cls(mean, std.clamp_min(1e-6))

    def used_by(self, variant: str) -> LatentStatistics:
        """What a network is trained with on these data: NeMo DFM's takes latents times sigma_data, and no more."""
        if variant == "dfm":
            return LatentStatistics(torch.zeros_like(self.mean), torch.ones_like(self.std))
        return self

    def to_model(self, latent: torch.Tensor, sigma_data: float) -> torch.Tensor:
        """[C, T, H, W] as stored -> float32, normalised."""
        mean, std = (v[:, None, None, None] for v in (self.mean, self.std))
        return (latent.float() - mean) / std * sigma_data

    def from_model(self, latent: torch.Tensor, sigma_data: float) -> torch.Tensor:
        """Inverse of `to_model`."""
        mean, std = (v[:, None, None, None] for v in (self.mean, self.std))
        return latent.float() / sigma_data * std + mean


# ---- the layout of a pack -------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Consecutive tokens of a segment with one noise level and frame rate."""

    tokens: int
    sigma: float
    fps: float
    noisy: bool = True  # False: given clean, or padding; no loss, and a sampler leaves its sigma alone


@dataclass(frozen=True)
class Segment:
    """Tokens that attend to one another and to `text` [L, D], and to nothing else. positions : float32 [tokens, 3]."""

    positions: torch.Tensor
    text: torch.Tensor
    rows: list[Row]


def sample_segment(
    grid: tuple[int, int, int],
    text: torch.Tensor,
    sigma: float,
    fps: float,
    clean_frames: int = 0,
    variant: str = "dit",
    text_padding: int | None = None,
) -> Segment:
    """The segment of a sample of (T, H, W) patches whose first `clean_frames` (in patches) are given.

    variant : of the network; all but ours count from the corner. text_padding : rows that `text` is cut at, or filled
    up to with zeros, which are attended to; None: as it is.
    """
    t, h, w = grid
    rows = [Row((t - clean_frames) * h * w, sigma, fps)]
    if clean_frames:
        rows.insert(0, Row(clean_frames * h * w, CLEAN_SIGMA, fps, noisy=False))
    if text_padding:
        text = F.pad(text, (0, 0, 0, text_padding - len(text)))
    return Segment(grid_positions(grid, centred=variant == "dit"), text, rows)


@dataclass
class PackLayout:
    """All of a packed sequence but its latents: S tokens, R conditioning rows, K text tokens. All tensors on the CPU.

    sigma, fps : float32 [R]; row : int64 [S], token -> row; positions : float32 [S, 3]; loss_mask : bool [S];
    text : bfloat16 [K, D]; pool : float32 [R, K], each row averages its segment's text.
    cu_q, cu_kv : bounds of the segments among tokens and text tokens; the last segment is the padding, if there is any.
    """

    sigma: torch.Tensor
    fps: torch.Tensor
    row: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    text: torch.Tensor
    pool: torch.Tensor
    cu_q: list[int]
    cu_kv: list[int]


def pack_layout(
    segments: Sequence[Segment],
    sigma_data: float,
    token_multiple: int = 1,
    text_multiple: int = 1,
    row_multiple: int = 1,
    capacity: int | None = None,
) -> PackLayout:
    """Put segments after one another, then pad tokens, text and rows.

    Parameters
    ----------
    sigma_data : noise level of rows without a sample (any positive number would do).
    token_multiple, text_multiple, row_multiple : see `PackSettings`.
    capacity : tokens of the pack; None: those there are, rounded up to `token_multiple`.
    """
    segments = list(segments)
    tokens = sum(len(s.positions) for s in segments)
    text = sum(len(s.text) for s in segments)
    padding = (_round_up(tokens, token_multiple) if capacity is None else capacity) - tokens
    assert padding >= 0, (tokens, capacity)
    # All padding is one last segment, so that no sample attends to it. Padding tokens must have a text token to attend
    # to, because a softmax over nothing is NaN. Padding text alone makes a segment without tokens and without a row.
    text_padding = _round_up(text + 1 if padding else text, text_multiple) - text
    if padding or text_padding:
        width = segments[0].text.shape[1]
        rows = [Row(padding, sigma_data, PADDING_FPS, noisy=False)] if padding else []
        segments.append(Segment(torch.zeros(padding, 3), segments[0].text.new_zeros(text_padding, width), rows))
    cu_q = [0, *accumulate(len(s.positions) for s in segments)]
    cu_kv = [0, *accumulate(len(s.text) for s in segments)]
    all_rows = [row for s in segments for row in s.rows]
    # Last come rows without a token; their pooled text stays zero.
    all_rows += [Row(0, sigma_data, PADDING_FPS, noisy=False)] * (-len(all_rows) % row_multiple)
    pool = torch.zeros(len(all_rows), cu_kv[-1])
    segment_of_row = [i for i, s in enumerate(segments) for _ in s.rows]
    for r, i in enumerate(segment_of_row):
        pool[r, cu_kv[i] : cu_kv[i + 1]] = 1 / len(segments[i].text)
    lengths = torch.tensor([row.tokens for row in all_rows])
    return PackLayout(
        sigma=torch.tensor([row.sigma for row in all_rows]),
        fps=torch.tensor([row.fps for row in all_rows]),
        row=torch.arange(len(all_rows)).repeat_interleave(lengths),
        positions=torch.cat([s.positions for s in segments]),
        loss_mask=torch.tensor([row.noisy for row in all_rows]).repeat_interleave(lengths),
        text=torch.cat([s.text for s in segments]),
        pool=pool,
        cu_q=cu_q,
        cu_kv=cu_kv,
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# ---- training samples -----------------------------------------------------------------------------------------------


@dataclass
class Draw:
    """A training sample and its random numbers. latent, noise : float32 [C, T, H, W]; text : [L, D]."""

    key: str
    latent: torch.Tensor  # normalised to sigma_data
    text: torch.Tensor
    fps: float
    sigma: float
    noise: torch.Tensor
    clean_frames: int = 0


def draw_sample(
    clip: EncodedClip, epoch: int, settings: PackSettings, statistics: LatentStatistics, empty_text: torch.Tensor
) -> Draw:
    """Normalise a stored latent and draw its sigma, noise and caption dropout from (seed, epoch, key)."""
    g = generator_for(settings.seed, "draw", epoch, clip.key)
    # All numbers are drawn in this order whether used or not, so a setting changes nothing but what it names.
    normal, drop, give = torch.randn((), generator=g), torch.rand((), generator=g), torch.rand((), generator=g)
    latent = statistics.to_model(clip.latent[0], settings.sigma_data)
    frames = latent.shape[1]
    sigma = edm.sigma_from_normal(normal, settings.P_mean, settings.P_std, settings.times)
    if settings.shift_tokens:  # more tokens tell more of one another: it takes more noise to hide as much
        tokens = latent[0].numel() / (settings.patch_temporal * settings.patch_spatial**2)
        sigma = sigma * math.sqrt(tokens / settings.shift_tokens)
    return Draw(
        key=clip.key,
        latent=latent,
        text=empty_text if drop < settings.caption_dropout else clip.text_emb[0],
        fps=float(clip.meta.get("fps") or 24),
        sigma=float(sigma),
        noise=torch.randn(latent.shape, generator=g),
        clean_frames=int(frames > 1 and give < settings.condition_frames_prob),
    )


def blank_draw(settings: PackSettings, channels: int, empty_text: torch.Tensor) -> Draw:
    """One patch of zeros, for a pack that has no sample."""
    latent = torch.zeros(channels, settings.patch_temporal, settings.patch_spatial, settings.patch_spatial)
    return Draw("", latent, empty_text, PADDING_FPS, settings.sigma_data, torch.zeros_like(latent))


@dataclass
class Pack(PackLayout):
    """The packed sequence of B samples. x0, noise : float32 [S, p], zero in the padding.

    keys[i], grids[i] : name and (T, H, W) in patches of the sample in segment i. dropped : (reason, detail) of
    samples that cannot be used. A pack may have no sample: then it has no keys, and nothing in it counts.
    """

    x0: torch.Tensor
    noise: torch.Tensor
    keys: list[str]
    grids: list[tuple[int, int, int]]
    dropped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of samples, without padding."""
        return sum(t * h * w for t, h, w in self.grids)

    def lengths(self, padding: bool = False) -> tuple[list[int], list[int]]:
        """Tokens and text tokens of each sample, and with `padding` of the last segment where there is one."""
        ends = None if padding else len(self.keys) + 1
        q, kv = ([b - a for a, b in pairwise(cu[:ends])] for cu in (self.cu_q, self.cu_kv))
        return q, kv


def pack_draws(draws: list[Draw], settings: PackSettings, capacity: int | None = None) -> Pack:
    """Put samples into one packed sequence, padded to `capacity` (or only to the layout's multiple when None).

    Samples are ordered by length, so that equal lengths are neighbours and one batched attention call serves them.
    """
    s, pt = settings.patch_spatial, settings.patch_temporal
    draws = sorted(draws, key=lambda d: (d.latent[0].numel(), d.latent.shape, len(d.text), d.key))
    segments, x0, noise, grids = [], [], [], []
    for d in draws:
        _, t, h, w = d.latent.shape
        grid, clean = (t // pt, h // s, w // s), d.clean_frames // pt
        segments.append(sample_segment(grid, d.text, d.sigma, d.fps, clean, settings.variant, settings.text_padding))
        x0.append(patchify(d.latent, s, pt))
        given = clean * grid[1] * grid[2]  # tokens whose noise is zero, so that the network sees them as they are
        noise += [torch.zeros_like(x0[-1][:given]), patchify(d.noise, s, pt)[given:]]
        grids.append(grid)
    layout = pack_layout(
        segments, settings.sigma_data, settings.token_multiple, settings.text_multiple, settings.row_multiple, capacity
    )
    padding = x0[0].new_zeros(layout.cu_q[-1] - sum(map(len, x0)), x0[0].shape[1])
    return Pack(
        **vars(layout),
        x0=torch.cat([*x0, padding]),
        noise=torch.cat([*noise, padding]),
        keys=[d.key for d in draws],
        grids=grids,
    )
