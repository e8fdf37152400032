"""Loggers of metrics in addition to metrics.jsonl, on rank 0 only: TensorBoard, Weights & Biases, others.

To add one, write one function, a `Logger`: here with its name in `LOGGERS`, or in a package by an entry point of
`dfm_nb.loggers`, or anywhere as `logger.report_to='[module:name]'`.
"""

import contextlib
import importlib.util
import math
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dfm_nb.base import plugins
from dfm_nb.base.log import log
from dfm_nb.base.run import Run
from dfm_nb.base.video import read_image, read_video
from dfm_nb.config.schema import LoggerConfig

FRAMES, FRAME_PX = 8, 256
"""TensorBoard stores at most 8 frames of a sample, of 256 px, because its event files are never deleted."""


Values = Mapping[str, "float | Sample"]
Logger = Callable[[Run, LoggerConfig, Mapping[str, object]], Generator[None, tuple[int, Values], None]]
"""A logger is one generator function of the run, the settings of loggers, and those that are shown with the run.

    def to_csv(run, config, settings):
        with open(run.path / "log.csv", "a") as file:
            while True:
                iteration, values = yield
                ...

Each `yield` gives an iteration and its values by name, numbers or a `Sample`; at the end of the run the generator is
closed. A logger that returns before its first `yield` is skipped, and logs the reason itself. One that raises later is
not used any more.
"""


class Sample(NamedTuple):
    """A finished sample; `path` is its .mp4 or .png."""

    caption: str
    path: Path


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


LOGGERS: dict[str, Logger] = {"tensorboard": tensorboard, "wandb": wandb}


class Loggers:
    """Send scalars and samples to the loggers of `logger.report_to`.

    Parameters
    ----------
    settings : shown with the run in Weights & Biases.

    A resumed run logs the iterations after its checkpoint again, which these services tolerate. A file that is appended
    to must be truncated in `Report.resume`, as `metrics.jsonl` is.
    """

    def __init__(self, config: LoggerConfig, run: Run, settings: Mapping[str, object]):
        names = config.report_to
        if names is None:
            names = ["tensorboard", "wandb"] if config.wandb_project else ["tensorboard"]
        chosen = {name: LOGGERS.get(name) or plugins.find("loggers", name, LOGGERS) for name in names}
        self._open = []
        for name, logger in chosen.items():
            opened = logger(run, config, settings)
            if not isinstance(opened, Generator):
                raise ValueError(f"logger.report_to: {name} must be a generator function; see dfm_nb.training.loggers")
            with contextlib.suppress(StopIteration):  # it is skipped
                next(opened)
                self._open.append(opened)

    def scalars(self, iteration: int, record: Mapping[str, object]) -> None:
        """Every finite number of a metrics record; validation losses by noise level as one series for each."""
        self._send(iteration, {k: float(v) for k, v in _flat(record).items() if math.isfinite(v)})

    def sample(self, iteration: int, index: int, caption: str, path: Path) -> None:
        """A finished sample, the `index`-th of its round; `path` is its .mp4 or .png."""
        self._send(iteration, {f"samples/{index}": Sample(caption, path)})

    def _send(self, iteration: int, values: Values) -> None:
        self._of_each(lambda logger: logger.send((iteration, values)))

    def close(self) -> None:
        self._of_each(lambda logger: logger.close())

    def _of_each(self, do: Callable[[Generator[None, Any, None]], object]) -> None:
        for logger in [*self._open]:
            try:
                do(logger)
            except Exception as error:  # for example, a service cannot be reached: training must continue
                log.warning("logger %s failed and is not used any more: %r", getattr(logger, "__name__", ""), error)
                self._open.remove(logger)


def _flat(record: Mapping[str, object]) -> dict[str, float]:
    """Numbers by name; `X_by_sigma` lists become X/sigma_0.02, ... with the levels of `val_sigmas`."""
    out: dict[str, float] = {}
    levels: Any = record.get("val_sigmas")
    for name, value in record.items():
        if isinstance(value, (int, float)) and name != "iteration":
            out[name] = value
        elif isinstance(value, list) and name.endswith("_by_sigma"):
            title = name.removesuffix("_by_sigma")
            out |= {f"{title}/sigma_{s:.3g}": v for s, v in zip(levels, value) if v is not None}
    return out
