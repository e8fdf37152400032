"""How samples become one packed sequence: normalisation, noise, caption dropout, segments, rows and padding.

A pack is one long sequence of tokens. It is divided in two ways: into *segments*, which attend to themselves and to one
text, and into conditioning *rows*, which share a noise level and frame rate. A sample is one segment. One row of it is
noised and has a loss. All others are given clean: first and last frames of the sample, and pictures and clips with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Sequence

import torch
import torch.nn.functional as F

from dfm_nb.base.records import EncodedClip
from dfm_nb.base.seeds import generator_for
from dfm_nb.config.networks import Network
from dfm_nb.config.schema import Config, ModelConfig
from dfm_nb.diffusion import edm
from dfm_nb.packs.packer import PackShape, round_up
from dfm_nb.packs.patches import check_divides, grid_positions, patchify

CLEAN_SIGMA = 0.002
"""Noise level of given frames, as an input of the network: EDM's sigma_min."""

PADDING_FPS = 24.0
"""Frame rate of rows without a sample; any positive number works."""

Grid = tuple[int, int, int]
"""Number of patches along T, H and W."""


# ---- settings and normalisation ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackSettings:
    """The settings of packs; equal on all ranks.

    statistics : what normalises the latents; `draw_sample` needs them.
    token_multiple, text_multiple, row_multiple : tokens, text tokens and conditioning rows of a pack are padded to
    multiples of these. A layout may need it, and repeated shapes are faster, because oneDNN compiles a kernel for every
    shape of a bfloat16 product.
    shape : of all training packs; a pack whose samples need more (their captions are longer than the index says) has
    more. None: each has its own.
    """

    config: Config
    statistics: LatentStatistics | None = None
    token_multiple: int = 1
    text_multiple: int = 1
    row_multiple: int = 1
    shape: PackShape | None = None

    @property
    def patch_volume(self) -> int:
        """Latent voxels per token."""
        return self.config.model.patch_temporal * self.config.model.patch_spatial**2


@dataclass(frozen=True)
class LatentStatistics:
    """From stored latents to the network's input and back: channels with mean 0 and standard deviation sigma_data.

    mean, std : float32 [C], statistics of the data set's training split.
    """

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def from_manifest(cls, manifest: dict) -> LatentStatistics:
        mean = torch.tensor(manifest["latent_mean"]).float()
        std = torch.tensor(manifest["latent_std"]).float()
        return cls(mean, std.clamp_min(1e-6))

    def used_by(self, network: Network) -> LatentStatistics:
        """The normalisation for a network on these data."""
        if network.standardised:
            return self
        return LatentStatistics(torch.zeros_like(self.mean), torch.ones_like(self.std))

    def to_model(self, latent: torch.Tensor, sigma_data: float) -> torch.Tensor:
        """[C, T, H, W] as stored -> float32, normalised."""
        mean = self.mean[:, None, None, None]
        std = self.std[:, None, None, None]
        return (latent.float() - mean) / std * sigma_data

    def from_model(self, latent: torch.Tensor, sigma_data: float) -> torch.Tensor:
        """Inverse of `to_model`."""
        mean = self.mean[:, None, None, None]
        std = self.std[:, None, None, None]
        return latent.float() / sigma_data * std + mean


# ---- the layout of a pack -------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Consecutive tokens of a segment with one noise level and frame rate."""

    tokens: int
    sigma: float
    fps: float
    noisy: bool = True  # False: given clean, or padding; no loss, and a sampler does not change its sigma


@dataclass(frozen=True)
class Segment:
    """Tokens that attend to one another and to `text` [L, D], and to nothing else. positions : float32 [tokens, 3]."""

    positions: torch.Tensor
    text: torch.Tensor
    rows: list[Row]

    @property
    def noisy(self) -> torch.Tensor:
        """bool [tokens], false for what is given."""
        return torch.cat([torch.full((row.tokens,), row.noisy) for row in self.rows])


def sample_segment(
    model: ModelConfig,
    grid: Grid,
    text: torch.Tensor,
    sigma: float,
    fps: float,
    ends: tuple[int, int] = (0, 0),
    given: Sequence[Grid] = (),
) -> Segment:
    """The segment of a sample of (T, H, W) patches, of which some are given.

    ends : frames in patches that are given at the start and at the end.
    given : sizes in patches of given pictures and clips. Their frames are before the target's frame 0, the first one
    nearest to it: two given pictures are at -1 and -2, and a clip of 3 frames after them is at -5, -4 and -3.
    """
    t, h, w = grid
    first, last = ends
    clean = Row(0, CLEAN_SIGMA, fps, noisy=False)
    after = last * h * w + sum(map(math.prod, given))
    rows = [
        clean._replace(tokens=first * h * w),
        Row((t - first - last) * h * w, sigma, fps),
        clean._replace(tokens=after),
    ]
    positions = [grid_positions(grid, model.network.centred)]
    before = 0  # frames between the target's first one and those of `given` so far
    for own in given:
        before += own[0]
        positions.append(grid_positions(own, model.network.centred))
        positions[-1][:, 0] -= before
    return Segment(torch.cat(positions), text, [row for row in rows if row.tokens])


