"""Shares with their intervals, prompts that training never showed, and the table of them."""

from types import SimpleNamespace

import numpy as np
import pytest

from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation.attributes import MEASURED, score, unseen_attributes, wilson
from dfm_nb.evaluation.judge import chance
from dfm_nb.evaluation.table import table


def test_wilson_interval_is_the_published_one():
    """9 of 10 (Brown, Cai & DasGupta 2001 give the formula; the numbers are its)."""
    assert wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=2e-4)
    low, high = wilson(0, 50)
    assert low == pytest.approx(0, abs=1e-12) and 0.05 < high < 0.08


def test_prompts_are_combinations_that_training_never_showed():
    triples = {tuple(sorted(t.items())) for t in synthetic.seen_combinations()}
    most = len(synthetic.unseen_combinations()) * len(synthetic.SPECIES)
    drawn = unseen_attributes(most, "still")
    assert len({tuple(sorted(d.items())) for d in drawn}) == most
    for d in drawn:
        assert tuple(sorted((k, d[k]) for k in ("colour", "pattern", "background"))) not in triples
    with pytest.raises(
        ValueError, match=r"there are (\d+) unseen combinations; got 99999; use --num-prompts \1 or fewer"
    ):
        unseen_attributes(99_999, "still")


def test_score_counts_what_the_classifier_finds():
    wanted = [{"colour": "red", "background": "sky", "pattern": "plain"}] * 4
    found = [{**wanted[0], "colour": c} for c in ("red", "red", "red", "blue")]
    videos = [np.zeros((1, 16, 16, 3), np.uint8)] * 4
    out = score(videos, wanted, SimpleNamespace(predict=lambda _: found))
    assert out["colour"]["accuracy"] == 0.75 and out["background"]["accuracy"] == 1 and "wing_motion" not in out
    assert (out["colour"]["low"], out["colour"]["high"]) == wilson(3, 4)
    assert out["colour"]["chance"] == chance()["colour"]
    assert out["colour"]["found"] == {"red": {"blue": 1, "red": 3}} and out["pattern"]["found"] == {
        "plain": {"plain": 4}
    }
    out["real_renders"] = {"as_drawn": dict.fromkeys(MEASURED, 1.0), "decoded": dict.fromkeys(MEASURED, 0.9)}
    text = table({"images": out})
    assert "| 4 images | colour | 75.0% | 30.1% - 95.4% | 12.5% | 100.0% | 90.0% |" in text.splitlines()
    assert text.splitlines()[-1] == "Images, colour by what was asked: red 3 of 4."
