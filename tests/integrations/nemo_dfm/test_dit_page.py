"""The page "Megatron DiT": its configuration file edited as it says, and its commands; then "Megatron Workflow", which
consolidates such a run into `model.pth`.

The configuration is `tests/config/dit_pretrain.yaml`.
"""

from pathlib import Path

import pytest
import yaml

from dfm_nb.base.video import read_video
from tests.processes import commands

CONFIG = Path(__file__).parents[2] / "config" / "dit_pretrain.yaml"
STEPS = ("train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1", "validation.num_steps=2")
SMALL = "model.num_layers=1 model.hidden_size=48 model.num_attention_heads=4 train.eval_interval=0".split()
SMALL += "dataset.task_encoder_seq_length=128 dataset.use_train_split_for_val=true scheduler.lr_warmup_iters=0".split()
"""A network and steps that two CPU cores manage."""


def run(module: str, ranks: int, *words: object, **settings) -> str:
    """A command of the pages under torchrun; what it prints."""
    done = commands().run("torchrun", "--nproc-per-node", ranks, "-m", f"dfm_nb.{module}", *words, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_commands_of_the_page_train_go_on_and_infer(theirs, tmp_path):
    """A preparation on two ranks, with both caches as the page gives them, and all data for training; then
    `cp conf/dit_pretrain.yaml conf/my_config.yaml`, the page's edits, two iterations and a validation; a third one;
    and inference with model.pth in the working directory.

    `checkpoint.load` is `checkpoint.save`, and empty at first: training starts from scratch. `--num_video_frames 10` is
    rounded to 9, with a notice: the tokenizer codes 1 + 4k.
    """
    caches = ("--t5_cache_dir", theirs / "t5", "--tokenizer_cache_dir", theirs / "cosmos")
    source = ("--source", f"smithsonian_butterflies:{theirs / 'butterflies'}", "--short-side", 64)
    encoders = ("--tokenizer", "cosmos_cv", "--text-encoder", "t5", "--val-fraction", 0, "--test-fraction", 0)
    run("prepare", 2, *source, *encoders, *caches, "--output-dir", tmp_path / "data")
    saved, path = tmp_path / "dfm_experiment", tmp_path / "my_config.yaml"
    saved.mkdir()
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["vae_cache_folder"] = str(theirs / "cosmos")
    config["dataset"]["path"] = str(tmp_path / "data")
    config["checkpoint"]["save"] = config["checkpoint"]["load"] = str(saved)
    config["train"]["global_batch_size"] = 2
    path.write_text(yaml.safe_dump(config))
    train = ("train", 2, *SMALL, "--config-file", path, "--run-dir", tmp_path / "run", *STEPS)
    run(*train)
    assert f"Resumed from {saved}/iter_0000002 at iteration 2" in run(*train, "train.train_iters=3")
    assert [p.name for p in sorted(saved.glob("iter_*"))] == ["iter_0000002", "iter_0000003"]
    assert list((tmp_path / "run/samples").glob("iter_0000002/*rank=1*.png")), "each process samples"
    assert commands().run("dfm", "export", saved, "--output", tmp_path / "model.pth").returncode == 0
    model = ("--tokenizer_model", "Cosmos-0.1-Tokenizer-CV4x8x8", "--checkpoint_path", "model.pth")
    size = ("--num_video_frames", 10, "--height", 64, "--width", 96, "--num_steps", 2, "--cp-size", 2)
    prompts = ("--prompt", "a monarch", "--prompt", "a blue morpho", "--seed", 42, "--guidance", 10.0)
    said = run("generate", 2, *caches, *model, *size, *prompts, "--video_save_path", "two.mp4", cwd=tmp_path)
    assert read_video(tmp_path / "idx=1_rank=0_two.mp4")[0].shape == (9, 64, 96, 3) and "10 becomes 9" in said
