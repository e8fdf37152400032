"""One picture per idea: latents, noise, schedules, losses by noise level, packs, positions, attention, guidance.

Each is one call that computes with the package's own functions and returns a `Picture`, drawn by matplotlib on white so
that it is readable on any page.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange

from dfm_nb import config as cfg
from dfm_nb import display
from dfm_nb.base import video
from dfm_nb.base.files import replacing
from dfm_nb.base.geometry import FRAMES_PER_LATENT
from dfm_nb.base.metrics import read_metrics, rounds_by_sigma
from dfm_nb.base.plots import PALETTE, blank, literal, plain, plain_ticks, png
from dfm_nb.base.records import Clip
from dfm_nb.base.run import Run
from dfm_nb.base.seeds import generator_for
from dfm_nb.config.schema import ModelConfig
from dfm_nb.data.order import PackOrder
from dfm_nb.data.stores import ShardStore
from dfm_nb.diffusion import edm, samplers
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.model.positions import rotary_angles
from dfm_nb.packs.packs import PackSettings
from dfm_nb.packs.patches import grid_positions
from workbench.words import word_attention

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 9.2
PX_PER_IN = 96
DPI = 128
CELL_IN = 1.0
PACKS_DRAWN = 4
PACKS_COUNTED = 100
INK = "#333333"
PADDING: dict[str, Any] = {"facecolor": "#cccccc", "hatch": "////", "edgecolor": "white"}
GLOW = np.array([1.0, 0.55, 0.15])
_USUAL = cfg.Config().model


@dataclass(repr=False)
class Picture:
    """A figure and a summary in words, for screen readers and for terminals without pictures."""

    figure: Figure
    summary: str

    def save(self, path: str | Path) -> Path:
        """Write the figure in the format of the suffix, PNG by default."""
        kind = Path(path).suffix[1:] or "png"
        with replacing(path) as temporary:
            literal(self.figure).savefig(temporary, format=kind)
        return Path(path)

    def _repr_html_(self) -> str:
        width_px = round(self.figure.get_size_inches()[0] * PX_PER_IN)
        return display.media_html("image/png", png(self.figure), self.summary, width_px)

    def _repr_png_(self) -> bytes:
        return display.small_png(video.read_image(png(self.figure))[0])

    def __repr__(self) -> str:
        return self.summary


def _figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    figure = blank(width_in, height_in, DPI)
    figure.set_layout_engine("constrained", rect=(0.008, 0.012, 0.984, 0.976))  # a margin, as the page may be dark
    return figure


# ---- clips, and estimates of them ----------------------------------------------------------------------------------


def _clean(pipe: Pipeline, clip: Clip | Generated) -> tuple[torch.Tensor, Request, np.ndarray]:
    """A clip's normalised latent, float64 [C, T, H, W], the request that has its prompt and size, and its frames."""
    if isinstance(clip, Generated):
        request = Request(clip.request.prompt, fps=clip.request.fps, guidance=1.0)
        frames = clip.frames
        latent = clip.latent.double()
    else:
        request = Request(clip.caption, fps=clip.fps, guidance=1.0)
        frames = clip.video
        latent = pipe.encode_pixels(frames)
    t, height, width = frames.shape[:3]
    return latent, request.replace(num_video_frames=t, height=height, width=width), frames


def _two_estimates(pipe: Pipeline, request: Request, x: torch.Tensor, sigma: float) -> torch.Tensor:
    """D(x; sigma) with the prompt and with the empty caption, float64 [2, C, T, H, W]."""
    return pipe.denoiser([request, request.replace(prompt="")]).cond(x[None].to(pipe.device), sigma).cpu()


def _edm_loss(D: torch.Tensor, y: torch.Tensor, sigma: float, sigma_data: float) -> float:
    """lambda(sigma) |D - y|^2, averaged."""
    return ((D - y).square().mean() / edm.c_out(torch.tensor(sigma), sigma_data) ** 2).item()


def _noise(latent: torch.Tensor, *names: Any) -> torch.Tensor:
    return torch.randn(latent.shape, generator=generator_for("pictures", *names), dtype=torch.float64)


