"""A run in one process does not listen beyond the loopback; under a launcher: test_orphans.py."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.tiny_run import SIZE

MOCK = ["--recipe", "demo", "--mock", *SIZE, "train.global_batch_size=2", "train.train_iters=3"]


@pytest.mark.slow
def test_a_run_listens_on_the_loopback_alone(tmp_path):
    command = [sys.executable, "-m", "dfm_nb", "pretrain", *MOCK, "--run-dir", str(tmp_path)]
    run = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    top, seen = psutil.Process(run.pid), set()
    while run.poll() is None:
        for process in [top, *top.children(recursive=True)]:
            try:
                seen |= {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
            except psutil.Error:  # it has just ended
                continue
    assert run.returncode == 0 and seen and seen <= {"127.0.0.1", "::1"}
