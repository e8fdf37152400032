"""The page "Megatron DiT": its configuration file edited as it says, and its commands; then "Megatron Workflow", which
consolidates such a run into `model.pth`.

The configuration is `tests/config/dit_pretrain.yaml`; `--mock`, the start without a checkpoint and the second start are
in tests/test_train_reference.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dfm_nb.base.metrics import read_metrics
from dfm_nb.base.video import read_video
from tests.nemo_dfm.conftest import SMALL, run
from tests.processes import commands

CONFIG = Path(__file__).parents[1] / "config" / "dit_pretrain.yaml"


@pytest.fixture(scope="module")
def trained(hub, small_webdataset, tmp_path_factory) -> Path:
    """`cp conf/dit_pretrain.yaml conf/my_config.yaml`, the page's edits, two iterations and a validation."""
    folder = tmp_path_factory.mktemp("dit")
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["vae_cache_folder"] = str(hub / "cosmos")
    config["dataset"]["path"] = str(small_webdataset)
    config["checkpoint"]["save"] = config["checkpoint"]["load"] = str(folder / "dfm_experiment")
    config["train"]["global_batch_size"] = 2
    path = folder / "my_config.yaml"
    path.write_text(yaml.safe_dump(config))
    steps = ("train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1", "validation.num_steps=2")
    run("train", 2, *SMALL, "--config-file", path, "--run-dir", folder / "run", *steps)
    return folder


@pytest.mark.slow
def test_each_gpu_samples_once_at_a_validation(trained):
    """The page: one sample a GPU, decoded with the tokenizer of `vae_cache_folder`."""
    assert [r["iteration"] for r in read_metrics(trained / "run" / "metrics.jsonl") if "val_loss" in r] == [2]
    (folder,) = (trained / "run" / "samples").iterdir()
    media = [path for path in folder.iterdir() if path.suffix in (".mp4", ".png")]
    assert sorted(re.search(r"rank=(\d)", path.name)[1] for path in media) == ["0", "1"]


@pytest.mark.slow
def test_the_command_of_inference(hub, trained, tmp_path):
    """`--num_video_frames 10` is rounded to 9, with a notice: the tokenizer codes 1 + 4k."""
    caches = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos")
    model = ("--tokenizer_model", "Cosmos-0.1-Tokenizer-CV4x8x8", "--checkpoint_path", trained / "dfm_experiment")
    size = ("--num_video_frames", 10, "--height", 240, "--width", 416, "--num_steps", 2)
    words = ("--video_save_path", tmp_path / "butterfly.mp4", "--prompt", "a blue morpho")
    said = run("generate", 2, *caches, *model, *size, *words)
    frames, _ = read_video(tmp_path / "idx=0_rank=0_butterfly.mp4")
    assert frames.shape == (9, 240, 416, 3) and "10 becomes 9" in said


@pytest.mark.slow
def test_model_pth_in_the_working_directory_generates(hub, trained, tmp_path):
    done = commands().run("dfm", "export", trained / "dfm_experiment", "--output", tmp_path / "model.pth")
    assert done.returncode == 0, done.stderr
    caches = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos")
    size = ("--height", 64, "--width", 96, "--num-video-frames", 13, "--num-steps", 3)
    prompts = ("--prompt", "a monarch", "--prompt", "a morpho", "--seed", 42, "--guidance", 10.0, "--cp-size", 2)
    words = ("--checkpoint-path", "model.pth", "--video-save-path", "two.mp4")
    run("generate", 2, *caches, *size, *prompts, *words, cwd=tmp_path)
    assert read_video(tmp_path / "idx=1_rank=0_two.mp4")[0].shape == (13, 64, 96, 3)
