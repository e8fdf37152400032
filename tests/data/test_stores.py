"""What a data set recommends to generate."""

from dataclasses import replace

import numpy as np
import pytest

from dfm_nb import config as cfg
from dfm_nb.config.samples import Anchors, Kind, TrainingSamples
from dfm_nb.data import stores
from dfm_nb.data.stores import MockStore, training_samples
from dfm_nb.generation.request import Request


class Captioned(MockStore):
    """Sizes in turns of nine, each with a caption of its own; of every second turn three samples are `a moth`."""

    subjects = {
        8: "a painted portrait of a knight",
        10: "the tall lighthouse by a stormy sea",
        12: "pixel art of dragons",
    }

    def meta(self, index):
        return {"caption": "a moth" if index % 18 in (0, 1, 5) else self.subjects[max(self.grid(index))]}


class OfTwoRates(MockStore):
    """Clips of 25 frames a second among stills of 1."""

    def meta(self, index):
        return {"fps": 25.0 if self.grid(index)[0] > 1 else 1.0}


def test_few_clips_among_many_stills_are_found_and_a_recommended_length_puts_its_kind_first():
    store = OfTwoRates([(1, 8, 8)] * 999 + [(1, 7, 8), (2, 8, 10)], length=20_000)
    stills = Kind(num_video_frames=1, height=64, width=64, fps=1.0, sizes=["64x64", "64x56"])
    clips = Kind(num_video_frames=5, height=64, width=80, fps=25.0, sizes=["80x64"])
    alone, asked = OfTwoRates([(1, 8, 8)]), [(store, 1, [stills, clips]), (store, 9, [clips, stills])]
    single = stills.model_copy(update={"sizes": ["64x64"]})
    for of, frames, kinds in ((store, None, [stills, clips]), *asked, (alone, 9, [single])):
        assert training_samples(of, {"num_video_frames": frames} if frames else {}).kinds == kinds
    assert not training_samples(MockStore([(1, 7, 8)]), {}).kinds, "no such size can be generated"


@pytest.mark.parametrize("length", [70, 40_000])
def test_a_prompt_gets_the_size_of_the_captions_most_like_it(length):
    store = Captioned([(1, 8, 8)] * 5 + [(1, 10, 8), (1, 8, 12)] + [(2, 8, 8), (2, 8, 10)], length=length)
    config = cfg.resolve("demo").config.with_samples(training_samples(store, {}))

    def size(prompt, **given):
        request = Request(prompt, **given).completed(config)
        return request.num_video_frames, request.height, request.width

    assert size("The tall lighthouse, by a stormy sea.") == (5, 64, 80), "more clips than stills have it"
    assert size("The tall lighthouse, by a stormy sea.", num_video_frames=1) == (1, 80, 64)
    assert size("pixel art of three dragons") == (1, 64, 96)
    assert size("a moth") == size("two robots play chess") == (1, 64, 64), "the most frequent one"
    assert size("the tall lighthouse by a stormy sea", num_video_frames=9) == (9, 64, 80)
    assert size("pixel art of dragons", height=32, width=48) == (1, 32, 48)
    known = sum(len(each.simhash) for each in config.samples.captions)
    assert known <= 2 * 4_096 * 16 * 4 / 3 + 200, "base64 of 16 bytes each"
    assert not training_samples(Captioned([(1, 8, 8)]), {}).captions


def test_the_nearest_caption_is_found_by_mean_states_and_its_own_is_none():
    means = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32) + 3
    known = Anchors.of({f"caption {i}": row for i, row in enumerate(means)})
    assert known.nearest("another", 0.8 * means[7] + 0.2 * means[9]) == "caption 7"
    assert not any(known.nearest(f"CAPTION {i}", row * (1 + 1e-3)) for i, row in enumerate(means))
    assert not known.nearest("caption 9", means[7]), "whatever its states"
    samples = TrainingSamples(anchors=known)
    assert TrainingSamples.model_validate_json(samples.file) == samples
    assert b"anchors" not in TrainingSamples().file
    for damaged in ("AAAA", "?", known.means[:-8]):
        with pytest.raises(ValueError, match="means"):
            Anchors(texts=known.texts, means=damaged)


def test_captions_of_many_samples_and_of_pairs_are_not_kept(monkeypatch):
    store = Captioned([(1, 8, 8), (1, 8, 10)], length=9)
    monkeypatch.setattr(store, "read", lambda i: replace(MockStore.read(store, i), meta=store.meta(i)))
    assert set(stores.anchors(store).texts) == {"a moth", Captioned.subjects[8], Captioned.subjects[10]}
    monkeypatch.setattr(Captioned, "any_given", True)
    assert stores.anchors(store) is None
    assert stores.anchors(MockStore([(1, 8, 8)], length=stores.MOST_ANCHORS + 1)) is None
    assert stores.anchors(MockStore([(1, 8, 8)], length=9)) is None, "without captions"
