"""What a data set recommends to generate."""

from types import SimpleNamespace

from dfm_nb.data.stores import MockStore, usual_sizes


class OfTwoRates(MockStore):
    """Clips of 25 frames a second among stills of 1."""

    def read(self, index):
        return SimpleNamespace(fps=25.0 if self.grid(index)[0] > 1 else 1.0)


def test_few_clips_among_many_stills_are_found_and_a_recommended_length_puts_its_kind_first():
    store = OfTwoRates([(1, 8, 8)] * 999 + [(1, 7, 8), (2, 8, 10)], length=20_000)
    stills = {"num_video_frames": 1, "height": 64, "width": 64, "fps": 1.0, "sizes": ["64x64", "64x56"]}
    clips = {"num_video_frames": 5, "height": 64, "width": 80, "fps": 25.0, "sizes": ["80x64"]}
    alone, asked = OfTwoRates([(1, 8, 8)]), [(store, 1, stills, clips), (store, 9, clips, stills)]
    single = stills | {"sizes": ["64x64"]}
    for found, frames, first, other in ((store, None, stills, clips), *asked, (alone, 9, single, single)):
        wanted = {f"generation.{k}": v for k, v in first.items()}
        assert usual_sizes(found, frames) == wanted | {f"generation.other.{k}": v for k, v in other.items()}
    assert usual_sizes(MockStore([(1, 7, 8)])) == {}, "no such size can be generated"
