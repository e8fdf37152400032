"""The sets of `benchmarks/own_pictures.py`: what is written of a package, and what the list promises."""

import csv

import numpy as np
from PIL import Image

from benchmarks.own_pictures import LIST, write_clips, write_sets
from dfm_nb.base import video


def test_pictures_are_on_white_and_have_their_captions(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    Image.new("RGBA", (600, 300), (255, 0, 0, 0)).save(package / "glass.png")
    Image.new("L", (20, 10)).save(package / "night.png")
    (package / "night.txt").write_text("A dark night.\nes.utf8=Una noche\n")
    listed = tmp_path / "list.csv"
    listed.write_text(
        "set,split,package,file,caption\nA,test,fake,glass.png,a pane of glass\nB,train,fake,night.png,\n"
    )
    write_sets(listed, {"fake": package}.__getitem__, tmp_path)
    for part, caption, size in (("A/test", "a pane of glass", (256, 128)), ("B/train", "a dark night", (20, 10))):
        assert (tmp_path / part / "metadata.csv").read_text() == f"file_name,text\n0000.png,{caption}\n"
        assert Image.open(tmp_path / part / "0000.png").size == size
    assert np.asarray(Image.open(tmp_path / "A/test/0000.png")).min() == 255


def test_a_clip_begins_at_its_frame_and_is_listed_with_the_pictures(tmp_path):
    greys = np.repeat(np.arange(50, dtype=np.uint8) * 5, 48 * 64 * 3).reshape(50, 48, 64, 3)
    video.write_mp4(tmp_path / "grey.mp4", greys, 10)
    (tmp_path / "metadata.csv").write_text("file_name,text\n0000.png,a pane of glass\n")
    (tmp_path / "list.csv").write_text("package,file,first_frame,caption\nfake,grey.mp4,7,it dawns\n")
    write_clips(tmp_path / "list.csv", {"fake": tmp_path}.__getitem__, tmp_path)
    clip, fps = video.read_video(tmp_path / "clip00.mp4")
    assert (tmp_path / "metadata.csv").read_text().endswith("glass\nclip00.mp4,it dawns\n")
    assert clip.shape == (41, 48, 64, 3) and fps == 25
    assert abs(clip.mean((1, 2, 3)) - greys[7:48].mean((1, 2, 3))).max() < 4


def test_no_file_and_no_caption_is_listed_twice_and_a_third_is_held_out():
    with LIST.open() as file:
        rows = list(csv.DictReader(file))
    assert len({(row["package"], row["file"]) for row in rows}) == len(rows)
    for name in "ABC":
        of_set = [row for row in rows if row["set"] == name]
        captions = [row["caption"].casefold() for row in of_set if row["caption"]]
        assert len(set(captions)) == len(captions) == (0 if name == "B" else len(of_set))
        assert sum(row["split"] == "test" for row in of_set) >= len(of_set) // 3
