"""Sources that somebody else wrote: what cannot be used is dropped, counted and named; nothing hangs or ends a run."""

import os
import socket
import zipfile
from pathlib import Path

import fsspec
import pandas as pd
import pytest
from PIL import Image

from dfm_nb import prepare
from dfm_nb.base.argv import guard
from dfm_nb.data.sources import folder, table
from tests.data.sources.test_folder import fault
from tests.frames import picture, pictures
from tests.json_files import read_json, write_json, write_lines
from tests.processes import commands
from tests.refusals import refused

LONE = "\ud83d x"  # half of a pair: JSON can hold it, UTF-8 cannot


def prepared(source: str, out: Path, *extra: str) -> dict:
    """The manifest of a preparation that ended well."""
    assert guard(prepare.main, ["--source", source, "--short-side", "16", "--output-dir", str(out), *extra]) == 0
    return read_json(out / "manifest.json")


def drops(manifest: dict) -> dict[str, str]:
    assert manifest["counts"]["dropped"] == len(manifest["drops"])
    return {d["reason"]: d["detail"] for d in manifest["drops"]}


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    pictures(root, "good one.png", "good two.png")
    return root


def test_captions_that_utf8_cannot_encode_are_dropped_and_named(photos, tmp_path):
    picture(photos / os.fsdecode(b"caf\xe9.png"))  # a name in latin-1 is the caption
    picture(photos / "json.png")
    write_json(photos / "metadata.jsonl", {"file_name": "json.png", "text": LONE})
    manifest = prepared(f"folder:{photos}", tmp_path / "d")
    assert manifest["counts"]["samples"] == 2 and manifest["counts"]["dropped_by_reason"] == {"caption_not_utf8": 2}
    assert all("caf" in d["key"] + d["detail"] or "json" in d["key"] for d in manifest["drops"])
    rows = [{"image": "good one.png", "caption": c} for c in ("one", "two", LONE)]
    write_lines(photos / "t.jsonl", [*rows, {"image": LONE, "caption": "three"}])
    manifest = prepared(f"table:{photos / 't.jsonl'}", tmp_path / "e")
    assert manifest["counts"]["samples"] == 2 and manifest["counts"]["dropped"] == 2
    assert "row 3 of t.jsonl" in drops(manifest)["caption_not_utf8"]


# ---- files that are none, and files elsewhere ---------------------------------------------------------------------


def test_devices_pipes_and_sockets_are_refused_and_do_not_hang(photos, tmp_path, monkeypatch):
    os.mkfifo(photos / "pipe.png")
    os.mkfifo(photos / "pipe.mp4")
    (photos / "zero.png").symlink_to("/dev/zero")
    monkeypatch.chdir(photos)  # a socket's path is short
    socket.socket(socket.AF_UNIX).bind("s.png")
    names = ["good one.png", "good two.png", "pipe.png", "pipe.mp4", "zero.png", "s.png", "/dev/zero", "."]
    (photos / "t.csv").write_text("image,caption\n" + "".join(f"{n},a caption\n" for n in names))
    manifest = prepared(f"table:{photos / 't.csv'}", tmp_path / "d")
    assert manifest["counts"]["samples"] == 2 and manifest["counts"]["dropped_by_reason"] == {"not_a_file": 6}
    (photos / "gone.png").symlink_to("of a disk that is not mounted.png")
    (photos / "loop.png").symlink_to("loop.png")
    reasons = {"not_a_file": 3, "missing_file": 2, "outside": 1}
    assert prepared(f"folder:{photos}", tmp_path / "e")["counts"]["dropped_by_reason"] == reasons


def test_paths_that_leave_a_folder_are_refused_unless_asked(photos, tmp_path):
    """Four ways out for a picture, a caption file that is a link, and then a table that is one."""
    picture(tmp_path / "secret.png")
    (tmp_path / "secret.txt").write_text("a secret")
    (photos / "link.png").symlink_to(tmp_path / "secret.png")
    (photos / "up").symlink_to(tmp_path)
    (photos / "good one.txt").symlink_to(tmp_path / "secret.txt")
    out = ["../secret.png", tmp_path / "secret.png", "up/secret.png", "link.png", "up/photos/good two.png"]
    (photos / "captions.csv").write_text("file,caption\n" + "".join(f"{path},a caption\n" for path in out))
    manifest = prepared(f"folder:{photos}", tmp_path / "d")
    assert manifest["counts"]["samples"] == 2 and manifest["counts"]["dropped_by_reason"] == {"outside": 5}
    assert "--allow-outside" in drops(manifest)["outside"]
    asked = prepared(f"folder:{photos}", tmp_path / "e", "--allow-outside")
    assert asked["counts"]["samples"] == 7 and asked["counts"]["dropped"] == 0
    assert asked["plan"]["source"] != manifest["plan"]["source"]
    (photos / "captions.csv").rename(tmp_path / "elsewhere.csv")
    (photos / "captions.csv").symlink_to(tmp_path / "elsewhere.csv")
    refused("--allow-outside", folder.build, str(photos))


