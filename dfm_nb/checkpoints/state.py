"""Model chunks and EMA as sharded state dicts, and back."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from dfm_nb.model.ema import PowerEMA

_LAYOUT_FREE = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the one form that continues exactly in another layout
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def _model_state(chunks, metadata) -> dict:
    state = {}
    for i, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{i}"] = chunk.sharded_state_dict(metadata=metadata)
    return state


def _ema_state(ema: PowerEMA, model_state: dict) -> dict:
    """The averages, sharded as the weights they average, in float32."""
    out: dict = {}
    for sigma_rel in ema.sigma_rels:
        for (chunk_key, chunk_state), averages in zip(model_state.items(), ema.named(sigma_rel)):
            for name, sharded in chunk_state.items():
                if isinstance(sharded, ShardedTensor) and name in averages:
                    value = averages[name]
                    out[f"ema.{sigma_rel:g}.{chunk_key}.{name}"] = replace(
                        sharded, key=f"ema.{sigma_rel:g}.{sharded.key}", data=value, dtype=value.dtype
                    )
    return out


def _load_model(chunks, state: dict) -> None:
    for i, chunk in enumerate(chunks):
        values = state["model" if len(chunks) == 1 else f"model{i}"]
        _, unexpected = chunk.load_state_dict(values, strict=False)
        assert not unexpected, unexpected


@torch.no_grad()
def _load_ema(ema: PowerEMA, values: dict) -> None:
    for sigma_rel in ema.sigma_rels:
        for i, averages in enumerate(ema.named(sigma_rel)):
            chunk_key = "model" if len(ema.chunks) == 1 else f"model{i}"
            for name, average in averages.items():
                average.copy_(values[f"ema.{sigma_rel:g}.{chunk_key}.{name}"])
