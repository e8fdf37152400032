"""The training driver: `dfm pretrain`, `torchrun ... -m dfm_nb.train` or `train_model(...)`.

All faults of the configuration (recipe < `--config-file` < `group.key=value`) are reported together, before torch is
imported and a process group starts.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfm_nb import config as cfg
from dfm_nb.base.argv import NPROC, ArgumentParser, guard, quietly, world_size_from_env
from dfm_nb.base.metrics import read_metrics, read_table
from dfm_nb.base.torchrun import launch

if TYPE_CHECKING:
    import pandas as pd


def parser() -> ArgumentParser:
    p = ArgumentParser(
        prog="dfm pretrain",
        description="Train a DiT on prepared shards. Settings: recipe < --config-file < group.key=value.",
        epilog=NPROC,
    )
    p.add_argument("--dataset-path", help="folder written by dfm prepare")
    p.add_argument("--config-file", help="YAML with groups and keys")
    p.add_argument("--recipe", default="default", help=f"one of {', '.join(cfg.recipes())}, or a YAML file")
    p.add_argument("--model", help="a size: DiT-S, DiT-B, DiT-L, DiT-XL, ... (the same as model.size=)")
    p.add_argument("--mock", action="store_true", help="random latents instead of a data set")
    p.add_argument("--run-dir", default="runs/pretrain", help="where config, metrics, logs and checkpoints go")
    p.add_argument("--print-config", action="store_true", help="show every value and the layer it came from, and stop")
    p.add_argument("overrides", nargs="*", metavar="group.key=value", help="highest precedence")
    return p


def parse(argv: list[str] | None) -> argparse.Namespace:
    return parser().parse_intermixed_args(argv)


def resolve(args: argparse.Namespace, world_size: int) -> cfg.Resolved:
    """The settled configuration; every fault, also of the layout on `world_size` processes, in one error."""
    overrides = list(args.overrides)
    if args.model:
        overrides.insert(0, f"model.size={args.model}")
    if args.dataset_path:
        overrides.insert(0, f"dataset.path={args.dataset_path}")
    if args.mock:
        overrides.insert(0, "dataset.mock=true")
    world = None if args.print_config else world_size
    training = not args.print_config
    return cfg.resolve(
        args.recipe, args.config_file, overrides, training=training, world_size=world, settings_of=_settings_of
    )


def _settings_of(weights: str) -> dict[str, Any]:
    """`checkpoints.weights.settings_of`; only a training that starts from weights needs torch to be settled."""
    from dfm_nb.checkpoints.weights import settings_of

    return settings_of(weights)


def show(resolved: cfg.Resolved) -> int:
    """Print every value and the layer it came from."""
    print(cfg.print_config(resolved))
    return 0


def preflight(argv: list[str], nproc: int) -> int | None:
    """Report mistakes once, before `nproc` processes start. An exit code means that there is nothing to start."""
    args = parse(argv)
    resolved = resolve(args, nproc)
    return show(resolved) if args.print_config else None


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    resolved = resolve(args, world_size_from_env())
    if args.print_config:
        return show(resolved)
    from dfm_nb.training import loop

    return loop.run(resolved, args.run_dir)


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
        """The settled configuration."""
        return cfg.from_yaml(self.path / "config.yaml")

    def __repr__(self) -> str:
        losses = [record["loss"] for record in read_metrics(self.path) if "loss" in record]
        last = f", last loss {losses[-1]:.4f}" if losses else ""
        return f"TrainedRun({str(self.path)!r}: {len(losses)} iterations{last})"


def train_model(
    *,
    dataset_path: str | os.PathLike | None = None,
    run_dir: str | os.PathLike | None = None,
    recipe: str | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    num_processes: int = 1,
    **flags: Any,
) -> TrainedRun:
    """Train a DiT on shards, or go on with the run of that folder.

    One process trains in this one; the console shows what it reports. `kernel interrupt` and Ctrl-C end it; the same
    call goes on from its last checkpoint.

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
    named = {"dataset_path": dataset_path, "run_dir": run_dir, "recipe": recipe, "overrides": overrides}
    words = parser().words(named | flags)
    args = parser().read(words)
    resolved = resolve(args, num_processes if num_processes > 1 else world_size_from_env())
    if args.print_config:
        show(resolved)
    elif num_processes > 1:
        launch("pretrain", words, num_processes)
    else:
        _train_here(resolved, args.run_dir)
    return TrainedRun(Path(args.run_dir).expanduser().resolve())


@quietly()
def _train_here(resolved: cfg.Resolved, run_dir: str) -> None:
    """In this process, which gets its signal handlers and its log back, and may train again."""
    from dfm_nb import parallel
    from dfm_nb.base.log import stop_logging
    from dfm_nb.training import loop

    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    try:
        loop.run(resolved, run_dir)
    finally:
        for number, handler in zip(numbers, before):
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        stop_logging()
        if world_size_from_env() == 1:  # an interrupted training; other ranks are torchrun's to end
            parallel.shutdown()


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as megatron-core asks of TP and SP; read by CUDA alone
    raise SystemExit(record(lambda: guard(main))())