@dataclass
class PackLayout:
    """A packed sequence without its latents: S tokens, R conditioning rows, K text tokens. All tensors are on the CPU.

    sigma, fps : float32 [R]; row : int64 [S], token -> row; positions : float32 [S, 3]; loss_mask : bool [S];
    text : bfloat16 [K, D]; pool : float32 [R, K], each row averages its segment's text.
    cu_q, cu_kv : bounds of the segments among tokens and text tokens; the last segment is the padding, if there is any.
    Packs of one shape have empty segments after it.
    longest : of packs of one shape: (tokens, text tokens), at least those of each segment, equal for all packs.
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
    longest: tuple[int, int] | None


def pack_layout(
    segments: Sequence[Segment],
    model: ModelConfig,
    token_multiple: int = 1,
    text_multiple: int = 1,
    row_multiple: int = 1,
    capacity: int | None = None,
    shape: PackShape | None = None,
) -> PackLayout:
    """Concatenate segments, then pad tokens, text and rows.

    Segments of 4 and 2 tokens, texts of 3 and 2 tokens, a capacity of 8 and a text_multiple of 4 (`.` is padding):

        tokens  a a a a b b . .    cu_q   0 4 6 8    row  0 0 0 0 1 1 2 2
        text    a a a b b . . .    cu_kv  0 3 5 8

    Parameters
    ----------
    model : its `text_padding` pads each text with rows of zeros, which are attended to, or truncates it.
    token_multiple, text_multiple, row_multiple, shape : see `PackSettings`.
    capacity : tokens of the pack; None: the number of tokens, rounded up to `token_multiple`.
    """
    segments = list(segments)
    if model.text_padding:
        segments = [replace(s, text=F.pad(s.text, (0, 0, 0, model.text_padding - len(s.text)))) for s in segments]
    padding_row = Row(0, model.sigma_data, PADDING_FPS, noisy=False)  # any positive noise level works
    tokens = sum(len(s.positions) for s in segments)
    text = sum(len(s.text) for s in segments)
    padding = (round_up(tokens, token_multiple) if capacity is None else capacity) - tokens
    assert padding >= 0, (tokens, capacity)
    # All padding is one last segment, so that no sample attends to it. Padding tokens need a text token to attend to,
    # because a softmax over nothing is NaN. Padding text alone is a segment without tokens and without a row.
    padded_text = round_up(text + 1 if padding else text, text_multiple)
    if shape is not None:
        padded_text = max(padded_text, shape.text)
    text_padding = padded_text - text
    if padding or text_padding:
        zeros = segments[0].text.new_zeros(text_padding, segments[0].text.shape[1])
        rows = [padding_row._replace(tokens=padding)] if padding else []
        segments.append(Segment(torch.zeros(padding, 3), zeros, rows))
    cu_q = [0]
    cu_kv = [0]
    all_rows: list[Row] = []
    for s in segments:
        cu_q.append(cu_q[-1] + len(s.positions))
        cu_kv.append(cu_kv[-1] + len(s.text))
        all_rows += s.rows
    longest = None
    if shape is not None:
        # longer padding takes the one other value that is enough for any
        fits = all(b - a <= shape.longest for a, b in pairwise(cu_q))
        longest = shape.longest if fits else cu_q[-1], cu_kv[-1]
        for bounds in (cu_q, cu_kv):
            bounds += bounds[-1:] * (shape.segments + 1 - len(bounds))
    # The last rows have no tokens; their pooled text stays zero.
    all_rows += [padding_row] * (-len(all_rows) % row_multiple)
    if shape is not None:
        all_rows += [padding_row] * (shape.rows - len(all_rows))
    pool = torch.zeros(len(all_rows), cu_kv[-1])
    row = 0
    for i, s in enumerate(segments):
        pool[row : row + len(s.rows), cu_kv[i] : cu_kv[i + 1]] = 1 / len(s.text)
        row += len(s.rows)
    lengths, sigma, fps, noisy = map(torch.tensor, zip(*all_rows))
    return PackLayout(
        sigma=sigma,
        fps=fps,
        row=torch.arange(len(all_rows)).repeat_interleave(lengths),
        positions=torch.cat([s.positions for s in segments]),
        loss_mask=noisy.repeat_interleave(lengths),
        text=torch.cat([s.text for s in segments]),
        pool=pool,
        cu_q=cu_q,
        cu_kv=cu_kv,
        longest=longest,
    )


def retexted(pack: PackLayout, text: torch.Tensor, text_multiple: int = 1) -> PackLayout:
    """The pack in which each segment has the text [L, D] instead of its own."""
    own = torch.tensor(pack.cu_kv).diff()
    length = len(text)
    segment = torch.arange(len(own)).repeat_interleave(own)  # of each text token
    pool = pack.pool @ F.one_hot(segment, len(own)).float()  # [R, segments]: 1 at the row's own
    cu_q = list(pack.cu_q)
    cu_kv = list(range(0, len(own) * length + 1, length))
    padding = -cu_kv[-1] % text_multiple
    if padding:
        cu_q.append(cu_q[-1])
        cu_kv.append(cu_kv[-1] + padding)
    return replace(
        pack,
        text=F.pad(text.repeat(len(own), 1), (0, 0, 0, padding)),
        pool=F.pad(pool.repeat_interleave(length, 1) / length, (0, padding)),
        cu_q=cu_q,
        cu_kv=cu_kv,
        longest=None,
    )


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In memory from which CUDA copies without blocking the host; without CUDA the tensor itself."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


# ---- training samples -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw(Segment):
    """A training sample: a segment with its latents x0 and noise, float32 [tokens, p]. grid : patches of the target."""

    key: str
    grid: Grid
    x0: torch.Tensor  # normalised to sigma_data
    noise: torch.Tensor  # zero on what is given, so that the network sees it clean


def noised(
    model: ModelConfig,
    key: str,
    latent: torch.Tensor,
    noise: torch.Tensor,
    text: torch.Tensor,
    sigma: float,
    fps: float,
    ends: tuple[int, int] = (0, 0),
    given: Sequence[torch.Tensor] = (),
) -> Draw:
    """A normalised latent and its noise, float32 [C, T, H, W].

    ends, given : as for `sample_segment`; given are normalised latents.
    """
    patch = (model.patch_spatial, model.patch_temporal)
    grid, *grids = (patch_grid(model, z.shape[1:]) for z in (latent, *given))
    segment = sample_segment(model, grid, text, sigma, fps, ends, grids)
    x0 = torch.cat([patchify(z, *patch) for z in (latent, *given)])
    noise = patchify(noise, *patch)
    noise = F.pad(noise, (0, 0, 0, len(x0) - len(noise))) * segment.noisy[:, None]
    return Draw(**vars(segment), key=key, grid=grid, x0=x0, noise=noise)


def patch_grid(model: ModelConfig, size: Sequence[int]) -> Grid:
    """Patches of a latent of T, H and W."""
    t, h, w = size
    return t // model.patch_temporal, h // model.patch_spatial, w // model.patch_spatial


def caption_of(clip: EncodedClip, epoch: int, seed: int) -> torch.Tensor:
    """The text embedding [L, D] of a sample in an epoch, drawn from (seed, epoch, key).

    The first caption in half of the epochs, because validation samples and `dfm evaluate` ask for it; of three, each
    other caption in a quarter. Half is a choice, not measured.
    """
    others = len(clip.more_text)
    if not others:
        return clip.text_emb[0]
    drawn = int(torch.randint(2 * others, (), generator=generator_for(seed, "caption", epoch, clip.key)))
    if drawn < others:
        return clip.text_emb[0]
    return clip.more_text[drawn - others][0]


def draw_sample(clip: EncodedClip, epoch: int, settings: PackSettings, empty_text: torch.Tensor) -> Draw:
    """Normalise a stored latent and draw its sigma, noise, caption and caption dropout from (seed, epoch, key).

    Raises
    ------
    SampleError : the latent does not divide into patches.
    """
    config = settings.config
    m = config.model
    seed = config.rng.seed
    assert settings.statistics is not None
    g = generator_for(seed, "draw", epoch, clip.key)
    for z in (clip.latent, *clip.given):
        check_divides(z[0], m.patch_spatial, m.patch_temporal, f"the latent of sample {clip.key}")
    # All numbers are drawn in this order whether used or not, so that a setting does not change other draws.
    normal = torch.randn((), generator=g)
    drop = torch.rand((), generator=g)
    give = torch.rand((), generator=g)
    latent, *given = (settings.statistics.to_model(z[0], m.sigma_data) for z in (clip.latent, *clip.given))
    sigma = edm.sigma_from_normal(normal, m.P_mean, m.P_std, m.times)
    if m.shift_tokens:  # more tokens share more information, so the same corruption needs more noise
        sigma = sigma * math.sqrt(latent[0].numel() / settings.patch_volume / m.shift_tokens)
    # One number drops the caption below `words` and what is given from `words / 2` on. So, with equal shares, both are
    # dropped together in half of the cases, and guidance learns estimates without words, without pictures and without
    # either.
    words = config.train.caption_dropout
    # One number decides about the first and the last frame, independently: within the range of the first one's outcome
    # it is uniform again. A clip keeps one frame to learn from.
    p = config.dataset.condition_frames_prob
    first = int(give < p)
    give_last = give / p if first else (give - p) / (1 - p)
    last = int(give_last < config.dataset.condition_last_prob)
    t = latent.shape[1]
    # Everything derived from the caption is dropped with it: guidance needs an estimate without that information.
    return noised(
        m,
        clip.key,
        latent,
        noise=torch.randn(latent.shape, generator=g),
        text=empty_text if drop < words else caption_of(clip, epoch, seed),
        sigma=float(sigma),
        fps=clip.fps,
        ends=(first and int(t > 1), last and int(t > 1 + first)),
        given=[] if words / 2 <= drop < words / 2 + config.train.given_dropout else given,
    )


@dataclass
class Pack(PackLayout):
    """The packed sequence of B samples. x0, noise : float32 [S, p], zero in the padding.

    weight : float32 [S], of a token's loss in the gradient: 0 outside `loss_mask`, more than 1 in first frames of clips
    (`train.first_frame_share`), else 1.
    keys[i], grids[i] : name and target's patches of the sample in segment i. dropped : (reason, detail) of samples that
    cannot be used. A pack without a sample has no keys and does not count in the loss. target : float32 [S, p], the
    estimate that a student must reach, if it is one.
    """

    x0: torch.Tensor
    noise: torch.Tensor
    weight: torch.Tensor
    keys: list[str]
    grids: list[Grid]
    dropped: list[tuple[str, str]] = field(default_factory=list)
    target: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of samples' tokens, without padding."""
        return self.cu_q[len(self.keys)]

    def lengths(self) -> tuple[list[int], list[int]]:
        """Tokens and text tokens of each sample, without the padding segment."""
        bounds = len(self.keys) + 1
        q = torch.tensor(self.cu_q[:bounds]).diff()
        kv = torch.tensor(self.cu_kv[:bounds]).diff()
        return q.tolist(), kv.tolist()