def _show(axes: Axes, picture: np.ndarray | None = None, **settings: Any) -> None:
    """A picture, or nothing, without ticks and frame."""
    if picture is not None:
        axes.imshow(picture, interpolation="nearest", **settings)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _table(
    rows: Sequence[str], columns: Mapping[str, Sequence[np.ndarray | None]], side_in: float = 1.45 * CELL_IN
) -> tuple[Figure, np.ndarray]:
    """A table of pictures with titled columns and named rows, and its axes [row, column]."""
    figure = _figure(len(rows) * side_in + 0.8, max(5.0, len(columns) * side_in + 1.2))
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes, (title, pictures) in zip(grid.T, columns.items()):
        axes[0].set_title(title, fontsize=10, color=INK)
        for cell, picture in zip(axes, pictures):
            _show(cell, picture)
    for axes, name in zip(grid, rows):
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=10, color=INK, labelpad=8)
    return figure, grid


# ---- data ---------------------------------------------------------------------------------------------------------


def tokenized(pipe: Pipeline, clip: Clip | Generated) -> Picture:
    """A clip through the tokenizer: its frames, the latent frames with all channels, and the decoded frames."""
    latent, _, frames = _clean(pipe, clip)
    decoded = pipe.decode(latent)
    shown = {f"frame {i}": [frames[i], None, decoded[i]] for i in range(len(frames))}
    figure, grid = _table(("pixels", "latent", "decoded"), shown, CELL_IN)
    cells = grid[0, 0].get_gridspec()
    channels, t, h, w = latent.shape
    for i in range(t):  # the first frame is encoded alone, then four together
        end = 1 + FRAMES_PER_LATENT * i
        cell = figure.add_subplot(cells[1, max(0, end - FRAMES_PER_LATENT) : end])
        apart_CHW = torch.nn.functional.pad(latent[:, i], (0, 1, 0, 1), value=math.nan)
        tiles = rearrange(apart_CHW, "(r c) h w -> (r h) (c w)", r=2 if i else 4).numpy()
        _show(cell, tiles, cmap="RdBu_r", vmin=-1.5, vmax=1.5)
    error = np.square(frames.astype(float) - decoded).mean()
    psnr = 10 * math.log10(255**2 / max(error, 1e-9))
    before = "{} x {} x {} pixels of 3 colours are ".format(*frames.shape) + f"{frames.size:,} numbers"
    after = f"the latent's {channels} channels of {t} x {h} x {w} are {latent.numel():,}"
    fewer = f"{frames.size / latent.numel():.0f} times fewer"
    figure.suptitle(f"{before},\n{after}: {fewer}", fontsize=10, color=INK)
    summary = f"A clip, its latent and the decoded clip. {before}, {after}, {fewer}. Decoded: {psnr:.1f} dB."
    return Picture(figure, summary)


