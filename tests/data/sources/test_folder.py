"""The folder source: captions from where they may stand, clips out of what moves, and nothing lost in silence."""

import json
import os
import unicodedata
from functools import partial

import numpy as np
import pytest

from dfm_nb.base import limits, video
from dfm_nb.base.records import SampleError
from dfm_nb.data.sources import _location, folder, table
from tests.frames import animate, counting_clip, picture, pictures
from tests.json_files import write_json, write_lines
from tests.refusals import refused


def frame_numbers(clip):
    return (clip.video[:, 16, 16, 1].astype(float) / 8).round().astype(int).tolist()


def read(source, index=0):
    return list(source.read(index))


def fault(source, index=0):
    return refused("", read, source, index, error=SampleError)


@pytest.fixture
def build(tmp_path):
    """Opens that folder."""
    return partial(folder.build, str(tmp_path))


# ---- captions -----------------------------------------------------------------------------------------------------


def test_captions_come_from_csv_then_txt_then_name(build, tmp_path):
    """The file may begin with a byte order mark and have the paths of another system."""
    pictures(tmp_path, "a.png", "b.png", "sub/my_blue-butterfly.png", "sub/x.png")
    table = '\ufefffile_name,caption\na.png,from csv\nb.png,\n./sub\\x.png,"ä, b"\n'
    (tmp_path / "captions.csv").write_bytes(table.encode())
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("from\n txt ")
    source = build()
    captions = [read(source, i)[0].caption for i in range(len(source))]
    assert captions == ["from csv", "from txt", "my blue butterfly", "ä, b"]


def test_a_folder_of_hugging_faces_has_its_captions_and_one_without_any_is_warned_of(build, tmp_path, caplog):
    pictures(tmp_path, "train/0000.png", "train/0002.png", "test/0000.png")
    assert [read(build(), i)[0].caption for i in range(3)] == ["0000", "0002", "0000"]
    assert str(tmp_path) in caplog.text
    rows = [{"file_name": "0000.png", "text": "a fox"}, {"file_name": "0002.png", "text": "an owl"}]
    write_lines(tmp_path / "train/metadata.jsonl", rows)
    (tmp_path / "test/metadata.csv").write_text("file_name,text\n0000.png,a hare\n")
    (tmp_path / "metadata.csv").write_text("file_name,text\ntrain/0000.png,farther away\n")
    assert [read(build(), i)[0].caption for i in range(3)] == ["a fox", "an owl", "a hare"]
    assert [build().item_split(i) for i in range(3)] == [None, None, "test"], "a fraction of train is for validation"
    before = build().identity()
    picture(tmp_path / "validation/0000.png")
    assert [build().item_split(i) for i in range(4)] == [
        "train",
        "train",
        "test",
        "val",
    ] and before != build().identity()


def test_folders_and_rows_are_held_out_by_any_usual_word_for_it(build, tmp_path, caplog):
    words = {"Train": None, "valid": "val", "Dev": "val", "Test": "test"}
    for name in words:
        picture(tmp_path / "a" / name / "0.png")
    named = folder.build(str(tmp_path / "a"))
    assert {f.partition("/")[0]: s for f, s in zip(named.files, named.splits)} == words | {"Train": "train"}
    assert build().splits == named.splits, "also below another folder"
    for i in range(4):
        picture(tmp_path / "b" / f"{i}.png")
    rows = tmp_path / "b" / "metadata.csv"
    rows.write_text("file_name,text,split\n0.png,a,train\n1.png,b,Test\n2.png,c,\n3.png,d,spare\n")
    listed, as_table = folder.build(str(tmp_path / "b")), table.build(str(rows))
    assert dict(zip(listed.files, listed.splits)) == {"0.png": None, "1.png": "test", "2.png": None, "3.png": None}
    assert [as_table.item_split(i) for i in range(4)] == [None, "test", None, None] and "spare" in caplog.text
    before = listed.identity(), as_table.identity()
    rows.write_text(rows.read_text().replace("0.png,a,train", "0.png,a,val"))
    listed, as_table = folder.build(str(tmp_path / "b")), table.build(str(rows))
    assert [as_table.item_split(i) for i in range(4)] == ["val", "test", "train", "train"]
    assert listed.identity() != before[0] and as_table.identity() != before[1]


