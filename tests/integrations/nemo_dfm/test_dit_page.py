"""The page "Megatron DiT": its configuration file edited as it says, and its commands; then "Megatron Workflow", which
consolidates such a run into `model.pth`.

The configuration is `tests/config/dit_pretrain.yaml`.
"""

from pathlib import Path

import pytest
import yaml

from dfm_nb.base.video import read_video
from tests.integrations.nemo_dfm.conftest import SMALL, run
from tests.processes import commands

CONFIG = Path(__file__).parents[2] / "config" / "dit_pretrain.yaml"
STEPS = ("train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1", "validation.num_steps=2")


@pytest.mark.slow
def test_the_commands_of_the_page_train_go_on_and_infer(hub, small_webdataset, tmp_path):
    """`cp conf/dit_pretrain.yaml conf/my_config.yaml`, the page's edits, two iterations and a validation; a third one;
    and inference with model.pth in the working directory.

    `checkpoint.load` is `checkpoint.save`, and empty at first: training starts from scratch. `--num_video_frames 10` is
    rounded to 9, with a notice: the tokenizer codes 1 + 4k.
    """
    saved, path = tmp_path / "dfm_experiment", tmp_path / "my_config.yaml"
    saved.mkdir()
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["vae_cache_folder"] = str(hub / "cosmos")
    config["dataset"]["path"] = str(small_webdataset)
    config["checkpoint"]["save"] = config["checkpoint"]["load"] = str(saved)
    config["train"]["global_batch_size"] = 2
    path.write_text(yaml.safe_dump(config))
    train = ("train", 2, *SMALL, "--config-file", path, "--run-dir", tmp_path / "run", *STEPS)
    run(*train)
    assert f"Resumed from {saved}/iter_0000002 at iteration 2" in run(*train, "train.train_iters=3")
    assert [p.name for p in sorted(saved.glob("iter_*"))] == ["iter_0000002", "iter_0000003"]
    assert list((tmp_path / "run/samples").glob("iter_0000002/*rank=1*.png")), "each process samples"
    assert commands().run("dfm", "export", saved, "--output", tmp_path / "model.pth").returncode == 0
    caches = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos")
    model = ("--tokenizer_model", "Cosmos-0.1-Tokenizer-CV4x8x8", "--checkpoint_path", "model.pth")
    size = ("--num_video_frames", 10, "--height", 64, "--width", 96, "--num_steps", 2, "--cp-size", 2)
    prompts = ("--prompt", "a monarch", "--prompt", "a blue morpho", "--seed", 42, "--guidance", 10.0)
    said = run("generate", 2, *caches, *model, *size, *prompts, "--video_save_path", "two.mp4", cwd=tmp_path)
    assert read_video(tmp_path / "idx=1_rank=0_two.mp4")[0].shape == (9, 64, 96, 3) and "10 becomes 9" in said
