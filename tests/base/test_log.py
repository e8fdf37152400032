"""Words in log lines."""

import pytest

from dfm_nb.base.log import duration


@pytest.mark.parametrize(
    "seconds, words",
    [(0.36, "0.4 s"), (12, "12 s"), (600, "10 min"), (12_000, "3 h 20 min"), (5.5e6, "64 days"), (2e8, "2,315 days")],
)
def test_duration_in_words(seconds, words):
    assert duration(seconds) == words