def test_a_file_may_have_several_captions_and_tags(build, tmp_path, caplog):
    for name in "abcd":
        picture(tmp_path / f"{name}.png")
    rows = [{"file": "a.png", "text": ["one", "two"], "tags": ["x", "y"]}]
    rows += [{"file": "b.png", "tags": "p, q"}, {"file": "c.png", "tags": "1girl, red hair"}]
    write_lines(tmp_path / "metadata.jsonl", rows)
    (tmp_path / "b.txt").write_text("from\ntxt")
    source = build()
    assert source.captions_from["names of files"] == "1 from names of files, such as 'd' (1)"
    assert source.tagged and [source.captions(i) for i in range(4)] == [
        (["one", "two"], ["x", "y"]),
        (["from txt"], ["p", "q"]),
        (["1girl, red hair"], ["1girl", "red hair"]),
        (["d"], []),
    ]
    (clip,) = read(source)
    assert (clip.caption, clip.more_captions, clip.tags) == ("one", ["two"], ["x", "y"])
    before = source.identity()
    (tmp_path / "metadata.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (rows[0] | {"text": ["one", "2"]}, *rows[1:]))
    )
    after = build().identity()
    assert {name for name in before if before[name] != after[name]} == {"captions_sha256"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(rows[0] | {"text": ["one", {}]}) + "\n")
    refused(r"a\.png", build)
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "captions.csv").write_text("file,caption\na.png,one\na.png,two\n")
    assert build().captions(0) == (["one", "two"], [])


def test_weights_come_from_the_list_then_from_kohyas_folders(build, tmp_path):
    pictures(tmp_path, "01_foxes/a.png", "10_cats/b.png", "10_cats/c.png", "2024_dogs/d.png", "e.png")
    source = build()
    assert [read(source, i)[0].weight for i in range(5)] == [1, 10, 10, 1, 1]
    (tmp_path / "metadata.csv").write_text("file_name,text,repeats\n10_cats/b.png,a cat,0.5\ne.png,a fox,many\n")
    listed = build()
    assert [read(listed, i)[0].weight for i in (1, 2)] == [0.5, 10]
    assert fault(listed, 4).reason == "bad_weight"
    assert listed.identity()["weights_sha256"] != source.identity()["weights_sha256"]


def test_captions_csv_with_a_missing_file_is_an_item_that_says_so(build, tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "captions.csv").write_text("file,caption\na.png,one\ngone.png,two\nnotes.pdf,three\n")
    (tmp_path / "notes.pdf").write_text("no media")
    source = build()
    assert len(source) == 3
    assert fault(source, 1).reason == "missing_file" and "gone.png" in fault(source, 1).detail
    assert fault(source, 2).reason == "unknown_type" and "notes.pdf" in fault(source, 2).detail


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.txt", b"\xff bad", "caption_not_utf8"),
        ("a.txt", b" \n ", "no_caption"),
        ("a.txt", bytes(limits.MOST_TEXT + 1), "too_large"),
    ],
)
def test_a_bad_caption_file_is_named_and_not_replaced_by_the_name(build, name, content, reason, tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / name).write_bytes(content)
    error = fault(build())
    assert error.reason == reason and name in error.detail


def captions_of(tmp_path, **rows_of):
    """Captions by file of a folder with lists of these rows, (file, caption)."""
    for name, rows in rows_of.items():
        path = tmp_path / name.replace("__", "/").removesuffix("captions") / "captions.csv"
        path.write_text("".join(f"{file},{caption}\n" for file, caption in [("file", "caption"), *rows]))
    source = folder.build(str(tmp_path))
    return {name: source.captions(i)[0][0] for i, name in enumerate(source.files)}


