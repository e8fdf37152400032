"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, on rank 0 only.

A run that goes on continues its Weights & Biases run; two run folders of one name never share one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dfm_nb.base.log import log
from dfm_nb.base.run import Run
from dfm_nb.base.video import read_image, read_video
from dfm_nb.config.schema import LoggerConfig

FRAMES, FRAME_PX = 8, 256
"""TensorBoard gets at most so many of a sample's frames, side by side, of this size: its event files are kept."""


class Loggers:
    """Scalars and samples to the configured services; nothing happens where none is.

    Parameters
    ----------
    settings : shown with the run in Weights & Biases.

    Weights & Biases is left out with a warning where it is not installed, knows no key or is out of reach: a run needs
    none of it, and `metrics.jsonl` has all numbers.

    A resumed run logs what came after its checkpoint again, with the same iterations, which these services bear. A file
    that is appended to must be cut back in `Report.resume`, as `metrics.jsonl` is.
    """

    def __init__(self, config: LoggerConfig, run: Run, settings: Mapping[str, object]):
        self._tensorboard = self._wandb = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run.path / "tensorboard"))
        if config.wandb_project and config.wandb_mode != "disabled":
            self._wandb = _start_wandb(config, run, settings)

    def scalars(self, iteration: int, record: Mapping[str, object]) -> None:
        """Every finite number of a metrics record; validation losses by noise level as one series for each."""
        numbers = {k: float(v) for k, v in _flat(record).items() if math.isfinite(v)}
        if self._tensorboard is not None:
            with contextlib.suppress(FileNotFoundError):  # the run folder was moved, and training goes on
                for name, value in numbers.items():
                    self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(numbers, step=iteration)

    def sample(self, iteration: int, index: int, caption: str, path: Path) -> None:
        """A finished sample, the `index`-th of its round; `path` is its .mp4 or .png."""
        if self._tensorboard is not None:
            frames = read_image(path) if path.suffix == ".png" else read_video(path)[0]
            fewer, smaller = -(-len(frames) // FRAMES), -(-max(frames.shape[1:3]) // FRAME_PX)
            shown = frames[::fewer, ::smaller, ::smaller]
            self._tensorboard.add_images(f"samples/{index}", shown, iteration, dataformats="NHWC")
            self._tensorboard.add_text(f"samples/{index}", caption, iteration)
        if self._wandb is not None:
            import wandb

            kind = wandb.Image if path.suffix == ".png" else wandb.Video
            self._wandb.log({f"samples/{index}": kind(str(path), caption=caption)}, step=iteration)

    def close(self) -> None:
        if self._tensorboard is not None:
            with contextlib.suppress(FileNotFoundError):
                self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(config: LoggerConfig, run: Run, settings: Mapping[str, object]) -> Any:
    """The Weights & Biases run of this folder, or None with a warning."""
    if importlib.util.find_spec("wandb") is None:
        log.warning("no Weights & Biases for this run: it is not installed; pip install 'dfm_nb[wandb]'")
        return None
    import wandb

    try:
        return wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name or run.name,
            mode=config.wandb_mode,
            dir=str(run.path),
            config=dict(settings),
            id=run.id,  # a resumed run continues its own
            resume="allow",
        )
    except wandb.Error as error:
        why = str(error).splitlines()[0]
        log.warning("no Weights & Biases for this run: %s; set WANDB_API_KEY, or logger.wandb_mode=offline", why)
        return None


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
