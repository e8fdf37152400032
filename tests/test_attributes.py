"""The judge of synthetic pictures agrees with the truth, also after lossy decoding, and tells stills from clips."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dfm_nb import attributes
from dfm_nb.sources import synthetic


@pytest.fixture(scope="module")
def judge():
    return attributes.AttributeClassifier().fit()


def draw(size_px=64, num_images=150, num_clips=15, seed=4321, unseen=False):
    source = synthetic.build(num_images=num_images, num_clips=num_clips, size_px=size_px, seed=seed, unseen=unseen)
    clips = [clip for i in range(len(source)) for clip in source.read(i)]
    return [c.video for c in clips], [c.attributes for c in clips]


def packed(video: np.ndarray, keep: int) -> np.ndarray:
    """uint8 [T, H, W, 3] through a linear 8 x 8 block code."""
    x = torch.from_numpy(video).permute(0, 3, 1, 2).float()
    x = attributes.compress_blocks(x, keep).clamp(0, 255).round().byte()
    return x.permute(0, 2, 3, 1).contiguous().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("unseen", [False, True])
def test_classifier_names_fresh_renders(judge, unseen):
    score = judge.accuracy(*draw(unseen=unseen))
    assert score["colour"] >= 0.98 and score["background"] >= 0.98 and score["pattern"] >= 0.85, score


@pytest.mark.slow
@pytest.mark.parametrize("size_px", [128, 256])
def test_classifier_names_larger_renders(judge, size_px):
    score = judge.accuracy(*draw(size_px, 80, 4))
    assert score["colour"] >= 0.98 and score["background"] >= 0.98 and score["pattern"] >= 0.85, score


@pytest.mark.slow
@pytest.mark.parametrize("keep", [3, 4])
def test_classifier_survives_block_compression(judge, keep):
    videos, truth = draw()
    score = judge.accuracy([packed(v, keep) for v in videos], truth)
    assert score["colour"] >= 0.97 and score["background"] >= 0.98 and score["pattern"] >= 0.75, score


@pytest.mark.slow
def test_classifier_survives_noise_and_shade(judge):
    videos, truth = draw()
    rng = np.random.default_rng(0)
    worn = [(v * 0.92 + rng.normal(0, 10, v.shape)).clip(0, 255).astype(np.uint8) for v in videos]
    score = judge.accuracy(worn, truth)
    assert score["colour"] >= 0.96 and score["background"] >= 0.98, score


@pytest.mark.slow
def test_classifier_at_chance_on_noise(judge):
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (1, 64, 64, 3), dtype=np.uint8) for _ in range(100)]
    _, truth = draw(num_images=100, num_clips=0)
    assert judge.accuracy(noise, truth)["all"] < 0.1


@pytest.mark.slow
def test_save_and_load_keep_every_answer(judge, tmp_path):
    videos, _ = draw(num_images=20, num_clips=2)
    judge.save(tmp_path / "judge.safetensors")
    again = attributes.AttributeClassifier.load(tmp_path / "judge.safetensors")
    assert again.predict(videos) == judge.predict(videos) and again.identity == judge.identity


def test_fit_is_deterministic():
    a, b = (attributes.AttributeClassifier().fit(seed=1, num_samples=128, epochs=1) for _ in range(2))
    other = attributes.AttributeClassifier().fit(seed=2, num_samples=128, epochs=1)
    for name, value in a.net.state_dict().items():
        assert torch.equal(value, b.net.state_dict()[name])
    assert not torch.equal(a.net.head.weight, other.net.head.weight)


def test_fit_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    attributes.AttributeClassifier().fit(num_samples=64, epochs=1)
    assert torch.equal(before, torch.get_rng_state())


def test_block_compression_is_a_projection():
    x = torch.randn(2, 3, 16, 24)
    once = attributes.compress_blocks(x, 3)
    assert torch.allclose(attributes.compress_blocks(once, 3), once, atol=1e-5)
    assert torch.allclose(attributes.compress_blocks(x, 8), x, atol=1e-5)
    means = attributes.compress_blocks(x, 1)[:, :, ::8, ::8]
    assert torch.allclose(means, torch.nn.functional.avg_pool2d(x, 8), atol=1e-5)


def test_chance_is_one_over_the_number_of_names():
    assert attributes.chance() == {"colour": 1 / 8, "background": 1 / 4, "pattern": 1 / 4, "all": 1 / 128}


def test_wing_motion_separates_clips_from_stills():
    rng = np.random.default_rng(0)
    for i in range(12):
        look = {"colour": synthetic.COLOURS[i % 8], "background": synthetic.BACKGROUNDS[i % 4],
                "species": synthetic.SPECIES[i % 6], "posture": synthetic.POSTURES[i // 3]}  # fmt: skip
        clip = synthetic.render(look, i, 64, 64, num_frames=9)
        still = np.repeat(synthetic.render(look, i, 64, 64), 9, axis=0)
        noisy = (still + rng.normal(0, 5, still.shape)).clip(0, 255).astype(np.uint8)
        assert attributes.wing_motion(still) == 0 == attributes.wing_motion(still[:1])
        assert attributes.wing_motion(noisy) < 0.05 < 0.1 < attributes.wing_motion(clip)
        assert attributes.wing_motion(packed(clip, 3)) > 0.1


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="fitted or loaded"):
        attributes.AttributeClassifier().predict([np.zeros((1, 64, 64, 3), np.uint8)])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        attributes.AttributeClassifier.load(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        attributes.AttributeClassifier.load(tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="at least 64 samples"):
        attributes.AttributeClassifier().fit(num_samples=3)
