import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_nb.base import geometry


@pytest.mark.parametrize("frames, floored", [(0, 1), (1, 1), (4, 1), (5, 5), (52, 49)])
def test_floor_frames(frames, floored):
    assert geometry.floor_frames(frames) == floored
    assert geometry.is_frame_count(frames) == (frames == floored)


@pytest.mark.parametrize("frames, rounded", [(1, 1), (2, 1), (3, 5), (121, 121)])
def test_round_frames(frames, rounded):
    assert geometry.round_frames(frames) == rounded


@pytest.mark.parametrize("px, near", [(0, "16"), (15, "16"), (32, "32"), (719, "704 or 720")])
def test_nearest_sides(px, near):
    assert geometry.nearest_multiples(px, 16) == near
    assert geometry.is_side(px) == (str(px) == near)


@given(st.integers(1, 50), st.integers(1, 200), st.integers(1, 200))
def test_latent_and_pixel_sizes_are_inverse(t, h, w):
    frames, height, width = geometry.pixel_size(t, h, w)
    assert geometry.is_frame_count(frames)
    assert geometry.latent_size(frames, height, width) == (t, h, w)


def test_published_size_of_the_cosmos_tokenizer():
    """Of its model card: 49 frames are 13 latents, sides divided by 8."""
    assert geometry.latent_size(49, 480, 720) == (13, 60, 90)
