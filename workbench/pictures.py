"""One picture per idea: latents, noise, schedules, losses by noise level, packs, positions, attention, guidance.

Each is one call that computes with the package's own functions and gives a `Picture`. matplotlib, on white, so that it
reads on any page.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no global state, no display
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from dfm_nb import config as cfg
from dfm_nb.base import video
from dfm_nb.base.geometry import FRAMES_PER_LATENT
from dfm_nb.base.metrics import read_metrics
from dfm_nb.base.plots import PALETTE
from dfm_nb.base.records import Clip
from dfm_nb.base.run import Run
from dfm_nb.base.seeds import generator_for
from dfm_nb.data.pack_plan import PackPlan
from dfm_nb.data.stores import EnergonStore
from dfm_nb.diffusion import edm, samplers
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.model.positions import rotary_angles
from dfm_nb.packs.packs import PackSettings
from dfm_nb.packs.patches import grid_positions
from workbench.words import word_attention

WIDTH_IN, PX_PER_IN, DPI = 9.2, 96, 128
CELL_IN = 1.0
INK, PADDING = "#333333", "#cccccc"
GLOW = np.array([1.0, 0.55, 0.15])
_USUAL = cfg.Config().model


@dataclass(repr=False)
class Picture:
    """A figure, and what it shows in words: read aloud in place of it, and printed where there are no pictures."""

    figure: Figure
    summary: str

    def save(self, path: str | Path) -> Path:
        """Write it as PNG, or as what else the suffix says."""
        self.figure.savefig(path, dpi=DPI)
        return Path(path)

    def _repr_html_(self) -> str:
        out = io.BytesIO()
        self.figure.savefig(out, format="png", dpi=DPI)
        width_px = round(self.figure.get_size_inches()[0] * PX_PER_IN)
        return video.media_html("image/png", out.getvalue(), self.summary, width_px)

    def __repr__(self) -> str:
        return self.summary


def _figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    figure = Figure(figsize=(width_in, height_in), facecolor="white")
    figure.set_layout_engine("constrained", rect=(0.008, 0.012, 0.984, 0.976))  # a margin, as the page may be dark
    return figure


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def _number(value: float, _position: object = None) -> str:
    return f"{value:g}"


def _label(axes: Axes, text: str) -> None:
    """A row's name, to the left of its first picture."""
    axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=10, color=INK, labelpad=8)


# ---- clips, and estimates of them ----------------------------------------------------------------------------------


def _clean(pipe: Pipeline, clip: Clip | Generated) -> tuple[torch.Tensor, Request]:
    """A clip's normalised latent, float64 [C, T, H, W], and the request that has its prompt and size."""
    frames, prompt, fps = _pixels(clip)
    size = {"num_video_frames": len(frames), "height": frames.shape[1], "width": frames.shape[2]}
    latent = clip.latent.double() if isinstance(clip, Generated) else pipe.encode_pixels(frames)
    return latent, Request(prompt, **size, fps=fps, guidance=1.0)


def _pixels(clip: Clip | Generated) -> tuple[np.ndarray, str, float]:
    """Frames, prompt and frames per second."""
    if isinstance(clip, Generated):
        return clip.frames, clip.request.prompt, clip.request.fps
    return clip.video, clip.caption, clip.fps


def _two_estimates(pipe: Pipeline, request: Request, x: torch.Tensor, sigma: float) -> torch.Tensor:
    """D(x; sigma) with the prompt and with the empty caption, float64 [2, C, T, H, W]."""
    return pipe.denoiser([request, request.replace(prompt="")]).cond(x[None].to(pipe.device), sigma).cpu()


def _edm_loss(D: torch.Tensor, y: torch.Tensor, sigma: float, sigma_data: float) -> float:
    """lambda(sigma) |D - y|^2, averaged."""
    return ((D - y).square().mean() / edm.c_out(torch.tensor(sigma), sigma_data) ** 2).item()


def _noise(latent: torch.Tensor, *names: Any) -> torch.Tensor:
    return torch.randn(latent.shape, generator=generator_for("pictures", *names), dtype=torch.float64)


def _mosaic(latent: torch.Tensor, rows: int) -> np.ndarray:
    """[C, H, W] -> [rows * (H + 1), C / rows * (W + 1)]: channels beside one another, NaN between them."""
    apart = torch.nn.functional.pad(latent, (0, 1, 0, 1), value=math.nan)
    return rearrange(apart, "(r c) h w -> (r h) (c w)", r=rows).numpy()


