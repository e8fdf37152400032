"""Saving while training goes on: what is written is the state at the call, whole, and in the end pruned."""

import os
import signal
import time
from math import prod
from pathlib import Path

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


@pytest.fixture
def trainer(one_rank):
    trainer, loader = make_trainer(SMALL)
    trainer.step(loader.next_step())
    trainer.packs = loader.next_step()
    return trainer


def writer_to(folder, **settings):
    return saving.Writer(folder, say=lambda *_: None, **settings)


def test_asynchronous_save_is_the_state_at_the_call(trainer, tmp_path, monkeypatch):
    write = background_save._write_file

    def late(bucket):
        time.sleep(1)
        return write(bucket)

    monkeypatch.setattr(background_save, "_write_file", late)
    writer = writer_to(tmp_path, asynchronous=True)
    want = values(trainer)
    save(writer, trainer, 1)
    for _ in range(2):
        trainer.step(trainer.packs)
        writer.poll()
    assert writer.busy and not checkpoint.whole_checkpoints(tmp_path)
    writer.close()
    assert not writer.busy and not torch.equal(want[0], values(trainer)[0])
    checkpoint.verify(tmp_path / "iter_0000001")
    assert not list(tmp_path.rglob("*.sha256")) and not list(tmp_path.glob("*.tmp"))
    other, _ = make_trainer([*SMALL, "rng.seed=99"])
    assert saving.load(other.pieces(), tmp_path / "iter_0000001") == {"iteration": 1}
    got = values(other)
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want))


def test_old_checkpoints_go_but_every_nth_stays(trainer, tmp_path):
    writer = writer_to(tmp_path, keep_last=2, keep_every=4, asynchronous=True)
    for iteration in (2, 4, 6, 8, 10):
        save(writer, trainer, iteration)
    writer.close()
    kept = [checkpoint.iteration_of(p) for p in checkpoint.whole_checkpoints(tmp_path)]
    assert kept == [4, 8, 10] and (tmp_path / checkpoint.TRACKER).read_text() == "10"


def test_removal_that_is_cut_off_leaves_no_half_checkpoint(trainer, tmp_path, monkeypatch):
    writer = writer_to(tmp_path, keep_last=1)
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


WRITE = background_save._write_file


def full(bucket):
    raise OSError(28, "No space left on device", bucket[0])


def elsewhere(bucket):
    """As on two nodes that do not share the folder: the first rank does not see the file."""
    results = WRITE(bucket)
    Path(bucket[0]).unlink()
    return results


def killed(bucket):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("fault, said", [(full, "No space left"), (elsewhere, "distcp"), (killed, "")])
def test_fault_of_a_background_save_names_it_and_the_last_good_one(trainer, tmp_path, monkeypatch, fault, said):
    writer = writer_to(tmp_path, asynchronous=True)
    save(writer, trainer, 1)
    writer.finish()
    monkeypatch.setattr(background_save, "_write_file", fault)
    save(writer, trainer, 2)
    with pytest.raises(ValueError, match=f"iter_0000002.*{said}"):
        writer.finish()
    assert [p.name for p in checkpoint.whole_checkpoints(tmp_path)] == ["iter_0000001"]
