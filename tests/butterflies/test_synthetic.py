"""The synthetic source: captions say what is drawn, items depend on (seed, index) alone, held-out triples stay out."""

import itertools
import re

import numpy as np
import pytest

from dfm_nb.base.records import KEY_PATTERN
from dfm_nb.butterflies import captions, judge, synthetic
from tests.refusals import refused

ALL = {"colour": synthetic.COLOURS, "pattern": synthetic.PATTERNS, "background": synthetic.BACKGROUNDS}


def one(source, index):
    (clip,) = source.read(index)
    return clip


def triple(attributes):
    return tuple(attributes[name] for name in ALL)


def test_items_are_images_then_clips():
    source = synthetic.build(num_images=4, num_clips=3)
    clips = [one(source, i) for i in range(len(source))]
    assert [len(c.video) > 1 for c in clips] == [False] * 4 + [True] * 3
    assert [c.key for c in clips] == [source.item_key(i) for i in range(7)] and len({c.key for c in clips}) == 7
    for c in clips:
        t, h, w, _ = c.video.shape
        assert KEY_PATTERN.fullmatch(c.key) and c.video.dtype == np.uint8 and h % 16 == w % 16 == 0
        assert t in (1, 9, 17) and c.fps in (8.0, 12.0) and c.source == "synthetic"
        assert c.attributes["motion"] == ("still" if t == 1 else "flapping")


def test_read_is_a_pure_function_of_seed_and_index():
    a, b = synthetic.build(num_images=20, num_clips=0, seed=3), synthetic.build(num_images=50, num_clips=9, seed=3)
    for i in (19, 0, 7):
        assert np.array_equal(one(a, i).video, one(b, i).video) and one(a, i).caption == one(b, i).caption
    other = one(synthetic.build(num_images=20, num_clips=0, seed=4), 7)
    assert other.video.shape != one(a, 7).video.shape or (other.video != one(a, 7).video).any()


def test_held_out_pairs_and_triples_leave_every_value_seen():
    seen = {triple(c) for c in synthetic.seen_combinations()}
    parts = {
        (part, by): {triple(c) for c in synthetic.unseen_combinations(part, by)}
        for part, by in itertools.product(synthetic.PARTS, ("pairs", "triples"))
    }
    everything = [seen, *parts.values()]
    assert sum(map(len, everything)) == len(set.union(*everything)) == len(list(itertools.product(*ALL.values())))
    seen_pairs = {t[:2] for t in seen}
    for (_, by), held in parts.items():
        assert len(held) > 8
        assert {t[1] for t in held} == set(synthetic.PATTERNS)
        if by == "pairs":  # with every background, and the pair nowhere in training
            assert not {t[:2] for t in held} & seen_pairs and len(held) == 4 * len({t[:2] for t in held})
        else:  # new as a triple alone
            assert {t[:2] for t in held} <= seen_pairs
    for i, values in enumerate(ALL.values()):
        assert {t[i] for t in seen} == set(values)


def test_varied_items_say_what_they_show():
    """Each fact by a word of its own vocabulary, and no word of another value's."""
    source = synthetic.build("varied", num_images=100, num_clips=10)
    items = [one(source, i) for i in range(len(source))]
    assert {max(c.video.shape[1:3]) > 96 for c in items} == {True, False}
    assert len({c.caption for c in items}) > 90
    named = 0
    for clip in items:
        low, a = clip.caption.lower(), clip.attributes
        for name in ("background", "pattern"):
            words = captions.SPOKEN[name]
            said = {value for value, phrases in words.items() if any(re.search(rf"\b{p}\b", low) for p in phrases)}
            assert said <= {a[name]}, clip.caption
            named += len(said)
        assert "tiny" not in low or a["size"] == "small"
        assert not any(f" a {v}" in low for v in "aeiou")
    assert named > 90


def test_training_never_shows_an_unseen_combination():
    unseen = {triple(c) for c in synthetic.unseen_combinations()}
    train = synthetic.build(num_images=80, num_clips=2)
    held = synthetic.build("unseen", num_images=20, num_clips=2)
    assert not unseen & {triple(one(train, i).attributes) for i in range(len(train))}
    assert {triple(one(held, i).attributes) for i in range(len(held))} <= unseen
    assert not {train.item_key(i) for i in range(82)} & {held.item_key(i) for i in range(22)}


@pytest.mark.parametrize("spec", ["edits,square", "edits,unseen,square"])
def test_edits_change_one_attribute_of_a_scene_and_name_it_alone(spec):
    """By the judge's eye, which may err once or twice."""
    source, seen = synthetic.build(spec, num_images=60, num_clips=0), {triple(c) for c in synthetic.seen_combinations()}
    clips = [one(source, i) for i in range(len(source))]
    shown = judge.AttributeClassifier.load().predict([c.given[0] for c in clips])
    right = 0
    for clip, given in zip(clips, shown):
        a, changed = clip.attributes, clip.attributes["changed"]
        right += {name for name in judge.HEADS if given[name] != a[name]} == {changed}
        assert (triple(a) in seen) != source.unseen and (source.unseen or triple(a | {changed: given[changed]}) in seen)
        kept = {a[name] for name in (*ALL, "species") if name != changed}
        assert not [word for word in kept if re.search(rf"\b{word}\b", clip.caption)], clip.caption
        if changed != "background":  # what captions leave open is the same: here the corner's cloud, grass or stars
            assert (clip.given[0][:, :3, :3] == clip.video[:, :3, :3]).all()
    assert right >= 58 and {c.attributes["changed"] for c in clips} == set(judge.HEADS)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: synthetic.build("elephants"), "elephants"),
        (lambda: synthetic.build(size_px=60), "60"),
        (lambda: synthetic.Flags(num_images=-1), "--num-images"),
        (lambda: synthetic.render({"colour": "mauve"}, 0, 64, 64), "mauve"),
        (lambda: synthetic.caption_for({"shade": "red"}), "shade"),
    ],
)
def test_mistakes_are_named(call, said):
    refused(said, call)


def test_identity_tells_sources_apart():
    changes = (
        {},
        {"seed": 2},
        {"spec": "unseen"},
        {"spec": "square"},
        {"spec": "varied"},
        {"spec": "edits"},
        {"size_px": 128},
    )
    a, *others = (synthetic.build(**{"seed": 1} | change).identity() for change in changes)
    assert a == synthetic.build(seed=1).identity() and a not in others