def test_a_table_that_the_user_names_may_hold_any_path_and_a_fetched_one_may_not(photos, tmp_path, monkeypatch):
    picture(tmp_path / "secret.png")
    named = {"image": [str(tmp_path / "secret.png"), "../secret.png", "good one.png"], "caption": "a"}
    pd.DataFrame(named).to_csv(photos / "t.csv", index=False)
    assert [len(list(table.build(str(photos / "t.csv")).read(i))) for i in range(3)] == [1, 1, 1]
    monkeypatch.chdir(photos)
    assert len(list(table.build(pd.DataFrame(named)).read(0))) == 1
    server = fsspec.filesystem("memory")
    server.put(f"{photos}/", "/shared/photos/", recursive=True)
    server.put_file(str(tmp_path / "secret.png"), "/shared/secret.png")
    fetched = table.build("memory://shared/photos/t.csv")
    assert len(list(fetched.read(2))) == 1
    for index in (0, 1):
        assert fault(fetched, index).reason == "outside"
    assert len(list(table.build("memory://shared/photos/t.csv", allow_outside=True).read(0))) == 1


@pytest.mark.parametrize(
    "name, reason",
    [
        ("file:///{secret}", "outside"),
        ("../secret.png", "outside"),
        ("zip://secret.png::file:///{zipped}", "bad_url"),
        ("memory://shared/secret.png", "bad_url"),
        ("http://127.0.0.1:9/secret.png", "refused"),
    ],
)
def test_data_at_a_url_say_not_where_to_fetch_from(name, reason, tmp_path):
    """A table's cell, and a name in a list of captions."""
    picture(tmp_path / "secret.png")
    with zipfile.ZipFile(tmp_path / "zipped.png", "w") as archive:
        archive.write(tmp_path / "secret.png", "secret.png")
    name = name.format(secret=tmp_path / "secret.png", zipped=tmp_path / "zipped.png")
    server = fsspec.filesystem("memory")
    server.put_file(str(tmp_path / "secret.png"), "/shared/secret.png")
    server.pipe("/shared/named/captions.csv", f"file,caption\n{name},a caption\n".encode())
    for source, faults in (
        (table.build("memory://shared/named/captions.csv"), {reason}),
        (folder.build("memory://shared/named"), {"outside", "missing_file"}),
    ):
        assert fault(source).reason in faults


def test_a_name_in_a_zip_or_on_a_server_that_could_be_elsewhere_is_left_out_and_said(tmp_path, caplog):
    picture(tmp_path / "a.png")
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        for name in ("a.png", "../b.png", "c.png::file:///etc/passwd"):
            archive.write(tmp_path / "a.png", name)
    assert folder.build(str(tmp_path / "p.zip")).files == ["a.png"]
    assert "../b.png" in caplog.text and "c.png::" in caplog.text
    refused("reference", folder.build, f"reference://::{tmp_path}/index.json")


# ---- sizes --------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, threading
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
def read():
    frames, _ = video.read_still_or_animation(sys.argv[1])
    assert frames[0, -1, -1].tolist() == [255, 0, 0]
    video.resize(frames, 64, 64)
threads = [threading.Thread(target=read) for _ in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
print(peak() - before)
"""


@pytest.mark.slow
def test_four_threads_that_read_a_bomb_share_the_bound_on_decoded_pixels(tmp_path):
    Image.new("RGB", (8000, 8000), "red").save(tmp_path / "bomb.png")  # 200 kB, 183 MiB decoded
    said = commands().run("python", "-W", "ignore", "-c", PEAK, str(tmp_path / "bomb.png"))
    assert int(said.stdout) < 4 * 183 + 1024 + 64  # MiB: a decoded picture a thread, and the share; it was 4 x 1,100
