"""A checkpoint written in one layout holds the same weights, optimizer state and averages for every other one."""

import pytest
import torch

from dfm_nb.checkpoints import saving
from tests.conftest import run_ranks
from tests.distributed.layouts import (
    LAYOUTS,
    MUON,
    by_name,
    gather,
    largest_relative_difference,
    make_trainer,
    randomise,
)
from tests.tiny_run import VARIANTS


def contents(trainer):
    """Whole tensors by name: weights, averages, and the weights after one more step."""
    from dfm_nb.parallel.groups import global_name, mpu, shard_dim

    rank, found = mpu.get_tensor_model_parallel_rank(), []
    averages = trainer.ema.named(0.1)
    for chunk, named in zip(trainer.chunks, averages):
        for local, p in chunk.named_parameters():
            name, dim = global_name(local, chunk), shard_dim(p)
            found.append((name, p.detach().float().clone(), dim, rank))
            found.append((f"ema {name}", named[local].clone(), dim, rank))
    whole = gather(found)
    whole |= {f"step {k}": v for k, v in after_one_more_step(trainer).items()}
    return whole


def after_one_more_step(trainer):
    """The weights after a step with gradients that depend on the name only: they show main weights and moments."""
    from dfm_nb.parallel.groups import global_name, mpu, shard_dim

    rank = mpu.get_tensor_model_parallel_rank()
    for chunk in trainer.ddp:
        chunk.zero_grad_buffer()
    values = []
    for _, p, draw in by_name(trainer, "gradient"):
        p.main_grad.copy_(draw(1e-2))
    trainer.optimizer.prepare_grads()
    trainer.optimizer.step_with_ready_grads()
    for chunk in trainer.chunks:
        for local, p in chunk.named_parameters():
            values.append((global_name(local, chunk), p.detach().float().clone(), shard_dim(p), rank))
    return gather(values)


def write(overrides, folders):
    """One training step, then a save of each kind of the same state."""
    trainer, loader = make_trainer(overrides)
    randomise(trainer)
    trainer.step(loader.next_step())
    for asynchronous, folder in zip((False, True), folders):
        writer = saving.Writer(folder, asynchronous=asynchronous, say=lambda *_: None)
        writer.save(trainer.pieces(), 1, {"iteration": 1}, "model: {}\n")
        writer.close()
    return contents(trainer)


def read(overrides, folders):
    from dfm_nb.checkpoints import weights as checkpoint

    out = []
    for folder in folders:
        trainer, _ = make_trainer([*overrides, "rng.seed=99"])
        found = checkpoint.find(folder)
        assert saving.load(trainer.pieces(), found) == {"iteration": 1}
        out.append(contents(trainer))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "saved", "loaded", "precision"),
    [
        ("dit", "TP2+SP", "CP2", "fp32"),
        ("dit", "PP2 virtual", "DP2 distributed optimizer", "bf16"),
        ("wan", "DP2 distributed optimizer", "TP2", "bf16"),
        ("muon", "CP2", "PP2 virtual", "fp32"),
    ],
)
def test_checkpoint_of_one_layout_is_the_same_in_another(tmp_path, kind, saved, loaded, precision):
    """Blocking and asynchronous; the optimizer's part as the difference that one more step makes, bit for bit (Muon's
    sums depend on the layout).
    """
    folders = [str(tmp_path / way) for way in ("blocking", "async")]
    extra = [*(MUON if kind == "muon" else VARIANTS[kind]), f"mixed_precision={precision}", "optimizer.clip_grad=0"]
    want = run_ranks(2, write, [*LAYOUTS[saved][1], *extra], folders)[0]
    for got in run_ranks(2, read, [*LAYOUTS[loaded][1], *extra], folders)[0]:
        assert got.keys() == want.keys()
        rounded = {k for k in want if k.startswith("step ") and kind == "muon"}
        differing = [k for k in want.keys() - rounded if not torch.equal(got[k], want[k])]
        assert not differing, differing[:5]
        if rounded:
            difference, where = largest_relative_difference(*({k: w[k] for k in rounded} for w in (got, want)))
            assert difference < 1e-5, where
