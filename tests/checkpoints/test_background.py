"""Saving while training goes on: what is written is the state at the call, whole, and in the end pruned."""

import os
import signal
import time
from math import prod

import numpy as np
import pytest
import torch

from dfm_nb.checkpoints import background as background_save
from dfm_nb.checkpoints import saving
from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.checkpoints.background import boxes
from tests.distributed.layouts import make_trainer

pytestmark = pytest.mark.slow  # every test forks a writer or saves whole optimizers

SMALL = ["model.num_layers=2", "train.global_batch_size=2"]


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (2, 3, 4), (4, 1, 3)])
def test_boxes_are_the_elements_in_order(shape):
    index = np.arange(prod(shape)).reshape(shape)
    for start in range(prod(shape) + 1):
        for end in range(start, prod(shape) + 1):
            found = [(o, s) for o, s in boxes(start, end, shape)]
            assert len(found) <= 2 * len(shape) - 1
            parts = [index[tuple(slice(a, a + n) for a, n in zip(o, s))].ravel() for o, s in found]
            assert all(len(p) for p in parts)
            assert np.concatenate([*parts, np.zeros(0, int)]).tolist() == list(range(start, end))


def values(trainer):
    weights = [p.detach().clone() for c in trainer.chunks for p in c.parameters()]
    inner = trainer.optimizer.chained_optimizers[0].optimizer
    moments = [s[k].clone() for s in inner.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return [*weights, *moments, *(a.clone() for a in trainer.ema.averages[0.1])]


def save(writer, trainer, iteration):
    writer.save(trainer.pieces(), iteration, {"iteration": iteration}, "model: {}\n")


@pytest.mark.parametrize("optimizer", ["true", "false"], ids=["distributed", "plain"])
def test_asynchronous_save_is_the_state_at_the_call(one_rank, tmp_path, monkeypatch, optimizer):
    write = background_save._write_file

    def late(bucket):
        time.sleep(1)
        return write(bucket)

    monkeypatch.setattr(background_save, "_write_file", late)
    trainer, loader = make_trainer([*SMALL, f"optimizer.use_distributed_optimizer={optimizer}"])
    trainer.step(loader.next_step())
    writer = saving.Writer(tmp_path, asynchronous=True, say=lambda *_: None)
    want = values(trainer)
    begun = time.monotonic()
    save(writer, trainer, 1)
    for _ in range(2):
        trainer.step(loader.next_step())
        writer.poll()
    assert writer.busy and not checkpoint.whole_checkpoints(tmp_path), time.monotonic() - begun
    writer.close()
    assert not writer.busy and not torch.equal(want[0], values(trainer)[0])
    checkpoint.verify(tmp_path / "iter_0000001")
    assert not list(tmp_path.rglob("*.sha256")) and not list(tmp_path.glob("*.tmp"))
    other, _ = make_trainer([*SMALL, f"optimizer.use_distributed_optimizer={optimizer}", "rng.seed=99"])
    assert saving.load(other.pieces(), tmp_path / "iter_0000001") == {"iteration": 1}
    got = values(other)
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want))


def test_old_checkpoints_go_but_every_nth_stays(one_rank, tmp_path):
    trainer, loader = make_trainer(SMALL)
    trainer.step(loader.next_step())
    for asynchronous in (False, True):
        root = tmp_path / str(asynchronous)
        writer = saving.Writer(root, keep_last=2, keep_every=4, asynchronous=asynchronous, say=lambda *_: None)
        for iteration in (2, 4, 6, 8, 10, 12, 14):
            save(writer, trainer, iteration)
        writer.close()
        kept = [checkpoint.iteration_of(p) for p in checkpoint.whole_checkpoints(root)]
        assert kept == [4, 8, 12, 14] and (root / checkpoint.TRACKER).read_text() == "14"


def test_removal_that_is_cut_off_leaves_no_half_checkpoint(one_rank, tmp_path, monkeypatch):
    trainer, loader = make_trainer(SMALL)
    trainer.step(loader.next_step())
    writer = saving.Writer(tmp_path, keep_last=1, say=lambda *_: None)
    save(writer, trainer, 1)

    class Killed(BaseException):
        pass

    def half(folder, **_):
        if (folder / "__0_0.distcp").exists():
            (folder / "__0_0.distcp").unlink()
            raise Killed

    monkeypatch.setattr(saving.shutil, "rmtree", half)
    with pytest.raises(Killed):
        save(writer, trainer, 2)
    assert not (tmp_path / "iter_0000001").exists()
    monkeypatch.undo()
    checkpoint.verify(tmp_path / "iter_0000002")
    save(writer, trainer, 3)
    assert [p.name for p in tmp_path.glob("iter_*")] == ["iter_0000003"]
    writer.close()


def test_fault_of_a_background_save_is_said_at_the_next_poll(one_rank, tmp_path, monkeypatch):
    trainer, loader = make_trainer(SMALL)
    trainer.step(loader.next_step())
    writer = saving.Writer(tmp_path, asynchronous=True, say=lambda *_: None)
    save(writer, trainer, 1)
    writer.finish()

    def full(bucket):
        raise OSError(28, "No space left on device", bucket[0])

    monkeypatch.setattr(background_save, "_write_file", full)
    save(writer, trainer, 2)
    with pytest.raises(
        ValueError, match=r"iter_0000002 could not be written .*No space left.*the last good one is iter_0000001"
    ):
        writer.finish()
    assert [p.name for p in checkpoint.whole_checkpoints(tmp_path)] == ["iter_0000001"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_file_that_the_first_rank_does_not_see_is_no_checkpoint(one_rank, tmp_path, monkeypatch, asynchronous):
    """As on two nodes that do not share the folder."""
    write = background_save._write_file

    def elsewhere(bucket):
        results = write(bucket)
        checkpoint.Path(bucket[0]).unlink()
        return results

    monkeypatch.setattr(background_save, "_write_file", elsewhere)
    trainer, loader = make_trainer(SMALL)
    trainer.step(loader.next_step())
    writer = saving.Writer(tmp_path, asynchronous=asynchronous, say=lambda *_: None)
    with pytest.raises(
        ValueError, match=r"iter_0000001 could not be written .*distcp is not there: all nodes must share"
    ):
        save(writer, trainer, 1)
        writer.finish()
    assert not checkpoint.whole_checkpoints(tmp_path)


def test_writer_that_is_killed_is_said(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(background_save, "_write_file", lambda bucket: os.kill(os.getpid(), signal.SIGKILL))
    trainer, loader = make_trainer(SMALL)
    trainer.step(loader.next_step())
    writer = saving.Writer(tmp_path, asynchronous=True, say=lambda *_: None)
    save(writer, trainer, 1)
    with pytest.raises(ValueError, match="iter_0000001 could not be written"):
        writer.finish()
