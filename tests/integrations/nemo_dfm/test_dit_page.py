"""The page "Megatron DiT": its configuration file edited as it says, and its commands; then "Megatron Workflow", which
consolidates such a run into `model.pth`.

The configuration is `tests/config/dit_pretrain.yaml`.
"""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from dfm_nb.base.metrics import read_metrics
from dfm_nb.base.video import read_video
from tests.integrations.nemo_dfm.conftest import SMALL, run
from tests.processes import commands

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "config" / "dit_pretrain.yaml"
STEPS = ("train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1", "validation.num_steps=2")


@pytest.fixture(scope="module")
def trained(hub, small_webdataset, tmp_path_factory) -> Path:
    """`cp conf/dit_pretrain.yaml conf/my_config.yaml`, the page's edits, two iterations and a validation.

    `checkpoint.load` is `checkpoint.save`, and empty: training starts anew.
    """
    folder = tmp_path_factory.mktemp("dit")
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["vae_cache_folder"] = str(hub / "cosmos")
    config["dataset"]["path"] = str(small_webdataset)
    config["checkpoint"]["save"] = config["checkpoint"]["load"] = str(folder / "dfm_experiment")
    config["train"]["global_batch_size"] = 2
    path = folder / "my_config.yaml"
    path.write_text(yaml.safe_dump(config))
    (folder / "dfm_experiment").mkdir()
    run("train", 2, *SMALL, "--config-file", path, "--run-dir", folder / "run", *STEPS)
    return folder


def test_the_same_command_goes_on_from_the_checkpoint_of_the_first(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "second")  # saved and loaded where the edited file says
    path = folder / "my_config.yaml"
    path.write_text(path.read_text().replace(str(trained), str(folder)))
    said = run("train", 2, *SMALL, "--config-file", path, "--run-dir", folder / "run", *STEPS, "train.train_iters=3")
    assert f"Resumed from {folder}/dfm_experiment/iter_0000002 at iteration 2" in said
    assert [p.name for p in sorted((folder / "dfm_experiment").glob("iter_*"))] == ["iter_0000002", "iter_0000003"]


def test_each_gpu_samples_at_a_validation(trained):
    """The page has one sample a GPU; here each takes two of the four captions, with the page's tokenizer."""
    assert [r["iteration"] for r in read_metrics(trained / "run" / "metrics.jsonl") if "val_loss" in r] == [2]
    (folder,) = (trained / "run" / "samples").glob("iter*")
    media = [path for path in folder.iterdir() if path.suffix in (".mp4", ".png")]
    assert sorted(re.search(r"rank=(\d)", path.name)[1] for path in media) == ["0", "0", "1", "1"]


def test_the_command_of_inference_with_model_pth_in_the_working_directory(hub, trained, tmp_path):
    """`--num_video_frames 10` is rounded to 9, with a notice: the tokenizer codes 1 + 4k."""
    done = commands().run("dfm", "export", trained / "dfm_experiment", "--output", tmp_path / "model.pth")
    assert done.returncode == 0, done.stderr
    caches = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos")
    model = ("--tokenizer_model", "Cosmos-0.1-Tokenizer-CV4x8x8", "--checkpoint_path", "model.pth")
    size = ("--num_video_frames", 10, "--height", 64, "--width", 96, "--num_steps", 2, "--cp-size", 2)
    prompts = ("--prompt", "a monarch", "--prompt", "a blue morpho", "--seed", 42, "--guidance", 10.0)
    said = run("generate", 2, *caches, *model, *size, *prompts, "--video_save_path", "two.mp4", cwd=tmp_path)
    assert read_video(tmp_path / "idx=1_rank=0_two.mp4")[0].shape == (9, 64, 96, 3) and "10 becomes 9" in said