def test_a_row_names_a_path_and_a_bare_name_elsewhere_only_what_has_no_other_caption(tmp_path):
    pictures(tmp_path, "0.png", "sub/0.png", "sub/1.png", "sub/2.png", "b/2.png", "b/3.png", "b/4.png")
    (tmp_path / "sub/0.txt").write_text("own")
    (tmp_path / "b/3.txt").write_text("own")
    root = [(n, f"row {n}") for n in ("0.png", "1.png", "2.png", "3.png", "4.png", "b/4.png", "b/../sub/2.png")]
    assert captions_of(tmp_path, captions=root) == {
        "0.png": "row 0.png",
        "sub/0.png": "own",
        "sub/1.png": "row 1.png",
        "sub/2.png": "row b/../sub/2.png",
        "b/2.png": "b",  # its folder, because a number says nothing
        "b/3.png": "own",
        "b/4.png": "row b/4.png",
        # which are reported as missing when they are read
        "2.png": "row 2.png",
        "3.png": "row 3.png",
        "4.png": "row 4.png",
    }
    assert captions_of(tmp_path, sub__captions=[("1.png", "nearer"), ("../0.png", "a path")])["sub/1.png"] == "nearer"
    assert captions_of(tmp_path)["0.png"] == "a path"


def test_an_absolute_path_inside_is_that_file_and_accents_may_be_in_either_form(tmp_path):
    nfc, nfd = (unicodedata.normalize(form, "caf\xe9 {}.png") for form in ("NFC", "NFD"))
    for name in ("a.png", nfd.format(1), nfc.format(2), nfd.format("x")):
        picture(tmp_path / "real" / name)
    (tmp_path / "real" / nfc.format("x")).with_suffix(".TXT").write_text("its text")
    (tmp_path / "link").symlink_to("real")
    rows = [(tmp_path / "link/a.png", "one"), (nfc.format(1), "two"), (nfd.format(2), "three")]
    found = captions_of(tmp_path / "link", captions=rows)
    assert found == {"a.png": "one", nfd.format(1): "two", nfc.format(2): "three", nfd.format("x"): "its text"}
    outside = captions_of(tmp_path / "real", captions=[(tmp_path / "b.png", "one")])
    assert str(tmp_path / "b.png") in outside, "as it was written"


def test_a_list_of_captions_is_bounded(build, tmp_path):
    (tmp_path / "captions.csv").touch()
    os.truncate(tmp_path / "captions.csv", limits.MOST_BYTES + 1)
    refused(r"captions\.csv", build)


# ---- pictures -----------------------------------------------------------------------------------------------------


def test_hidden_and_foreign_files_are_no_items(build, tmp_path, caplog):
    picture(tmp_path / "a.png")
    picture(tmp_path / ".trash" / "b.png")
    picture(tmp_path / ".c.png")
    for own in (".dfm/plan.json", ".run.json"):  # a prepared folder and a run, which have contact sheets and samples
        picture(tmp_path / "sub" / own.strip(".") / "contact_sheet.png")
        (tmp_path / "sub" / own.strip(".") / own).parent.mkdir(exist_ok=True)
        (tmp_path / "sub" / own.strip(".") / own).touch()
    (tmp_path / "d.pdf").write_text("x")
    (tmp_path / "E.PSD").write_text("x")
    with caplog.at_level("INFO", "dfm_nb"):
        source = build()
    assert source.files == ["a.png"] and "1 .pdf" in caplog.text
    (warned,) = [
        r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "captions.csv" not in r.msg % r.args
    ]
    assert "1 .psd" in warned


