"""The reference's training commands as its pages give them: its YAML, its first command, its ways to resume."""

import os
import pty
import re
import termios
import time
from pathlib import Path

import pytest

from tests.processes import commands, forks

YAML = str(Path(__file__).parent / "config" / "dit_pretrain.yaml")
SMALL = ["model.num_layers=1", "model.hidden_size=64", "dataset.task_encoder_seq_length=160"]


def pretrain(folder, *words):
    """Two processes of the YAML in `folder`; what they printed."""
    launch = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "dfm_nb.train", "--config-file", YAML]
    done = commands().run(*launch, *SMALL, *words, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_yaml_of_the_reference_starts_anew_then_resumes(tmp_path):
    """`checkpoint.load` is `checkpoint.save`: empty at the first start, full at the second."""
    (tmp_path / "dfm_experiment").mkdir()
    assert "dfm_experiment" in pretrain(tmp_path, "--mock", "train.train_iters=2")
    again = pretrain(tmp_path, "--mock", "train.train_iters=3")
    assert "Resumed from dfm_experiment/iter_0000002 at iteration 2" in again
    assert [p.name for p in sorted((tmp_path / "dfm_experiment").glob("iter_*"))] == ["iter_0000002", "iter_0000003"]
    # the pages name a checkpoint without zeros
    named = ["--run-dir", "other", "checkpoint.load_checkpoint=dfm_experiment/iter_2/", "train.train_iters=3"]
    assert "Resumed from dfm_experiment/iter_0000002 at iteration 2" in pretrain(tmp_path, "--mock", *named)


def on_a_terminal(folder, argv, wanted, timeout_s=400):
    """What two processes write to a terminal until all of `wanted` has been seen; then they are killed."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 160))  # tqdm shows nothing on a terminal without columns
    launch = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "dfm_nb.train", *argv)
    process = commands().start(*launch, cwd=folder, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said, deadline = "", time.monotonic() + timeout_s
    try:
        while not all(re.search(w, said) for w in wanted) and time.monotonic() < deadline:
            said += os.read(ours, 1 << 16).decode(errors="replace")
    except OSError:  # nobody writes any more: they ended
        pass
    finally:
        for p in (*forks(), process):
            p.kill()
        process.wait()
        os.close(ours)
    return said


FORECAST = r"An iteration will take about \d.* on this CPU, all 10000 \d"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """57 samples, as a first trial has them."""
    from dfm_nb.prepare import main

    folder = tmp_path_factory.mktemp("first") / "data"
    assert main(["--source", "synthetic", "--num-images", "50", "--num-clips", "7", "--output-dir", str(folder)]) == 0
    return str(folder)


@pytest.mark.slow
def test_first_command_says_how_long_it_takes_and_counts_its_packs_on_the_terminal_alone(tmp_path, data):
    """The pages' first command on a CPU, on packs of a quarter, for which a test can wait; in memory too."""
    bar = r"packs: +\d+%.* (\d+)/16 "
    said = on_a_terminal(tmp_path, ["--dataset-path", data, "dataset.task_encoder_seq_length=2048"], [FORECAST, bar])
    forecast, progress = re.search(FORECAST, said), re.search(bar, said)
    assert forecast and progress and forecast.start() < progress.start(), said[-3000:]
    logged = (tmp_path / "runs" / "pretrain" / "log.txt").read_text()
    assert re.search(FORECAST, logged) and "packs:" not in logged


@pytest.mark.slow
def test_yaml_of_the_reference_as_it_is_comes_to_its_first_step(tmp_path):
    said = on_a_terminal(tmp_path, ["--config-file", YAML, "--mock"], [FORECAST])
    assert re.search(FORECAST, said), said[-3000:]
