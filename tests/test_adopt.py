"""What a user of NeMo DFM does with the shards he has: every door names `dfm adopt`, and after it all of them open."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.data.stores import EnergonStore
from tests import tiny_run
from tests.processes import commands

pytestmark = pytest.mark.slow


def dfm(*words: object, code: int = 0) -> str:
    done: subprocess.CompletedProcess[str] = commands().run("dfm", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def pretrain(data: Path, run: Path, *more: str, code: int = 0) -> str:
    words = ["pretrain", "--recipe", "demo", "--dataset-path", data, "--run-dir", run, *tiny_run.SIZE, *more]
    return dfm(*words, code=code)


def generate(run: Path, theirs: Path, out: Path) -> str:
    size = ["--height", "32", "--width", "32", "--num-video-frames", "5", "--num-steps", "2", "--guidance", "2"]
    weights = ["--tokenizer_cache_dir", theirs / "cosmos", "--t5_cache_dir", theirs / "t5"]
    words = ["generate", "--checkpoint-path", run, "--prompt", "a blue butterfly", *size, *weights]
    return dfm(*words, "--video-save-path", out)


@pytest.fixture
def data(theirs, tmp_path) -> Path:
    return shutil.copytree(theirs / "data", tmp_path / "data")


def test_shards_of_nemo_dfm_are_adopted_inspected_trained_on_and_generated_from(data, theirs, tmp_path):
    weights = ["--tokenizer_cache_dir", theirs / "cosmos", "--t5_cache_dir", theirs / "t5"]
    adopt = f"dfm adopt {data} "
    assert adopt in dfm("inspect", data, "--samples", "0")
    assert adopt in pretrain(data, tmp_path / "run", code=2)
    dfm("adopt", data, "--tokenizer", "cosmos_cv", "--text-encoder", "t5", *weights)
    shown = dfm("inspect", data, "--verify", "--tokenizer-path", theirs / "cosmos")
    assert "1x32x48 (4), 1x48x32 (4), 5x32x32 (4)" in shown and "every sample is good" in shown
    assert "false colours" not in shown

    # the splits are the pages' 1, 0, 0: said before the first step
    refused = pretrain(data, tmp_path / "run", "train.eval_interval=2", code=2)
    assert "no samples in its 'val' split" in refused and "Starting pretraining" not in refused
    validated = ["dataset.use_train_split_for_val=true", "train.eval_interval=2", "validation.prompts=[]"]
    said = pretrain(data, tmp_path / "run", *validated, f"model.vae_cache_folder={theirs / 'cosmos'}")
    assert "12 samples" in said and "No samples" not in said
    assert (
        len(list((tmp_path / "run" / "samples").rglob("*_sample.*.json"))) == 1
    )  # of a stored text, without a text encoder
    (folder,) = (tmp_path / "run" / "checkpoints").glob("iter_*")
    trained = checkpoint.read_statistics(folder)
    assert torch.equal(trained.mean, EnergonStore(data).statistics.mean) and (folder / checkpoint.STATISTICS).is_file()

    shutil.rmtree(data)  # a checkpoint needs nothing of it
    generate(tmp_path / "run", theirs, tmp_path / "clip.mp4")
    assert (tmp_path / "clip.mp4").stat().st_size > 500
