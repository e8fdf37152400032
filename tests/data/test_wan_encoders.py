"""Wan's autoencoder and UMT5, with random weights, from pictures over training by flow matching to a clip."""

import pytest

from tests import tiny_run
from tests.data import encoder_files

pytestmark = pytest.mark.slow


def test_prepared_trained_and_generated(tmp_path, make_once):
    from dfm_nb import Pipeline, prepare_dataset

    vae = make_once("wan-vae", encoder_files.save_wan_vae)
    text = make_once("umt5", encoder_files.save_umt5) / "wan"
    data = prepare_dataset(
        num_images=6, num_clips=2, short_side=32, val_fraction=0.0, tokenizer="wan_vae", tokenizer_path=vae,
        text_encoder="umt5", text_encoder_path=text, output_dir=tmp_path / "data",
    )  # fmt: skip
    assert data["tokenizer"]["name"] == "wan_vae" and data["text_encoder"]["name"] == "umt5"
    assert data["counts"]["samples"] == 8
    flow = ["model.objective=flow", "model.sigma_data=1", "validation.samples=false"]
    run = tiny_run.train(tmp_path / "data", tmp_path / "run", *flow)
    pipe = Pipeline.from_pretrained(run, tokenizer_path=vae, text_encoder_path=text)
    clip = pipe("a blue butterfly", height=32, width=32, num_video_frames=5, num_steps=3, schedule="flow")[0]
    assert clip.frames.shape == (5, 32, 32, 3)
