"""The training driver: `dfm pretrain`, or `torchrun ... -m dfm_nb.train`.

Enters: a prepared folder (or `--mock`), a configuration in three layers (recipe < `--config-file` < `group.key=value`).
Leaves: a run folder (`runs`): config.yaml, metrics.jsonl, log.txt, checkpoints/, samples/.
Guarantees: faults of the configuration are all reported before a process group starts; stopped at any instant and started again, the run
goes on with the same losses; validation touches no training state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dfm_nb import checkpoint, parallel
from dfm_nb import config as cfg
from dfm_nb.attention import pick_backend
from dfm_nb.dataset import EnergonStore, MockStore, Pack, PackedLoader, PackPlan, PackSettings
from dfm_nb.denoiser import forward
from dfm_nb.dit import DiT, DiTConfig, init_weights, transformer_config
from dfm_nb.ema import PowerEMA
from dfm_nb.parallel import Layout, mpu

SIGMA_DATA = 0.5
"""Latents are scaled to this standard deviation, with the data set's own mean and std per channel (EDM2, appendix B.1)."""


def layout_of(model) -> Layout:
    return Layout(
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
        model.virtual_pipeline_model_parallel_size,
        model.sequence_parallel,
    )


def build_chunks(model, mixed_precision: str, seed: int, **overrides) -> tuple[DiTConfig, list[DiT]]:
    """This rank's stage of the network (several with virtual stages), on its device, initialised from (seed, name)."""
    device = parallel.device()
    backend = pick_backend(model.attention_backend, device)
    config = transformer_config(model, mixed_precision, backend, **overrides)
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    chunks = []
    for v in stages:
        vp_stage = v if config.virtual_pipeline_model_parallel_size else None
        chunk = DiT(
            config,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        init_weights(chunk, seed)
        chunks.append(chunk.to(device))
    return config, chunks


@dataclass
class StepResult:
    """What one optimizer step did, over all ranks."""

    loss: float
    tokens: int
    grad_norm: float
    skipped: bool


class Trainer:
    """Model, optimizer and schedule of one rank; knows nothing of files except through `checkpoint`.

    Parameters
    ----------
    config : resolved configuration with `model.in_channels`, `model.text_dim` and `model.sigma_data` set.
    """

    def __init__(self, config: cfg.Config):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config, self.device = config, parallel.device()
        self.layout = layout_of(config.model)
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.model_config, self.chunks = build_chunks(config.model, config.mixed_precision, config.rng.seed)
        self.model_config.finalize_model_grads_func = finalize_model_grads
        overlap = self.dp_size > 1 and self.device.type == "cuda"
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.optimizer.use_distributed_optimizer,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and config.optimizer.use_distributed_optimizer,
        )
        self.ddp = [
            DistributedDataParallel(self.model_config, ddp_config, c, disable_bucketing=i > 0)
            for i, c in enumerate(self.chunks)
        ]
        sync = [d.no_sync for d in self.ddp]
        self.model_config.no_sync_func = sync if len(sync) > 1 else sync[0]
        self._build_optimizer(overlap)
        self.ema = PowerEMA(self.chunks, config.ema.sigma_rels)
        self.run_schedule = get_forward_backward_func()
        self.capacity = config.train.micro_batch_size * config.dataset.task_encoder_seq_length
        self.steps_taken = 0  # optimizer steps that changed the weights

    def _build_optimizer(self, overlap: bool) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        from dfm_nb._megatron_cpu import cuda_type_names

        c, o, s = self.config, self.config.optimizer, self.config.scheduler
        settings = OptimizerConfig(
            optimizer="adam", lr=o.lr, min_lr=o.min_lr, weight_decay=o.weight_decay,
            adam_beta1=o.adam_beta1, adam_beta2=o.adam_beta2, adam_eps=o.adam_eps, clip_grad=o.clip_grad,
            bf16=c.mixed_precision == "bf16", params_dtype=self.model_config.params_dtype,
            use_distributed_optimizer=o.use_distributed_optimizer,
            overlap_param_gather=overlap and o.use_distributed_optimizer,
        )  # fmt: skip
        parameters = [p for chunk in self.ddp for p in chunk.parameters()]
        if self.device.type == "cuda":
            self.optimizer = get_megatron_optimizer(settings, self.ddp)
        else:
            with cuda_type_names(parameters):
                self.optimizer = get_megatron_optimizer(settings, self.ddp)
        decay = s.lr_decay_iters or c.train.train_iters
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=o.lr, min_lr=o.min_lr,
            lr_warmup_steps=min(s.lr_warmup_iters, decay - 1), lr_decay_steps=decay, lr_decay_style=s.lr_decay_style,
            start_wd=o.weight_decay, end_wd=o.weight_decay, wd_incr_steps=decay, wd_incr_style="constant",
        )  # fmt: skip

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def pieces(self) -> checkpoint.Pieces:
        return checkpoint.Pieces(self.chunks, self.optimizer, self.scheduler, self.ema)

    def _forward_step(self, packs: Iterator[Pack], model):
        output, loss_of = forward(model, next(packs), self.config.model.sigma_data, self.device)

        def loss_function(network_output):
            losses = loss_of(network_output)
            total, count = (losses.loss * losses.mask).sum(), losses.mask.sum().int()
            return total, count, {"sum": torch.stack((total.detach(), count.float()))}

        return output, loss_function

    def _schedule(self, packs: list[Pack], forward_step, forward_only: bool) -> list[dict]:
        iterators = [iter(packs) for _ in self.ddp]
        return self.run_schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.ddp if len(self.ddp) > 1 else self.ddp[0],
            num_microbatches=len(packs),
            seq_length=len(packs[0].x0),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def backward(self, packs: list[Pack]) -> torch.Tensor:
        """Gradients of the mean loss per token over all ranks' packs; returns float64 [loss sum, tokens]."""
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self.reduce_sums(self._schedule(packs, self._forward_step, forward_only=False), 2)

    def reduce_sums(self, outputs: list[dict], width: int) -> torch.Tensor:
        """Sum the "sum" entries of micro-batches over ranks, the same float64 [width] on every rank."""
        total = torch.zeros(width, dtype=torch.float64, device=self.device)
        for out in outputs:  # empty except on the last pipeline stage
            total += out["sum"]
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
        return parallel.broadcast_from_last_stage(total)

    def step(self, packs: list[Pack]) -> StepResult:
        """One optimizer step on this rank's packs. NaN or Inf in loss or gradients: the weights stay as they are."""
        from megatron.core.optimizer import optimizer as mcore_optimizer

        loss_sum, tokens = self.backward(packs).tolist()
        found_inf = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        loss = loss_sum / max(tokens, 1)
        skipped = bool(found_inf) or not (math.isfinite(grad_norm) and math.isfinite(loss))
        if not skipped:
            clip = self.config.optimizer.clip_grad
            for part in self.optimizer.chained_optimizers:
                parameters = part.get_parameters()
                if clip > 0 and parameters:
                    mcore_optimizer.clip_grad_by_total_norm_fp32(parameters, max_norm=clip, total_norm=grad_norm)
            self.optimizer.step_with_ready_grads()
            self.steps_taken += 1
            self.ema.update(self.steps_taken)
        self.scheduler.step(increment=1)
        return StepResult(loss, int(tokens), grad_norm, skipped)