def test_captions_come_from_where_other_trainers_write_them(build, tmp_path):
    """kohya, musubi, ai-toolkit, SimpleTuner, OneTrainer, DiffSynth, Hugging Face; a name is the last resort."""
    written = {
        "a.txt": "of txt",
        "b.caption": "of caption",
        "c.png.txt": "of png.txt",
        "d.json": '{"prompt": "of json"}',
        "e.json": '{"width": 3}',
    }
    names = ["a", "b", "c", "d", "e", "10_sks dog/IMG_0", "cats/IMG_2030", "train/images/0001", "k/f"]
    names += ["cats/3fa85f64-5717", "cats/facade-bed"]  # words of hex letters are words
    for name in names:
        picture(tmp_path / f"{name}.png")
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "k/captions.json").write_text('{"f.png": "of captions.json"}')
    source = build()
    said = {name: read(source, i)[0].caption for i, name in enumerate(source.files)}
    assert said == {
        "a.png": "of txt",
        "b.png": "of caption",
        "c.png": "of png.txt",
        "d.png": "of json",
        "e.png": "e",
        "10_sks dog/IMG_0.png": "sks dog",
        "cats/IMG_2030.png": "cats",
        "cats/3fa85f64-5717.png": "cats",
        "cats/facade-bed.png": "facade bed",
        "train/images/0001.png": "0001",
        "k/f.png": "of captions.json",
    }
    assert {origin: int(said.split()[0]) for origin, said in source.captions_from.items()} == {
        ".txt files": 2,
        ".caption files": 1,
        ".json files": 1,
        "captions.json": 1,
        "names of their folders": 3,
        "names of files": 3,
    }
    before = source.identity()["captions_sha256"]
    (tmp_path / "d.json").write_text('{"prompt": "another"}')
    assert build().identity()["captions_sha256"] != before


@pytest.mark.parametrize("lines, captions", [("whole", ["one two"]), ("each", ["one", "two"])])
def test_lines_of_a_text_are_one_caption_or_several(build, lines, captions, tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    clip = read(build(caption_lines=lines))[0]
    assert [clip.caption, *clip.more_captions] == captions


def test_each_column_of_a_list_counts_for_itself(build, tmp_path):
    """A row without a caption still holds its file out, weighs it and gives it a picture."""
    pictures(tmp_path, "p0.png", "p1.png", "in.png")
    rows = "file_name,text,split,weight,source\np0.png,a fox,train,,\np1.png,,test,5,in.png\nin.png,,,,\n"
    (tmp_path / "metadata.csv").write_text(rows)
    source = build()
    assert source.files == ["p0.png", "p1.png"] and source.item_split(1) == "test"
    (clip,) = read(source, 1)
    assert (clip.caption, clip.weight, len(clip.given)) == ("p1", 5, 1)


@pytest.mark.parametrize("place", ["", "set/"])
def test_lists_of_one_folder_and_of_those_above_complete_each_other(build, place, tmp_path):
    """The nearest counts, for each column."""
    pictures(tmp_path, "set/p0.png", "set/p1.png")
    (tmp_path / "set/p1.txt").write_text("a cat")
    (tmp_path / "set/captions.csv").write_text("file_name,text,weight\np0.png,a fox,\n")
    listed = f"file_name,text,split,weight\n{place}p0.png,other,,5\np1.png,,test,\n"
    (tmp_path / ("metadata.csv" if place else "set/metadata.csv")).write_text(listed)
    source = build()
    assert source.files == ["set/p0.png", "set/p1.png"] and source.item_split(1) == "test"
    (fox,), (cat,) = read(source), read(source, 1)
    assert fox.weight == 5 and cat.caption == "a cat" and fox.caption == "a fox"
    assert set(source.captions_from) == {"captions.csv", ".txt files"}


def test_unused_lists_and_texts_are_reported(build, tmp_path, caplog):
    picture(tmp_path / "a.png")
    for name in ("prompts.csv", "b.txt", "e.json"):
        (tmp_path / name).write_text("{}")
    build()
    assert all(name in caplog.text for name in ("3 texts or tables", "prompts.csv", "b.txt", "e.json"))


def test_thumbnails_and_bins_of_other_systems_are_skipped(build, tmp_path):
    """And not what people name with the same signs."""
    for place in ("", "@eaDir/", "#recycle/", "$RECYCLE.BIN/", "__MACOSX/", "sub/lost+found/", "@somebody/", "#fox/"):
        picture(tmp_path / f"{place}a.png")
    picture(tmp_path / "@me.png")
    assert build().files == ["#fox/a.png", "@me.png", "@somebody/a.png", "a.png"]


@pytest.mark.parametrize("content", ['{"caption": [1, 2]}', "[" * 100_000, b"\xff\xfe\x00", None])
def test_a_json_of_another_tool_costs_no_picture(content, tmp_path):
    picture(tmp_path / "set/red-fox.png")
    path = tmp_path / "set/red-fox.json"
    if content is None:
        path.symlink_to(tmp_path / "outside.json")
        (tmp_path / "outside.json").write_text('{"caption": "not of this folder"}')
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "set/metadata.json").write_text('{"name": "my set", "version": 1}')
    source = folder.build(str(tmp_path / "set"))
    assert captions_of(tmp_path / "set") == {"red-fox.png": "red fox"} and len(source) == 1


