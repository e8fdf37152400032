"""Recall and copies: closed cases, and a collapse and copies that were planted."""

import numpy as np
import pytest

from dfm_nb.measure import diversity
from tests.measure.test_verdict import pictures, smudged


@pytest.fixture
def real():
    return np.random.default_rng(0).normal(size=(300, 8))


def test_distances_are_those_of_a_loop(real):
    x, y = real[:7], real[7:20]
    assert np.allclose(diversity.pairwise(x, y), [[np.linalg.norm(a - b) for b in y] for a in x])


def test_the_same_distribution_is_recalled_and_another_is_not(real):
    same = np.random.default_rng(1).normal(size=(300, 8))
    assert diversity.recall(real, real) == 1 and diversity.recall(same, real) > 0.7
    assert diversity.recall(same + 50, real) == 0


def test_a_collapse_is_seen(real):
    few = np.random.default_rng(1).normal(size=(5, 8))
    collapsed = np.repeat(few, 60, 0) + np.random.default_rng(2).normal(size=(300, 8)) * 1e-3
    assert diversity.recall(collapsed, real) < 0.01


def test_copies_are_found_also_of_pictures_that_are_stored_often():
    """Twelve training pictures, half of them stored ten times."""
    train, held_out = pictures(12, 0), diversity.thumbnails(pictures(40, 1))
    training = diversity.thumbnails(train + 9 * train[:6])
    planted, fresh, real = (
        diversity.nearness(x, training)
        for x in (diversity.thumbnails(smudged(train)), diversity.thumbnails(pictures(40, 2)), held_out)
    )
    assert diversity.copied(planted, real)["value"] == 1
    assert diversity.copied(fresh, real)["value"] < 0.1 and diversity.copied(real, real)["value"] <= 0.05


def test_one_training_picture_alone_has_no_copies_to_tell():
    alone = diversity.thumbnails(pictures(1, 0))
    assert diversity.nearness(alone, np.repeat(alone, 5, 0)).tolist() == [0]


def test_scatter_is_the_deviation_within_a_prompt_alone(real):
    prompts = 100 * np.random.default_rng(4).normal(size=(60, 1, 8))
    one_prompt_five_seeds = real.reshape(60, 5, 8)
    assert diversity.scatter(prompts + one_prompt_five_seeds) == pytest.approx(8**0.5, rel=0.05)
    assert diversity.scatter(np.repeat(prompts, 5, 1)) < 1e-9
