"""Sources that somebody else wrote: what cannot be used is dropped, counted and named; nothing hangs or ends a run."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from dfm_nb import prepare
from dfm_nb.base import video
from dfm_nb.base.argv import guard
from dfm_nb.base.records import SampleError
from dfm_nb.data.sources import folder, table
from tests.processes import commands

LONE = "\ud83d x"  # half of a pair: JSON can hold it, UTF-8 cannot


def picture(path: Path | str) -> None:
    Image.new("RGB", (32, 32), "red").save(path, "PNG")


def prepared(source: str, out: Path, *extra: str) -> dict:
    """The manifest of a preparation that ended well."""
    assert guard(prepare.main, ["--source", source, "--short-side", "16", "--output-dir", str(out), *extra]) == 0
    return json.loads((out / "manifest.json").read_text())


def drops(manifest: dict) -> dict[str, str]:
    assert manifest["counts"]["dropped"] == len(manifest["drops"])
    return {d["reason"]: d["detail"] for d in manifest["drops"]}


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    for name in ("good one.png", "good two.png"):
        picture(root / name)
    return root


def test_captions_that_utf8_cannot_encode_are_dropped_and_named(photos, tmp_path):
    picture(os.fsdecode(os.fsencode(photos) + b"/caf\xe9.png"))  # a name in latin-1 is the caption
    picture(photos / "json.png")
    (photos / "json.json").write_text(json.dumps({"caption": LONE}))
    manifest = prepared(f"folder:{photos}", tmp_path / "d")
    assert manifest["counts"]["samples"] == 2 and manifest["counts"]["dropped_by_reason"] == {"caption_not_utf8": 2}
    assert all("caf" in d["key"] + d["detail"] or "json" in d["key"] for d in manifest["drops"])


def test_a_file_whose_name_is_not_utf8_is_used_with_a_caption_and_named_without_pixels(photos, tmp_path):
    root = os.fsencode(photos)
    picture(os.fsdecode(root + b"/caf\xe9.png"))
    Path(os.fsdecode(root + b"/caf\xe9.txt")).write_text("a café")
    Path(os.fsdecode(root + b"/b\xe9.png")).write_bytes(b"no picture")
    Path(os.fsdecode(root + b"/b\xe9.txt")).write_text("broken")
    os.rename(photos, odd := Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9t\xe9")))
    manifest = prepared(f"folder:{odd}", tmp_path / "d")
    assert manifest["counts"]["samples"] == 3 and "b\\udce9.png" in drops(manifest)["unreadable_image"]


def test_a_table_with_such_captions_and_paths_goes_on(photos, tmp_path):
    rows = [{"image": "good one.png", "caption": c} for c in ("one", "two", LONE)]
    rows.append({"image": LONE, "caption": "three"})
    (photos / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    manifest = prepared(f"table:{photos / 't.jsonl'}", tmp_path / "d")
    assert manifest["counts"]["samples"] == 2
    assert "row 3 of t.jsonl" in drops(manifest)["caption_not_utf8"] and manifest["counts"]["dropped"] == 2


@pytest.mark.parametrize("line", ["[" * 100_000, '{"caption": ' + "1" * 5000 + "}"], ids=["nested", "digits"])
def test_a_table_that_json_cannot_read_is_one_sentence(line, tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text(line)
    source = ["--source", f"table:{tmp_path / 't.jsonl'}", "--output-dir", str(tmp_path / "d")]
    assert guard(prepare.main, source) == 2
    assert "line 1" in capsys.readouterr().err


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
    (photos / "captions.csv").write_text("file,caption\npipe.png,a\npipe.mp4,b\n")
    assert prepared(f"folder:{photos}", tmp_path / "e")["counts"]["dropped_by_reason"] == {"not_a_file": 2}


def leaving(photos: Path, tmp_path: Path) -> None:
    """Four ways out of the folder for a picture, and a caption file that is a link."""
    picture(tmp_path / "secret.png")
    (tmp_path / "secret.txt").write_text("a secret")
    (photos / "link.png").symlink_to(tmp_path / "secret.png")
    (photos / "up").symlink_to(tmp_path)
    (photos / "good one.txt").symlink_to(tmp_path / "secret.txt")
    out = ["../secret.png", tmp_path / "secret.png", "up/secret.png", "link.png", "up/photos/good two.png"]
    rows = [f"{path},a caption" for path in out]
    (photos / "captions.csv").write_text("file,caption\n" + "\n".join(rows))


def test_paths_that_leave_a_folder_are_refused_unless_asked(photos, tmp_path):
    leaving(photos, tmp_path)
    manifest = prepared(f"folder:{photos}", tmp_path / "d")
    assert manifest["counts"]["samples"] == 2 and manifest["counts"]["dropped_by_reason"] == {"outside": 5}
    assert "--allow-outside" in drops(manifest)["outside"]
    asked = prepared(f"folder:{photos}", tmp_path / "e", "--allow-outside")
    assert asked["counts"]["samples"] == 7 and asked["counts"]["dropped"] == 0
    assert asked["plan"]["source"] != manifest["plan"]["source"]


def test_captions_csv_that_is_a_link_out_of_the_folder_is_refused(photos, tmp_path):
    (tmp_path / "elsewhere.csv").write_text("file,caption\ngood one.png,a\n")
    (photos / "captions.csv").symlink_to(tmp_path / "elsewhere.csv")
    with pytest.raises(ValueError, match="--allow-outside"):
        folder.build(str(photos))
    assert folder.build(str(photos), allow_outside=True).caption(0) == "a"


def test_a_table_that_the_user_names_may_hold_any_path_and_a_fetched_one_may_not(photos, tmp_path, monkeypatch):
    picture(tmp_path / "secret.png")
    named = {"image": [str(tmp_path / "secret.png"), "../secret.png", "good one.png"], "caption": "a"}
    pd.DataFrame(named).to_csv(photos / "t.csv", index=False)
    assert [len(list(table.build(str(photos / "t.csv")).read(i))) for i in range(3)] == [1, 1, 1]
    monkeypatch.chdir(photos)
    assert len(list(table.build(pd.DataFrame(named)).read(0))) == 1
    monkeypatch.setattr(table._fetch, "hub_file", lambda url: photos / "t.csv")
    fetched = table.build("hf://datasets/a/b/t.csv")
    assert len(list(fetched.read(2))) == 1
    for index in (0, 1):
        with pytest.raises(SampleError, match="--allow-outside") as caught:
            list(fetched.read(index))
        assert caught.value.reason == "outside"
    assert len(list(table.build("hf://datasets/a/b/t.csv", allow_outside=True).read(0))) == 1


# ---- a full disk --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """`small_disk(kib)` is a folder on a file system of that size."""
    place = tmp_path / "disk"
    place.mkdir()

    def mounted(kib: int) -> Path:
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", place], capture_output=True
        ).returncode:
            pytest.skip("mounting a file system needs root")
        return place / "d"

    yield mounted
    subprocess.run(["umount", "-l", place], capture_output=True)


@pytest.mark.parametrize("kib, reached", [(32, "plan.json"), (96, "tokenizer"), (320, "rank0-000000"), (440, "000002")])
def test_a_full_disk_is_one_sentence_and_leaves_no_temporary(kib, reached, small_disk, capfd):
    out = small_disk(kib)
    small = [
        "--source",
        "synthetic",
        "--num-images",
        "12",
        "--num-clips",
        "2",
        "--short-side",
        "32",
        "--shard-size",
        "8",
    ]
    assert guard(prepare.main, [*small, "--output-dir", str(out)]) == 2
    said = capfd.readouterr().err
    assert "no space left" in said and "Traceback" not in said
    there = [p.name for p in out.rglob("*") if p.is_file()]
    assert not [name for name in there if name.endswith(".tmp")] and any(reached in name for name in there)


@pytest.mark.parametrize("name", ["tokenizer.safetensors", "text_empty.safetensors", "manifest.json"])
def test_a_disk_that_fills_at_a_small_file_is_one_sentence(name, photos, tmp_path, capfd, monkeypatch):
    def full(self: Path, data: bytes) -> int:
        if f".{name}." in self.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", full)
    out = tmp_path / "d"
    assert guard(prepare.main, ["--source", f"folder:{photos}", "--short-side", "16", "--output-dir", str(out)]) == 2
    assert "no space left" in capfd.readouterr().err
    assert not list(out.rglob("*.tmp")) and not (out / name).exists()
    monkeypatch.undo()
    assert prepared(f"folder:{photos}", out, "--resume")["counts"]["samples"] == 2


def test_every_file_of_a_prepared_folder_has_the_umasks_mode(photos, tmp_path):
    old = os.umask(0o027)
    try:
        prepared(f"folder:{photos}", tmp_path / "d")
    finally:
        os.umask(old)
    files = [p for p in (tmp_path / "d").rglob("*") if p.is_file()]
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} - {0o640} == set(), files


# ---- sizes --------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, threading
from dfm_nb.base import video
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


def test_a_caption_of_100_kb_without_spaces_is_wrapped_at_once():
    started = time.monotonic()
    video.contact_sheet([np.zeros((1, 64, 64, 3), np.uint8)], ["x" * 100_000])
    assert time.monotonic() - started < 5  # over 60 s when each cut measured the whole word