def packs(data_dir: str | os.PathLike, capacity: int | None = None, recipe: str = "demo") -> Picture:
    """The first packs of a training on these shards, one of them as a padded batch, and which tokens attend to which.

    The two shares are those of the first `PACKS_COUNTED`.

    capacity : tokens of a pack; None: the recipe's, or the longest sample's if it has more.
    """
    config = cfg.resolve(recipe).config
    store = ShardStore(Path(data_dir), "train")
    settings = PackSettings(config)
    samples = [(t * h * w // settings.patch_volume, t) for t, h, w in map(store.grid, range(len(store)))]
    if capacity is None:
        usual = config.train.micro_batch_size * config.dataset.task_encoder_seq_length
        capacity = max(usual, max(samples)[0])
    order = PackOrder(store, settings, capacity, config.dataset.packing_buffer_size)
    drawn = []
    used = padded_size = 0
    kinds: set[int] = set()
    for _ in range(PACKS_COUNTED):
        pack = sorted(samples[item.sample] for item in order.next())  # (tokens, latent frames) of each sample
        drawn.append(pack)
        used += sum(tokens for tokens, _ in pack)
        padded_size += len(pack) * pack[-1][0]
        kinds.update(t for _, t in pack)
    packed = used / (PACKS_COUNTED * capacity)
    padded = used / padded_size

    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MultipleLocator

    colours = {}
    keys = []
    for t, colour in zip(sorted(kinds), itertools.cycle((0, 1, 2, 4, 3))):
        colours[t] = PALETTE[colour]
        name = "stills" if t == 1 else f"clips of {1 + FRAMES_PER_LATENT * (t - 1)} frames"
        keys.append(Rectangle((0, 0), 1, 1, color=colours[t], label=name))
    keys.append(Rectangle((0, 0), 1, 1, **PADDING, label="padding"))
    figure = _figure(5.6)
    grid = figure.add_gridspec(2, 2, height_ratios=(PACKS_DRAWN + 2, 9), width_ratios=(3, 1.6))
    axes = figure.add_subplot(grid[0, :])
    _bars(axes, drawn[:PACKS_DRAWN], capacity, colours)
    axes.set(yticks=range(PACKS_DRAWN), yticklabels=[f"pack {i + 1}" for i in range(PACKS_DRAWN)])
    axes.xaxis.set_major_locator(MultipleLocator(capacity / 6))
    axes.set_title(f"Packed: {packed:.1%} of the tokens are samples", fontsize=11)
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9)

    first = drawn[0]
    axes = figure.add_subplot(grid[1, 0])
    _bars(axes, [[sample] for sample in first], first[-1][0], colours)
    axes.set(yticks=[], ylabel=f"samples of pack 1 ({len(first)})")
    axes.set_title(f"Padded to the longest: {padded:.1%} would be samples", fontsize=11)

    axes = figure.add_subplot(grid[1, 1])
    axes.add_patch(Rectangle((0, 0), capacity, capacity, color="#f2f2f2"))
    start = 0
    for n, t in first:
        axes.add_patch(Rectangle((start, start), n, n, color=colours[t]))
        start += n
    axes.set(xlim=(0, capacity), ylim=(capacity, 0), aspect="equal")
    axes.set(xlabel="attends to token", ylabel="token of pack 1")
    axes.set_title("Each sample sees only itself", fontsize=11)
    shares = f"{packed:.1%} are samples; padded to the longest, {padded:.1%}"
    return Picture(figure, f"Of packs of {capacity} tokens, {shares}.")


def _bars(axes: Axes, packs: Sequence[Sequence[tuple[int, int]]], length: int, colours: dict[int, str]) -> None:
    """One row per pack: its samples (tokens, latent frames) end to end, and padding up to `length`."""
    for row, pack in enumerate(packs):
        start = 0
        for n, t in pack:
            axes.barh(row, n, left=start, color=colours[t], edgecolor="white", linewidth=0.7)
            start += n
        axes.barh(row, length - start, left=start, linewidth=0, **PADDING)
    axes.set(xlim=(0, length), ylim=(len(packs) - 0.4, -0.6), xlabel="tokens")
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)


# ---- noise --------------------------------------------------------------------------------------------------------