def pack_settings(config: cfg.Config) -> PackSettings:
    layout = layout_of(config.model)
    return PackSettings(
        seed=config.rng.seed, patch_spatial=config.model.patch_spatial, patch_temporal=config.model.patch_temporal,
        sigma_data=config.model.sigma_data, P_mean=config.model.P_mean, P_std=config.model.P_std,
        caption_dropout=config.train.caption_dropout, condition_frames_prob=config.dataset.condition_frames_prob,
        token_multiple=layout.token_multiple(), text_multiple=layout.text_multiple(),
    )  # fmt: skip


def open_store(config: cfg.Config, split: str = "train"):
    d = config.dataset
    if d.mock:
        return MockStore(
            d.mock_latent_sizes, d.mock_text_tokens, config.model.in_channels or 16, config.model.text_dim or 384
        )
    if split == "val" and d.use_train_split_for_val:
        split = "train"
    return EnergonStore(d.path, split, progress=parallel.rank() == 0)


def packed_loader(config: cfg.Config, store, dp_rank: int, dp_size: int) -> PackedLoader:
    t = config.train
    plan = PackPlan(
        store, pack_settings(config), t.micro_batch_size * config.dataset.task_encoder_seq_length, config.dataset.packing_buffer_size
    )
    return PackedLoader(plan, t.global_batch_size // t.micro_batch_size, dp_rank, dp_size, config.dataset.num_workers)
