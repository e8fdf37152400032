"""The page "Megatron Workflow": what it has beyond the pages of preparation and training, which is generation.

Pictures and networks are smaller than the page's 704 x 1280 with 121 frames, which two CPU cores cannot do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dfm_nb.base.video import read_video
from dfm_nb.generation.request import Request
from tests.nemo_dfm.test_training_page import train
from tests.processes import commands

SIZE = ("--height", 64, "--width", 96, "--num-video-frames", 13)


@pytest.fixture(scope="module")
def model_pth(hub, small_webdataset, tmp_path_factory) -> Path:
    """A trained run, consolidated into model.pth, copied alone to where the page's user stands."""
    folder = tmp_path_factory.mktemp("quickstart")
    train(2, small_webdataset, "--run-dir", folder / "run")
    done = commands().run("dfm", "export", folder / "run", "--output", folder / "export" / "model.pth")
    assert done.returncode == 0, done.stderr
    desk = folder / "desk"
    desk.mkdir()
    shutil.copy(folder / "export" / "model.pth", desk)
    return desk / "model.pth"


def generate(hub: Path, desk: Path, *words: object) -> None:
    caches = ("--t5_cache_dir", hub / "t5", "--tokenizer_cache_dir", hub / "cosmos")
    torchrun = ("torchrun", "--nproc-per-node", 2, "-m", "dfm_nb.generate", "--checkpoint-path", "model.pth")
    done = commands().run(*torchrun, *caches, *SIZE, *words, cwd=desk)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_model_pth_in_the_working_directory_generates(hub, model_pth):
    prompt = "A beautiful monarch butterfly with orange and black wings"
    generate(hub, model_pth.parent, "--prompt", prompt, "--video-save-path", "butterfly_monarch.mp4", "--num-steps", 3)
    frames, _ = read_video(model_pth.parent / "idx=0_rank=0_butterfly_monarch.mp4")
    assert frames.shape == (13, 64, 96, 3)


@pytest.mark.slow
def test_custom_settings(hub, model_pth):
    """`--num-steps 50 --guidance 9.0 --seed 42 --cp-size 2`; the page's guidance 9 is 10 here."""
    words = ("--prompt", "A blue morpho butterfly in a rainforest", "--num-steps", 50, "--guidance", 10.0)
    generate(hub, model_pth.parent, *words, "--seed", 42, "--cp-size", 2, "--video-save-path", "morpho_rainforest.mp4")
    said = json.loads((model_pth.parent / "idx=0_rank=0_morpho_rainforest.mp4.json").read_text())
    assert (said["num_steps"], said["guidance"], said["seed"]) == (50, 10.0, 42) and said["layout"].startswith("CP")


@pytest.mark.slow
def test_several_prompts_have_the_names_of_the_page(hub, model_pth):
    prompts = ("--prompt", "a monarch", "--prompt", "a morpho", "--num-steps", 2)
    generate(hub, model_pth.parent, *prompts, "--video-save-path", "two.mp4")
    assert sorted(p.name for p in model_pth.parent.glob("idx=*_rank=*_two.mp4")) == [
        "idx=0_rank=0_two.mp4",
        "idx=1_rank=1_two.mp4",
    ]


@pytest.mark.slow
def test_a_missing_model_is_named(hub, tmp_path):
    words = ("--checkpoint-path", "model.pth", "--prompt", "a", "--video-save-path", tmp_path / "a.mp4", *SIZE)
    done = commands().run("dfm", "generate", *words, cwd=tmp_path)
    assert done.returncode == 2 and "model.pth" in done.stderr and "Traceback" not in done.stderr


def test_defaults_are_the_pages():
    request = Request("a", height=64, width=64, num_video_frames=1)
    assert (request.num_steps, request.guidance, request.seed) == (35, 7, 1)