# ---- what moves ---------------------------------------------------------------------------------------------------


def test_animations_are_clips_of_one_plus_four_k_frames(build, tmp_path):
    animate(tmp_path / "a.webp", counting_clip(12), duration=100, lossless=True)
    (clip,) = read(build())
    assert frame_numbers(clip) == list(range(9)) and clip.fps == pytest.approx(10)
    (slow,) = read(build(fps=5))
    assert frame_numbers(slow) == [0, 2, 4, 6, 8] and slow.fps == 5
    animate(tmp_path / "a.webp", counting_clip(3), duration=[400, 100, 200], lossless=True)
    (uneven,) = read(build(fps=10))
    assert frame_numbers(uneven) == [0, 0, 0, 0, 1] and "uneven_frames" not in uneven.lost  # of 7 that are shown
    animate(tmp_path / "a.webp", counting_clip(5), duration=[100] * 4 + [2000], lossless=True)
    (uneven,) = read(build())
    assert len(uneven.video) == 5 and uneven.lost.keys() == {"uneven_frames"}


def test_keys_keep_the_letters_of_any_script():
    assert [folder.key_of(name)[:-9] for name in ("кот 2.png", "猫.png", "e\u0301te\u0301.png")] == [
        "кот_2",
        "猫",
        "été",
    ]


def test_videos_are_cut_into_clips(build, tmp_path):
    video.write_mp4(tmp_path / "a.mp4", counting_clip(20), 10, crf=4)
    whole = read(build())
    assert [frame_numbers(c) for c in whole] == [list(range(17))] and whole[0].key == folder.key_of("a.mp4")
    parts = read(build(clip_frames=9))
    assert [frame_numbers(c) for c in parts] == [list(range(9)), list(range(9, 18))]
    assert [c.key for c in parts] == [f"{whole[0].key}-0000", f"{whole[0].key}-0001"]
    overlapping = read(build(clip_frames=5, stride=3))
    assert [frame_numbers(c)[0] for c in overlapping] == [0, 3, 6, 9, 12, 15]
    assert all(len(c.video) == 5 and c.fps == 10 for c in overlapping)
    assert [frame_numbers(c)[0] for c in read(build(clip_frames=5, stride=8))] == [0, 8]
    (short,) = read(build(clip_frames=25))
    assert len(short.video) == 17 and short.lost.keys() == {"short_clip"}
    (still,) = read(build(fps=2))
    assert len(still.video) == 1 and still.lost.keys() == {"short_clip"} and still.fps == 1, "as pictures have"
    assert whole[0].lost.keys() == {"cut_over_5%"}, "3 of 20 frames"
    assert not any(clip.lost for clip in (*parts, *overlapping))