def noising(pipe: Pipeline, clip: Clip | Generated, sigmas: Sequence[float] = (0.05, 0.2, 0.5, 1, 2, 5, 20)) -> Picture:
    """The middle of a clip with noise of several levels, and the model's estimates D(x; sigma) of it without the noise.

    The losses are EDM losses over the whole clip.
    """
    y, request, _ = _clean(pipe, clip)
    middle = request.num_video_frames // 2
    eps = _noise(y, 0)
    losses = []
    texts = []

    def seen(x: torch.Tensor, sigma: float) -> np.ndarray:
        """Three channels of the middle latent frame as colours, five standard deviations from black to white."""
        spread = 5 * math.hypot(sigma, pipe.sigma_data)
        return (0.5 + x[:3, y.shape[1] // 2].permute(1, 2, 0).numpy() / spread).clip(0, 1)

    columns: dict[str, list[np.ndarray | None]] = {"clean": [seen(y, 0.0), pipe.decode(y)[middle], None, None]}
    for sigma in sigmas:
        x = y + sigma * eps
        estimates = _two_estimates(pipe, request, x, sigma)
        losses += [_edm_loss(D, y, sigma, pipe.sigma_data) for D in estimates]
        with_caption, without = losses[-2:]
        texts.append(f"{with_caption:.2f} and {without:.2f} at {sigma:g}")
        stills = [pipe.decode(z)[middle] for z in (x, *estimates)]
        columns[f"sigma {sigma:g}"] = [seen(x, sigma), *stills]
    names = ("noisy latent\n(3 channels)", "decoded", "estimate,\nwith caption", "estimate,\nno caption")
    figure, grid = _table(names, columns, CELL_IN)
    for cell, loss in zip(grid[2:, 1:].T.flat, losses):
        cell.set_xlabel(f"loss {loss:.2f}", fontsize=9, color=INK)
    return Picture(figure, f"{request.prompt} EDM loss with and without the caption by sigma: {', '.join(texts)}.")


def schedules(num_steps: int = 18, P_mean: float = _USUAL.P_mean, P_std: float = _USUAL.P_std) -> Picture:
    """The noise levels of every schedule, step by step, next to the distribution that training draws from."""
    figure = _figure(4.0)
    axes, side = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    counts = []
    for i, (name, schedule) in enumerate(samplers.SCHEDULES.items()):
        levels = schedule(num_steps)[:-1]
        usual = name == Request.model_fields["schedule"].default
        label = f"{name} (default of every sampler)" if usual else name
        axes.semilogy(levels, "o-", color=PALETTE[i], label=label, linewidth=1 + usual, markersize=3 + usual)
        inside = (levels.log() - P_mean).abs() < 2 * P_std
        counts.append(f"{name} {int(inside.sum())}")
    axes.set(xlabel="step", ylabel="sigma", title=f"{num_steps} steps from noise to clip")
    axes.locator_params("x", integer=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=9)
    plain(axes)
    low, high = axes.get_ylim()
    grid = np.geomspace(low, high, 300)
    side.fill_betweenx(grid, _density(grid, P_mean, P_std), color=PALETTE[5], alpha=0.6, linewidth=0)
    side.set(title="Training noise", xticks=[], xlim=(0, None))
    side.tick_params(axis="y", which="both", left=False)
    side.spines[["top", "right", "bottom"]].set_visible(False)
    low, high = np.exp([P_mean - 2 * P_std, P_mean + 2 * P_std])
    for panel in (axes, side):
        panel.axhspan(low, high, color=PALETTE[5], alpha=0.14, linewidth=0)
    bulk = f"Steps of {num_steps} where training draws 95 % of its noise, {low:.2g} to {high:.2g}"
    return Picture(figure, f"{bulk}: {', '.join(counts)}.")


def _density(sigmas: np.ndarray, P_mean: float, P_std: float) -> np.ndarray:
    """Density of ln(sigma) in training, scaled to a maximum of 1."""
    return np.exp(-0.5 * ((np.log(sigmas) - P_mean) / P_std) ** 2)


LEVELS = tuple(float(s) for s in np.geomspace(0.02, 40, 12).round(3))


def loss_of_model(pipe: Pipeline, clips: Sequence[Clip | Generated], sigmas: Sequence[float] = LEVELS) -> Picture:
    """EDM loss of clips by noise level, with their captions and with the empty one, over the noise of training."""
    losses = np.zeros((2, len(sigmas)))
    for i, clip in enumerate(clips):
        y, request, _ = _clean(pipe, clip)
        for j, sigma in enumerate(sigmas):
            estimates = _two_estimates(pipe, request, y + sigma * _noise(y, i, j), sigma)
            losses[:, j] += [_edm_loss(D, y, sigma, pipe.sigma_data) / len(clips) for D in estimates]
    curves = {"with caption": (sigmas, losses[0]), "with no caption": (sigmas, losses[1])}
    return _losses(curves, pipe.config.model)


def loss_of_run(run_dir: str | Path, rounds: int = 3) -> Picture:
    """A run's validation loss by noise level: first, last and some rounds between, over the noise of training."""
    records = rounds_by_sigma(read_metrics(run_dir))
    if not records:
        raise ValueError(f"{run_dir} has no validation yet; lower train.eval_interval, or wait")
    curves = {}
    for i in np.linspace(0, len(records) - 1, rounds).round().astype(int):
        record = records[i]
        curves[f"iteration {record['iteration']}"] = (record["val_sigmas"], record["val_loss_by_sigma"])
    return _losses(curves, cfg.from_yaml(Run(Path(run_dir)).config_file).config.model)


def _losses(curves: dict[str, tuple[Sequence[float], Any]], model: ModelConfig) -> Picture:
    P_mean = model.P_mean
    P_std = model.P_std
    figure = _figure(4.1, 7.4)
    axes = figure.add_subplot()
    ends = [math.exp(P_mean - 3 * P_std), math.exp(P_mean + 3 * P_std)]
    for sigmas, _ in curves.values():
        ends.extend(sigmas)
    low = 0.9 * min(ends)
    high = max(ends) / 0.9
    grid = np.geomspace(low, high, 300)
    density = _density(grid, P_mean, P_std)
    axes.fill_between(grid, density, color=PALETTE[5], alpha=0.3, linewidth=0, label="how often training draws it")
    axes.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label="a network with output 0")
    texts = []
    for (name, (sigmas, losses)), colour in zip(curves.items(), itertools.cycle((1, 0, 2, 3, 4))):
        axes.semilogx(sigmas, losses, "o-", color=PALETTE[colour], markersize=4.5, label=name)
        points = ", ".join(f"{loss:.2f} at {sigma:.2g}" for sigma, loss in zip(sigmas, losses))
        texts.append(f"{name} {points}")
    axes.set(xlabel="sigma", ylabel="EDM loss", ylim=(0, None), xlim=(low, high))
    plain_ticks(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    plain(axes)
    noise = f"Training draws ln(sigma) from N({P_mean:g}, {P_std:g})."
    return Picture(figure, f"EDM loss by sigma: {'; '.join(texts)}. {noise}")


def toy(network: Callable[..., torch.Tensor], y: torch.Tensor, sigma_data: float) -> Picture:
    """Points y [N, 2] with noise of three levels, and the estimates of them by a network F(c_in x, c_noise)."""
    sigmas = (0.1, 0.4, 2.0)
    figure = _figure(3.7)
    for axes, sigma in zip(figure.subplots(1, len(sigmas), sharey=True), sigmas):
        level_N1 = torch.full((len(y), 1), sigma)
        x = y + sigma * _noise(y, sigma).float()
        with torch.no_grad():
            F_x = network(edm.c_in(level_N1, sigma_data) * x, edm.c_noise(level_N1))
            D_x = edm.denoised(F_x, x, level_N1, sigma_data)
        for points, colour, label in ((x, PALETTE[5], "noisy"), (y, "#bbbbbb", "clean"), (D_x, PALETTE[1], "estimate")):
            axes.plot(*points.T, ".", color=colour, markersize=2.5, label=label)
        axes.set(title=f"sigma {sigma:g}", xlim=(-1.7, 1.7), ylim=(-1.7, 1.7), aspect="equal")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, markerscale=4)
    spread = f"their standard deviation at sigma {sigmas[-1]:g} is {D_x.std():.2f}, that of the points {y.std():.2f}"
    return Picture(figure, f"Points, the points with noise, and the estimates: {spread}.")


def differences(losses: Mapping[str, Sequence[float]]) -> Picture:
    """Losses of runs by iteration, and how far each is from the first's."""
    figure = _figure(3.4)
    axes, apart = figure.subplots(1, 2)
    first = np.asarray(next(iter(losses.values())))
    iterations = range(1, len(first) + 1)
    worst = 0.0
    for i, (name, values) in enumerate(losses.items()):
        # each line is thinner than the one below it, which stays visible
        axes.plot(iterations, values, color=PALETTE[i], linewidth=6 - 2 * min(i, 2), label=name)
        if i:
            relative = np.abs(np.asarray(values) / first - 1)
            apart.plot(iterations, relative, "o-", color=PALETTE[i], label=name, clip_on=False)
            worst = max(worst, relative.max())
    apart.axhline(torch.finfo(torch.float32).eps, color=INK, linestyle=(0, (4, 3)), label="float32's last digit")
    apart.set_yscale("symlog", linthresh=1e-9)  # logarithmic, with a place for 0
    apart.set(xlim=axes.get_xlim(), ylim=(0, 1e-3), title="relative difference from the first")
    axes.set(title="loss")
    for panel in (axes, apart):
        panel.set_xlabel("iteration")
        panel.locator_params("x", integer=True)
        panel.legend(frameon=False, fontsize=8)
        plain(panel)
    return Picture(figure, f"Losses of {', '.join(losses)}; the largest relative difference is {worst:.1e}.")


def convergence(
    pipe: Pipeline, prompt: str, evaluations: Sequence[int] = (7, 14, 28), reference_steps: int = 64, **settings: Any
) -> Picture:
    """How far samplers are from the result of many Heun steps, by evaluations of the network; stills of the most.

    settings : as for `pipe(...)`, for the samplers; the reference has the default schedule. Guidance is 1 if not given.
    """
    usual = {"guidance": 1.0, **settings}
    (reference,) = pipe(prompt, **usual | {"num_steps": reference_steps, "sampler": "heun", "schedule": "focused"})
    figure = _figure(5.0)
    top, below = figure.subfigures(2, 1, height_ratios=(2, 1.1))  # type: ignore[misc]  # an array of two
    axes = top.subplots()
    texts = []
    clips = {f"{reference_steps} steps": reference}
    for name, colour in zip(("euler", "heun", "dpmpp_2m", "unipc_2"), PALETTE):
        points = []
        for number in evaluations:
            steps = 1 + (number - 1) // samplers.find(name).evaluations_per_step
            (clips[name],) = pipe(prompt, **usual | {"num_steps": steps, "sampler": name})
            distance = torch.linalg.vector_norm(clips[name].latent - reference.latent)
            relative = (distance / torch.linalg.vector_norm(reference.latent)).item()
            points.append((samplers.evaluations(name, steps), relative))
        axes.loglog(*zip(*points), "o-", color=colour, label=name)
        distances = ", ".join(f"{relative:.3g} after {count}" for count, relative in points)
        texts.append(f"{name} {distances}")
    axes.set(xlabel="evaluations of the network", ylabel="distance from the reference")
    axes.set_xticks(evaluations, [str(number) for number in evaluations])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False)
    plain(axes)
    for still, (name, clip) in zip(below.subplots(1, len(clips)), clips.items()):
        _show(still, clip.frames[len(clip.frames) // 2])
        still.set_title(name, fontsize=10)
    return Picture(figure, f"Relative distance of the latents from {reference_steps} Heun steps: {'; '.join(texts)}.")


# ---- the network --------------------------------------------------------------------------------------------------


def rotary(side: int = 8, frames: int = 3, head_dim: int = 32) -> Picture:
    """Rotary positions: how the channel pairs of a head rotate over time, height and width.

    side, frames : size of a clip in patches; 8 are 128 px.
    """
    angles = rotary_angles(grid_positions((frames, side, side)), head_dim)
    omega = rotary_angles(torch.eye(3), head_dim)  # [axis, pair], radians a frame or patch; each pair has one axis
    axis_of = omega.argmax(0)
    turns = 2 * math.pi / omega.amax(0)
    own = [torch.nonzero(axis_of == i).flatten().tolist() for i in range(3)]
    figure = _figure(4.3)
    parts = figure.add_gridspec(1, 2, width_ratios=(2.3, 1))
    left = figure.add_subfigure(parts[0])
    right = figure.add_subfigure(parts[1])
    grid = left.add_gridspec(3, max(map(len, own)))
    maps = rearrange(angles.sin(), "(t h w) p -> p t h w", t=frames, h=side)
    for row, (name, colour) in enumerate(zip(("time", "height", "width"), PALETTE)):
        for column, pair in enumerate(own[row]):
            axes = left.add_subplot(grid[row, column])
            picture = torch.nn.functional.pad(maps[pair], (0, 1), value=math.nan) if row == 0 else maps[pair, :1]
            _show(axes, rearrange(picture, "t h w -> h (t w)").numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
            if column == 0:
                axes.set_ylabel(name, fontsize=12, color=colour, fontweight="bold")
            turn = f"{turns[pair]:.0f}" if turns[pair] > 10 else f"{turns[pair]:.1f}"
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
        plain(panel)
    right.suptitle("q · k of equal vectors: the pairs\nof time, of height (thick: mean)", fontsize=11)
    counts = ", ".join(f"{len(pairs)} over {name}" for pairs, name in zip(own, ("time", "height", "width")))
    rotate = f"{len(axis_of)} pairs of channels rotate: {counts}."
    return Picture(figure, f"{rotate} The fastest make a quarter turn per patch or frame.")


def attention(pipe: Pipeline, clip: Generated, words: Sequence[str], layer: int | None = None) -> Picture:
    """Where in a clip the cross attention attends to words of its prompt (`word_attention`).

    Parameters
    ----------
    words : some words of the prompt. layer : counted from 0, -1 for the last; None for the mean of all.

    Raises
    ------
    ValueError : a word that is not in the prompt.
    """
    measured = word_attention(pipe, clip)
    maps_of = {word.lower(): maps.mean(0) if layer is None else maps[layer] for word, maps in reversed(measured)}
    missing = [word for word in words if word.lower() not in maps_of]
    if missing:
        raise ValueError(f"the words must be in the prompt {clip.request.prompt!r}; got {', '.join(missing)}")
    t = len(next(iter(maps_of.values())))
    instants = [max(0, FRAMES_PER_LATENT * i - 1) for i in range(t)]  # in the middle of a latent frame's frames
    frames = clip.frames[instants]
    greys = 0.6 / 255 * frames.mean(-1, keepdims=True).repeat(3, -1)
    columns = {"the clip\n": list(frames)}
    texts = []
    for word in words:
        shares_THW = maps_of[word.lower()]
        size = [1, frames.shape[1] // shares_THW.shape[1], frames.shape[2] // shares_THW.shape[2]]
        weights = np.kron(shares_THW / shares_THW.max(), np.ones(size))[..., None]
        title = f"{word}\n{shares_THW.mean():.1%}, up to {shares_THW.max():.0%}"
        columns[title] = list(greys * (1 - weights) + GLOW * weights)
        texts.append(f"{word} {shares_THW.max():.1%} at most, {shares_THW.mean():.1%} on average")
    figure, _ = _table([f"frame {i}" for i in instants], columns)
    which = "the mean of all layers" if layer is None else f"layer {layer}"
    return Picture(figure, f"Shares of the cross attention, {which}: {'; '.join(texts)}.")


def guidance(pipe: Pipeline, prompt: str, weights: Sequence[float] = (0, 1, 2, 4, 8), **settings: Any) -> Picture:
    """The effect of guidance on the estimate at one noise level, and on stills with the same seeds.

    settings : as for `pipe(...)`, such as `num_steps`.
    """
    sigma = 2.0
    seeds = (1, 2)
    y, request, _ = _clean(pipe, pipe(prompt, guidance=1.0, seed=seeds[0], **settings)[0])
    D_cond, D_uncond = _two_estimates(pipe, request, y + sigma * _noise(y, 0), sigma)
    columns = {}
    contrasts = []
    for g in map(float, weights):
        estimate = pipe.decode(samplers.classifier_free(D_cond, D_uncond, g))
        stills = [pipe(prompt, guidance=g, seed=s, **settings)[0].frames for s in seeds]
        what = {0.0: "(caption unused)", 1.0: "(none)"}.get(g, "")
        columns[f"guidance {g:g}\n{what}"] = [frames[0] for frames in (estimate, *stills)]
        contrast = np.mean([frames.std() for frames in stills])
        contrasts.append(f"{g:g}: {contrast:.0f}")
    figure, _ = _table([f"estimate\nat sigma {sigma:g}", *(f"finished,\nseed {seed}" for seed in seeds)], columns)
    return Picture(figure, f"{prompt} Standard deviation of the finished pixels by guidance: {', '.join(contrasts)}.")
