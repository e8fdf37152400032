"""The judge of synthetic pictures agrees with the truth, also after lossy decoding, and tells stills from clips."""

import numpy as np
import pytest
import torch

from dfm_nb.butterflies import judge as attributes
from dfm_nb.butterflies import synthetic
from scripts import train_classifier as script


@pytest.fixture(scope="module")
def judge():
    return attributes.AttributeClassifier.load()


def draw(size_px=64, num_images=150, num_clips=15, seed=4321, spec=None):
    source = synthetic.build(spec, num_images, num_clips, size_px, seed)
    clips = [clip for i in range(len(source)) for clip in source.read(i)]
    return [c.video for c in clips], [c.attributes for c in clips]


SIDES = ("left", "right")


def packed(video: np.ndarray, keep: int, keep_frames: int | None = None) -> np.ndarray:
    """uint8 [T, H, W, 3] through a linear code of 8 x 8 pixels; with `keep_frames` also of 1 + 4k frames in time."""
    x = torch.from_numpy(video).permute(0, 3, 1, 2).float()
    groups = [x] if keep_frames is None else [x[:1], *x[1:].split(4)]
    x = torch.cat([script.compress_blocks(g, keep, keep_frames if len(g) > 1 else None) for g in groups])
    return x.clamp(0, 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


@pytest.mark.parametrize(
    "drawing, change, pattern",
    [({"spec": "unseen"}, lambda v: v, 0.85), ({}, lambda v: packed(v, 3), 0.75)],
    ids=["unseen", "packed"],
)
def test_classifier_names_fresh_renders(judge, drawing, change, pattern):
    videos, truth = draw(**drawing)
    score = script.accuracy(judge, [change(v) for v in videos], truth)
    assert score["colour"] >= 0.96 and score["background"] >= 0.98 and score["pattern"] >= pattern, score


def test_frames_that_say_nothing_are_outvoted_by_one_that_does(judge):
    """Two of four coefficients in time and two of eight in space: closed wings cannot be read any more."""
    clips, truth = draw(num_images=0, num_clips=60)
    coded = [np.concatenate([v[:1], packed(v[:9], 2, 2)[1:]]) for v in clips]
    whole, closed = (script.accuracy(judge, v, truth)["pattern"] for v in (coded, [v[4:5] for v in coded]))
    assert closed < 0.85 and whole >= 0.95, (closed, whole)


def test_classifier_at_chance_on_noise(judge):
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (1, 64, 64, 3), dtype=np.uint8) for _ in range(100)]
    _, truth = draw(num_images=100, num_clips=0)
    assert script.accuracy(judge, noise, truth)["all"] < 0.1


def test_save_and_load_keep_every_answer(judge, tmp_path):
    videos, _ = draw(num_images=20, num_clips=2)
    judge.save(tmp_path / "judge.safetensors")
    again = attributes.AttributeClassifier.load(tmp_path / "judge.safetensors")
    assert again.predict(videos) == judge.predict(videos) and again.identity == judge.identity


def test_left_is_right_in_the_mirror(judge):
    """Posture is told of pictures and their mirror images, whose tilt is the other one."""
    look = {"colour": "red", "background": "sand", "pattern": "plain"}
    tilted = [synthetic.render(look | {"posture": f"tilted {side}"}, i, 64, 64) for i in range(6) for side in SIDES]
    found = [p["posture"] for p in judge.predict([*tilted, *(v[:, :, ::-1].copy() for v in tilted)])]
    assert found == [f"tilted {side}" for side in (*SIDES * 6, *SIDES[::-1] * 6)]


def test_wing_motion_separates_clips_from_stills():
    rng = np.random.default_rng(0)
    for i in range(12):
        look = {"colour": synthetic.COLOURS[i % 8], "background": synthetic.BACKGROUNDS[i % 4]}
        look |= {"species": synthetic.SPECIES[i % 6], "posture": synthetic.POSTURES[i // 3]}
        clip = synthetic.render(look, i, 64, 64, num_frames=9)
        still = np.repeat(synthetic.render(look, i, 64, 64), 9, axis=0)
        noisy = (still + rng.normal(0, 5, still.shape)).clip(0, 255).astype(np.uint8)
        assert attributes.wing_motion(still) == 0 == attributes.wing_motion(still[:1])
        assert attributes.wing_motion(noisy) < 0.05 < 0.1 < attributes.wing_motion(clip)
        assert attributes.wing_motion(packed(clip, 3)) > 0.1


def test_a_judge_of_other_drawings_is_refused(monkeypatch):
    monkeypatch.setattr(synthetic, "DRAWING", synthetic.DRAWING + 1)
    with pytest.raises(ValueError, match="train_classifier"):
        attributes.AttributeClassifier.load()
