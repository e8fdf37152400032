"""What ends a run from outside: processes that die or hang, and disks that fill up. Two processes each."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from dfm_nb.checkpoints import weights as checkpoint
from tests.processes import commands, wait_until
from tests.test_train import SMALL, command, losses, pretrain

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
LONG = ["train.train_iters=100000", "dist.hang_timeout_s=6"]


@pytest.fixture
def start():
    """Starts commands whose processes are all gone after the test."""
    started = []

    def popen(argv):
        process = subprocess.Popen(
            argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def workers(process):
    """The processes of the ranks, by rank."""
    found = {}
    for p in psutil.Process(process.pid).children():
        if "RANK" in p.environ():
            found[int(p.environ()["RANK"])] = p
    return found


def torchrun_script(name, *words, **environment):
    """A run under torchrun by one of the scripts in tests/distributed, in forks."""
    script = Path(__file__).parent / "distributed" / name
    env = commands().environment(**environment)
    return commands().run("torchrun", "--standalone", "--nproc-per-node=2", script, *SMALL, *words, env=env)


def wait_for_steps(run, process, count=8):
    def enough():
        assert process.poll() is None
        return (run / "metrics.jsonl").exists() and len(losses(run)) >= count

    wait_until(enough, f"{count} steps", 120)


@pytest.mark.slow
def test_stopped_rank_is_named_and_the_job_ends(tmp_path, start):
    process = start(command(tmp_path / "run", *LONG))
    wait_for_steps(tmp_path / "run", process)
    stopped = workers(process)[1]
    began = time.monotonic()
    stopped.send_signal(signal.SIGSTOP)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - began < 45 and process.returncode
    line = next(x for x in output.splitlines() if "the run hangs" in x)
    assert re.search(rf"rank 1 \(host .*, process {stopped.pid}\) at iteration \d+", line) and "no sign of life" in line
    assert not stopped.is_running()


@pytest.mark.slow
def test_rank_that_hangs_is_named_with_its_line_of_code(tmp_path):
    done = torchrun_script("hanging_run.py", "--run-dir", tmp_path / "run", *LONG)
    output = done.stdout + done.stderr
    line = next(x for x in output.splitlines() if "the run hangs" in x)
    assert "rank 1 (" in line and "rank 0 (" not in line and "loading data" in line and "hanging_run.py" in line
    assert done.returncode and max(losses(tmp_path / "run")) == 4


@pytest.mark.slow
def test_rank_that_dies_ends_the_job_with_its_number(tmp_path, start):
    process = start(command(tmp_path / "run", "train.train_iters=100000"))
    wait_for_steps(tmp_path / "run", process)
    began = time.monotonic()
    workers(process)[1].kill()
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - began < 45 and process.returncode
    assert re.search(r"local_rank: 1.*\n(.*\n)*?.*exitcode *: -9|exitcode: -9.*local_rank: 1", output), output[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["checkpoint.async_save=false", "checkpoint.async_save=true"])
def test_full_disk_is_one_sentence_and_the_last_checkpoint_stays_good(tmp_path, mode):
    """A limit on the size of files stands for the disk: the optimizer's file does not fit any more."""
    run = tmp_path / "run"
    pretrain(run, "train.train_iters=4", mode)
    good = checkpoint.whole_checkpoints(run / "checkpoints")
    largest = max(f.stat().st_size for f in good[-1].rglob("*") if f.is_file())
    words = ("--run-dir", run, "train.train_iters=8", mode)
    done = torchrun_script("full_disk_run.py", *words, FILE_BYTES=str(largest // 2))
    output = done.stdout + done.stderr
    assert done.returncode and output.count("error: the checkpoint") == 1, output[-3000:]
    line = next(x for x in output.splitlines() if x.startswith("error: the checkpoint"))
    assert "iter_0000008" in line and "iter_0000004" in line and "make room" in line
    assert checkpoint.whole_checkpoints(run / "checkpoints") == good
    assert (run / "checkpoints" / checkpoint.TRACKER).read_text() == "4"
    checkpoint.verify(good[-1])
    assert "Resumed from" in pretrain(run, "train.train_iters=8", mode)
