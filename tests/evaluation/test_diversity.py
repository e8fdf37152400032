"""Recall and copies: closed cases, and a collapse and copies that were planted."""

import numpy as np
import pytest

from dfm_nb.evaluation import diversity


@pytest.fixture
def real():
    return np.random.default_rng(0).normal(size=(300, 8))


def test_distances_are_those_of_a_loop(real):
    x, y = real[:7], real[7:20]
    assert np.allclose(diversity.pairwise(x, y), [[np.linalg.norm(a - b) for b in y] for a in x])
    assert np.allclose(diversity.nearest(x, y, rows=3), diversity.pairwise(x, y).min(1))


def test_the_same_distribution_is_recalled_and_another_is_not(real):
    same = np.random.default_rng(1).normal(size=(300, 8))
    assert diversity.recall(real, real) == 1 and diversity.recall(same, real) > 0.7
    assert diversity.recall(same + 50, real) == 0


def test_a_collapse_is_seen(real):
    few = np.random.default_rng(1).normal(size=(5, 8))
    collapsed = np.repeat(few, 60, 0) + np.random.default_rng(2).normal(size=(300, 8)) * 1e-3
    assert diversity.recall(collapsed, real) < 0.01


def test_planted_copies_are_found(real):
    rng = np.random.default_rng(3)
    training, held_out = rng.normal(size=(2000, 8)), rng.normal(size=(500, 8))
    fresh = rng.normal(size=(200, 8))
    copies = np.concatenate([fresh[:180], training[:20] + rng.normal(size=(20, 8)) * 1e-3])
    assert diversity.memorised(fresh, held_out, training) <= 0.03
    assert 0.1 <= diversity.memorised(copies, held_out, training) <= 0.13