def test_a_clip_that_re_timing_leaves_standing_says_so(build, tmp_path):
    """3 frames of 1 a second, and 20 of 10 in a video, at 12 a second: only the first repeats more than a quarter."""
    animate(tmp_path / "a.gif", counting_clip(3), duration=1000)
    video.write_mp4(tmp_path / "b.mp4", counting_clip(20), 10, crf=4)
    slow, faster = (read(build(fps=12, clip_frames=9), index) for index in (0, 1))
    assert [len(set(frame_numbers(clip))) for clip in slow] == [1, 2, 2, 1]
    assert all(clip.lost.keys() == {"repeated_frames"} for clip in slow)
    assert len(faster) == 2 and not any(clip.lost for clip in faster)
    assert all("repeated_frames" not in clip.lost for fps in (None, 1) for clip in read(build(fps=fps)))


# ---- the list -----------------------------------------------------------------------------------------------------


def test_keys_are_unique_and_legible(build, tmp_path):
    pictures(tmp_path, "a b.png", "a-b.png", "a_b.png", "ü.png", "sub/a b.png")
    source = build()
    keys = [source.item_key(i) for i in range(len(source))]
    assert len(set(keys)) == 5 and all(c.key == k for i, k in enumerate(keys) for c in read(source, i))


def test_identity_follows_options_and_what_files_hold_and_not_when_they_were_copied(build, tmp_path, monkeypatch):
    """Of a large file the time of change counts."""

    def differ(change):
        before = build().identity()
        change()
        after = build().identity()
        return {name for name in before if before[name] != after[name]}

    picture(tmp_path / "a.bmp")
    picture(tmp_path / "b.bmp")
    assert build(clip_frames=9).identity() != build().identity()
    assert differ(lambda: (tmp_path / "a.txt").write_text("a cat")) == {"captions_sha256"}
    assert differ(lambda: (tmp_path / "a.txt").write_text("a dog")) == {"captions_sha256"}
    assert differ(lambda: os.utime(tmp_path / "b.bmp", (1, 1))) == set()
    assert differ(lambda: picture(tmp_path / "b.bmp", "blue")) == {"contents_sha256"}
    monkeypatch.setattr(_location, "COMPARED_BYTES", 10)
    assert differ(lambda: os.utime(tmp_path / "b.bmp", (2, 2))) == {"contents_sha256"}


@pytest.mark.parametrize(
    "options, said",
    [
        ({"clip_frames": 10}, "clip-frames.*10"),
        ({"fps": 0}, "--fps"),
        ({"stride": 0, "clip_frames": 5}, "--stride"),
        ({"stride": 4}, "--clip-frames"),
        ({"background": "mud-brown"}, "mud-brown"),
    ],
)
def test_bad_options_are_refused(build, options, said, tmp_path):
    picture(tmp_path / "a.png")
    refused(said, build, **options)


def test_bad_folders_are_refused(build, tmp_path):
    refused("none", folder.build, str(tmp_path / "none"), error=NotADirectoryError)
    refused(tmp_path.name, build)
    (tmp_path / "captions.csv").write_text("a,b\n1,2\n")
    refused("captions.csv", build)


def given_sizes(clip):
    return [frames.shape for frames in clip.given]


def test_files_named_source_are_given_beside_theirs_and_are_no_items(build, tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "a.source.png", "blue", (16, 48))
    for number in (10, 2):
        picture(tmp_path / f"b.source{number}.jpg", size=(number * 8, 16))
    picture(tmp_path / "b.png")
    picture(tmp_path / "lost.source.png")
    source = build()
    assert source.files == ["a.png", "b.png", "lost.source.png"]
    assert given_sizes(*read(source, 0)) == [(1, 48, 16, 3)]
    assert given_sizes(*read(source, 1)) == [(1, 16, 16, 3), (1, 16, 80, 3)]
    assert fault(source, 2).reason == "no_target"
    before = source.identity()
    picture(tmp_path / "a.source.png", "green", (16, 48))
    assert build().identity() != before
    (tmp_path / "a.source.png").write_bytes(b"damaged")
    assert fault(build(), 0).reason == "unreadable_image"


