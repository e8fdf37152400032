"""The training driver: `dfm pretrain`, `torchrun ... -m dfm_nb.train` or `train_model(...)`.

All faults of the configuration (recipe < `--config-file` < `group.key=value`) are reported together, before torch is
imported and a process group starts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dfm_nb import config as cfg
from dfm_nb.base import plugins
from dfm_nb.base.argv import NPROC, from_launcher, guard, quietly
from dfm_nb.base.log import log
from dfm_nb.base.metrics import read_metrics, read_table
from dfm_nb.base.options import option
from dfm_nb.base.process import STOPS
from dfm_nb.base.run import Run, iteration_folders
from dfm_nb.base.torchrun import launch
from dfm_nb.base.verb import Report, Verb
from dfm_nb.config.notation import Overrides, write_value

if TYPE_CHECKING:
    import pandas as pd


def _settings_of(weights: str) -> dict:
    """`checkpoints.loading.settings_of`; only a training that starts from weights needs torch to be settled."""
    from dfm_nb.checkpoints.loading import settings_of

    return settings_of(weights)


def _dialled(resolved: cfg.Resolved, world_size: int) -> cfg.Resolved:
    """With the settings that follow from the data set, if `train.minutes` is set."""
    if resolved.config.train.minutes and not resolved.is_dialled and resolved.config.dataset.path:
        from dfm_nb.training import batches

        log.info("Iterations, validations and checkpoints follow when a run has timed its first iterations")
        store = batches.open_store(resolved.config)
        return plugins.find("dials", "minutes").of_data(batches.with_data(resolved, store), store, world_size)
    return resolved


@dataclass(frozen=True)
class TrainedRun:
    """A run folder after training, usable as its path: `Pipeline.from_checkpoint(run)`."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def metrics(self) -> pd.DataFrame:
        """`metrics.jsonl`, a row a record."""
        return read_table(self.path)

    @property
    def config(self) -> cfg.Resolved:
        """The resolved configuration."""
        return cfg.from_yaml(self.path / "config.yaml")

    def __repr__(self) -> str:
        losses = [record["loss"] for record in read_metrics(self.path) if "loss" in record]
        last = f", last loss {losses[-1]:.4f}" if losses else ""
        return f"TrainedRun({str(self.path)!r}: {len(losses)} iterations{last})"


class TrainOptions(Verb):
    """Train a DiT on prepared shards. Settings: recipe < --config-file < group.key=value."""

    prog = "dfm pretrain"
    epilog = NPROC
    module: ClassVar[str | None] = "dfm_nb.train"

    dataset_path: str | None = option(None, "folder written by dfm prepare")
    config_file: str | None = option(None, "YAML with groups and keys")
    recipe: str | None = option(
        None, f"one of {', '.join(cfg.recipes())}, or a YAML file; default: own with --minutes, else default"
    )
    model: str | None = option(None, "a size: DiT-S, DiT-B, DiT-L, DiT-XL, ... (the same as model.size=)")
    minutes: float | None = option(None, "how long to train (the same as train.minutes=, with recipe own)", gt=0)
    mock: bool = option(False, "random latents instead of a data set")
    run_dir: str = option("runs/pretrain", "folder for config, metrics, logs and checkpoints", output=True)
    print_config: bool = option(False, "show every value and the layer it came from, and stop")
    overrides: Overrides = option([], "highest precedence", positional=True, metavar="group.key=value")

    def resolve(self, world_size: int) -> cfg.Resolved:
        """The resolved configuration; one error lists every fault, also of the layout on `world_size` processes."""
        named = {
            "model.size": self.model,
            "dataset.path": self.dataset_path,
            "dataset.mock": self.mock or None,
            "train.minutes": self.minutes,
        }
        words = [f"{key}={write_value(value)}" for key, value in named.items() if value is not None]
        return cfg.resolve(
            self.recipe or ("own" if self.minutes else "default"),
            self.config_file,
            [*words, *self.overrides],
            training=not self.print_config,
            world_size=None if self.print_config else world_size,
            settings_of=_settings_of,
            run_dir=self.run_dir,
        )

    def preflight(self, num_processes: int) -> cfg.Resolved | None:
        resolved = self.resolve(num_processes)
        return _dialled(resolved, num_processes) if self.print_config else None

    def run(self) -> Any:
        world_size = from_launcher("WORLD_SIZE")
        resolved = self.resolve(world_size)
        if self.print_config:
            return _dialled(resolved, world_size)
        from dfm_nb.training import loop

        loop.run(resolved, self.run_dir)
        return TrainedRun(Path(self.run_dir).resolve())

    def report(self, result: cfg.Resolved | TrainedRun) -> Report:
        """The settings and their layers where they were asked for, else the run's figures."""
        if isinstance(result, cfg.Resolved):
            settled = {key: {"value": result.get(key), "from": origin} for key, origin in result.provenance.items()}
            return Report({"settings": settled}, cfg.print_config(result))
        if not self.as_json:
            return Report({})
        run = Path(self.run_dir)
        saved = iteration_folders(run / "checkpoints")
        row = Run(run).figures(result.config.get("train.train_iters"))
        records = read_metrics(run)
        row["stopped_by"] = records[-1].get("stopped_by") if records else None
        row["checkpoint"] = str(saved[-1][1]) if saved else None
        return Report({"run_dir": str(run), **row})


main = TrainOptions.main


@quietly()
def train_model(
    *,
    dataset_path: str | os.PathLike | None = None,
    run_dir: str | os.PathLike | None = None,
    recipe: str | None = None,
    overrides: Iterable[str] | Mapping = (),
    num_processes: int = 1,
    **flags: Any,
) -> TrainedRun:
    """Train a DiT on shards, or resume the run in that folder.

    A single process trains in this process and logs to the console. `kernel interrupt` and Ctrl-C stop it after the
    iteration, save, and raise KeyboardInterrupt; a second one, 3 s later or more, raises at once. The same call resumes
    from the last checkpoint.

    Parameters
    ----------
    dataset_path, run_dir, recipe, **flags : the flags of `dfm pretrain` with underscores (`config_file`, `model`,
        `mock`), and their defaults.
    overrides : settings as ["group.key=value"] or {"group.key": value}.
    num_processes : more than 1 start `torchrun`; under torchrun, leave it at 1.

    Raises
    ------
    ConfigError, ValueError, FileNotFoundError : before anything starts. RuntimeError : a started process failed.

    >>> train_model(dataset_path="data", run_dir="runs/a", recipe="demo", overrides={"train.train_iters": 100})
    ... # doctest: +SKIP
    """
    flags |= {"dataset_path": dataset_path, "run_dir": run_dir, "recipe": recipe, "overrides": overrides}
    options = TrainOptions(**flags)
    if num_processes > 1:
        options.preflight(num_processes)
        launch("pretrain", options.words(), num_processes)
        return TrainedRun(Path(options.run_dir).resolve())
    from dfm_nb import parallel
    from dfm_nb.base.log import stop_logging

    # this process gets its signal handlers and its log back, and may train again
    before = [signal.getsignal(number) for number in STOPS]
    try:
        return options.run()
    finally:
        for number, handler in zip(STOPS, before):
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        stop_logging()
        if from_launcher("WORLD_SIZE") == 1:  # an interrupted training; other ranks are torchrun's to end
            parallel.shutdown()


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as megatron-core asks of TP and SP; read by CUDA alone
    raise SystemExit(record(lambda: guard(main))())
