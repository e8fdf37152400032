"""Killed at random instants and resumed, a preparation on two ranks ends in the same bytes.
`benchmarks/prepare_kill.py` is the long form.
"""

import os
import random
import signal
import subprocess
import time

import psutil
import pytest

from dfm_nb.base.argv import torchrun_argv
from dfm_nb.data import shards
from tests.processes import alive, commands, wait_until

FLAGS = ["--source", "synthetic", "--num-images", "60", "--num-clips", "6", "--short-side", "32", "--shard-size", "4"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def prepare(folder):
    """To the end."""
    launch = ["--standalone", "--nproc-per-node=2", "-m", "dfm_nb.prepare"]
    done = commands().run("torchrun", *launch, *FLAGS, "--output-dir", folder, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr


def start(folder):
    """Real processes, to be killed."""
    argv = torchrun_argv("dfm_nb.prepare", [*FLAGS, "--output-dir", str(folder), "--resume"], 2)
    quiet = subprocess.DEVNULL
    return subprocess.Popen(argv, env=ENV, stdout=quiet, stderr=quiet, start_new_session=True)


def parts(folder):
    """Every member of every tar by shard and name."""
    return {
        f"{tar.name}/{e.key}.{part}": data
        for tar in sorted(folder.glob("*.tar"))
        for e in shards.scan_shard(tar)
        for part, data in shards.read_parts(e).items()
    }


@pytest.mark.slow
def test_killed_preparation_resumes_to_the_same_bytes(tmp_path):
    prepare(tmp_path / "clean")
    rng, folder = random.Random(2), tmp_path / "d"
    for finished, whole_group in ((1, True), (6, False), (11, True)):  # shards that are there when the signal comes
        process = start(folder)
        wait_until(lambda n=finished: len(list(folder.glob(".dfm/rank*.json"))) >= n, "shards", 90, pause_s=0.005)
        time.sleep(rng.uniform(0, 0.05))
        workers = psutil.Process(process.pid).children(recursive=True)
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()  # torchrun alone: its processes must go with it
        process.wait()
        wait_until(lambda w=workers: not alive(w), "the workers' end", 10)
        assert not (folder / "manifest.json").exists()
        for tar in folder.glob("*.tar"):  # whole or absent
            assert all(e.read() for e in shards.scan_shard(tar))
    prepare(folder)
    assert parts(folder) == parts(tmp_path / "clean") and len(parts(folder)) == 3 * 66
    assert not list(folder.glob("*.tmp"))
