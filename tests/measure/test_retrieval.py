"""Retrieval by features against a count over all choices, at both ends, and where nothing can be told."""

import itertools

import numpy as np
import pytest

from dfm_nb.measure.distance import retrieval, similarities, wrong_passes


def test_retrieval_equals_a_count_over_all_choices():
    rng = np.random.default_rng(0)
    real = rng.normal(size=(7, 4))
    generated = real + rng.normal(size=real.shape)
    near = similarities(generated, real)
    cases = [
        near[i, i] > max(near[i, j] for j in others)
        for i in range(7)
        for others in itertools.combinations([j for j in range(7) if j != i], 2)
    ]
    right = retrieval(generated, real, ways=3)["value"]
    assert right == pytest.approx(np.mean(cases))
    passed = [
        near[i, j] > max(near[i, k] for k in others)
        for i, j in itertools.permutations(range(7), 2)
        for others in itertools.combinations([k for k in range(7) if k != j], 2)
    ]
    assert wrong_passes(right, 7, 3) == pytest.approx(np.mean(passed)), "judged by another caption than its own"


def test_retrieval_cannot_be_flattered_by_what_ignores_the_captions():
    rng = np.random.default_rng(0)
    real = rng.normal(size=(200, 16))
    assert retrieval(real, real)["value"] == 1
    assert retrieval(np.roll(real, 1, 0), real)["value"] < 0.1, "wrong captions"
    assert retrieval(np.repeat(real[:1], 200, 0), real)["value"] == pytest.approx(0.05, abs=0.01), "one picture for all"
    assert retrieval(np.zeros_like(real), real)["value"] < 0.1, "equally near to all is near to none"
