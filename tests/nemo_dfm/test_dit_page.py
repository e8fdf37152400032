"""The page "Megatron DiT": its configuration file edited as it says, its commands, its table of sizes.

The configuration is `tests/config/dit_pretrain.yaml`; SMALL is added, as two CPU cores cannot do its steps.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dfm_nb import config as cfg
from dfm_nb.base.metrics import read_metrics
from dfm_nb.base.video import read_video
from dfm_nb.config import counts
from tests.nemo_dfm.test_training_page import SMALL
from tests.processes import commands

CONFIG = Path(__file__).parents[1] / "config" / "dit_pretrain.yaml"


def pretrain(*words: object) -> str:
    torchrun = ("torchrun", "--nproc-per-node", 2, "-m", "dfm_nb.train")
    done = commands().run(*torchrun, *SMALL, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def my_config(hub, small_webdataset, tmp_path_factory) -> Path:
    """`cp conf/dit_pretrain.yaml conf/my_config.yaml`, and the five edits that the page lists."""
    folder = tmp_path_factory.mktemp("dit")
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["vae_cache_folder"] = str(hub / "cosmos")
    config["dataset"]["path"] = str(small_webdataset)
    config["checkpoint"]["save"] = config["checkpoint"]["load"] = str(folder / "dfm_experiment")
    config["train"]["global_batch_size"] = 2
    config["logger"]["wandb_exp_name"] = "mine"
    path = folder / "my_config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def trained(my_config) -> Path:
    """Two iterations and a validation; save and load are one folder that is not there yet."""
    run = my_config.parent / "run"
    pretrain(
        *("--config-file", my_config, "--run-dir", run, "dataset.use_train_split_for_val=true"),
        *("train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1", "validation.num_steps=2"),
    )
    return run


@pytest.mark.slow
def test_each_gpu_samples_once_at_a_validation(trained):
    """The page: one sample a GPU, decoded with the tokenizer of `vae_cache_folder`."""
    assert [r["iteration"] for r in read_metrics(trained / "metrics.jsonl") if "val_loss" in r] == [2]
    (folder,) = (trained / "samples").iterdir()
    media = [path for path in folder.iterdir() if path.suffix in (".mp4", ".png")]
    assert sorted(re.search(r"rank=(\d)", path.name)[1] for path in media) == ["0", "1"]


@pytest.mark.slow
def test_the_same_command_goes_on_from_its_own_folder(trained, my_config):
    run = my_config.parent / "again"
    checkpoint = my_config.parent / "dfm_experiment" / "latest_checkpointed_iteration.txt"
    assert checkpoint.read_text().strip() == "2"
    pretrain("--config-file", my_config, "--run-dir", run, "train.train_iters=3")
    assert [r["iteration"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r] == [3]


@pytest.mark.slow
def test_the_mock_data_set_needs_no_folder(tmp_path):
    said = pretrain("--config-file", CONFIG, "--mock", "--run-dir", tmp_path / "run", *place(tmp_path))
    assert re.search(r"Iteration +1/1, Loss: ", said)


def place(folder: Path) -> tuple[str, ...]:
    """`dfm_experiment` lies in the working directory; here in the test's folder."""
    names = (f"checkpoint.{name}={folder / 'dfm_experiment'}" for name in ("save", "load"))
    return (*names, "train.train_iters=1", "train.global_batch_size=2")


def test_values_can_still_be_overridden_from_the_command_line():
    resolved = cfg.resolve("default", str(CONFIG), ["train.train_iters=20000", "model.num_layers=32"], training=False)
    assert (resolved.config.train.train_iters, resolved.config.model.num_layers) == (20000, 32)
    assert resolved.get("dataset.task_encoder_seq_length") == 15360 and resolved.get("train.global_batch_size") == 8


@pytest.mark.slow
def test_the_command_of_inference(hub, trained, tmp_path):
    """`--num_video_frames 10` is rounded to 9, with a notice: the tokenizer codes 1 + 4k."""
    out = tmp_path / "butterfly.mp4"
    done = commands().run(
        *("torchrun", "--nproc-per-node", 2, "-m", "dfm_nb.generate", "--t5_cache_dir", hub / "t5"),
        *("--tokenizer_cache_dir", hub / "cosmos", "--tokenizer_model", "Cosmos-0.1-Tokenizer-CV4x8x8"),
        *(
            "--checkpoint_path",
            trained.parent / "dfm_experiment",
            "--num_video_frames",
            10,
            "--height",
            240,
            "--width",
            416,
        ),
        *("--video_save_path", out, "--prompt", "a blue morpho", "--num_steps", 2),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    frames, _ = read_video(tmp_path / "idx=0_rank=0_butterfly.mp4")
    assert frames.shape == (9, 240, 416, 3) and "10 becomes 9" in done.stderr


@pytest.mark.parametrize(("size", "millions"), [("DiT-L", 473), ("DiT-XL", 686), ("DiT-S", 46)])
def test_sizes_are_near_those_of_the_table(size, millions):
    """The pages say 450, 700 and, by a slip, 330 million; with T5-11B's width of 1,024."""
    derived = {"model.in_channels": 16, "model.text_dim": 1024}
    model = (
        cfg.resolve("default", None, [f"model.size={size}"], training=False).with_derived(derived, "T5").config.model
    )
    assert round(counts.parameter_count(model) / 1e6) == millions