def test_a_list_names_what_is_given_and_a_source_may_also_be_an_author(build, tmp_path):
    pictures(tmp_path, "out.png", "in.png")
    for column, cell in (
        ("input_image", "in.png"),
        ("source", "in.png"),
        ("source", "the museum"),
        ("source", "https://museum.org/in.png"),
        ("source", "museum/of/in.png"),
    ):
        given = [cell] if cell == "in.png" else []
        rows = {"file_name": "out.png", "caption": "make it red", column: cell}
        write_json(tmp_path / "metadata.jsonl", rows)
        source = build()
        assert source.files == (["out.png"] if given else ["in.png", "out.png"])
        assert len(read(source, len(source) - 1)[0].given) == len(given)
    (tmp_path / "metadata.jsonl").write_text(
        json.dumps({"file_name": "out.png", "text": "b", "source_image": "none.png"})
    )
    assert fault(build(), 1).reason in ("missing_file", "unreadable_image")


def test_a_picture_is_given_beside_every_clip_and_a_video_beside_its_own(build, tmp_path):
    for name in ("a", "a.source"):
        video.write_mp4(tmp_path / f"{name}.mp4", counting_clip(10), 8)
    source = build(clip_frames=5)
    clips = read(source)
    assert [frame_numbers(c) for c in clips] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert all(np.array_equal(c.video, c.given[0]) for c in clips)
    video.write_mp4(tmp_path / "a.source.mp4", counting_clip(10), 8)
    (tmp_path / "a.source.mp4").unlink()
    picture(tmp_path / "a.source.png")
    assert [given_sizes(c) for c in read(build(clip_frames=5))] == [[(1, 32, 24, 3)]] * 2


def both(tmp_path, rows: list[dict]) -> list:
    """The folder with that list of its files, and the list as a table."""
    write_lines(tmp_path / "metadata.jsonl", rows)
    return [folder.build(str(tmp_path)), table.build(str(tmp_path / "metadata.jsonl"))]


@pytest.mark.parametrize("cell", ["['a.png', 'b.JPG']", '["a.png", "b.JPG"]'])
def test_a_cell_may_hold_a_list_of_pictures(cell, tmp_path):
    """As pandas and DiffSynth write it; in a folder suffixes may be in either case."""
    for name, colour in (("out.png", "red"), ("a.png", "blue"), ("b.JPG", "white")):
        picture(tmp_path / name, colour)
    row = {"image": "out.png", "prompt": "make it red", "edit_image": cell}
    for source in both(tmp_path, [row]):
        (clip,) = read(source)
        assert len(source) == 1 and [tuple(v[0, 0, 0]) for v in clip.given] == [(0, 0, 255), (255, 255, 255)]
    listed, _ = both(tmp_path, [row | {"image": "out.PNG", "edit_image": cell.lower()}])
    assert listed.files == ["out.png"] and len(read(listed)[0].given) == 2


GIVEN = "edit_image control_path control_path_0 input_images kontext_image conditioning".split()
ELSEWHERE = "original_filename source_file input_path output_path target_file".split()


@pytest.mark.parametrize("column", GIVEN + ELSEWHERE)
def test_columns_of_other_trainers_give_pictures_that_are_here(column, tmp_path):
    """What a file was called before, or where another tool wrote its own, is neither given nor made."""
    for name in ("out.png", "in.png")[: 1 + (column in GIVEN)]:
        picture(tmp_path / name)
    cell = "in.png" if column in GIVEN else "photos/IMG_1.JPG"
    for source in both(tmp_path, [{"file_name": "out.png", "text": "a fox", column: cell}]):
        (clip,) = read(source)
        assert len(source) == 1 and len(clip.given) == (column in GIVEN) and clip.caption == "a fox"


