"""The training driver: `dfm pretrain`, or `torchrun ... -m dfm_nb.train`.

All faults of the configuration (recipe < `--config-file` < `group.key=value`) are reported together, before torch is
imported and a process group starts.
"""

from __future__ import annotations

import argparse
import os

from dfm_nb import config as cfg
from dfm_nb.base.argv import ArgumentParser, guard, world_size_from_env


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = ArgumentParser(
        prog="dfm pretrain",
        description="Train a DiT on prepared shards. Settings: recipe < --config-file < group.key=value.",
    )
    p.add_argument("--dataset-path", help="folder written by dfm prepare")
    p.add_argument("--config-file", help="YAML with groups and keys")
    p.add_argument("--recipe", default="default", help=f"one of {', '.join(cfg.recipes())}, or a YAML file")
    p.add_argument("--model", help="a size: DiT-S, DiT-B, DiT-L, DiT-XL, ... (the same as model.size=)")
    p.add_argument("--mock", action="store_true", help="random latents instead of a data set")
    p.add_argument("--run-dir", default="runs/pretrain", help="where config, metrics, logs and checkpoints go")
    p.add_argument("--print-config", action="store_true", help="show every value and the layer it came from, and stop")
    p.add_argument("overrides", nargs="*", metavar="group.key=value", help="highest precedence")
    return p.parse_intermixed_args(argv)


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
    return cfg.resolve(args.recipe, args.config_file, overrides, training=not args.print_config, world_size=world)


def show(resolved: cfg.Resolved) -> int:
    """Print every value and the layer it came from."""
    print(cfg.print_config(resolved, explain=True))
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


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(record(lambda: guard(main))())
