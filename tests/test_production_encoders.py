"""cosmos_cv and t5 of the published architectures from shards to clips; weights mean nothing."""

import json
import shutil

import numpy as np
import pytest
import torch

from dfm_nb import generate, prepare
from dfm_nb.base import video
from dfm_nb.base.argv import guard
from dfm_nb.butterflies import synthetic
from dfm_nb.data import shards
from dfm_nb.data.encoding import to_pixels
from dfm_nb.data.tokenizers import cosmos_cv
from dfm_nb.generation.pipeline import Pipeline
from tests import tiny_run
from tests.data import encoder_files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(make_once):
    """Folders of (cosmos as published: a bfloat16 trace, t5)."""
    cosmos = make_once("cosmos-bf16", lambda place: encoder_files.save_cosmos(place, torch.bfloat16))
    return cosmos, make_once("t5", encoder_files.save_t5)


@pytest.fixture(scope="module")
def data(weights, tmp_path_factory):
    """6 images and 2 clips of 9 frames."""
    folder = tmp_path_factory.mktemp("production") / "data"
    argv = ["--source", "synthetic", "--num-images", "6", "--num-clips", "2", "--short-side", "32"]
    argv += ["--tokenizer", "cosmos_cv", "--tokenizer-cache-dir", str(weights[0])]
    argv += ["--text-encoder", "t5", "--t5-cache-dir", str(weights[1])]
    assert prepare.main([*argv, "--output-dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    return tiny_run.train(data, tmp_path_factory.mktemp("production-run"), "validation.prompts=[]")


def run(trained, weights, out, *extra):
    cosmos, t5 = map(str, weights)
    size = ["--height", "32", "--width", "48", "--num-steps", "2"]
    argv = ["--checkpoint-path", str(trained), "--prompt", "a blue butterfly", *size, "--video-save-path", str(out)]
    return guard(generate.main, [*argv, "--tokenizer-cache-dir", cosmos, "--t5-cache-dir", t5, *extra])


def test_prepared_latents_are_the_networks(data, weights):
    """A clip is stored as one call of the network gives it; the manifest names both halves and the text encoder."""
    clips = [e.read() for tar in sorted(data.glob("*.tar")) for e in shards.samples_of(tar)]
    tokenizer, source = cosmos_cv.build(weights[0]), synthetic.build(num_images=6, num_clips=2, size_px=32)
    drawn = {clip.key: clip.video for i in range(len(source)) for clip in source.read(i)}
    assert {tuple(c.latent.shape[1:3]) for c in clips} == {(16, 1), (16, 3)} and drawn.keys() == {c.key for c in clips}
    for clip in clips:  # bfloat16 as stored
        whole = tokenizer.encode(to_pixels(drawn[clip.key])[None])
        torch.testing.assert_close(clip.latent.float(), whole, atol=0.01, rtol=0.01)
    assert {c.text_emb.shape[2] for c in clips} == {1024}
    manifest = json.loads((data / "manifest.json").read_text())
    assert manifest["tokenizer"] == tokenizer.identity()
    assert len(manifest["text_encoder"]["sha256"]) == 64


def test_clip_is_decoded_by_the_network_it_was_trained_with(trained, weights, tmp_path, one_rank):
    out = tmp_path / "clip.mp4"
    assert run(trained, weights, out, "--num-video-frames", "9", "--save-latents") == 0
    assert video.read_video(out)[0].shape == (9, 32, 48, 3)
    pipe = Pipeline.from_checkpoint(trained, tokenizer_path=str(weights[0]))
    clip = torch.randn(16, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    raw = pipe.statistics.from_model(clip, pipe.sigma_data)
    whole = cosmos_cv.build(weights[0]).decode(raw[None])[0]
    expected = ((whole.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
    assert np.array_equal(pipe.decode(clip), expected)


def test_other_weights_are_refused_in_a_sentence(trained, weights, tmp_path, capsys):
    cosmos, t5 = weights
    other = encoder_files.save_cosmos(tmp_path / "other", torch.bfloat16, seed=1)
    for half in ("decoder", "encoder"):  # one half of another training is enough
        mixed = shutil.copytree(cosmos, tmp_path / f"other-{half}")
        shutil.copy(other / f"{half}.jit", mixed)
        assert run(trained, (mixed, t5), tmp_path / "a.mp4") == 2
        assert "cosmos_cv" in capsys.readouterr().err
    changed = encoder_files.save_t5(tmp_path / "t5", seed=1)
    assert run(trained, (cosmos, changed), tmp_path / "a.mp4") == 2
    assert "--text-encoder-path" in capsys.readouterr().err
