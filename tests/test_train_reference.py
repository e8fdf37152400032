"""The reference's training commands as its pages give them: its YAML and its ways to resume."""

from pathlib import Path

import pytest

from tests.processes import commands

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
    # the pages name a checkpoint without zeros; another run may not save where the first one does
    named = ["--run-dir", "other", "checkpoint.save=anew", "checkpoint.load_checkpoint=dfm_experiment/iter_2/"]
    assert "Resumed from dfm_experiment/iter_0000002 at iteration 2" in pretrain(
        tmp_path, "--mock", "train.train_iters=3", *named
    )
