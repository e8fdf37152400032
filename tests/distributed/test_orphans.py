"""Processes of one machine listen on the loopback alone, and none outlives its launcher: SIGKILL of what a user started
ends workers, which have sessions of their own.
"""

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest

from dfm_nb.base.run import Run
from tests.processes import commands, wait_until
from tests.text.text_tokenizers import build, save
from tests.tiny_run import SIZE

pytestmark = pytest.mark.slow

MOCK = ["--recipe", "demo", "--mock", *SIZE, "train.global_batch_size=2", "train.train_iters=100000"]
LIMIT_S = 60


def listening(processes) -> set[str]:
    """Addresses that they accept connections on."""
    return {c.laddr.ip for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN}


def test_a_run_in_one_process_listens_on_the_loopback_alone(tmp_path):
    process, seen = commands().start("dfm", "pretrain", *MOCK, "--run-dir", tmp_path, "train.train_iters=3"), set()

    def ended() -> bool:
        with contextlib.suppress(psutil.Error):  # it has just ended
            seen.update(listening([owner, *owner.children(recursive=True)]) if (owner := Run(tmp_path).owner()) else ())
        return process.poll() is not None

    wait_until(ended, "the end of the run")
    assert process.returncode == 0 and seen and seen <= {"127.0.0.1", "::1"}


def test_workers_end_when_their_launcher_is_killed(tmp_path):
    said, ready = tmp_path / "said.txt", tmp_path / "run" / "metrics.jsonl"
    command = [sys.executable, "-m", "dfm_nb", "pretrain", "--nproc-per-node", "2", *MOCK, "--run-dir", ready.parent]
    with said.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_until(lambda: ready.exists() or process.poll() is not None, "the workers' first step")
    assert process.poll() is None, said.read_text()
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    workers = [p for p in tree if p.cmdline()[1:4:2] == ["-u", "dfm_nb.train"]]
    assert len(workers) == 2, [p.cmdline() for p in tree]
    assert listening(tree) and listening(tree) <= {"127.0.0.1", "::1"}, (
        "nothing listens beyond the loopback on one node"
    )
    process.kill()
    process.wait(60)
    assert not psutil.wait_procs(workers, timeout=LIMIT_S)[1]


def test_a_command_that_another_started_ends_with_it(tmp_path):
    child = (
        "import time\nfrom dfm_nb.base.argv import guard\nguard(lambda _: print('in', flush=True) or time.sleep(600))"
    )
    code = f"""
import sys
import time
from pathlib import Path
from dfm_nb.base.process import start
print(start([sys.executable, "-c", {child!r}], Path({str(tmp_path / "log")!r}), own_session=False).pid, flush=True)
sys.stdin.read()
"""
    sweep = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    run = psutil.Process(int(sweep.stdout.readline()))
    wait_until(lambda: "in" in (tmp_path / "log").read_text(), "the command")
    sweep.kill()
    sweep.wait(60)
    assert not psutil.wait_procs([run], timeout=LIMIT_S)[1]


def test_tokenizing_workers_end_with_their_command(tmp_path):
    tokenizer = save(build("gpt2"), tmp_path / "tokenizer")
    (tmp_path / "in.jsonl").write_text('{"text": "a blue butterfly over a meadow, wings spread"}\n' * 1_000_000)
    flags = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer]
    command = [sys.executable, "-m", "dfm_nb", "text", "preprocess", *map(str, flags), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = lambda: [p for p in psutil.Process(process.pid).children() if "--multiprocessing-fork" in p.cmdline()]  # noqa: E731
    wait_until(lambda: process.poll() is not None or len(found()) >= 2, "both workers")
    workers = found()
    time.sleep(1)  # they import, or tokenize
    assert process.poll() is None
    process.kill()
    process.wait(60)
    assert not psutil.wait_procs(workers, timeout=LIMIT_S)[1]
