import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_nb.model.positions import factorised_sincos, rotary_angles
from dfm_nb.packs.packer import Packer, PackItem, fill
from dfm_nb.packs.patches import grid_positions, patchify, unpatchify
from tests.refusals import refused


@given(t=st.integers(1, 3), h=st.integers(1, 4), w=st.integers(1, 4), pt=st.integers(1, 2), ps=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_unpatchify_inverts_patchify(t, h, w, pt, ps):
    latent = torch.randn(5, t * pt, h * ps, w * ps)
    tokens = patchify(latent, ps, pt)
    assert tokens.shape == (t * h * w, 5 * pt * ps * ps)
    assert torch.equal(unpatchify(tokens, (t, h, w), ps, pt), latent)


def test_patchify_orders_tokens_by_frame_row_column_and_refuses_what_does_not_divide():
    tokens = patchify(torch.arange(2 * 4 * 6).reshape(1, 2, 4, 6), 2)
    assert tokens[1].tolist() == [2, 3, 8, 9]  # second column of the first row
    assert tokens[3].tolist() == [12, 13, 18, 19]  # second row
    for shape in ((1, 8, 8), (2, 9, 8)):
        refused("x".join(map(str, shape)), patchify, torch.zeros(4, *shape), 2, 2)


def test_positions_never_alias_at_any_size():
    for grid in ((1, 80, 60), (31, 2, 2), (1, 1, 4000)):
        p = grid_positions(grid)
        assert len(torch.unique(p, dim=0)) == len(p)
        embedding = factorised_sincos(p, 96)
        assert embedding.shape == (len(p), 96)
        assert len(torch.unique((embedding * 1e4).round(), dim=0)) == len(p)


def test_positions_are_centred_in_space_and_start_at_the_first_frame():
    p = grid_positions((2, 3, 5))
    assert p.mean(0).tolist() == [0.5, 0, 0]
    assert p[0].tolist() == [0, -1, -2]


def test_rotary_angles_are_linear_in_positions_and_tell_the_axes_apart():
    p = grid_positions((3, 4, 5))
    angles = rotary_angles(p, 32)
    assert angles.shape == (60, 16) and angles.dtype == torch.float32
    torch.testing.assert_close(angles[7] - angles[3], rotary_angles((p[7] - p[3])[None], 32)[0])
    for axis, pairs in enumerate((4, 6, 6)):
        one = torch.zeros(1, 3)
        one[0, axis] = 1.0
        turned = rotary_angles(one, 32)[0]
        assert int((turned != 0).sum()) == pairs and turned.max() == pytest.approx(math.pi / 2)
    assert all(rotary_angles(p, d).shape[1] == d // 2 for d in (2, 4, 6, 10, 64, 128))


def brute_force(lengths, capacity):
    best = 0
    for mask in range(1 << (len(lengths) - 1)):
        total = lengths[0] + sum(x for i, x in enumerate(lengths[1:]) if mask >> i & 1)
        if total <= capacity:
            best = max(best, total)
    return best


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(30, 80))
@settings(max_examples=80, deadline=None)
def test_fill_is_the_best_subset_with_the_oldest_sample(lengths, capacity):
    chosen = fill(lengths, capacity)
    assert chosen[0] == 0 and chosen == sorted(set(chosen))
    assert sum(lengths[i] for i in chosen) == brute_force(lengths, capacity)


def test_packer_loses_and_repeats_nothing():
    rng = random.Random(0)
    lengths = [rng.choice([4, 6, 16, 20, 24, 48]) for _ in range(500)]
    packer, stream, seen = Packer(100, 20), (PackItem(0, i, n) for i, n in enumerate(lengths)), []
    for _ in range(80):
        items = packer.next(stream)
        assert sum(item.tokens for item in items) <= 100
        seen += items
    seen += packer.waiting
    assert sorted(item.sample for item in seen) == list(range(len(seen))) and len(seen) > 300


def test_packs_are_at_least_98_percent_full():
    sizes = [(px // 16) ** 2 for px in (128, 192, 256, 320, 384, 448, 512, 640, 704, 768, 896, 1024)]
    rng = random.Random(1)
    packer = Packer(15_360, 100)
    stream = (PackItem(0, i, rng.choice(sizes)) for i in range(10**9))
    filled = [sum(item.tokens for item in packer.next(stream)) / 15_360 for _ in range(60)]
    assert sum(filled) / len(filled) >= 0.98
