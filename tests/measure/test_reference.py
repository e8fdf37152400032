"""Real samples of folders that another writer made."""

import shutil
from unittest.mock import MagicMock, Mock

import numpy as np

from dfm_nb import prepare_dataset
from dfm_nb.adopt import adopt_dataset
from dfm_nb.base import geometry, video
from dfm_nb.data.stores import ShardStore
from dfm_nb.measure.reference import Originals, Real, choose, open_reference
from tests.frames import noise
from tests.json_files import read_json
from tests.refusals import refused


def test_no_more_is_looked_at_than_is_asked_for():
    """A data set may have a hundred million samples."""
    reference = MagicMock(
        is_clip=Mock(return_value=False), read=Mock(side_effect=lambda i: Real(np.zeros(1), "", 1, {}))
    )
    reference.__len__.return_value = 1000
    assert len(choose(reference, 3, 0, 9, seed=0)[0]) == 3 == reference.is_clip.call_count


def test_folder_without_metadata_or_captions_is_named_with_the_way_out(theirs, tmp_path):
    folder = shutil.copytree(theirs / "data", tmp_path / "data")
    pipe = Mock(manifest={"tokenizer": {"name": "cosmos_cv"}})
    opening = (open_reference, str(folder), "train", pipe, 32)
    refused(f"`dfm adopt {folder}", *opening, error=FileNotFoundError)
    adopt_dataset(folder, "cosmos_cv", "t5")
    refused(f"000000 of {folder} must have a caption", open_reference(str(folder), "train", pipe, 32).read, 0)


def test_samples_are_compared_with_their_files_while_these_are_here_and_unchanged(tmp_path):
    shown = noise(4, 36, 52)
    for i, picture in enumerate(shown):
        video.write_png(tmp_path / f"set/{i}.png", picture)
    video.write_mp4(tmp_path / "set/clip.mp4", np.resize(shown, (7, 36, 52, 3)), 25)
    how = {"tokenizer": "pca", "short_side": 32, "val_fraction": 0}
    prepare_dataset(f"folder:{tmp_path / 'set'}", output_dir=tmp_path / "data", **how)

    def opened():
        store = ShardStore(tmp_path / "data")
        like = [np.zeros((*geometry.pixel_size(*store.grid(i)), 3), np.uint8) for i in range(len(store))]
        originals = Originals(store)
        return {store.entry(i).key[:4].rstrip("-"): originals.read(i, like[i]) for i in range(len(store))}

    found = opened()
    assert len(found) == 5 and found["clip"].shape[0] == 5
    assert all(o.shape[1:] == (33, 48, 3) for o in found.values()), "as large as what was cropped to 32 x 48"
    video.write_png(tmp_path / "set/1.png", shown[0])
    changed = [key for key, original in opened().items() if original is None]
    assert len(changed) == 1 and changed[0].startswith("1")
    manifest = read_json(tmp_path / "data/manifest.json")
    (tmp_path / "evil.py").write_text("raise SystemExit('a module of a manifest ran')")
    for source in (f"folder:{tmp_path / 'gone'}", f"evil:build:{tmp_path / 'set'}"):
        store = Mock(manifest=manifest | {"arguments": manifest["arguments"] | {"source": source}}, folder=tmp_path)
        assert not Originals(store).items
