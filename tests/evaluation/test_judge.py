"""The judge of synthetic pictures agrees with the truth, also after lossy decoding, and tells stills from clips."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation import judge as attributes
from scripts import train_classifier as script


@pytest.fixture(scope="module")
def judge():
    return attributes.AttributeClassifier.load()


def draw(size_px=64, num_images=150, num_clips=15, seed=4321, unseen=False):
    source = synthetic.build(num_images=num_images, num_clips=num_clips, size_px=size_px, seed=seed, unseen=unseen)
    clips = [clip for i in range(len(source)) for clip in source.read(i)]
    return [c.video for c in clips], [c.attributes for c in clips]


SIDES = ("left", "right")


def packed(video: np.ndarray, keep: int, keep_frames: int | None = None) -> np.ndarray:
    """uint8 [T, H, W, 3] through a linear code of 8 x 8 pixels; with `keep_frames` also of 1 + 4k frames in time."""
    x = torch.from_numpy(video).permute(0, 3, 1, 2).float()
    groups = [x] if keep_frames is None else [x[:1], *x[1:].split(4)]
    x = torch.cat([script.compress_blocks(g, keep, keep_frames if len(g) > 1 else None) for g in groups])
    return x.clamp(0, 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


@pytest.mark.parametrize("unseen", [False, True])
def test_classifier_names_fresh_renders(judge, unseen):
    score = judge.accuracy(*draw(unseen=unseen))
    assert score["colour"] >= 0.98 and score["background"] >= 0.98 and score["pattern"] >= 0.85, score


@pytest.mark.parametrize("size_px", [128, 256])
def test_classifier_names_larger_renders(judge, size_px):
    score = judge.accuracy(*draw(size_px, 80, 4))
    assert score["colour"] >= 0.98 and score["background"] >= 0.98 and score["pattern"] >= 0.85, score


@pytest.mark.parametrize("keep", [3, 4])
def test_classifier_survives_block_compression(judge, keep):
    videos, truth = draw()
    score = judge.accuracy([packed(v, keep) for v in videos], truth)
    assert score["colour"] >= 0.97 and score["background"] >= 0.98 and score["pattern"] >= 0.75, score


def test_frames_that_say_nothing_are_outvoted_by_one_that_does(judge):
    """Two of four coefficients in time and two of eight in space: closed wings cannot be read any more."""
    clips, truth = draw(num_images=0, num_clips=60)
    coded = [np.concatenate([v[:1], packed(v[:9], 2, 2)[1:]]) for v in clips]
    whole, closed = (judge.accuracy(v, truth)["pattern"] for v in (coded, [v[4:5] for v in coded]))
    assert closed < 0.85 and whole >= 0.95, (closed, whole)


def test_classifier_survives_noise_and_shade(judge):
    videos, truth = draw()
    rng = np.random.default_rng(0)
    worn = [(v * 0.92 + rng.normal(0, 10, v.shape)).clip(0, 255).astype(np.uint8) for v in videos]
    score = judge.accuracy(worn, truth)
    assert score["colour"] >= 0.96 and score["background"] >= 0.98, score


def test_classifier_at_chance_on_noise(judge):
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (1, 64, 64, 3), dtype=np.uint8) for _ in range(100)]
    _, truth = draw(num_images=100, num_clips=0)
    assert judge.accuracy(noise, truth)["all"] < 0.1


def test_save_and_load_keep_every_answer(judge, tmp_path):
    videos, _ = draw(num_images=20, num_clips=2)
    judge.save(tmp_path / "judge.safetensors")
    again = attributes.AttributeClassifier.load(tmp_path / "judge.safetensors")
    assert again.predict(videos) == judge.predict(videos) and again.identity == judge.identity


@pytest.mark.slow
def test_training_is_deterministic_and_reaches_the_file(tmp_path, monkeypatch):
    def train(name, seed):
        argv = [
            "train_classifier.py",
            "--stills",
            "32",
            "--clips",
            "16",
            "--epochs",
            "1",
            "--seed",
            seed,
            "--held-out",
            "2",
            "--output",
            str(tmp_path / name),
            "--result",
            str(tmp_path / f"{name}.json"),
        ]
        monkeypatch.setattr("sys.argv", argv)
        script.main()
        return attributes.AttributeClassifier.load(tmp_path / name)

    a, b, other = train("a", "1"), train("b", "1"), train("c", "2")
    for name, value in a.net.state_dict().items():
        assert torch.equal(value, b.net.state_dict()[name])
    assert not torch.equal(a.net.head.weight, other.net.head.weight)
    assert a.identity == {"stills": 32, "clips": 16, "epochs": 1, "seed": 1, "drawing": synthetic.DRAWING}
    measured = json.loads((tmp_path / "a.json").read_text())["accuracy"]
    assert list(measured) == ["images as drawn", "images decoded", "clips as drawn", "clips decoded"]


def test_the_shipped_classifier_is_the_one_that_was_measured(judge):
    result = json.loads(script.RESULT.read_text())
    assert result["settings"] == judge.identity
    assert min(a["pattern"] for a in result["accuracy"].values()) > 0.95


def test_block_compression_is_a_projection():
    x = torch.randn(2, 3, 16, 24)
    once = script.compress_blocks(x, 3)
    assert torch.allclose(script.compress_blocks(once, 3), once, atol=1e-5)
    assert torch.allclose(script.compress_blocks(x, 8), x, atol=1e-5)
    assert torch.allclose(script.compress_blocks(x, 8, 1), x.mean(0, keepdim=True).expand_as(x), atol=1e-5)
    means = script.compress_blocks(x, 1)[:, :, ::8, ::8]
    assert torch.allclose(means, torch.nn.functional.avg_pool2d(x, 8), atol=1e-5)


def test_left_is_right_in_the_mirror(judge):
    """Posture is told of pictures and their mirror images, whose tilt is the other one."""
    look = {"colour": "red", "background": "sand", "pattern": "plain"}
    tilted = [synthetic.render(look | {"posture": f"tilted {side}"}, i, 64, 64) for i in range(6) for side in SIDES]
    found = [p["posture"] for p in judge.predict([*tilted, *(v[:, :, ::-1].copy() for v in tilted)])]
    assert found == [f"tilted {side}" for side in (*SIDES * 6, *SIDES[::-1] * 6)]


def test_probabilities_are_those_of_the_prediction(judge):
    videos, _ = draw(num_images=12, num_clips=4)
    said = judge.probabilities(videos)
    assert said.keys() == attributes.HEADS.keys()
    for name, p in said.items():
        assert p.shape == (16, len(attributes.HEADS[name])) and np.allclose(p.sum(1), 1, atol=1e-5)
        assert [attributes.HEADS[name][i] for i in p.argmax(1)] == [f[name] for f in judge.predict(videos)]


def test_wing_motion_separates_clips_from_stills():
    rng = np.random.default_rng(0)
    for i in range(12):
        look = {
            "colour": synthetic.COLOURS[i % 8],
            "background": synthetic.BACKGROUNDS[i % 4],
            "species": synthetic.SPECIES[i % 6],
            "posture": synthetic.POSTURES[i // 3],
        }
        clip = synthetic.render(look, i, 64, 64, num_frames=9)
        still = np.repeat(synthetic.render(look, i, 64, 64), 9, axis=0)
        noisy = (still + rng.normal(0, 5, still.shape)).clip(0, 255).astype(np.uint8)
        assert attributes.wing_motion(still) == 0 == attributes.wing_motion(still[:1])
        assert attributes.wing_motion(noisy) < 0.05 < 0.1 < attributes.wing_motion(clip)
        assert attributes.wing_motion(packed(clip, 3)) > 0.1


def test_mistakes_are_named(judge, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="a video must be uint8"):
        judge.predict([np.zeros((1, 64, 64, 3), np.float32)])
    with pytest.raises(FileNotFoundError, match=r"make one with scripts/train_classifier\.py"):
        attributes.AttributeClassifier.load(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        attributes.AttributeClassifier.load(tmp_path / "bad.safetensors")
    monkeypatch.setattr(synthetic, "DRAWING", synthetic.DRAWING + 1)
    with pytest.raises(ValueError, match="trained for other attributes or drawings"):
        attributes.AttributeClassifier.load()
