"""How long an iteration will take on this CPU, said before the first one when it is long.

The work is the plan's FLOPs of the packs that were just read; the rate is that of an MLP of the network's widths, timed
here. A GPU says nothing: its first iteration ends before one would ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch.distributed as dist

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.cpu import mlp_flops_per_s
from dfm_nb.base.log import duration, log
from dfm_nb.config import counts
from dfm_nb.packs.packs import Pack
from dfm_nb.parallel.groups import layout_of

LONG_S = 10.0
"""An iteration that takes longer than this gets a forecast and, on a terminal, a bar of its packs."""

CPU_RECIPES = ("demo", "demo_bf16")


def measured_rate(config: cfg.Config) -> float:
    """FLOP/s of this process: forward and backward of LayerNorm and MLP in the network's widths and arithmetic."""
    m = config.model
    assert m.ffn_hidden_size is not None
    return mlp_flops_per_s(m.hidden_size, m.ffn_hidden_size, config.mixed_precision == "bf16")


def tell(config: cfg.Config, packs: Sequence[Pack]) -> None:
    """Log on rank 0 what a step on these packs of this process will take on a CPU, if that is long.

    Every process measures, because they share the cores in training too.
    """
    if parallel.device().type != "cpu":
        return
    flops = sum(counts.model_flops(config.model, *p.lengths(padding=True)) for p in packs)
    flops //= layout_of(config.model).model_size
    seconds = flops / (rate := measured_rate(config))
    if parallel.rank() == 0 and seconds > LONG_S:
        log.info(
            "An iteration will take about %s on this CPU (%.3g TFLOP a process, at %.3g GFLOP/s), all %d about %s%s",
            duration(seconds),
            flops / 1e12,
            rate / 1e9,
            config.train.train_iters,
            duration(seconds * config.train.train_iters),
            _shorter(config, packs, seconds),
        )


def _shorter(config: cfg.Config, packs: Sequence[Pack], seconds: float) -> str:
    """The recipe for CPUs that does more of these samples in the same time here, if its iterations are shorter."""
    q, kv = (list(chain(*lengths)) for lengths in zip(*(p.lengths() for p in packs)))
    fed = {"model.in_channels": config.model.in_channels, "model.text_dim": config.model.text_dim}
    found = []
    for name in CPU_RECIPES:
        recipe = cfg.resolve(name).with_derived(fed, "the data set").config
        token_s = counts.model_flops(recipe.model, q, kv) / sum(q) / measured_rate(recipe)
        length = max(recipe.dataset.task_encoder_seq_length, *q)
        longer = f" dataset.task_encoder_seq_length={length}" if length in q else ""
        tokens = recipe.train.global_batch_size * length / dist.get_world_size()
        found.append((token_s, token_s * tokens, f"--recipe {name}{longer}"))
    _, shorter, settings = min(found)
    return f"; {settings} in place of these settings: about {duration(shorter)}" if shorter < seconds / 2 else ""