def pack_draws(draws: Sequence[Draw], settings: PackSettings, capacity: int | None = None) -> Pack:
    """Pack samples into one sequence, padded to `capacity` (None: only to the layout's multiple).

    Samples are sorted by length, so that equal lengths are neighbours and share one batched attention call.
    """
    draws = sorted(draws, key=lambda d: (len(d.x0), d.grid, len(d.text), d.key))
    s = settings
    grids = [d.grid for d in draws]
    layout = pack_layout(
        draws, s.config.model, s.token_multiple, s.text_multiple, s.row_multiple, capacity, shape=s.shape
    )
    padding = (0, 0, 0, layout.cu_q[-1] - layout.cu_q[len(draws)])
    share = settings.config.train.first_frame_share
    weight = layout.loss_mask.float()
    for start, (t, h, w) in zip(layout.cu_q, grids):
        weight[start : start + h * w] *= max(1, share / (1 - share) * (t - 1))
    return Pack(
        **vars(layout),
        x0=F.pad(torch.cat([d.x0 for d in draws]), padding),
        noise=F.pad(torch.cat([d.noise for d in draws]), padding),
        weight=weight,
        keys=[d.key for d in draws],
        grids=grids,
    )


def blank_pack(settings: PackSettings, channels: int, empty_text: torch.Tensor, capacity: int | None = None) -> Pack:
    """A pack without a sample: a patch of zeros and padding, without loss."""
    m = settings.config.model
    zeros = torch.zeros(channels, m.patch_temporal, m.patch_spatial, m.patch_spatial)
    pack = pack_draws([noised(m, "", zeros, zeros, empty_text, m.sigma_data, PADDING_FPS)], settings, capacity)
    none = torch.zeros_like(pack.loss_mask)
    return replace(pack, loss_mask=none, weight=none.float(), keys=[], grids=[])
