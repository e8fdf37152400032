"""Model chunks of this rank, initialised from (seed, name)."""

from typing import Any

import torch

from dfm_nb import parallel
from dfm_nb.config import counts
from dfm_nb.config.schema import ModelConfig
from dfm_nb.model.attention import pick_backend, use_flash_attention_3
from dfm_nb.model.dit import DiT, DiTConfig, init_weights, network_class, transformer_config
from dfm_nb.model.linear import freeze_base, is_lora
from dfm_nb.parallel.groups import Layout, mpu


def on_meta(model: ModelConfig) -> DiT:
    """The complete network without memory for its float32 weights: names, shapes and places."""
    with torch.device("meta"):
        return network_class(model)(transformer_config(model.model_copy(update=Layout().settings)))


def why_eager(model: ModelConfig, device: torch.device) -> str | None:
    """Why the layers cannot be compiled for training; None if they can."""
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if getattr(model, name) > 1:
            return f"model.{name} is {getattr(model, name)}"
    if model.recompute_granularity:
        return f"model.recompute_granularity is {model.recompute_granularity}"
    return None if device.type == "cuda" else "there is no CUDA device"


def build_chunks(model: ModelConfig, mixed_precision: str, seed: int, **overrides: Any) -> tuple[DiTConfig, list[DiT]]:
    """This rank's stage of the network (several with virtual stages), on its device, initialised from (seed, name).

    Raises
    ------
    ValueError : the network has other parameters than its `Network` counts, so its weights could not be loaded.
    """
    device = parallel.device()
    backend = pick_backend(model.attention_backend, device, mixed_precision)
    if backend == "varlen":
        use_flash_attention_3(device)
    config = transformer_config(model, mixed_precision, backend, **overrides)
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    chunks = []
    for v in stages:  # several with VPP: with 4 layers, PP 2 and VPP 2, rank 0 has layers 0 and 2
        vp_stage = v if config.virtual_pipeline_model_parallel_size else None
        chunk = network_class(model)(
            config,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        held = sum(p.numel() for name, p in chunk.named_parameters() if not is_lora(name))
        tp = model.tensor_model_parallel_size
        pp = model.pipeline_model_parallel_size
        counted = counts.parameter_count(model, tp, pp, mpu.get_pipeline_model_parallel_rank())
        if vp_stage is None and held != counted:
            must = f"model.variant={model.variant} must have the {counted:,} parameters that its Network counts"
            raise ValueError(f"{must}; it has {held:,}: correct its linear layers and vectors")
        init_weights(chunk, seed)
        if model.lora.rank:
            freeze_base(chunk)
        chunks.append(chunk.to(device))
    return config, chunks