def _show(axes: Axes, picture: np.ndarray, **settings: Any) -> None:
    axes.imshow(picture, interpolation="nearest", **settings)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


# ---- data ---------------------------------------------------------------------------------------------------------


def tokenized(pipe: Pipeline, clip: Clip | Generated) -> Picture:
    """What the tokenizer makes of a clip: its frames, the latent frames with all channels, and the frames decoded."""
    (latent, _), (frames, *_) = _clean(pipe, clip), _pixels(clip)
    decoded = pipe.decode(latent)
    (channels, t, h, w), n = latent.shape, len(frames)
    figure = _figure(3 * CELL_IN + 0.8, max(5.0, n * CELL_IN + 0.7))
    grid = figure.add_gridspec(3, n)
    for row, pictures in ((0, frames), (2, decoded)):
        for i, picture in enumerate(pictures):
            _show(figure.add_subplot(grid[row, i]), picture)
    for axes, i in zip(figure.axes, range(n)):
        axes.set_title(f"frame {i}", fontsize=9, color=INK)
    for i in range(t):  # the first frame is coded alone, then four together
        columns = slice(1 + FRAMES_PER_LATENT * (i - 1), 1 + FRAMES_PER_LATENT * i) if i else slice(0, 1)
        channels_shown = _mosaic(latent[:, i], 2 if i else 4)
        _show(figure.add_subplot(grid[1, columns]), channels_shown, cmap="RdBu_r", vmin=-1.5, vmax=1.5)
    for axes, name in zip(figure.axes[::n], ("pixels", "decoded", "latent")):
        _label(axes, name)
    error = np.square(frames.astype(float) - decoded).mean()
    psnr = 10 * math.log10(255**2 / max(error, 1e-9))
    before = f"{n} x {frames.shape[1]} x {frames.shape[2]} pixels of 3 colours are {frames.size:,} numbers"
    after = f"the latent's {channels} channels of {t} x {h} x {w} are {latent.numel():,}"
    fewer = f"{frames.size / latent.numel():.0f} times fewer"
    figure.suptitle(f"{before},\n{after}: {fewer}", fontsize=10, color=INK)
    return Picture(
        figure, f"A clip, its latent and the clip decoded. {before}, {after}, {fewer}. Decoded: {psnr:.1f} dB."
    )


