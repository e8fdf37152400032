"""Sources that somebody else wrote: what cannot be used is dropped, counted and named; nothing hangs or ends a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from dfm_nb import prepare
from dfm_nb.base.argv import guard

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
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("good one.png", "good two.png"):
        picture(folder / name)
    return folder


def test_captions_that_utf8_cannot_encode_are_dropped_and_named(photos, tmp_path):
    picture(os.fsdecode(os.fsencode(photos) + b"/caf\xe9.png"))  # a name in latin-1 is the caption
    picture(photos / "json.png")
    (photos / "json.json").write_text(json.dumps({"caption": LONE}))
    manifest = prepared(f"folder:{photos}", tmp_path / "d")
    assert manifest["counts"]["samples"] == 2 and manifest["counts"]["dropped_by_reason"] == {"caption_not_utf8": 2}
    assert all("caf" in d["key"] + d["detail"] or "json" in d["key"] for d in manifest["drops"])


def test_a_file_whose_name_is_not_utf8_is_used_with_a_caption_and_named_without_pixels(photos, tmp_path):
    folder = os.fsencode(photos)
    picture(os.fsdecode(folder + b"/caf\xe9.png"))
    Path(os.fsdecode(folder + b"/caf\xe9.txt")).write_text("a café")
    Path(os.fsdecode(folder + b"/b\xe9.png")).write_bytes(b"no picture")
    Path(os.fsdecode(folder + b"/b\xe9.txt")).write_text("broken")
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
