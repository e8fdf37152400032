"""The judge of synthetic pictures agrees with the truth, and tells stills from clips."""

import numpy as np
import pytest

from dfm_nb.butterflies import judge as attributes
from dfm_nb.butterflies import synthetic
from scripts import train_classifier as script
from tests.refusals import refused


@pytest.fixture(scope="module")
def judge():
    return attributes.AttributeClassifier.load()


def draw(size_px=64, num_images=150, num_clips=15, seed=4321, spec=None):
    source = synthetic.build(spec, num_images, num_clips, size_px, seed)
    clips = [clip for i in range(len(source)) for clip in source.read(i)]
    return [c.video for c in clips], [c.attributes for c in clips]


def test_classifier_names_fresh_renders(judge):
    score = script.accuracy(judge, *draw(spec="unseen"))
    assert score["colour"] >= 0.96 and score["background"] >= 0.98 and score["pattern"] >= 0.85, score


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


def test_a_judge_of_other_drawings_is_refused(monkeypatch):
    monkeypatch.setattr(synthetic, "DRAWING", synthetic.DRAWING + 1)
    refused("train_classifier", attributes.AttributeClassifier.load)