def test_a_column_of_pictures_that_no_rule_knows_is_reported_and_can_be_given(tmp_path, caplog):
    pictures(tmp_path, "out.png", "in.png")
    (tmp_path / "metadata.csv").write_text("filename,description,sketch\nout.png,a fox,in.png\n")
    for opened in (folder.build, lambda spec, **options: table.build(f"{spec}/metadata.csv", **options)):
        caplog.clear()
        opened(str(tmp_path))
        assert "sketch" in caplog.text and "--given-column" in caplog.text
        source = opened(str(tmp_path), given_column="sketch", caption_column="description")
        assert len(source) == 1 and len(read(source)[0].given) == 1 and read(source)[0].caption == "a fox"


def test_beside_a_target_the_image_is_given(tmp_path):
    for name in ("out.png", "in.png"):
        picture(tmp_path / name, size=(32, 16) if name == "in.png" else (16, 16))
    (tmp_path / "t.csv").write_text("image,edited_image,instruction\nin.png,out.png,make it red\n")
    (clip,) = read(table.build(str(tmp_path / "t.csv")))
    assert clip.video.shape == (1, 16, 16, 3) and given_sizes(clip) == [(1, 16, 32, 3)]


@pytest.mark.parametrize(
    "files, pairs",
    [
        (["a.png", "a.SOURCE.png"], {"a.png": 1}),
        (["a\u0308.png", "\u00e4.source.png"], {"a\u0308.png": 1}),
        (["a.png", "a.jpg", "a.source.png"], {"a.jpg": 1, "a.png": 1}),
        (["target/0.png", "control/0.jpg"], {"target/0.png": 1}),
        (["set/output/0.png", "set/input/0.png"], {"set/output/0.png": 1}),
        (["a.png", "a-condlabel.png", "a-masklabel.png"], {"a.png": 1}),
        (["a.png", "a.source.png", ("metadata.csv", "file_name,text,source\na.png,red,a.source.png\n")], {"a.png": 1}),
        (["control/0.png", "b.png"], {"b.png": 0, "control/0.png": 0}),
        (["targets/a.png", "controls/a_0.png", "controls/a_1.png"], {"targets/a.png": 2}),
        (["images/a.png", "control_1/a.png", "control_2/a.png"], {"images/a.png": 2}),
        (["target/a_1.png", "target/a.png", "control/a_1.png"], {"target/a.png": 0, "target/a_1.png": 1}),
    ],
)
def test_pairs_are_found_by_one_rule_of_names(build, files, pairs, tmp_path):
    for name in files:
        if isinstance(name, tuple):
            (tmp_path / name[0]).write_text(name[1])
        else:
            picture(tmp_path / name)
    source = build()
    assert {name: len(read(source, i)[0].given) for i, name in enumerate(source.files)} == pairs


def test_a_given_video_that_is_shorter_is_no_still(build, tmp_path):
    """9 given frames are one window of 5 and not a still that is given with each of the target's four."""
    video.write_mp4(tmp_path / "a.mp4", counting_clip(20), 8)
    video.write_mp4(tmp_path / "a.source.mp4", counting_clip(9), 8)
    clips = build(clip_frames=5).read(0)
    assert frame_numbers(next(clips)) == [0, 1, 2, 3, 4]
    refused("given video", next, clips, error=SampleError)
    video.write_mp4(tmp_path / "a.source.mp4", counting_clip(20), 16)
    assert all("given_other_rate" in clip.lost for clip in build(clip_frames=5).read(0))


def test_rows_that_name_no_file_are_counted(build, tmp_path, caplog):
    picture(tmp_path / "a.png")
    rows = [{"file_name": name, "text": "one"} for name in ("a.png", None)]
    write_lines(tmp_path / "metadata.jsonl", [*rows, {"text": "two"}])
    assert len(build()) == 1
    assert "2 rows of" in caplog.text
