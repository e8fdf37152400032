"""The training driver on two processes: logs, metrics, checkpoints, exact resume after kills, elastic layouts, and what
ends a run from outside.
"""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from dfm_nb import train
from dfm_nb.base.metrics import read_metrics
from dfm_nb.base.process import send
from dfm_nb.base.torchrun import HUNG, torchrun_argv
from dfm_nb.checkpoints import folders, saving
from tests import tiny_run
from tests.attacks.checkpoint_files import reseal
from tests.processes import commands, wait_until
from tests.refusals import refused
from workbench.monitor import Monitor

pytestmark = pytest.mark.slow

SMALL = ["--mock", "--recipe", "demo", *tiny_run.NETWORK, "dataset.mock_latent_sizes=[[1,8,8],[3,4,8],[1,4,4]]"]
SMALL += "model.num_layers=2 mixed_precision=fp32 train.eval_interval=0 dataset.task_encoder_seq_length=96".split()
SMALL += "train.train_iters=12 checkpoint.save_interval=4 checkpoint.keep_last=0 scheduler.lr_warmup_iters=2".split()
SMALL += "logger.log_interval=4 dataset.condition_frames_prob=0.5 dataset.condition_last_prob=0.5".split()
FAULTY = str(Path(__file__).parent / "distributed" / "faulty_run.py")


def torchrun(*words, **environment):
    """A torchrun whose processes are forks (see `tests.processes`); what it printed."""
    done = commands().run("torchrun", *words, env=commands().environment(**environment))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def pretrain(run_dir, *extra):
    return torchrun("--standalone", "--nproc-per-node=2", "-m", "dfm_nb.train", *SMALL, "--run-dir", run_dir, *extra)


def losses(run_dir, name="loss"):
    """Or another figure, by iteration."""
    return {r["iteration"]: r[name] for r in read_metrics(run_dir / "metrics.jsonl") if name in r}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """An uninterrupted run, and its output."""
    run = tmp_path_factory.mktemp("clean") / "run"
    return run, pretrain(run)


def test_run_leaves_log_lines_metrics_and_checkpoints(clean):
    run, output = clean
    assert "[INFO] Iteration    4/12, Loss: " in output
    assert "[INFO] Checkpoint saved: " in output
    records = read_metrics(run / "metrics.jsonl")
    assert [r["iteration"] for r in records] == list(range(1, 13))
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_s", "elapsed_s"} <= records[0].keys()
    gpu = {"gpu_memory_gib"}
    assert Monitor(run).rates.keys() <= records[0].keys() | gpu, "a panel without its key stays hidden"
    assert (run / "checkpoints" / folders.TRACKER).read_text() == "12"
    assert [p.name for p in folders.whole_checkpoints(run / "checkpoints")] == [f"iter_{i:07d}" for i in (4, 8, 12)]
    assert (run / "config.yaml").is_file() and (run / "loss.png").stat().st_size > 5000


def test_killed_run_goes_on_bit_for_bit(clean, tmp_path):
    """SIGKILL of everything at some instant after the first checkpoint; the same command goes on."""
    run = tmp_path / "run"
    argv = torchrun_argv("dfm_nb.train", [*SMALL, "--run-dir", str(run)], 2)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = psutil.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)
    wait_until(lambda: folders.whole_checkpoints(run / "checkpoints"), "a checkpoint")
    send([*process.children(recursive=True), process], signal.SIGKILL)
    process.wait()
    output = pretrain(run)
    assert "Resumed from" in output and "Done: iteration 12" in output
    assert losses(run) == losses(clean[0])
    output = pretrain(run, "train.train_iters=13", "optimizer.lr=0.0007")
    assert "optimizer.lr is 0.0007" in output and "train.train_iters is 13" in output and 13 in losses(run)


def test_torchruns_restart_goes_on_from_the_last_checkpoint(clean, tmp_path):
    """Rank 1 dies before its tenth step; torchrun starts both again, and the losses are
    those of the run that nothing happened to.
    """
    run = tmp_path / "run"
    launch = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", FAULTY]
    output = torchrun(*launch, *SMALL, "--run-dir", run, "checkpoint.async_save=true", FAULT="die")
    assert re.search(r"exitcode: -9\) local_rank: 1", output) and output.count("Starting pretraining") == 2
    assert re.search(r"Resumed from .*iter_000000[48] at iteration [48]", output)
    assert losses(run) == losses(clean[0])


def test_checkpoint_continues_in_another_layout(clean, tmp_path):
    """Saved at DP2, resumed in TP2+SP from iteration 8: same losses to rounding, on the same samples."""
    run, layout = tmp_path / "run", ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]
    start = clean[0] / "checkpoints" / "iter_0000008"
    assert "at iteration 8" in pretrain(run, *layout, f"checkpoint.load_checkpoint={start}")
    got, want = losses(run), losses(clean[0])
    assert sorted(got) == [9, 10, 11, 12]
    assert got == pytest.approx({i: want[i] for i in got}, rel=2e-5)
    assert losses(run, "samples").items() <= losses(clean[0], "samples").items()


