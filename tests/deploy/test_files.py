"""The job files: the commands in them parse, and the batch scripts do what they promise."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from dfm_nb.text.commands import MergeOptions, PreprocessOptions
from dfm_nb.train import TrainOptions
from tests.processes import wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def job_command() -> list[str]:
    """The command of train-job.yaml as Kubernetes starts it: $(NAME) stands for a variable of the container."""
    _, job = yaml.safe_load_all((DEPLOY / "kubernetes/train-job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    return [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in container["command"]]


# ---- commands ------------------------------------------------------------------------------------------------------

STAND_INS = """
source() { :; }
scontrol() { if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$DESK/scontrol.log"; fi; }
srun() {
    while [[ $1 == -* ]]; do shift; done
    [ -z "${TRAINS-}" ] || { trap 'exit 0' USR1; sleep 0.5; }
    printf '%q ' "$@" > "$DESK/srun.log"
    [ -z "${TRAINS-}" ] || { for _ in {1..500}; do sleep 0.1; done; exit 1; }
}
"""
"""Of Slurm and the environment: `srun` writes the command down; with TRAINS it lasts until SIGUSR1, as training does,
which then saves."""


def batch(tmp_path: Path, name: str, *arguments: str, **environment: str) -> subprocess.Popen:
    """A batch script at work."""
    (tmp_path / name).write_text(STAND_INS + (DEPLOY / "slurm" / name).read_text())
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "DESK": str(tmp_path)}
    return subprocess.Popen(["bash", str(tmp_path / name), *arguments], env={**os.environ, **job, **environment})


def started(*given) -> list[str]:
    """The one command that a batch script hands to srun."""
    assert batch(*given).wait(60) == 0
    return shlex.split((given[0] / "srun.log").read_text())


def test_training_commands_are_understood_by_torchrun_and_by_dfm(tmp_path):
    from torch.distributed.run import get_args_parser

    slurm = started(tmp_path, "train.sbatch")
    for command in (slurm, job_command()):
        args = get_args_parser().parse_args(command[1:])
        assert command[0] == "torchrun" and args.module and args.training_script == "dfm_nb.train"
        assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2", "8", 3)
        assert args.rdzv_backend == "c10d" and (command is not slurm or "SIGUSR1" in args.signals_to_handle)
        training = TrainOptions.parse(args.training_script_args)
        assert (training.dataset_path, training.run_dir) == ("/shared/data/shards", "/shared/runs/dit-xl")
        # the shards are not here
        settled = training.model_copy(update={"dataset_path": None, "mock": True}).resolve(16).config
        assert settled.model.tensor_model_parallel_size == 2 and settled.model.size == "DiT-XL"


@pytest.mark.parametrize("options, arguments", [(PreprocessOptions, []), (MergeOptions, ["merge"])])
def test_the_text_job_is_understood_by_dfm(tmp_path, options, arguments):
    words = started(tmp_path, "text.sbatch", *arguments)
    assert words[:3] == ["dfm", "text", (*arguments, "preprocess")[0]]
    assert options.parse(words[3:]).output_prefix == "/shared/data/megatron/techpulse"


# ---- the batch script at work --------------------------------------------------------------------------------------


def test_batch_script_passes_the_signal_on_and_queues_again(tmp_path):
    """SIGUSR1 to the batch shell, as Slurm sends it, then the job's second life. What training does with that signal:
    `tests/training/test_loop.py`.
    """
    job = batch(tmp_path, "train.sbatch", TRAINS="1")
    wait_until(lambda: job.poll() is not None or (tmp_path / "srun.log").exists(), "the step")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 0
    assert started(tmp_path, "train.sbatch")  # a job that is done does not queue again
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
