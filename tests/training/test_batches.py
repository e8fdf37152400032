"""What a run takes from its data set, as a user gets it."""

import re

import numpy as np

from dfm_nb import config as cfg
from dfm_nb import prepare
from dfm_nb.base import geometry, video
from dfm_nb.data.stores import ShardStore
from dfm_nb.generation.request import Request
from dfm_nb.training.batches import with_data

SAMPLES = {
    "an old harbour at dawn": [(1, 32, 32, None)],
    "a bee on a thistle": [(1, 32, 48, None)],
    "a kite over the dunes": [(9, 32, 32, 10)],
    "waves break at the pier": [(9, 48, 32, 25)],
    "children chase a ball": [(13, 32, 32, 25)],
    "a cat asleep": [(9, 32, 32, 25), (1, 32, 48, None), (9, 32, 32, 25)],
}
"""Frames, height, width and rate of the samples of each caption."""


def write(folder, samples=SAMPLES, given=()) -> None:
    rng = np.random.default_rng(0)
    for caption, files in samples.items():
        for i, (frames, height, width, fps) in enumerate(files):
            place = folder / f"{caption.replace(' ', '-')}{i}"
            shown = rng.integers(0, 255, (frames, height, width, 3), np.uint8)
            if fps:
                video.write_mp4(place.with_suffix(".mp4"), shown, fps)
            else:
                video.write_png(place.with_suffix(".png"), shown[0])
            if caption in given:
                video.write_png(place.with_suffix(".source.png"), shown[0])
            place.with_suffix(".txt").write_text(caption)


def prepared(folder, samples=SAMPLES, given=(), *overrides: str) -> tuple[ShardStore, cfg.Config]:
    """The training samples, and the configuration of a run with them."""
    (folder / "set").mkdir()
    write(folder / "set", samples, given)
    argv = ["--source", f"folder:{folder / 'set'}", "--output-dir", str(folder / "data")]
    assert prepare.main([*argv, *"--tokenizer pca --short-side 32 --val-fraction 0".split()]) == 0
    store = ShardStore(folder / "data")
    return store, with_data(cfg.resolve("demo", overrides=list(overrides)), store).config


def shape(request: Request) -> tuple[int, int, int, float]:
    return request.num_video_frames, request.height, request.width, request.fps


def test_every_caption_alone_gets_frames_size_and_rate_of_its_sample(tmp_path, capsys):
    store, config = prepared(tmp_path)
    found = {}
    for i in range(len(store)):
        sample = store.read(i)
        have = (*geometry.pixel_size(*store.grid(i)), sample.fps)
        found.setdefault(sample.meta["caption"], []).append(have)
    assert len({have for some in found.values() for have in some}) >= 5
    for caption, some in found.items():
        usual = max(some, key=some.count)
        assert shape(Request(caption).completed(config)) == usual, caption
        assert shape(Request(f"{caption.upper()}!").completed(config)) == usual, "case and punctuation do not count"
    *_, told = capsys.readouterr().err.splitlines()
    assert re.findall(r"\d+", told) == ["1"], "a cat asleep has a still and a clip"
    assert shape(Request("a cat asleep", num_video_frames=1).completed(config))[:3] == (1, 32, 48)


def test_a_caption_of_given_pictures_alone_is_told_so_and_a_recommendation_of_the_user_holds(tmp_path):
    still = [(1, 32, 32, None)]
    samples = {"make it red": still, "a bee on a thistle": still, "a ball rolls": [(9, 32, 32, 25)]}
    store, config = prepared(tmp_path, samples, ("make it red",), "generation.fps=7")
    asked = {caption: Request(caption).completed(config) for caption in samples}
    assert [shape(request) for request in asked.values()] == [(1, 32, 32, 7), (1, 32, 32, 7), (9, 32, 32, 7)]
    assert ["--given" in request.untrained(config) for request in asked.values()] == [True, False, False]
    given = Request("Make it red!", given=(str(tmp_path / "set/make-it-red0.source.png"),)).completed(config)
    assert not given.untrained(config) and store.any_given
