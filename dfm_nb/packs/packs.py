"""How samples become one packed sequence: normalisation, noise level, noise, caption dropout, segment bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dfm_nb.base.records import EncodedClip
from dfm_nb.base.seeds import generator_for
from dfm_nb.diffusion import edm
from dfm_nb.packs.patches import grid_positions, patchify


@dataclass(frozen=True)
class PackSettings:
    """How samples become a pack; equal on all ranks.

    sigma_data : the standard deviation that latents are scaled to (after the data set's mean and std per channel).
    token_multiple, text_multiple, row_multiple : the packed lengths and the number of conditioning rows are padded to these, for a layout,
    or so that shapes come again: oneDNN makes a new kernel for every shape of a product in bfloat16.
    condition_frames_prob : chance that a clip's first latent frame is given clean and left out of the loss.
    """

    seed: int
    patch_spatial: int = 2
    patch_temporal: int = 1
    sigma_data: float = 0.5
    P_mean: float = -1.2
    P_std: float = 1.2
    caption_dropout: float = 0.1
    condition_frames_prob: float = 0.0
    token_multiple: int = 1
    text_multiple: int = 1
    row_multiple: int = 1


@dataclass
class Pack:
    """One packed sequence of S tokens from B samples, R conditioning rows, K text tokens. All tensors on the CPU.

    x0, noise : float32 [S, p]; sigma, fps : float32 [R]; row : int64 [S]; positions : float32 [S, 3]; loss_mask : bool [S];
    text : bfloat16 [K, D]; pool : float32 [R, K]. A last segment holds the padding, if any: its loss mask is False. Last rows may have no token.
    cu_q, cu_kv : segment bounds, also for the padding. grids[i] : (T, H, W) in patches of sample i.
    """

    x0: torch.Tensor
    noise: torch.Tensor
    sigma: torch.Tensor
    fps: torch.Tensor
    row: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    text: torch.Tensor
    pool: torch.Tensor
    cu_q: list[int]
    cu_kv: list[int]
    keys: list[str]
    grids: list[tuple[int, int, int]]
    dropped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of samples, without padding."""
        return sum(t * h * w for t, h, w in self.grids)


@dataclass(frozen=True)
class LatentStatistics:
    """From stored latents to what the network sees and back: every channel has mean 0 and standard deviation sigma_data.

    mean, std : float32 [C], of the data set's training split.
    """

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def from_manifest(cls, manifest: dict) -> LatentStatistics:
        mean, std = (torch.tensor(manifest[k]).float() for k in ("latent_mean", "latent_std"))
        return cls(mean, std.clamp_min(1e-6))

    def to_model(self, latent: torch.Tensor, sigma_data: float) -> torch.Tensor:
        """[C, T, H, W] as stored -> float32, normalised."""
        mean, std = (v[:, None, None, None] for v in (self.mean, self.std))
        return (latent.float() - mean) / std * sigma_data

    def from_model(self, latent: torch.Tensor, sigma_data: float) -> torch.Tensor:
        mean, std = (v[:, None, None, None] for v in (self.mean, self.std))
        return latent.float() / sigma_data * std + mean


@dataclass
class Draw:
    """One sample as the network will see it, before packing."""

    key: str
    latent: torch.Tensor  # float32 [C, T, H, W], normalised to sigma_data
    text: torch.Tensor  # [L, D]
    fps: float
    sigma: float
    noise: torch.Tensor  # float32 [C, T, H, W]
    clean_frames: int = 0


CLEAN_SIGMA = 0.002  # noise level announced for given frames: EDM's sigma_min


def draw_sample(
    clip: EncodedClip, epoch: int, settings: PackSettings, statistics: LatentStatistics, empty_text: torch.Tensor
) -> Draw:
    """Normalise a stored latent and draw its sigma, noise and caption dropout from (seed, epoch, key)."""
    g = generator_for(settings.seed, "draw", epoch, clip.key)
    normal, drop, give = torch.randn((), generator=g), torch.rand((), generator=g), torch.rand((), generator=g)
    latent = statistics.to_model(clip.latent[0], settings.sigma_data)
    frames = latent.shape[1]
    clean = int(frames > 1 and give < settings.condition_frames_prob)
    return Draw(
        key=clip.key,
        latent=latent,
        text=empty_text if drop < settings.caption_dropout else clip.text_emb[0],
        fps=float(clip.meta.get("fps") or 24),
        sigma=float(edm.sigma_from_normal(normal, settings.P_mean, settings.P_std)),
        noise=torch.randn(latent.shape, generator=g),
        clean_frames=clean,
    )


def pack_draws(draws: list[Draw], settings: PackSettings, capacity: int | None = None) -> Pack:
    """Put samples into one packed sequence, padded to `capacity` (or only to the layout's multiple when None).

    Samples are ordered by length, so that equal lengths are neighbours and one batched attention call serves them.
    """
    s, pt = settings.patch_spatial, settings.patch_temporal
    draws = sorted(draws, key=lambda d: (d.latent[0].numel(), d.latent.shape, len(d.text), d.key))
    x0, noise, positions, rows, mask, grids = [], [], [], [], [], []
    sigma, fps, row_text, lengths, text_lengths = [], [], [], [], []
    for i, d in enumerate(draws):
        _, t, h, w = d.latent.shape
        grid = (t // pt, h // s, w // s)
        tokens, per_frame = grid[0] * grid[1] * grid[2], grid[1] * grid[2]
        clean = d.clean_frames // pt * per_frame
        clean_noise = d.noise
        if clean:
            clean_noise = d.noise.clone()
            clean_noise[:, : d.clean_frames] = 0
            rows.append(torch.full((clean,), len(sigma)))
            sigma.append(CLEAN_SIGMA)
            fps.append(d.fps)
            row_text.append(i)
        rows.append(torch.full((tokens - clean,), len(sigma)))
        sigma.append(d.sigma)
        fps.append(d.fps)
        row_text.append(i)
        x0.append(patchify(d.latent, s, pt))
        noise.append(patchify(clean_noise, s, pt))
        positions.append(grid_positions(grid))
        mask.append(torch.arange(tokens) >= clean)
        grids.append(grid)
        lengths.append(tokens)
        text_lengths.append(len(d.text))
    texts = [d.text for d in draws]
    total, text_total = sum(lengths), sum(text_lengths)
    target = capacity if capacity is not None else -(-total // settings.token_multiple) * settings.token_multiple
    text_target = -(-text_total // settings.text_multiple) * settings.text_multiple
    padding = target - total
    assert padding >= 0, (total, capacity)
    if padding or text_target > text_total:
        if padding == 0:  # text alone is padded: the surplus text tokens belong to a segment without queries
            text_padding = text_target - text_total
        else:
            text_target = -(-(text_total + 1) // settings.text_multiple) * settings.text_multiple
            text_padding = text_target - text_total
            rows.append(torch.full((padding,), len(sigma)))
            sigma.append(settings.sigma_data)
            fps.append(24.0)
            row_text.append(len(draws))
            p = x0[0].shape[1]
            x0.append(torch.zeros(padding, p))
            noise.append(torch.zeros(padding, p))
            positions.append(torch.zeros(padding, 3))
            mask.append(torch.zeros(padding, dtype=torch.bool))
        lengths.append(padding)
        text_lengths.append(text_padding)
        texts.append(texts[0].new_zeros(text_padding, texts[0].shape[1]))
    cu_kv = [0]
    for n in text_lengths:
        cu_kv.append(cu_kv[-1] + n)
    cu_q = [0]
    for n in lengths:
        cu_q.append(cu_q[-1] + n)
    spare = -len(sigma) % settings.row_multiple  # rows without a token
    sigma += [settings.sigma_data] * spare
    fps += [24.0] * spare
    pool = torch.zeros(len(sigma), cu_kv[-1])
    for r, segment in enumerate(row_text):
        pool[r, cu_kv[segment] : cu_kv[segment + 1]] = 1 / text_lengths[segment]
    return Pack(
        x0=torch.cat(x0),
        noise=torch.cat(noise),
        sigma=torch.tensor(sigma),
        fps=torch.tensor(fps),
        row=torch.cat(rows),
        positions=torch.cat(positions),
        loss_mask=torch.cat(mask),
        text=torch.cat(texts),
        pool=pool,
        cu_q=cu_q,
        cu_kv=cu_kv,
        keys=[d.key for d in draws],
        grids=grids,
    )
