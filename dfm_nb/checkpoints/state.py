"""Model chunks and averages as megatron-core's sharded state dicts, and back.

A sharded state dict says of each local tensor where in the whole it lies; megatron-core writes and reads any layout
from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from dfm_nb.checkpoints.torch_dist import without_objects
from dfm_nb.model.ema import PowerEMA

LAYOUT_FREE = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the one form that continues exactly in another layout
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""How megatron-core shards what is saved; kept in the checkpoint as its content's metadata."""


def _chunk_key(index: int, count: int) -> str:
    """As megatron-core names the chunks of a rank: `model`, or `model0`, `model1`, ... with virtual pipeline stages."""
    return "model" if count == 1 else f"model{index}"


def model_state(chunks: Sequence[Any]) -> dict[str, dict]:
    """Sharded state of this rank's chunks, by chunk."""
    metadata = dict(LAYOUT_FREE)
    states = [without_objects(c.sharded_state_dict(metadata=metadata)) for c in chunks]
    return {_chunk_key(i, len(chunks)): state for i, state in enumerate(states)}


def ema_state(ema: PowerEMA, model_state: Mapping[str, Mapping]) -> dict[str, ShardedTensor]:
    """The averages in float32, sharded as the weights that they average."""
    out = {}
    for sigma_rel in ema.sigma_rels:
        for (chunk_key, chunk_state), averages in zip(model_state.items(), ema.named(sigma_rel)):
            for name, sharded in chunk_state.items():
                if isinstance(sharded, ShardedTensor) and name in averages:
                    value = averages[name]
                    out[f"ema.{sigma_rel:g}.{chunk_key}.{name}"] = replace(
                        sharded, key=f"ema.{sigma_rel:g}.{sharded.key}", data=value, dtype=value.dtype
                    )
    return out


def load_model(chunks: Sequence[Any], state: Mapping[str, Any]) -> None:
    """Loaded tensors, by chunk as `model_state` has them, into the chunks."""
    for i, chunk in enumerate(chunks):
        _, unexpected = chunk.load_state_dict(state[_chunk_key(i, len(chunks))], strict=False)
        assert not unexpected, unexpected


@torch.no_grad()
def load_ema(ema: PowerEMA, values: Mapping[str, torch.Tensor]) -> None:
    """Loaded tensors, named as `ema_state` names them, into the averages."""
    for sigma_rel in ema.sigma_rels:
        for i, averages in enumerate(ema.named(sigma_rel)):
            for name, average in averages.items():
                average.copy_(values[f"ema.{sigma_rel:g}.{_chunk_key(i, len(ema.chunks))}.{name}"])
