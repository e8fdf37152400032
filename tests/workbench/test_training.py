"""The workbench over the real trainer: stopped it has saved, then it resumes; its samples and galleries are real."""

from __future__ import annotations

import pytest

import workbench
from dfm_nb.base.metrics import read_metrics
from tests.processes import alive, wait_until

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from dfm_nb.prepare import main as prepare

    folder = tmp_path_factory.mktemp("training") / "data"
    form = workbench.PrepareForm(str(folder), {"num_images": 30, "num_clips": 4, "short_side": 32})
    assert form.valid and prepare(form.argv()) == 0
    return folder


@pytest.fixture(scope="module")
def run(data):
    """A run of the small model that was stopped half way by the launcher, and then resumed to its end."""
    form = workbench.ConfigForm(
        ["model", "train", "validation"],
        {
            "model.num_layers": 2,
            "model.hidden_size": 48,
            "model.num_attention_heads": 4,
            "train.train_iters": STEPS,
            "train.global_batch_size": 1,
            "train.eval_interval": 20,
            "train.eval_iters": 1,
            "dataset.num_workers": 0,
            "dataset.task_encoder_seq_length": 160,
            "validation.prompts": ["a blue moth"],
            "validation.height": 32,
            "validation.width": 32,
            "validation.num_steps": 2,
            "logger.log_interval": 5,
            "logger.tensorboard": False,
        },
        recipe="demo",
    )
    argv = ["--recipe", "demo", "--dataset-path", str(data), *form.check().overrides()]
    launcher = workbench.Launcher(data.parent / "run", argv)
    launcher.start()
    try:
        wait_until(lambda: len(read_metrics(launcher.run_dir)) >= 5, "five steps", 90)
        tree = launcher.job.processes()
        launcher.stop()
        stopped = {
            "alive": alive(tree),
            "state": launcher.state,
            "record": launcher.job.record,
            "iteration": read_metrics(launcher.run_dir)[-1]["iteration"],
        }
        again = workbench.Launcher.attach(launcher.run_dir).resume()
        again.wait()
    finally:
        launcher.job.stop(grace_s=5)
    return again, stopped


def test_stopped_training_has_saved_and_left_nothing_and_resumes(run):
    launcher, stopped = run
    assert stopped["alive"] == [] and stopped["state"] == "stopped" and stopped["record"]["exit_code"] == 0
    assert launcher.state == "finished" and f"Resumed from {launcher.run_dir}" in launcher.job.output()
    iterations = [r["iteration"] for r in read_metrics(launcher.run_dir) if "loss" in r]
    assert iterations == list(range(1, STEPS + 1)) and 5 <= stopped["iteration"] < STEPS


def test_galleries_of_a_runs_samples_guidances_and_checkpoints(run):
    from dfm_nb import parallel
    from dfm_nb.generation.pipeline import Pipeline

    launcher, _ = run
    assert len(workbench.Gallery(launcher.run_dir / "samples")) == 3
    settings = {"height": 32, "width": 32, "num_steps": 4, "num_video_frames": 5}
    parallel.init()
    try:
        pipe = Pipeline.from_checkpoint(launcher.run_dir)
        compared = workbench.Gallery.of_guidance(pipe, ["a blue moth"], guidance=(1.0, 4.0), **settings)
        assert list(compared.columns) == ["guidance 1", "guidance 4"]
        assert compared.columns["guidance 1"][0].data != compared.columns["guidance 4"][0].data
        both = sorted((launcher.run_dir / "checkpoints").glob("iter_*"))
        assert len(workbench.Gallery.of_checkpoints([both[0], both[-1]], ["a blue moth"], **settings)) == 2
    finally:
        parallel.shutdown()
