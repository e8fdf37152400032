"""Which checkpoint to take: copies that were planted, and the rule on figures whose best is known."""

import numpy as np
import pytest

from dfm_nb.measure import diversity, verdict
from dfm_nb.measure.distance import difference, kernel_estimate, kernel_influences


def pictures(n: int, seed: int) -> list[np.ndarray]:
    """Random 4 x 4 patterns, uint8 [1, 48, 64, 3]: centre-cropped, they stay apart."""
    small = np.random.default_rng(seed).integers(0, 256, (n, 1, 4, 4, 3), np.uint8)
    return list(small.repeat(12, 2).repeat(16, 3))


def network(frames: np.ndarray) -> np.ndarray:
    """Pixels are features enough."""
    return frames[:, ::12, ::16].reshape(len(frames), -1) / 127.5 - 1


def smudged(frames: list[np.ndarray]) -> list[np.ndarray]:
    noise = np.random.default_rng(9)
    return [(f + noise.normal(0, 25, f.shape)).clip(0, 255).astype(np.uint8) for f in frames]


@pytest.fixture(scope="module")
def judge():
    """Twelve training pictures, half of them stored ten times."""
    train, held_out = pictures(12, 0), pictures(40, 1)
    return verdict.Judge(
        held_out[:12], train, held_out, diversity.thumbnails(train + 9 * train[:6]), network, lambda f: f
    )


def test_the_verdict_is_by_copies_then_by_distance(judge):
    train, held_out = pictures(12, 0), pictures(40, 1)[:12]
    flat = [np.full_like(f, 255) for f in held_out]
    near = smudged(pictures(40, 1)[12:24])
    made = [(flat, pictures(12, 3)), (near, pictures(12, 4)), (smudged(near), pictures(12, 5))]
    made += [(f, smudged(train)) for f in (flat, near)]
    found = [judge.figures(100 * i, *some) for i, some in enumerate(made, 1)]
    told = judge.verdict(found)
    best = min(found[:3], key=lambda r: r["kernel_distance"]["value"])["iteration"]
    assert (told["take"], told["alike"], told["copies_begin"]) == (best, [200, 300], 400)
    assert told["sentence"].startswith(f"take {best} (") and "copies begin at 400" in told["sentence"].split("; ")
    early = judge.verdict(found[3:])
    assert (early["take"], early["copies_begin"]) == (500, 400)
    assert "copies begin at 400, the first checkpoint" in early["sentence"].split("; ")
    assert judge.verdict(found[:2])["copies_begin"] is None
    assert "12 captions" in told["sentence"], "fewer than the rule was measured with"


def test_differences_of_distances_to_the_same_set_are_narrower():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 60, 8))
    near = x + 0.05 * rng.normal(size=x.shape)
    found = difference(*(kernel_influences(some, y) for some in (near, x)))
    one, other = kernel_estimate(near, y), kernel_estimate(x, y)
    assert found["value"] == pytest.approx(one["value"] - other["value"])
    assert found["high"] - found["low"] < 0.3 * (one["high"] - one["low"])
