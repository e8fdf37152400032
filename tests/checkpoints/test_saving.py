"""Saving while training continues: the files hold the state at the call, are complete, and are pruned at the end."""

import errno
import json
import os
import resource
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist

from dfm_nb.base.files import temporary_of
from dfm_nb.checkpoints import folders, loading, saving
from tests.conftest import run_ranks
from tests.distributed.layouts import make_trainer
from tests.refusals import refused

pytestmark = pytest.mark.slow  # every test forks a writer or saves whole optimizers

SMALL = ["model.num_layers=2", "train.global_batch_size=2"]


def values(trainer):
    weights = [p.detach().clone() for c in trainer.chunks for p in c.parameters()]
    inner = trainer.optimizer.chained_optimizers[0].optimizer
    moments = [s[k].clone() for s in inner.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return [*weights, *moments, *(a.clone() for a in trainer.ema.averages[0.1])]


WRITE = saving._write


def save(writer, trainer, iteration):
    writer.save(trainer.pieces(), iteration, {"iteration": iteration}, "model: {}\n")


@pytest.fixture
def trainer(one_rank):
    trainer, loader = make_trainer(SMALL)
    trainer.step(loader.next_step())
    trainer.packs = loader.next_step()
    return trainer


def writer_to(folder, **settings):
    return saving.Writer(folder, **settings)


def test_asynchronous_save_is_the_state_at_the_call(trainer, tmp_path, monkeypatch):
    go = tmp_path / "go"

    def late(*given):
        while not go.exists():
            time.sleep(0.01)
        WRITE(*given)

    monkeypatch.setattr(saving, "_write", late)
    writer = writer_to(tmp_path, asynchronous=True)
    want = values(trainer)
    save(writer, trainer, 1)
    for _ in range(2):
        trainer.step(trainer.packs)
        writer.poll()
    assert writer.busy and not folders.whole_checkpoints(tmp_path)
    go.touch()
    writer.close()
    assert not writer.busy and not torch.equal(want[0], values(trainer)[0])
    folders.verify(tmp_path / "iter_0000001")
    assert not list(tmp_path.rglob("rank-*.json")) and not list(tmp_path.glob("*.tmp"))
    other, _ = make_trainer([*SMALL, "rng.seed=99"])
    assert saving.load(other.pieces(), tmp_path / "iter_0000001") == {"iteration": 1}
    got = values(other)
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want))


def test_kept_are_the_newest_the_best_and_every_nth():
    iterations = [2, 4, 6, 8, 10]
    assert {*iterations} <= saving.kept(iterations, 0, None, None)
    assert saving.kept(iterations, 1, None, None) - {None} == {10}
    assert saving.kept(iterations, 2, 4, 6) == {4, 6, 8, 10}


def test_removal_that_is_cut_off_leaves_no_half_checkpoint(trainer, tmp_path, monkeypatch):
    writer = writer_to(tmp_path, keep_last=1)
    save(writer, trainer, 1)

    here = os.getpid()

    def half(folder, **_):
        for file in Path(folder).glob("rank-*") if os.getpid() != here else ():
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(saving.shutil, "rmtree", half)
    refused("", save, writer, trainer, 2)
    assert not (tmp_path / "iter_0000001").exists()
    monkeypatch.undo()
    folders.verify(tmp_path / "iter_0000002")
    temporary_of(tmp_path / folders.TRACKER).touch()  # as a kill leaves it
    save(writer, trainer, 3)
    assert not list(tmp_path.glob(".*"))
    assert [p.name for p in tmp_path.glob("iter_*")] == ["iter_0000003"]


def full(parts, folder, rank):
    raise OSError(28, "No space left on device", str(folder))


def elsewhere(parts, folder, rank):
    """As on two nodes that do not share the folder: the first rank does not see the file."""
    WRITE(parts, folder, rank)
    (folder / "rank-00000.safetensors").unlink()


def killed(parts, folder, rank):
    os.kill(os.getpid(), signal.SIGKILL)


no_process = Mock(side_effect=BlockingIOError(errno.EAGAIN, "too many processes"))
FAULTS = [(saving, "_write", full, "No space left"), (saving, "_write", elsewhere, "rank-00000")]
FAULTS += [(saving, "_write", killed, "9"), (os, "fork", no_process, "too many processes")]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("module, name, fault, said", FAULTS, ids=[fault[3] for fault in FAULTS])
def test_fault_of_a_save_names_it_and_the_last_good_one(
    trainer, tmp_path, monkeypatch, module, name, fault, said, asynchronous
):
    writer = writer_to(tmp_path, asynchronous=asynchronous)
    save(writer, trainer, 1)
    writer.close()
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(ValueError, match=f"iter_0000002.*{said}.*iter_0000001"):
        save(writer, trainer, 2)
        writer.close()
    assert [p.name for p in tmp_path.glob("iter_*")] == ["iter_0000001"] and not writer.busy


def test_an_older_checkpoint_that_cannot_be_removed_is_no_fault_of_the_new_one(trainer, tmp_path, monkeypatch):
    writer = writer_to(tmp_path, keep_last=1)
    save(writer, trainer, 1)
    monkeypatch.setattr(Path, "rename", Mock(side_effect=OSError(errno.EIO, "at fault")))
    refused("iter_0000002.* is whole.*at fault", save, writer, trainer, 2)
    assert folders.usable(tmp_path) == tmp_path / "iter_0000002"


def second_fails(root):
    trainer, _ = make_trainer(SMALL)
    if dist.get_rank() == 1:
        saving._write = full
    with pytest.raises((ValueError, SystemExit)) as error:
        save(writer_to(root), trainer, 1)
    return error.type, str(error.value)


def test_fault_of_one_rank_ends_all(tmp_path):
    """The writing process of the first waits for the file of the second."""
    first, second = run_ranks(2, second_fails, tmp_path)
    assert first[0] is ValueError and "No space left" in first[1] and second[0] is SystemExit
    assert not list(tmp_path.glob("iter_*"))


def in_little_memory(folder):
    trainer, _ = make_trainer(SMALL)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (64 << 20), -1))
    state = saving.load(trainer.pieces(), folder)
    loading.weights_in(folder).load(trainer.chunks, None)
    return state


def test_memory_of_loading_is_bounded_by_what_is_needed(trainer, tmp_path):
    """Under `ulimit -v`, of a file of 3 GiB with a tensor that is not asked for."""
    save(writer_to(tmp_path), trainer, 1)
    folder = tmp_path / "iter_0000001"
    file = folder / "rank-00000.safetensors"
    content, size = file.read_bytes(), 3 << 30
    start = 8 + int.from_bytes(content[:8], "little")
    header, end = json.loads(content[8:start]), len(content) - start
    header["large"] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [end, end + size]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    os.truncate(file, 8 + len(text) + end + size)
    (folder / "config.yaml").write_text("ema: {sigma_rels: []}")
    assert run_ranks(1, in_little_memory, folder) == [{"iteration": 1}]
