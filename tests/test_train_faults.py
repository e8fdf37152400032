"""What ends a run from outside: processes that hang or stop, and disks that fill up. Two processes each."""

import signal
from pathlib import Path

import pytest

from dfm_nb.base.torchrun import HUNG, torchrun_argv
from dfm_nb.checkpoints import folders
from tests.processes import commands
from tests.test_train import FAULTY, SMALL, losses, pretrain

pytestmark = pytest.mark.slow


def faulty(fault, *words, **environment):
    """A run under torchrun whose rank 1, or disk, has this fault; in forks."""
    env = commands().environment(FAULT=fault, **environment)
    return commands().run("python", *torchrun_argv(FAULTY, [*SMALL, *map(str, words)], 2)[1:], env=env)


@pytest.mark.parametrize("fault, where", [("stop", "no heartbeats"), ("hang", Path(FAULTY).name)])
def test_rank_that_hangs_or_stops_is_named_and_the_job_ends(tmp_path, fault, where):
    """One that hangs with its line of code."""
    done = faulty(fault, "--run-dir", tmp_path / "run", "train.train_iters=100000", "dist.hang_timeout_s=6")
    output = done.stdout + done.stderr
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output[-3000:]
    assert "rank 1 (" in lines[0] and "rank 0 (" not in lines[0] and where in lines[0]
    assert done.returncode == HUNG and max(losses(tmp_path / "run")) == 4


def test_rank_that_is_killed_is_one_sentence_and_the_job_ends(tmp_path):
    done = faulty("die", "--run-dir", tmp_path / "run")
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 128 + signal.SIGKILL and len(said) == 1, done.stderr[-3000:]
    assert "rank 1 " in said[0] and "SIGKILL" in said[0] and "torch/distributed/run.py" not in done.stderr


def test_full_disk_is_one_sentence_and_the_last_checkpoint_stays_good(tmp_path):
    """The optimizer's file does not fit any more."""
    run, mode = tmp_path / "run", "checkpoint.async_save=true"
    pretrain(run, "train.train_iters=4", mode)
    good = folders.whole_checkpoints(run / "checkpoints")
    largest = max(f.stat().st_size for f in good[-1].rglob("*") if f.is_file())
    done = faulty("full disk", "--run-dir", run, "train.train_iters=8", mode, FILE_BYTES=str(largest // 2))
    output = done.stdout + done.stderr
    assert done.returncode and output.count("error: the checkpoint") == 1, output[-3000:]
    line = next(x for x in output.splitlines() if x.startswith("error: the checkpoint"))
    assert "iter_0000008" in line and "iter_0000004" in line
    assert folders.whole_checkpoints(run / "checkpoints") == good
    assert (run / "checkpoints" / folders.TRACKER).read_text() == "4"
    folders.verify(good[-1])
    assert "Resumed from" in pretrain(run, "train.train_iters=8", mode)
