"""No process outlives its launcher: SIGKILL of what a user started ends workers, which have sessions of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dfm_nb.base.torchrun import torchrun_argv
from tests.text.text_tokenizers import build, save
from tests.tiny_run import SIZE

pytestmark = pytest.mark.slow

MOCK = ["--recipe", "demo", "--mock", *SIZE, "train.global_batch_size=2", "train.train_iters=100000"]
LIMIT_S = 5


def workers(top: psutil.Process, module: str) -> list[psutil.Process]:
    return [p for p in top.children(recursive=True) if p.cmdline()[1:4:2] == ["-u", module]]


def start(command: list[str], module: str, ready: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """The command, and its two workers once the file `ready` says that they are at work."""
    log = ready.parent / "said.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    ready.unlink(missing_ok=True)
    deadline = time.monotonic() + 120
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    top = psutil.Process(process.pid)
    tree, found = [top, *top.children(recursive=True)], workers(top, module)
    assert len(found) == 2, [p.cmdline() for p in tree]
    listening = {c.laddr.ip for p in tree for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening and listening <= {"127.0.0.1", "::1"}, "nothing listens beyond the loopback on one node"
    return process, found


@pytest.mark.parametrize("launcher", ["dfm pretrain", "torchrun"])
def test_workers_end_when_their_launcher_is_killed(tmp_path, launcher):
    run = ["--run-dir", str(tmp_path)]
    commands = {
        "dfm pretrain": [sys.executable, "-m", "dfm_nb", "pretrain", "--nproc-per-node", "2", *MOCK, *run],
        "torchrun": torchrun_argv("dfm_nb.train", [*MOCK, *run], 2),
    }
    process, found = start(commands[launcher], "dfm_nb.train", tmp_path / "metrics.jsonl")
    process.kill()
    process.wait(60)
    _, alive = psutil.wait_procs(found, timeout=LIMIT_S)
    assert not alive
    if launcher == "torchrun":
        return
    # The same command finds nobody in the folder; a worker that is killed is reported in one sentence.
    process, found = start(commands[launcher], "dfm_nb.train", tmp_path / "metrics.jsonl")
    found[1].kill()
    assert process.wait(60) == 128 + signal.SIGKILL
    said = (tmp_path / "said.txt").read_text()
    assert "SIGKILL" in said and "torch/distributed/run.py" not in said


def test_tokenizing_workers_end_with_their_command(tmp_path):
    tokenizer = save(build("gpt2"), tmp_path / "tokenizer")
    (tmp_path / "in.jsonl").write_text('{"text": "a blue butterfly over a meadow, wings spread"}\n' * 1_000_000)
    flags = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer]
    command = [sys.executable, "-m", "dfm_nb", "text", "preprocess", *map(str, flags), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline, found = time.monotonic() + 60, []
    while len(found) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        found = [p for p in psutil.Process(process.pid).children() if "--multiprocessing-fork" in p.cmdline()]
        time.sleep(0.05)
    time.sleep(1)  # they import, or tokenize
    assert process.poll() is None
    process.kill()
    process.wait(60)
    assert not psutil.wait_procs(found, timeout=LIMIT_S)[1]
