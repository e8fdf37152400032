"""Loggers of metrics: TensorBoard, and Weights & Biases."""

import importlib.util
from collections.abc import Generator, Mapping
from typing import Any

from dfm_nb.base.log import log
from dfm_nb.base.run import Run
from dfm_nb.base.video import read_image, read_video
from dfm_nb.config.schema import LoggerConfig
from dfm_nb.training.report import Sample

FRAMES, FRAME_PX = 8, 256
"""TensorBoard stores at most 8 frames of a sample, of 256 px, because its event files are never deleted."""


def tensorboard(run: Run, config: LoggerConfig, settings: Mapping[str, object]) -> Generator[None, Any, None]:
    """Events under tensorboard/ in the run folder."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.path / "tensorboard"))
    try:
        while True:
            iteration, values = yield
            for name, value in values.items():
                if not isinstance(value, Sample):
                    writer.add_scalar(name, value, iteration)
                    continue
                frames = read_image(value.path) if value.path.suffix == ".png" else read_video(value.path)[0]
                fewer = -(-len(frames) // FRAMES)
                smaller = -(-max(frames.shape[1:3]) // FRAME_PX)
                shown = frames[::fewer, ::smaller, ::smaller]
                writer.add_images(name, shown, iteration, dataformats="NHWC")
                writer.add_text(name, value.caption, iteration)
    finally:
        writer.close()


def wandb(run: Run, config: LoggerConfig, settings: Mapping[str, object]) -> Generator[None, Any, None]:
    """The Weights & Biases run of this folder, which a resumed run continues.

    If it is not installed, has no key or cannot be reached, the run warns and continues without it.
    """
    if config.wandb_mode == "disabled":
        return
    if importlib.util.find_spec("wandb") is None:
        log.warning("no Weights & Biases for this run: it is not installed; pip install 'dfm_nb[wandb]'")
        return
    import wandb

    try:
        service = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name or run.name,
            mode=config.wandb_mode,
            dir=str(run.path),
            config=dict(settings),
            id=run.id,
            resume="allow",
        )
    except (wandb.Error, OSError, ValueError) as error:  # the last two: it checks names and the run's id
        why = str(error).splitlines()[0]
        log.warning("no Weights & Biases for this run: %s; set WANDB_API_KEY, or logger.wandb_mode=offline", why)
        return
    try:
        while True:
            iteration, values = yield
            shown = dict[str, Any](values)
            for name, value in values.items():
                if isinstance(value, Sample):
                    kind = wandb.Image if value.path.suffix == ".png" else wandb.Video
                    shown[name] = kind(str(value.path), caption=value.caption)
            service.log(shown, step=iteration)
    finally:
        service.finish()