def test_sigterm_saves_and_ends_cleanly(tmp_path):
    run = tmp_path / "run"
    process = commands().start("python", "-m", "dfm_nb.train", *SMALL, "--run-dir", run, "train.train_iters=2000")
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) >= 6, "six steps")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "Stopped by SIGTERM at iteration" in output
    last = max(losses(run))
    assert saving.read_state(folders.find(run))["iteration"] == last


def errors(said):
    return [line for line in said.splitlines() if line.startswith("error: ")]


def faulty(fault, *words, **environment):
    """A run under torchrun whose rank 1, or disk, has this fault; in forks."""
    env = commands().environment(FAULT=fault, **environment)
    return commands().run("python", *torchrun_argv(FAULTY, [*SMALL, *map(str, words)], 2)[1:], env=env)


@pytest.mark.parametrize("fault, where", [("stop", "no heartbeats"), ("hang", Path(FAULTY).name)])
def test_rank_that_hangs_or_stops_is_named_and_the_job_ends(tmp_path, fault, where):
    """One that hangs with its line of code."""
    done = faulty(fault, "--run-dir", tmp_path / "run", "train.train_iters=100000", "dist.hang_timeout_s=6")
    output = done.stdout + done.stderr
    lines = errors(output)
    assert len(lines) == 1, output[-3000:]
    assert "rank 1 (" in lines[0] and "rank 0 (" not in lines[0] and where in lines[0]
    assert done.returncode == HUNG and max(losses(tmp_path / "run")) == 4


def test_rank_that_is_killed_is_one_sentence_and_the_job_ends(tmp_path):
    done = faulty("die", "--run-dir", tmp_path / "run")
    said = errors(done.stderr)
    assert done.returncode == 128 + signal.SIGKILL and len(said) == 1, done.stderr[-3000:]
    assert "rank 1 " in said[0] and "SIGKILL" in said[0] and "torch/distributed/run.py" not in done.stderr


def test_full_disk_is_one_sentence_and_the_last_checkpoint_stays_good(clean, tmp_path):
    """The optimizer's file does not fit any more."""
    run = shutil.copytree(clean[0], tmp_path / "run")
    good = folders.whole_checkpoints(run / "checkpoints")
    largest = max(f.stat().st_size for f in good[-1].rglob("*") if f.is_file())
    more = ("train.train_iters=16", "checkpoint.async_save=true")
    done = faulty("full disk", "--run-dir", run, *more, FILE_BYTES=str(largest // 2))
    (line,) = (said for said in errors(done.stdout + done.stderr) if "error: the checkpoint" in said)
    assert done.returncode and "iter_0000016" in line and "iter_0000012" in line
    assert folders.whole_checkpoints(run / "checkpoints") == good
    assert (run / "checkpoints" / folders.TRACKER).read_text() == "12"
    folders.verify(good[-1])


def test_validation_changes_nothing_of_training(tiny_data, tiny_checkpoint, tmp_path):
    """`tiny_checkpoint` is the same run without validation."""
    validation = ["train.eval_interval=1", "train.eval_iters=1", "validation.prompts=[]"]
    run = tiny_run.train(tiny_data, tmp_path / "run", *validation, "dataset.use_train_split_for_val=true")
    rounds = [r for r in read_metrics(run / "metrics.jsonl") if "val_loss" in r]
    assert [r["iteration"] for r in rounds] == [1, 2, 3] and len({r["val_loss"] for r in rounds}) == 3
    assert len(rounds[0]["val_loss_by_sigma"]) == len(rounds[0]["val_sigmas"]) == 8
    assert rounds[0]["val_loss_ema_0.05"] > 0
    assert losses(run) == losses(tiny_checkpoint)
    assert not losses(tiny_checkpoint, "val_loss")  # train.eval_iters=0
    ends = [saving.read_state(folders.find(folder)) for folder in (run, tiny_checkpoint)]
    assert ends[0]["data"] == ends[1]["data"] and ends[0]["consumed_samples"] == ends[1]["consumed_samples"] > 0


def test_state_without_its_entries_is_one_sentence(tiny_data, tiny_checkpoint, tmp_path):
    """With checksums that fit."""
    run = shutil.copytree(tiny_checkpoint, tmp_path / "run")
    (path := run / "checkpoints" / "iter_0000003" / "state.json").write_text("{}")
    reseal(path.parent)
    refused(
        f"{path.parent}.*state.json",
        train.train_model,
        dataset_path=tiny_data,
        run_dir=run,
        config_file=run / "config.yaml",
        error=folders.CheckpointError,
    )


def test_empty_checkpoint_folder_is_a_clear_error(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        refused(str(folder), folders.find, folder, error=FileNotFoundError)
