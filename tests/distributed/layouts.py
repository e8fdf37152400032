"""One global batch in any layout: the losses of five iterations, and every gradient after the first, gathered whole."""

from dataclasses import replace

import torch
import torch.distributed as dist

from tests import tiny_run

BASE = [
    *"dataset.mock=true dataset.mock_latent_sizes=[[1,8,8],[3,4,6],[1,4,4],[2,8,4]] dataset.num_workers=0".split(),
    *"dataset.task_encoder_seq_length=96 dataset.packing_buffer_size=12 mixed_precision=fp32 rng.seed=7".split(),
    *tiny_run.NETWORK,
    *"model.num_layers=4 model.adaln_lora_dim=16 model.in_channels=4 model.text_dim=24 model.rope=true".split(),
    *"train.global_batch_size=4 train.micro_batch_size=1 train.train_iters=5 train.eval_iters=1".split(),
    "train.first_frame_share=0.6",  # not of all tokens the same weight
    *"optimizer.lr=1e-3 optimizer.use_distributed_optimizer=true scheduler.lr_warmup_iters=1".split(),
    "ema.sigma_rels=[0.1]",
]
MUON = ["optimizer.optimizer=muon", "optimizer.use_distributed_optimizer=false"]

TP, PP, CP = (f"model.{axis}_parallel_size=2" for axis in ("tensor_model", "pipeline_model", "context"))
SP, VPP = "model.sequence_parallel=true", "model.virtual_pipeline_model_parallel_size=2"
LAYOUTS = {
    # name: (processes, overrides)
    "TP2": (2, [TP]),
    "TP2+SP": (2, [TP, SP]),
    "CP2": (2, [CP]),
    "PP2": (2, [PP]),
    "PP2 virtual": (2, [PP, VPP]),
    "DP2": (2, ["optimizer.use_distributed_optimizer=false"]),
    "DP2 distributed optimizer": (2, []),
    "TP2xCP2": (4, [TP, CP]),
    "TP2xPP2": (4, [TP, PP]),
    "CP2xDP2": (4, [CP]),
    "TP2xSPxPP2": (4, [TP, SP, PP]),
    "recompute full": (1, ["model.recompute_granularity=full"]),
    "recompute selective": (1, ["model.recompute_granularity=selective"]),
}


GIVEN = "given"
"""Among overrides: samples have given pictures."""


def with_given(store):
    """The mock store with a picture of 2 x 4 latent pixels given beside every other sample."""
    import numpy as np

    from dfm_nb.base.seeds import generator_for
    from dfm_nb.data.sample_index import Shard

    read, beside = store.read, np.arange(len(store)) % 2 * 8
    voxels = store.voxels(slice(None)) + beside
    store.columns["given"] = beside
    store.shards = [Shard("mock", len(store), int(voxels.sum()), int(voxels.max()))]

    def read_pair(index):
        given = torch.randn(1, store.channels, 1, 2, 4, generator=generator_for("given", index)).bfloat16()
        return replace(read(index), given=[given] if beside[index] else [])

    store.read = read_pair
    return store


def make_trainer(overrides: list[str]):
    from dfm_nb import config as cfg
    from dfm_nb import parallel
    from dfm_nb.parallel.groups import layout_of
    from dfm_nb.training.batches import open_store, packed_loader
    from dfm_nb.training.trainer import Trainer

    settings = [words for words in overrides if words != GIVEN]
    config = cfg.resolve(None, overrides=[*BASE, "model.sigma_data=0.5", *settings]).config
    parallel.init(layout_of(config.model), timeout_s=60, seed=config.rng.seed)
    store = open_store(config)
    store = with_given(store) if GIVEN in overrides else store
    trainer = Trainer(config, store.empty_text)
    loader = packed_loader(config, store, trainer.dp_rank, trainer.dp_size)
    return trainer, loader


def by_name(trainer, purpose: str):
    """(global name, parameter, draw): `draw(scale, shift)` is this rank's part of normal values by purpose and name."""
    from dfm_nb.base.seeds import generator_for
    from dfm_nb.parallel.groups import global_name, mpu, shard_dim

    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    for chunk in trainer.chunks:
        for local, p in chunk.named_parameters():
            name, dim = global_name(local, chunk), shard_dim(p)
            shape = list(p.shape)
            if dim is not None:
                shape[dim] *= size

            def draw(scale: float, shift: float = 0.0, name=name, dim=dim, shape=shape):
                full = torch.randn(shape, generator=generator_for(purpose, name)) * scale + shift
                return full if dim is None else full.chunk(size, dim)[rank]

            yield name, p, draw


def randomise(trainer) -> None:
    """Zero-initialised layers would hide errors: give every parameter a value that depends on its name only."""
    with torch.no_grad():
        for name, p, draw in by_name(trainer, "test"):
            p.copy_(draw(0.08, float("norm" in name)))
    trainer.optimizer.reload_model_params()


def gather(values: list[tuple[str, torch.Tensor, int | None, int]]) -> dict[str, torch.Tensor]:
    """Whole tensors by global name from every rank's (name, local tensor, shard dim, tp rank)."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    by_name: dict[str, dict[int, tuple]] = {}
    for rank_values in everyone:
        for name, tensor, dim, tp_rank in rank_values:
            by_name.setdefault(name, {})[tp_rank] = (tensor, dim)
    out = {}
    for name, parts in by_name.items():
        dim = parts[0][1]
        out[name] = parts[0][0] if dim is None else torch.cat([parts[r][0] for r in sorted(parts)], dim)
    return out


def local_values(trainer, kind: str) -> list[tuple]:
    from dfm_nb.parallel.groups import global_name, mpu, shard_dim

    rank = mpu.get_tensor_model_parallel_rank()
    if kind == "grad" and trainer.config.optimizer.use_distributed_optimizer:
        for ddp in trainer.ddp:  # the distributed optimizer leaves each rank its shard: put the buffers together
            for buffer in ddp.buffers:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    shard = bucket.grad_data.chunk(group.size())[group.rank()].contiguous()
                    dist.all_gather_into_tensor(bucket.grad_data, shard.clone(), group=group)
    out = []
    for chunk in trainer.chunks:
        for local, p in chunk.named_parameters():
            if kind == "grad" and not p.requires_grad:
                continue
            value = p.main_grad if kind == "grad" else p
            out.append((global_name(local, chunk), value.detach().float().clone(), shard_dim(p), rank))
    return out


def losses_and_gradients(overrides: list[str], iterations: int = 5) -> dict:
    from dfm_nb.training.validation import Validation

    trainer, loader = make_trainer(overrides)
    randomise(trainer)
    packs = loader.next_step()
    trainer.backward(packs)
    gradients = gather(local_values(trainer, "grad"))
    losses, norms = [], []
    for i in range(iterations):
        result = trainer.step(packs if i == 0 else loader.next_step())
        norms.append(result.grad_norm)
        losses.append(result.loss)
    weights = gather(local_values(trainer, "weight"))
    held_out = Validation(trainer.config, trainer, loader.order.store, loader.order.settings).run()
    found = {"losses": losses, "gradients": gradients, "norms": norms, "weights": weights}
    return found | {"val_losses": [held_out["val_loss"], *held_out["val_loss_by_sigma"]]}


def largest_relative_difference(a: dict, b: dict) -> tuple[float, str]:
    """max over parameters of max|a - b| / max|b|, and where."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    worst = max(a, key=lambda n: ((a[n] - b[n]).abs().max() / (b[n].abs().max() + 1e-20)).item())
    return ((a[worst] - b[worst]).abs().max() / (b[worst].abs().max() + 1e-20)).item(), worst
