"""SimHash against its expectation: the share of bits that differ is the angle between the words / 180 degrees."""

import numpy as np

from dfm_nb.config.samples import ALIKE, Captions, simhash

WORDS = [f"word{i}" for i in range(2_000)]


def differing_bits(text, others):
    known = Captions(height=16, width=16, num_video_frames=1, fps=1.0, given=False, simhash=simhash(others))
    return known.differing_bits(text)


def test_bits_differ_in_proportion_to_the_angle_between_the_words():
    rng = np.random.default_rng(0)
    for common in (0, 3, 6, 9):
        bits = []
        for _ in range(100):
            first, second, both = np.split(rng.permutation(WORDS)[: 22 - common], [11 - common, 22 - 2 * common])
            bits += differing_bits(" ".join([*first, *both]), [" ".join([*second, *both])]).tolist()
        expected = 128 * np.arccos(common / 11) / np.pi
        assert abs(np.mean(bits) - expected) < 2.5, (common, np.mean(bits), expected)
    assert expected < ALIKE


def test_case_order_and_punctuation_do_not_count_and_no_caption_is_like_no_words():
    assert differing_bits("Red fox, in snow!", ["in snow: red FOX", "a quiet harbour at dawn"])[0] == 0
    assert differing_bits("", ["a red fox"])[0] > ALIKE
