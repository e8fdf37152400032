"""Frechet and kernel distance against closed forms: known Gaussians, equal distributions, exact kernels."""

import numpy as np
import pytest

from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation import features
from dfm_nb.evaluation.frechet import (
    compare,
    frechet_distance,
    frechet_estimate,
    kernel_distance,
    kernel_estimate,
    mean_estimate,
    polynomial_kernel,
    temporal_consistency,
)


def whitened(n: int, d: int, seed: int) -> np.ndarray:
    """[n, d] with mean exactly 0 and covariance exactly the identity."""
    x = np.random.default_rng(seed).standard_normal((n, d))
    x = x - x.mean(0)
    return x @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T))).T


def rotation(d: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]


def test_frechet_of_commuting_gaussians_is_the_closed_form():
    """Same eigenvectors: |mu|^2 + sum (s - t)^2."""
    d, q = 6, rotation(6, 3)
    s, t, shift = np.arange(1.0, 7), np.array([2.0, 2, 2, 0.5, 5, 9]), np.linspace(-1, 1, 6)
    x, y = whitened(200, d, 1) * s @ q, whitened(300, d, 2) * t @ q + shift
    assert frechet_distance(x, y) == pytest.approx((shift**2).sum() + ((s - t) ** 2).sum(), rel=1e-9)


def test_frechet_of_any_gaussians_is_the_closed_form():
    """Covariances that do not commute, against the square root of C_x^(1/2) C_y C_x^(1/2) by its eigenvalues."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 5)), rng.standard_normal((5, 5))
    x, y = whitened(100, 5, 1) @ a, whitened(80, 5, 2) @ b
    c_x, c_y = a.T @ a, b.T @ b
    values, vectors = np.linalg.eigh(c_x)
    root = vectors * np.sqrt(values) @ vectors.T
    want = np.trace(c_x + c_y) - 2 * np.sqrt(np.linalg.eigvalsh(root @ c_y @ root)).sum()
    assert frechet_distance(x, y) == pytest.approx(want, rel=1e-8)


def test_frechet_with_fewer_samples_than_features_is_exact():
    """Points in a 3-D subspace of 50 features: the distance is the one in the subspace."""
    basis = rotation(50, 5)[:3]
    x, y = whitened(8, 3, 1) * [1, 2, 3], whitened(9, 3, 2) * [3, 2, 1] + [1, 0, 0]
    assert frechet_distance(x @ basis, y @ basis) == pytest.approx(1 + 4 + 0 + 4, rel=1e-9)
    assert frechet_distance(x @ basis, x @ basis) == pytest.approx(0, abs=1e-9)


def test_kernel_distance_is_the_unbiased_sum_over_pairs():
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((5, 3)), rng.standard_normal((4, 3)) + 1
    k = lambda a, b: (a @ b / 3 + 1) ** 3  # noqa: E731
    xx = np.mean([k(x[i], x[j]) for i in range(5) for j in range(5) if i != j])
    yy = np.mean([k(y[i], y[j]) for i in range(4) for j in range(4) if i != j])
    xy = np.mean([k(a, b) for a in x for b in y])
    assert kernel_distance(x, y) == pytest.approx(xx + yy - 2 * xy, rel=1e-10)
    assert polynomial_kernel(x, y)[1, 2] == pytest.approx(k(x[1], y[2]))


def test_kernel_distance_of_equal_distributions_is_zero_on_average():
    rng = np.random.default_rng(0)
    pairs = [(rng.standard_normal((40, 16)), rng.standard_normal((40, 16))) for _ in range(200)]
    same = np.array([kernel_distance(x, y) for x, y in pairs])
    shifted = np.array([kernel_distance(x, y + 0.5) for x, y in pairs[:20]])
    assert abs(same.mean()) < 3 * same.std() / len(same) ** 0.5
    assert 0.2 < (same < 0).mean() < 0.8, "an unbiased estimate of 0 falls on both sides"
    assert shifted.min() > same.max()


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_intervals_cover_95_percent(shift):
    """Of the kernel distance, the Frechet distance at these sizes, and the mean; the bounds are a binomial's."""
    rng, runs = np.random.default_rng(1), 200
    draws = [(rng.standard_normal((40, 4)), rng.standard_normal((40, 4)) + shift) for _ in range(5 * runs)]
    kernel = np.mean([kernel_distance(x, y) for x, y in draws])
    frechet = np.mean([frechet_distance(x, y) for x, y in draws])
    covered = np.zeros(3)
    for x, y in draws[:runs]:
        for i, (e, truth) in enumerate(
            ((kernel_estimate(x, y), kernel), (frechet_estimate(x, y), frechet), (mean_estimate(x[:16, 0]), 0.0))
        ):
            covered[i] += e.low <= truth <= e.high
    assert (covered / runs > 0.9).all(), covered
    if shift:  # between equal distributions the first order vanishes, and intervals are up to 1.4 times too wide
        assert (covered / runs < 0.99).all(), covered


