"""What a preparation settles before any work."""

from __future__ import annotations

import pytest

from dfm_nb.data.preparation import PrepareConfig


class Items(list):
    def __init__(self, count, split=None):
        super().__init__(range(count))
        self.item_split = lambda index: split if index == 0 else None


@pytest.mark.parametrize(
    "count, split, settings, share",
    [
        (19, None, {}, 0.05),
        (20, None, {}, 0.125),
        (999, None, {}, 0.125),
        (1000, None, {}, 0.05),
        (1000, None, {"limit": 500}, 0.125),
        (500, "test", {}, 0.05),
        (500, None, {"test_fraction": 0.9}, 0.05),
    ],
)
def test_an_eighth_of_few_items_is_held_out_unless_they_have_splits_or_it_is_set(count, split, settings, share):
    assert PrepareConfig(output_dir="d", **settings).val_share(Items(count, split)) == share
