"""The job files: the commands in them parse, and the batch scripts do what they promise."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dfm_nb.text.commands import MergeOptions, PreprocessOptions
from dfm_nb.train import TrainOptions
from tests.processes import commands, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SLURM = DEPLOY / "slurm"


def job_command() -> list[str]:
    """The command of train-job.yaml as Kubernetes starts it: $(NAME) stands for a variable of the container."""
    _, job = yaml.safe_load_all((DEPLOY / "kubernetes/train-job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    return [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in container["command"]]


def edited(script: Path, **variables: str) -> str:
    """A batch script with other values of its variables, as a user edits them."""
    text = script.read_text()
    for name, value in variables.items():
        old = re.search(rf"^{name}=(\(.*?^\)|.*?$)", text, re.M | re.S)
        assert old is not None, name
        text = text.replace(old[0], f"{name}={value}", 1)
    return text


# ---- commands ------------------------------------------------------------------------------------------------------

SRUN = """#!{python}
import os, shlex, signal, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[0]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
with open(os.environ["SRUN_LOG"], "a") as f:
    print(shlex.join(words), file=f)
if "TRAINS" in os.environ:
    sys.exit(signal.sigtimedwait([signal.SIGUSR1], 50) is None)
"""
"""Writes the command down; with TRAINS it lasts until SIGUSR1, as training does, which then saves."""

SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$SCONTROL_LOG"; fi
"""


JOB_ID = str(os.getpid())
"""The script's port follows from it: two of these tests at a time must differ."""


def desk(tmp_path: Path) -> dict[str, str]:
    """An environment with stand-ins for Slurm's commands before all others, and an empty VENV."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL), ("activate", "")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": JOB_ID}
    logs = {f"{name.upper()}_LOG": str(tmp_path / f"{name}.log") for name in ("srun", "scontrol")}
    env = commands().environment(**job, **logs)
    return {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}


def started(tmp_path: Path, script: str, *arguments: str) -> list[str]:
    """The one command that a batch script hands to srun."""
    subprocess.run(["bash", "-s", *arguments], input=script, text=True, env=desk(tmp_path), check=True)
    return shlex.split((tmp_path / "srun.log").read_text().splitlines()[-1])


def test_training_commands_are_understood_by_torchrun_and_by_dfm(tmp_path):
    from torch.distributed.run import get_args_parser

    batch = started(tmp_path, edited(SLURM / "train.sbatch", VENV=str(tmp_path)))
    for command in (batch, job_command()):
        args = get_args_parser().parse_args(command[1:])
        assert command[0] == "torchrun" and args.module and args.training_script == "dfm_nb.train"
        assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2", "8", 3)
        assert args.rdzv_backend == "c10d" and (command is not batch or "SIGUSR1" in args.signals_to_handle)
        training = TrainOptions.parse(args.training_script_args)
        assert (training.dataset_path, training.run_dir) == ("/shared/data/shards", "/shared/runs/dit-xl")
        # the shards are not here
        settled = training.model_copy(update={"dataset_path": None, "mock": True}).resolve(16).config
        assert settled.model.tensor_model_parallel_size == 2 and settled.model.size == "DiT-XL"


@pytest.mark.parametrize("options, arguments", [(PreprocessOptions, []), (MergeOptions, ["merge"])])
def test_the_text_job_is_understood_by_dfm(tmp_path, options, arguments):
    words = started(tmp_path, edited(SLURM / "text.sbatch", VENV=str(tmp_path)), *arguments)
    assert words[:3] == ["dfm", "text", (*arguments, "preprocess")[0]]
    assert options.parse(words[3:]).output_prefix == "/shared/data/megatron/techpulse"


# ---- the batch script at work --------------------------------------------------------------------------------------


def test_batch_script_passes_the_signal_on_and_queues_again(tmp_path):
    """SIGUSR1 to the batch shell, as Slurm sends it, then the job's second life. What training does with that signal:
    `tests/training/test_loop.py`.
    """
    (tmp_path / "train.sbatch").write_text(edited(SLURM / "train.sbatch", VENV=str(tmp_path)))
    env = desk(tmp_path)
    command = ["bash", str(tmp_path / "train.sbatch")]
    batch = subprocess.Popen(command, env=env | {"TRAINS": "1"})
    wait_until(lambda: batch.poll() is not None or (tmp_path / "srun.log").exists(), "the step")
    batch.send_signal(signal.SIGUSR1)
    assert batch.wait(60) == 0
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {JOB_ID}\n"
    subprocess.run(command, env=env, check=True)
    # A job that is done does not queue again.
    assert (tmp_path / "scontrol.log").read_text().count("requeue") == 1
