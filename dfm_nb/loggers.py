"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, on rank 0 only.

Guarantees: a logger that is not configured costs nothing; one that is asked for and missing says so before training starts.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dfm_nb._config_groups import LoggerConfig
from dfm_nb.runs import Run


class Loggers:
    """Scalars and pictures to the configured services."""

    def __init__(self, config: LoggerConfig, run: Run, settings: Mapping[str, object]):
        self._tensorboard = self._wandb = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run.path / "tensorboard"))
        if config.wandb_project and config.wandb_mode != "disabled":
            if importlib.util.find_spec("wandb") is None:
                raise ValueError(
                    "logger.wandb_project is set but wandb is not installed; pip install wandb, or unset it"
                )
            import wandb

            self._wandb = wandb.init(
                project=config.wandb_project, name=config.wandb_exp_name or run.name, mode=config.wandb_mode,
                dir=str(run.path), config=dict(settings), id=run.name, resume="allow",
            )  # fmt: skip

    def scalars(self, iteration: int, record: Mapping[str, object]) -> None:
        """Every finite number of a metrics record."""
        numbers = {
            k: v for k, v in record.items() if isinstance(v, (int, float)) and math.isfinite(v) and k != "iteration"
        }
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(numbers, step=iteration)

    def sample(self, iteration: int, frames: np.ndarray, fps: float, caption: str, path: Path) -> None:
        """A finished sample, uint8 [T, H, W, 3]; `path` is its file."""
        if self._tensorboard is not None:
            self._tensorboard.add_image(caption, frames[0], iteration, dataformats="HWC")
        if self._wandb is not None:
            import wandb

            media = (
                wandb.Image(str(path), caption=caption) if len(frames) == 1 else wandb.Video(str(path), caption=caption)
            )
            self._wandb.log({"sample": media}, step=iteration)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
