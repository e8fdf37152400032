"""One picture per idea: packs, schedules, losses by noise level, samplers.

Each is one call that computes with the package's own functions and returns a `Picture`, drawn by matplotlib on white so
that it is readable on any page.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dfm_nb import config as cfg
from dfm_nb import display
from dfm_nb.base import video
from dfm_nb.base.geometry import FRAMES_PER_LATENT
from dfm_nb.base.metrics import read_metrics
from dfm_nb.base.records import Clip
from dfm_nb.base.run import Run
from dfm_nb.base.seeds import generator_for
from dfm_nb.config.schema import ModelConfig
from dfm_nb.data.order import PackOrder
from dfm_nb.data.stores import ShardStore
from dfm_nb.diffusion import edm, samplers
from dfm_nb.display.plots import PALETTE, blank, plain, png
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.packs.packs import PackSettings
from workbench.metrics_reader import rounds_by_sigma
from workbench.plot import plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 9.2
PX_PER_IN = 96
DPI = 128
PACKS_DRAWN = 4
PACKS_COUNTED = 100
INK = "#333333"
PADDING: dict[str, Any] = {"facecolor": "#cccccc", "hatch": "////", "edgecolor": "white"}
_USUAL = cfg.Config().model


@dataclass(repr=False)
class Picture:
    """A figure and a summary in words, for screen readers and for terminals without pictures."""

    figure: Figure
    summary: str

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


# ---- data ---------------------------------------------------------------------------------------------------------


def packs(data_dir: str | os.PathLike, capacity: int | None = None) -> Picture:
    """The first packs of a training on these shards, one of them as a padded batch, and which tokens attend to which.

    The two shares are those of the first `PACKS_COUNTED`.

    capacity : tokens of a pack; None: those of the recipe `demo`, or the longest sample's if it has more.
    """
    config = cfg.resolve("demo").config
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

    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MultipleLocator

    colours = {}
    keys = []
    for t, colour in zip(sorted(kinds), itertools.cycle(PALETTE)):
        colours[t] = colour
        name = "stills" if t == 1 else f"clips of {1 + FRAMES_PER_LATENT * (t - 1)} frames"
        keys.append(Patch(color=colour, label=name))
    keys.append(Patch(**PADDING, label="padding"))
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


LEVELS = tuple(np.geomspace(0.02, 40, 12).round(3).tolist())


def loss_of_model(pipe: Pipeline, clips: Sequence[Clip], sigmas: Sequence[float] = LEVELS) -> Picture:
    """EDM loss of clips by noise level, with their captions and with the empty one, over the noise of training."""
    losses = np.zeros((2, len(sigmas)))
    for i, clip in enumerate(clips):
        y = pipe.encode_pixels(clip.video)
        t, height, width, _ = clip.video.shape
        request = Request(clip.caption, fps=clip.fps, guidance=1.0, num_video_frames=t, height=height, width=width)
        denoise = pipe.denoiser([request, request.replace(prompt="")]).cond
        for j, sigma in enumerate(sigmas):
            eps = torch.randn(y.shape, generator=generator_for("pictures", i, j), dtype=y.dtype)
            x = y + sigma * eps
            D_x = denoise(x[None].to(pipe.device), sigma).cpu()
            weighted = (D_x - y) / edm.c_out(torch.tensor(sigma), pipe.sigma_data)
            losses[:, j] += weighted.square().flatten(1).mean(1).numpy() / len(clips)
    curves = {"with caption": (sigmas, losses[0]), "with no caption": (sigmas, losses[1])}
    return _losses(curves, pipe.config.model)


def loss_of_run(run_dir: str | Path) -> Picture:
    """A run's validation loss by noise level: first, middle and last round, over the noise of training."""
    records = rounds_by_sigma(read_metrics(run_dir))
    if not records:
        raise ValueError(f"{run_dir} has no validation yet; lower train.eval_interval, or wait")
    curves = {}
    for record in (records[0], records[len(records) // 2], records[-1]):
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
    for (name, (sigmas, losses)), colour in zip(curves.items(), PALETTE):
        axes.semilogx(sigmas, losses, "o-", color=colour, markersize=4.5, label=name)
        points = ", ".join(f"{loss:.2f} at {sigma:.2g}" for sigma, loss in zip(sigmas, losses))
        texts.append(f"{name} {points}")
    axes.set(xlabel="sigma", ylabel="EDM loss", ylim=(0, None), xlim=(low, high))
    plain_ticks(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    plain(axes)
    noise = f"Training draws ln(sigma) from N({P_mean:g}, {P_std:g})."
    return Picture(figure, f"EDM loss by sigma: {'; '.join(texts)}. {noise}")


def convergence(
    pipe: Pipeline, prompt: str, evaluations: Sequence[int] = (7, 14, 28), reference_steps: int = 64, **settings: Any
) -> Picture:
    """How far samplers are from the result of many Heun steps, by evaluations of the network; stills of the most.

    settings : as for `pipe(...)`, for the samplers; by default with guidance 1 and the reference's schedule, `focused`.
    """
    usual = {"guidance": 1.0, "schedule": "focused", **settings}
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
            relative = torch.dist(clips[name].latent, reference.latent) / torch.linalg.vector_norm(reference.latent)
            points.append((samplers.evaluations(name, steps), relative.item()))
        axes.loglog(*zip(*points), "o-", color=colour, label=name)
        texts.append(f"{name} " + ", ".join(f"{relative:.3g} after {count}" for count, relative in points))
    axes.set(xlabel="evaluations of the network", ylabel="distance from the reference")
    axes.set_xticks(evaluations, [str(number) for number in evaluations])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False)
    plain(axes)
    for still, (name, clip) in zip(below.subplots(1, len(clips)), clips.items()):
        still.imshow(clip.frames[len(clip.frames) // 2], interpolation="nearest")
        still.set_axis_off()
        still.set_title(name, fontsize=10)
    return Picture(figure, f"Relative distance of the latents from {reference_steps} Heun steps: {'; '.join(texts)}.")
