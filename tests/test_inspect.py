import errno
import json
import shutil
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from dfm_nb import inspect
from dfm_nb.base.argv import guard
from dfm_nb.data import shards
from dfm_nb.display.dataset import InspectedShards
from tests.data.shard_files import write_shard
from tests.json_files import read_json


@pytest.fixture
def folder(shards_of_four, tmp_path):
    return shutil.copytree(shards_of_four, tmp_path / "data")


def faults_of(folder, capsys):
    assert guard(inspect.main, [str(folder), "--verify", "--json", "--samples", "0"]) == 1
    return json.loads(capsys.readouterr().out)["faults"]


def test_table_and_contact_sheet_of_a_prepared_folder(folder, capsys):
    assert inspect.main([str(folder), "--verify"]) == 0
    out = capsys.readouterr().out
    manifest = read_json(folder / "manifest.json")
    assert "34 samples in" in out and "verified" in out and f"train {manifest['counts']['train']}" in out
    assert "tokenizer pca" in out and "dB" in out
    worst = manifest["psnr_db"]["worst"]
    assert len(worst) == 5 and list(worst.values()) == sorted(worst.values()) and all(key in out for key in worst)
    sheet = np.asarray(Image.open(folder / "contact_sheet.png"))
    assert sheet.shape[0] > 200 and sheet.std() > 20


@pytest.mark.parametrize("content", [None, b"", lambda held: held[:-8], lambda held: bytes(8) + held[8:-1] + b"x"])
def test_an_index_of_energon_that_is_missing_or_damaged_is_a_fault(folder, capsys, content):
    index = folder / "rank0-000000.tar.idx"
    if content is None:
        index.unlink()
    else:
        index.write_bytes(content(index.read_bytes()) if callable(content) else content)
    (fault,) = faults_of(folder, capsys)
    assert "rank0-000000.tar.idx" in fault


def test_a_folder_that_cannot_be_written_has_no_contact_sheet(folder, capsys, monkeypatch):
    error = OSError(errno.EROFS, "read-only")
    monkeypatch.setattr(inspect.video, "write_png", mock.Mock(side_effect=error))
    assert guard(inspect.main, [str(folder)]) == 0
    assert "--contact-sheet" in capsys.readouterr().out


def test_changed_missing_surplus_and_cut_shards_are_found(folder, capsys):
    (folder / "rank0-000001.tar").rename(folder / "other.tar")
    tar = folder / "rank0-000000.tar"
    data = bytearray(tar.read_bytes())
    data[len(data) // 3] ^= 1
    tar.write_bytes(data)
    said = " ".join(faults_of(folder, capsys))
    assert all(name in said for name in ("rank0-000001.tar", "other.tar", "rank0-000000.tar"))
    tar.write_bytes(data[:5000])
    assert "rank0-000000.tar" in " ".join(faults_of(folder, capsys))


def test_a_key_that_occurs_twice_is_named(folder, capsys):
    """What is wrong with one sample: tests/attacks/test_samples.py."""
    tar = folder / "rank0-000000.tar"
    clips = [e.read() for e in shards.samples_of(tar)]
    write_shard(tar, [*clips, clips[0]])
    for name in ("manifest.json", "checksums.json"):
        (folder / name).unlink()
    assert any("occurs 2 times" in f for f in faults_of(folder, capsys))


def test_shards_from_elsewhere_are_shown_in_false_colours(shards_of_four, tmp_path, capsys):
    (tmp_path / "part").mkdir()
    shutil.copy(shards_of_four / "rank0-000000.tar", tmp_path / "part" / "theirs.tar")
    assert inspect.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "4 samples in 1 shards" in out and "false colours" in out
    assert np.asarray(Image.open(tmp_path / "contact_sheet.png")).std() > 10
    sheet = tmp_path / "one.png"
    words = ["--contact-sheet", str(sheet), "--tokenizer", "pca", "--tokenizer-path", str(shards_of_four)]
    assert inspect.main([str(tmp_path / "part" / "theirs.tar"), *words]) == 0
    assert "false colours" not in capsys.readouterr().out and sheet.is_file()


@pytest.mark.parametrize("files", [{}, {"a.tar": b"x" * 2000}, {"a.tar": b"x", "manifest.json": b"{"}])
def test_mistakes_are_named(tmp_path, capsys, files):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert guard(inspect.main, [str(tmp_path)]) in (1, 2)
    printed = capsys.readouterr()
    assert str(tmp_path) in printed.out + printed.err and "Traceback" not in printed.err


@pytest.mark.parametrize(
    "stills, clips, shown", [(280, 13, (20, 4)), (60, 60, (12, 12)), (40, 2, (22, 2)), (9, 0, (9, 0))]
)
def test_a_sheet_of_24_shows_several_of_the_kind_that_fewer_samples_have(stills, clips, shown):
    entries = [
        mock.Mock(meta={"num_frames": frames}) for frames, count in ((1, stills), (9, clips)) for _ in range(count)
    ]
    chosen = InspectedShards.chosen(mock.Mock(entries=entries), 24)
    assert len(set(chosen)) == len(chosen) == sum(shown) and sum(i < stills for i in chosen) == shown[0]
