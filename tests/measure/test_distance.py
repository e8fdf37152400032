"""Kernel distance and its interval against closed forms: exact kernels, equal distributions."""

import numpy as np
import pytest

from dfm_nb.butterflies import synthetic
from dfm_nb.measure import distance


def test_kernel_distance_is_the_unbiased_sum_over_pairs():
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((5, 3)), rng.standard_normal((4, 3)) + 1
    k = lambda a, b: (a @ b / 3 + 1) ** 3  # noqa: E731
    xx = np.mean([k(x[i], x[j]) for i in range(5) for j in range(5) if i != j])
    yy = np.mean([k(y[i], y[j]) for i in range(4) for j in range(4) if i != j])
    xy = np.mean([k(a, b) for a in x for b in y])
    assert distance.kernel_estimate(x, y)["value"] == pytest.approx(xx + yy - 2 * xy, rel=1e-10)
    assert distance.polynomial_kernel(x, y)[1, 2] == pytest.approx(k(x[1], y[2]))


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_intervals_cover_95_percent(shift):
    """Of the kernel distance and the mean; the bounds are a binomial's."""
    rng, runs = np.random.default_rng(1), 200
    draws = [(rng.standard_normal((40, 4)), rng.standard_normal((40, 4)) + shift) for _ in range(5 * runs)]
    kernel = np.mean([distance.kernel_estimate(x, y)["value"] for x, y in draws])
    covered = np.zeros(2)
    for x, y in draws[:runs]:
        found = (distance.kernel_estimate(x, y), kernel), (distance.mean_estimate(x[:16, 0]), 0.0)
        for i, (e, truth) in enumerate(found):
            covered[i] += e["low"] <= truth <= e["high"]
    assert (covered / runs > 0.9).all(), covered
    if shift:  # between equal distributions the first order vanishes, and intervals are up to 1.4 times too wide
        assert (covered / runs < 0.99).all(), covered


def test_student_t_quantiles_are_the_tabulated_ones():
    for values, t in ((2, 12.706), (3, 4.303), (5, 2.776), (11, 2.228), (61, 2.000)):
        x = np.arange(values, dtype=float)
        e = distance.mean_estimate(x)
        assert (e["high"] - e["value"]) / (x.std(ddof=1) / values**0.5) == pytest.approx(t, abs=2e-3)


def test_temporal_consistency_of_known_clips():
    frozen, turning = np.tile([1.0, 2, 3], (5, 1)), np.eye(4)
    assert distance.temporal_consistency(frozen) == pytest.approx(1)
    assert distance.temporal_consistency(turning) == pytest.approx(0)
    returning = np.array([[1.0, 0], [0, 1], [1, 0]])  # neighbours 0, 0; first 0, 1
    assert distance.temporal_consistency(returning) == pytest.approx(0.25)


def test_a_sample_and_its_own_real_one_are_no_pair_of_the_distance():
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((6, 3)), rng.standard_normal((6, 3)) + 1
    k = distance.polynomial_kernel
    apart = ~np.eye(6, dtype=bool)
    want = k(x, x)[apart].mean() + k(y, y)[apart].mean() - 2 * k(x, y)[apart].mean()
    paired = lambda x, y: distance.estimate(*distance.paired_kernel_influences(x, y))  # noqa: E731
    found = paired(x, y)
    assert found["value"] == pytest.approx(want, rel=1e-10) and found["low"] < found["value"] < found["high"]
    assert paired(x, x)["value"] == pytest.approx(0, abs=1e-12), "copies are not below zero"
    draws = [rng.standard_normal((2, 40, 4)) + [[[0]], [[0.5]]] for _ in range(50)]
    of_pairs, of_sets = (
        np.mean([e["high"] - e["low"] for e in (how(*draw) for draw in draws)])
        for how in (paired, distance.kernel_estimate)
    )
    assert of_pairs == pytest.approx(of_sets, rel=0.05), "of independent rows"


def test_a_perfect_model_is_as_near_as_real_samples():
    """Samples that are the asked ones; blank ones are farther."""
    usual = {"species": "monarch", "posture": "open", "motion": "flapping"}
    attributes = [usual | c for c in synthetic.seen_combinations()[:72]]
    asked = [synthetic.render(a, i, 64, 64, 5) for i, a in enumerate(attributes)]
    network = lambda clip: clip[:, ::8, ::8].reshape(len(clip), -1) / 127.5 - 1  # noqa: E731 - pixels are features enough
    asked, frozen = ([network(c) for c in some] for some in (asked, [np.zeros_like(c) for c in asked]))
    same = distance.compare(asked, asked, asked)
    assert same["kernel_distance"]["value"] == pytest.approx(0, abs=1e-9)
    consistency, own = same["temporal_consistency"], same["retrieval"]
    assert consistency["value"] == pytest.approx(consistency["real"]) and consistency["low"] < consistency["high"]
    assert own["value"] == own["real"] == 1 and own["wrong"] == pytest.approx((72 / 20 - 1) / 71)
    blank = distance.compare(frozen, asked, asked)
    assert blank["kernel_distance"]["low"] > same["kernel_distance"]["value"]
    assert blank["temporal_consistency"]["value"] == pytest.approx(1) and consistency["value"] < 0.999


def test_few_samples_are_compared_with_others_and_what_they_do_not_tell_is_left_out():
    rng = np.random.default_rng(0)
    real = list(rng.normal(size=(30, 1, 8)))
    few = distance.compare(real[:3], real[:3], real[:3], real[3:])
    assert few["retrieval"]["value"] == 1 and few["retrieval"]["ways"] == 20 and "kernel_distance" not in few
    assert distance.compare(real[:5], real[:5], real[:5])["retrieval"]["ways"] == 5
    assert distance.compare(real[:3], real[:3], real[:3]) == {}
