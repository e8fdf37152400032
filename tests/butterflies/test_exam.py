"""Shares with their intervals, prompts that training never showed, and the table of them."""

import numpy as np
import pytest

from dfm_nb.butterflies import captions, synthetic, wordings
from dfm_nb.butterflies.exam import MEASURED, is_pair, score, share, shares, unseen_attributes
from dfm_nb.butterflies.judge import HEADS
from dfm_nb.measure.distance import share_estimate
from tests.frames import black
from tests.refusals import refused


def test_wilson_interval_is_the_published_one():
    """9 of 10 (Brown, Cai & DasGupta 2001 give the formula; the numbers are its)."""
    some, none = share_estimate(9, 10), share_estimate(0, 50)
    assert (some["low"], some["high"]) == pytest.approx((0.5958, 0.9821), abs=2e-4)
    assert none["low"] == pytest.approx(0, abs=1e-12) and 0.05 < none["high"] < 0.08


@pytest.mark.parametrize("part", synthetic.PARTS)
def test_prompts_are_combinations_that_training_never_showed(part):
    seen = {tuple(sorted(t.items())) for t in synthetic.seen_combinations()}
    drawn = unseen_attributes(400, "still", part)
    assert len({tuple(sorted(d.items())) for d in drawn}) == 400
    for d in drawn:
        assert tuple(sorted((k, d[k]) for k in ("colour", "pattern", "background"))) not in seen
    assert [is_pair(d) for d in drawn] == [True, False] * 200
    assert all({d[k] for d in drawn} == set(values) for k, values in HEADS.items() if k in ("species", "posture"))
    refused("--num-prompts", unseen_attributes, 9999, "still", part)


class Judge:
    """Sees what it is told: the asked value with this probability, else the next one."""

    def __init__(self, wanted, sure):
        self.wanted, self.sure = wanted, sure

    def probabilities(self, videos):
        out = {}
        for name, values in HEADS.items():
            p = np.full((len(videos), len(values)), 0.0)
            for i, (w, given) in enumerate(zip(self.wanted, self.sure)):
                right = values.index(w[name])
                p[i, right] = given.get(name, 1.0)
                p[i, (right + 1) % len(values)] = 1 - p[i, right]
            out[name] = p
        return out

    def predict(self, videos):
        best = {name: p.argmax(1) for name, p in self.probabilities(videos).items()}
        return [{name: HEADS[name][best[name][i]] for name in HEADS} for i in range(len(videos))]


def exactly(value):
    """Thresholds without scatter."""
    return {end: dict.fromkeys(MEASURED, value) for end in ("low", "value", "high")}


def test_score_counts_what_is_found_and_what_is_found_surely():
    wanted = unseen_attributes(4, "still")
    judge = Judge(wanted, [{"pattern": 0.9}, {"pattern": 0.6}, {"pattern": 0.2}, {"species": 0.1}])
    out = score([black(1, 16, 16)] * 4, wanted, judge, exactly(0.8))
    assert out["pattern"]["argmax"]["share"] == 0.75 and out["pattern"]["sure"]["share"] == 0.5
    half = share_estimate(2, 4)
    assert (out["pattern"]["sure"]["low"], out["pattern"]["sure"]["high"]) == pytest.approx((half["low"], half["high"]))
    assert out["all three"]["argmax"]["share"] == 0.75 and out["all three"]["sure"]["share"] == 0.5
    assert out["all five"]["argmax"]["share"] == 0.5 and out["all five"]["sure"]["share"] == 0.25
    assert out["all three"]["chance"] == 1 / 128 and out["posture"]["chance"] == 1 / 4
    assert out["pairs"] == pytest.approx({"samples": 2, **share(np.array([True, False]))})
    assert out["triples"]["share"] == 0.5 and "wing_motion" not in out
    assert sum(sum(saw.values()) for saw in out["colour"]["found"].values()) == 4


def test_of_edits_the_change_and_the_rest_are_counted_apart():
    changed = ("pattern", "pattern", "colour", "colour")
    wanted = [w | {"changed": name} for w, name in zip(unseen_attributes(4, "flapping"), changed)]
    judge = Judge(wanted, [{"pattern": 0.1}, {"colour": 0.1}, {"colour": 0.7}, {}])
    out = score([black(5, 16, 16)] * 4, wanted, judge, exactly(0.8))
    found = {name: (out[name]["argmax"]["share"], out[name]["sure"]["share"]) for name in out if "change" in name}
    assert found == {"change": (0.75, 0.5), "change and rest": (0.5, 0.25)} and out["rest"]["sure"]["share"] == 0.75
    assert out["change"]["chance"] == (1 / 4 + 1 / 8) / 2 and "all five" not in out


def test_a_name_that_is_not_the_likeliest_is_not_sure_however_low_the_threshold():
    wanted = unseen_attributes(4, "still")
    judge = Judge(wanted, [{"species": 0.3}] * 4)
    found = shares(judge.probabilities([None] * 4), wanted, exactly(0.2))
    assert found["species"]["sure"]["share"] == 0 and found["pattern"]["sure"]["share"] == 1


def test_how_often_a_wrong_name_passes_is_counted_over_the_names_asked_of_others():
    wanted = [w | {"colour": c} for w, c in zip(unseen_attributes(3, "still"), ("red", "red", "orange"))]
    judge = Judge(wanted, [{"colour": 0.1}, {}, {}])  # the first shows the next colour, orange, instead
    found = shares(judge.probabilities([None] * 3), wanted, exactly(0.8))
    assert found["colour"]["wrong"] == 1 / 4  # of red or orange, each asked of samples of the other: one in four


def test_the_interval_holds_the_scatter_of_the_thresholds():
    wanted = unseen_attributes(200, "still")
    judge = Judge(wanted, [{"colour": 0.5 + i / 400} for i in range(200)])
    said = judge.probabilities([None] * 200)
    scatter = exactly(0.75) | {"low": dict.fromkeys(MEASURED, 0.7), "high": dict.fromkeys(MEASURED, 0.8)}
    plain, wide = (shares(said, wanted, s)["colour"]["sure"] for s in (exactly(0.75), scatter))
    assert plain["share"] == wide["share"] == 0.5
    assert wide["low"] == pytest.approx(0.5 - np.hypot(0.5 - plain["low"], 0.1))
    assert wide["high"] == pytest.approx(0.5 + np.hypot(plain["high"] - 0.5, 0.1))


def test_wordings_are_not_those_of_training():
    """No synonym of the file is in the grammar of training, and no prompt follows a template of it."""
    vocabulary = str(captions.SPOKEN) + str(synthetic.TEMPLATES)
    for name, form in wordings.FORMS.items():
        for synonyms in form.get("words", {}).values():
            assert len(set(synonyms)) == 4 and not [w for w in synonyms if w in vocabulary], synonyms
        said = {part: set() for part in synthetic.PARTS}
        for part in synthetic.PARTS:
            wanted = unseen_attributes(60, "still", part)
            trained = {synthetic.caption_for(w, t) for w in wanted for t in range(synthetic.NUM_TEMPLATES)}
            said[part] = {wordings.prompt(name, part, w, i) for i, w in enumerate(wanted)}
            assert not said[part] & trained and not any("{" in text for text in said[part])
        assert not said["development"] & said["test"]
