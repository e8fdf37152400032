"""`dfm text train`: a small GPT on a blend, with a run folder like that of `dfm pretrain`; also under torchrun.

Enters: `WEIGHT PREFIX ...` or a blend's YAML, and sizes. Leaves: RUN/config.yaml, metrics.jsonl and log.txt.
Guarantees: one process; the same losses for the same seed. Cost: see `text_train`; it keeps no weights.
"""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path

import yaml

from dfm_nb.base.argv import ArgumentParser, guard, world_size_from_env
from dfm_nb.base.log import log, start_logging
from dfm_nb.base.metrics import Metrics
from dfm_nb.base.run import Run
from dfm_nb.text import weights as tw

HELP = {
    "steps": "optimizer steps",
    "micro_batch_size": "sequences a step",
    "seq_length": "tokens a sequence",
    "num_layers": "transformer layers",
    "hidden_size": "width",
    "num_attention_heads": "heads; must divide the width",
    "lr": "peak learning rate",
    "seed": "of weights and order",
    "eval_samples": "held-out sequences measured at the end; 0 for none",
}


def parse(argv: list[str] | None):
    from dfm_nb.text.train import TextTrainConfig

    p = ArgumentParser(prog="dfm text train", description="Train a small GPT on a blend of text corpora.")
    p.add_argument("blend", nargs="*", metavar="WEIGHT PREFIX", help="0.5 A 0.5 B, or one prefix")
    p.add_argument("--config", metavar="YAML", help="the blend's rows, as dfm text blend --output writes them")
    p.add_argument("--split", default="90,10,0", help="train, validation and test shares of each corpus")
    p.add_argument("--run-dir", default="runs/text", help="where config, metrics and log go")
    p.add_argument("--log-interval", type=int, default=10, help="steps from one line to the next")
    for f in fields(TextTrainConfig):
        if f.name in HELP:
            p.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default, help=HELP[f.name])
    return p.parse_args(argv)


def read_blend(args) -> tw.Blend:
    """The blend of the arguments; corpora without weights are seen in proportion to their tokens."""
    if bool(args.blend) == bool(args.config):
        raise ValueError("dfm text train takes either WEIGHT PREFIX ... or --config YAML")
    blend = tw.read_yaml(args.config) if args.config else tw.parse_list(args.blend, args.split)
    if blend.train[0].weight is None and not blend.phases:
        blend = tw.apply_strategy(blend, "proportional", tw.token_counts(blend))
    return blend


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--num-attention-heads must divide --hidden-size {args.hidden_size}; got {args.num_attention_heads}"
        )
    blend = read_blend(args)
    from dfm_nb import parallel
    from dfm_nb.text.train import TextTrainConfig, train

    if world_size_from_env() > 1:
        raise ValueError("dfm text train runs in one process; leave --nproc-per-node out")
    run = Run.create(args.run_dir)
    run.claim()
    settings = {name: getattr(args, name) for name in HELP}
    shown = {"train": {"train_iters": args.steps}, "text": settings, "blend": {s.prefix: s.weight for s in blend.train}}
    run.save_config(yaml.safe_dump(shown, sort_keys=False))
    start_logging(run)
    with Metrics(run.metrics_file) as metrics:
        metrics.truncate(0)  # no weights are kept, so a run begins anew
        started = time.monotonic()

        def note(step: int, loss: float, lr: float) -> None:
            elapsed = time.monotonic() - started
            tokens = args.micro_batch_size * args.seq_length
            metrics.write(
                {
                    "iteration": step,
                    "loss": loss,
                    "lr": lr,
                    "tokens": tokens,
                    "tokens_per_s": step * tokens / elapsed,
                    "elapsed_s": elapsed,
                }
            )
            if step == 1 or step % args.log_interval == 0 or step == args.steps:
                log.info("Step %d/%d, loss %.4f nats a token", step, args.steps, loss)

        config = TextTrainConfig(**settings, cache_dir=str(Path(run.path, "cache")))
        result = train(blend, config, on_step=note)
        if result.validation_loss is not None:
            metrics.write({"iteration": args.steps, "val_loss": result.validation_loss})
            log.info("Held-out text: %.4f nats a token", result.validation_loss)
    result.model = None
    parallel.shutdown()
    run.release()
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