def test_student_t_quantiles_are_the_tabulated_ones():
    for values, t in ((2, 12.706), (3, 4.303), (5, 2.776), (11, 2.228), (61, 2.000)):
        x = np.arange(values, dtype=float)
        e = mean_estimate(x)
        assert (e.high - e.value) / (x.std(ddof=1) / values**0.5) == pytest.approx(t, abs=2e-3)


def test_kernel_interval_of_two_samples_is_finite():
    rng = np.random.default_rng(2)
    e = kernel_estimate(rng.standard_normal((2, 3)), rng.standard_normal((2, 3)) + 1)
    assert np.isfinite([e.value, e.low, e.high]).all() and e.low < e.high


def test_frechet_interval_shrinks_with_samples():
    rng, width = np.random.default_rng(1), {}
    for n in (50, 400):
        x, y = rng.standard_normal((n, 8)), rng.standard_normal((n, 8)) + 0.5
        e = frechet_estimate(x, y)
        assert e.low < e.value < e.high
        width[n] = e.high - e.low
    assert width[400] < width[50] / 1.7, "a standard error falls as 1/sqrt(n)"


def test_frechet_distance_of_few_samples_is_refused_because_it_rewards_collapse():
    rng = np.random.default_rng(0)
    spread = 1 / (1 + np.arange(640)) ** 0.5
    ours, same, others = (rng.standard_normal((64, 1, 640)) * spread for _ in range(3))
    assert frechet_distance(0.6 * ours[:, 0], others[:, 0]) < frechet_distance(ours[:, 0], others[:, 0])
    found = compare(list(ours), list(same), list(others))
    assert "frechet_distance" not in found and "it needs 1280 samples" in found["notes"][0]
    assert {"kernel_distance", "notes"} == set(found)


def test_temporal_consistency_of_known_clips():
    frozen, turning = np.tile([1.0, 2, 3], (5, 1)), np.eye(4)
    assert temporal_consistency(frozen) == pytest.approx(1)
    assert temporal_consistency(turning) == pytest.approx(0)
    assert temporal_consistency(np.array([[1.0, 0], [0, 1], [1, 0]])) == pytest.approx(
        0.25
    )  # neighbours 0, 0; first 0, 1
    with pytest.raises(ValueError, match="two or more frames"):
        temporal_consistency(np.ones((1, 3)))


def test_sets_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"got \[3, 4\] and \[3, 5\]"):
        frechet_distance(np.ones((3, 4)), np.ones((3, 5)))
    with pytest.raises(ValueError, match="two or more rows"):
        kernel_distance(np.ones((1, 4)), np.ones((3, 4)))


def test_a_perfect_model_has_the_distance_of_real_samples():
    """Samples that are the asked ones: both columns agree; blank ones are farther."""
    attributes = [
        {"species": "monarch", "posture": "open", "motion": "flapping", **c} for c in synthetic.seen_combinations()[:72]
    ]
    clips = [synthetic.render(a, i, 64, 64, 5) for i, a in enumerate(attributes)]
    asked, others = clips[:36], clips[36:]
    mean = lambda x: x.flatten(2)[:, :, ::43].flatten(1)  # noqa: E731 - some pixels are features enough here
    network = features.FeatureNetwork("pixels", mean, 16, (0.5,) * 3, (0.5,) * 3)
    asked, others, frozen = ([network(c) for c in some] for some in (asked, others, [np.zeros_like(c) for c in asked]))
    same = compare(asked, asked, others)
    for key in ("frechet_distance", "kernel_distance", "temporal_consistency"):
        assert same[key]["value"] == pytest.approx(same[key]["real"]) and same[key]["low"] < same[key]["high"]
    blank = compare(frozen, asked, others)
    for key in ("frechet_distance", "kernel_distance"):
        assert blank[key]["low"] > same[key]["value"]
    assert blank["temporal_consistency"]["value"] == pytest.approx(1) and same["temporal_consistency"]["value"] < 0.999