def packs(
    data_dir: str | os.PathLike,
    capacity: int | None = None,
    recipe: str = "demo",
    num_packs: int = 4,
    averaged: int = 100,
) -> Picture:
    """The first packs of a training on these shards, one of them as a padded batch, and which tokens attend to which.

    capacity : tokens of a pack; None: the recipe's, or those of the longest sample if it has more.
    averaged : packs that the two shares are taken from.
    """
    config = cfg.resolve(recipe).config
    store = EnergonStore(Path(data_dir), "train")
    settings = PackSettings.of(config)
    volume = settings.patch_temporal * settings.patch_spatial**2
    samples = [(t * h * w // volume, t) for t, h, w in map(store.grid, range(len(store)))]
    if capacity is None:
        usual = config.train.micro_batch_size * config.dataset.task_encoder_seq_length
        capacity = max(usual, max(samples)[0])
    plan = PackPlan(store, settings, capacity, config.dataset.packing_buffer_size)
    lengths = [sorted(samples[i] for _, i in plan.next()) for _ in range(max(averaged, num_packs))]
    used = [sum(n for n, _ in pack) for pack in lengths]
    packed = sum(used) / (len(used) * capacity)
    padded = sum(used) / sum(len(pack) * pack[-1][0] for pack in lengths)

    kinds = sorted({t for pack in lengths for _, t in pack})
    colours = {t: PALETTE[(0, 1, 2, 4, 3)[i % 5]] for i, t in enumerate(kinds)}
    figure = _figure(5.6)
    grid = figure.add_gridspec(2, 2, height_ratios=(num_packs + 2, 9), width_ratios=(3, 1.6))
    axes = figure.add_subplot(grid[0, :])
    for row, pack in enumerate(lengths[:num_packs]):
        _row(axes, row, pack, capacity, colours)
    labels = [f"pack {i + 1}" for i in range(num_packs)]
    axes.set(xlim=(0, capacity), ylim=(num_packs - 0.4, -0.6), yticks=range(num_packs), yticklabels=labels)
    axes.xaxis.set_major_locator(MultipleLocator(capacity / 6))
    axes.set_xlabel("tokens")
    axes.set_title(f"Packed: {packed:.1%} of the tokens are samples", fontsize=11)
    names = {t: "stills" if t == 1 else f"clips of {1 + FRAMES_PER_LATENT * (t - 1)} frames" for t in kinds}
    keys = [Rectangle((0, 0), 1, 1, color=colours[t], label=names[t]) for t in kinds]
    keys.append(Rectangle((0, 0), 1, 1, facecolor=PADDING, hatch="////", edgecolor="white", label="padding"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9)

    first = lengths[0]
    axes = figure.add_subplot(grid[1, 0])
    for row, sample in enumerate(first):
        _row(axes, row, [sample], first[-1][0], colours)
    axes.set(xlim=(0, first[-1][0]), ylim=(len(first) - 0.4, -0.6), xlabel="tokens", yticks=[])
    axes.set_ylabel(f"samples of pack 1 ({len(first)})")
    axes.set_title(f"Padded to the longest: {padded:.1%} would be samples", fontsize=11)

    axes = figure.add_subplot(grid[1, 1])
    start = 0
    axes.add_patch(Rectangle((0, 0), capacity, capacity, color="#f2f2f2"))
    for n, t in first:
        axes.add_patch(Rectangle((start, start), n, n, color=colours[t]))
        start += n
    axes.set(
        xlim=(0, capacity), ylim=(capacity, 0), aspect="equal", xlabel="attends to token", ylabel="token of pack 1"
    )
    axes.set_title("Each sample sees only itself", fontsize=11)
    said = f"Of packs of {capacity} tokens {packed:.1%} are samples, of the same padded to the longest {padded:.1%}."
    return Picture(figure, said)


def _row(axes: Axes, row: int, samples: Sequence[tuple[int, int]], length: int, colours: dict[int, str]) -> None:
    """Samples (tokens, latent frames) after one another, and padding up to `length`."""
    start = 0
    for n, t in samples:
        axes.barh(row, n, left=start, height=0.8, color=colours[t], edgecolor="white", linewidth=0.7)
        start += n
    if start < length:
        axes.barh(
            row, length - start, left=start, height=0.8, color=PADDING, hatch="////", edgecolor="white", linewidth=0
        )
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)


# ---- noise --------------------------------------------------------------------------------------------------------


def noising(
    pipe: Pipeline, clip: Clip | Generated, sigmas: Sequence[float] = (0.05, 0.2, 0.5, 1, 2, 5, 20), seed: int = 0
) -> Picture:
    """The middle of a clip with noise of several levels, and the model's estimates D(x; sigma) of it without the noise.

    The losses are those of EDM, over the whole clip.
    """
    y, request = _clean(pipe, clip)
    middle, eps = request.num_video_frames // 2, _noise(y, seed)
    names = ("noisy latent\n(3 channels)", "decoded", "estimate,\nwith caption", "estimate,\nno caption")
    columns, losses = 1 + len(sigmas), []
    figure = _figure(4 * CELL_IN + 0.9, columns * CELL_IN + 1.2)
    grid = figure.subplots(4, columns)
    for axes, sigma in zip(grid.T, (0.0, *sigmas)):
        x = y + sigma * eps
        spread = 5 * math.hypot(sigma, pipe.sigma_data)
        colours = 0.5 + x[:3, y.shape[1] // 2].permute(1, 2, 0).numpy() / spread
        _show(axes[0], colours.clip(0, 1))
        axes[0].set_title(f"sigma {sigma:g}" if sigma else "clean", fontsize=10, color=INK)
        _show(axes[1], pipe.decode(x)[middle])
        if not sigma:
            _bare(axes[2])
            _bare(axes[3])
            continue
        estimates = _two_estimates(pipe, request, x, sigma)
        losses.append([_edm_loss(D, y, sigma, pipe.sigma_data) for D in estimates])
        for cell, D, loss in zip(axes[2:], estimates, losses[-1]):
            _show(cell, pipe.decode(D)[middle])
            cell.set_xlabel(f"loss {loss:.2f}", fontsize=9, color=INK)
    for axes, name in zip(grid, names):
        _label(axes[0], name)
    told = ", ".join(f"{a:.2f} and {b:.2f} at {sigma:g}" for sigma, (a, b) in zip(sigmas, losses))
    return Picture(figure, f"{request.prompt} EDM loss with and without the caption by sigma: {told}.")


def schedules(
    num_steps: int = 18,
    P_mean: float = _USUAL.P_mean,
    P_std: float = _USUAL.P_std,
    sigma_data: float = _USUAL.sigma_data,
) -> Picture:
    """The noise levels of every schedule, step by step, beside the noise levels that training draws."""
    figure = _figure(4.0)
    axes, side = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    told = []
    for i, (name, schedule) in enumerate(samplers.SCHEDULES.items()):
        own = {"sigma_data": sigma_data} if "sigma_data" in schedule.settings else {}
        levels = schedule(num_steps, **own)[:-1]
        usual = name == Request("").schedule
        label = f"{name} (what every sampler uses unless told)" if usual else name
        (line,) = axes.semilogy(levels, "o-", color=PALETTE[i], label=label)
        line.set(linewidth=2.2 if usual else 1.2, markersize=4.5 if usual else 3, zorder=3 if usual else 2)
        inside = (levels.log() - P_mean).abs() < 2 * P_std
        told.append(f"{name} {int(inside.sum())}")
    axes.set(xlabel="step", ylabel="sigma", title=f"{num_steps} steps from noise to clip")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.legend(frameon=False, fontsize=9)
    _plain(axes)
    low, high = axes.get_ylim()
    grid = np.geomspace(low, high, 300)
    side.fill_betweenx(grid, _density(grid, P_mean, P_std), color=PALETTE[5], alpha=0.6, linewidth=0)
    side.set(title="Training noise", xticks=[], xlim=(0, None))
    side.tick_params(axis="y", which="both", left=False)
    side.spines[["top", "right", "bottom"]].set_visible(False)
    for panel in (axes, side):
        panel.axhspan(*np.exp([P_mean - 2 * P_std, P_mean + 2 * P_std]), color=PALETTE[5], alpha=0.14, linewidth=0)
    low, high = np.exp([P_mean - 2 * P_std, P_mean + 2 * P_std])
    said = f"Of {num_steps} steps these lie where training draws 95 % of its noise, {low:.2g} to {high:.2g}"
    return Picture(figure, f"{said}: {', '.join(told)}.")


def _density(sigmas: np.ndarray, P_mean: float, P_std: float) -> np.ndarray:
    """Of ln(sigma) in training, 1 at its highest."""
    return np.exp(-0.5 * ((np.log(sigmas) - P_mean) / P_std) ** 2)


LEVELS = tuple(float(s) for s in np.geomspace(0.02, 40, 12).round(3))


def loss_of_model(pipe: Pipeline, clips: Sequence[Clip | Generated], sigmas: Sequence[float] = LEVELS) -> Picture:
    """EDM loss of clips by noise level, with their captions and with the empty one, over the noise of training."""
    losses = np.zeros((2, len(sigmas)))
    for i, clip in enumerate(clips):
        y, request = _clean(pipe, clip)
        for j, sigma in enumerate(sigmas):
            estimates = _two_estimates(pipe, request, y + sigma * _noise(y, i, j), sigma)
            losses[:, j] += [_edm_loss(D, y, sigma, pipe.sigma_data) / len(clips) for D in estimates]
    m = pipe.config.model
    named = {"with caption": losses[0], "with no caption": losses[1]}
    return _losses({name: (sigmas, values) for name, values in named.items()}, m.P_mean, m.P_std)


def loss_of_run(run_dir: str | Path, rounds: int = 3) -> Picture:
    """Validation loss by noise level of a run's first, last and some rounds between, over the noise of training."""
    found = [r for r in read_metrics(run_dir) if r.get("val_loss_by_sigma")]
    if not found:
        raise ValueError(f"{run_dir} has no validation yet; lower train.eval_interval, or wait")
    chosen = [found[i] for i in sorted({*np.linspace(0, len(found) - 1, rounds).round().astype(int)})]
    model = cfg.from_yaml(Run(Path(run_dir)).config_file).config.model
    curves = {f"iteration {r['iteration']}": (r["val_sigmas"], r["val_loss_by_sigma"]) for r in chosen}
    return _losses(curves, model.P_mean, model.P_std)


def _losses(curves: dict[str, tuple[Sequence[float], Any]], P_mean: float, P_std: float) -> Picture:
    figure = _figure(4.1, 7.4)
    axes = figure.add_subplot()
    ends = [s for sigmas, _ in curves.values() for s in sigmas] + [math.exp(P_mean + n * P_std) for n in (-3, 3)]
    low, high = 0.9 * min(ends), max(ends) / 0.9
    grid = np.geomspace(low, high, 300)
    axes.fill_between(
        grid,
        _density(grid, P_mean, P_std),
        color=PALETTE[5],
        alpha=0.3,
        linewidth=0,
        label="how often training draws it",
    )
    axes.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label="a network that answers 0")
    for i, (name, (sigmas, losses)) in enumerate(curves.items()):
        axes.semilogx(sigmas, losses, "o-", color=PALETTE[(1, 0, 2, 3, 4)[i % 5]], markersize=4.5, label=name)
    axes.set(xlabel="sigma", ylabel="EDM loss", ylim=(0, None), xlim=(low, high))
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _plain(axes)
    told = "; ".join(
        f"{name} {', '.join(f'{b:.2f} at {a:.2g}' for a, b in zip(*points))}" for name, points in curves.items()
    )
    return Picture(figure, f"EDM loss by sigma: {told}. Training draws ln(sigma) from N({P_mean:g}, {P_std:g}).")


# ---- the network --------------------------------------------------------------------------------------------------


def rotary(side: int = 8, frames: int = 3, head_dim: int = 32) -> Picture:
    """Rotary positions: how the pairs of channels of a head turn over time, height and width.

    side, frames : of a clip, in patches; 8 are 128 px.
    """
    angles = rotary_angles(grid_positions((frames, side, side)), head_dim)
    omega = rotary_angles(torch.eye(3), head_dim)  # [axis, pair], radians a frame or patch; each pair has one axis
    axis_of, turns = omega.argmax(0), 2 * math.pi / omega.amax(0)
    own = [torch.nonzero(axis_of == i).flatten().tolist() for i in range(3)]
    figure = _figure(4.3)
    parts = figure.add_gridspec(1, 2, width_ratios=(2.3, 1))
    left, right = figure.add_subfigure(parts[0]), figure.add_subfigure(parts[1])
    grid = left.add_gridspec(3, max(map(len, own)))
    maps = rearrange(angles.sin(), "(t h w) p -> p t h w", t=frames, h=side)
    for row, (name, colour) in enumerate(zip(("time", "height", "width"), PALETTE)):
        for column, pair in enumerate(own[row]):
            axes = left.add_subplot(grid[row, column])
            picture = torch.nn.functional.pad(maps[pair], (0, 1), value=math.nan) if row == 0 else maps[pair, :1]
            _show(axes, rearrange(picture, "t h w -> h (t w)").numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
            if column == 0:
                axes.set_ylabel(name, fontsize=12, color=colour, fontweight="bold")
            turn = f"{turns[pair]:.{0 if turns[pair] > 10 else 1}f}"
            axes.set_xlabel(f"{turn} {'patches' if row else 'frames'}", fontsize=9)
    title = "sin(angle) over a frame, one pair of channels a tile"
    left.suptitle(f"{title}\n(time: frames 0 to {frames - 1}; below: length of a full turn)", fontsize=11)

    axis = torch.linspace(-8, 8, 321)
    panels = right.subplots(2, 1, sharey=True)
    for at, (panel, label) in enumerate(zip(panels, ("frames apart", "patches apart"))):
        alike = (axis[:, None] * omega[at, own[at]]).cos()
        panel.plot(axis, alike, color=PALETTE[at], alpha=0.35, linewidth=1)
        panel.plot(axis, alike.mean(1), color=PALETTE[at], linewidth=2.4)
        panel.set(xlabel=label, yticks=[-1, 0, 1], xticks=[-8, -4, 0, 4, 8])
        _plain(panel)
    right.suptitle("q · k of equal vectors: the pairs\nof time, of height (thick: mean)", fontsize=11)
    counts = ", ".join(f"{len(pairs)} over {name}" for pairs, name in zip(own, ("time", "height", "width")))
    said = f"Of {len(axis_of)} pairs of channels turn {counts}. The fastest turn a quarter per patch or frame."
    return Picture(figure, said)


def attention(pipe: Pipeline, clip: Generated, words: Sequence[str], layer: int | None = None) -> Picture:
    """Where in a clip the cross attention looks at words of its prompt (`word_attention`).

    Parameters
    ----------
    words : some of the prompt. layer : counted from 0, -1 for the last; None for the mean of all.

    Raises
    ------
    ValueError : a word that the prompt does not have.
    """
    measured = word_attention(pipe, clip)
    places = {word.lower(): maps.mean(0) if layer is None else maps[layer] for word, maps in reversed(measured)}
    if missing := [word for word in words if word.lower() not in places]:
        raise ValueError(f"the words must be of the prompt {clip.request.prompt!r}; got {', '.join(missing)}")
    t = len(next(iter(places.values())))
    instants = [0 if i == 0 else FRAMES_PER_LATENT * i - 1 for i in range(t)]  # amid the frames of a latent frame
    frames = [clip.frames[i] for i in instants]
    side = 1.45 * CELL_IN
    figure = _figure(t * side + 0.7, (len(words) + 1) * side + 0.9)
    grid = figure.subplots(t, 1 + len(words), squeeze=False)
    told = []
    for j, word in enumerate(["", *words]):
        shares = places[word.lower()] if word else None
        for i, cell in enumerate(grid[:, j]):
            if shares is None:
                _show(cell, frames[i])
                _label(cell, f"frame {instants[i]}")
                continue
            grey = frames[i].mean(-1, keepdims=True) / 255 * np.full(3, 0.6)
            size = frames[i].shape[0] // shares.shape[1], frames[i].shape[1] // shares.shape[2]
            weight = np.kron(shares[i] / shares.max(), np.ones(size))[..., None]
            _show(cell, grey * (1 - weight) + GLOW * weight)
        if shares is None:
            grid[0, j].set_title("the clip", fontsize=11, color=INK)
        else:
            grid[0, j].set_title(f"{word}\n{shares.mean():.1%}, up to {shares.max():.0%}", fontsize=11, color=INK)
            told.append(f"{word} {shares.max():.1%} at most, {shares.mean():.1%} on average")
    which = "the mean of all layers" if layer is None else f"layer {layer}"
    return Picture(figure, f"Shares of the cross attention, {which}: {'; '.join(told)}.")


def guidance(
    pipe: Pipeline,
    prompt: str,
    weights: Sequence[float] = (0, 1, 2, 4, 8),
    sigma: float = 2.0,
    seeds: Sequence[int] = (1, 2),
    **settings: Any,
) -> Picture:
    """What guidance does to the estimate at one noise level, and to stills of the same seeds.

    settings : as for `pipe(...)`, `num_steps` and such.
    """
    stills = [[pipe(prompt, guidance=float(g), seed=s, **settings)[0] for g in weights] for s in seeds]
    y, request = _clean(pipe, pipe(prompt, guidance=1.0, seed=seeds[0], **settings)[0])
    D_cond, D_uncond = _two_estimates(pipe, request, y + sigma * _noise(y, 0), sigma)
    guided = [pipe.decode(samplers.classifier_free(D_cond, D_uncond, g)) for g in weights]
    rows = {f"estimate\nat sigma {sigma:g}": guided}
    rows |= {f"finished,\nseed {s}": [still.frames for still in row] for s, row in zip(seeds, stills)}
    side = 1.45 * CELL_IN
    figure = _figure(len(rows) * side + 0.5, len(weights) * side + 1.2)
    for axes, (name, clips) in zip(figure.subplots(len(rows), len(weights), squeeze=False), rows.items()):
        _label(axes[0], name)
        for cell, frames in zip(axes, clips):
            _show(cell, frames[0])
    for cell, g in zip(figure.axes, weights):
        what = {0.0: "\n(caption unused)", 1.0: "\n(none)"}.get(float(g), "\n")
        cell.set_title(f"guidance {g:g}{what}", fontsize=10, color=INK)
    contrast = [np.mean([row[i].frames.std() for row in stills]) for i in range(len(weights))]
    told = ", ".join(f"{g:g}: {c:.0f}" for g, c in zip(weights, contrast))
    return Picture(figure, f"{prompt} Standard deviation of the finished pixels by guidance: {told}.")
