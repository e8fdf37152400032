import errno
import os
import re
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dfm_nb.base import argv, files
from tests.refusals import refused


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "x.json"
    files.write_atomically(path, b"old")
    with pytest.raises(TypeError):
        files.write_atomically(path, None)
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with files.replacing(tmp_path / "x") as first, files.replacing(tmp_path / "x") as second:
        assert first != second
        first.write_bytes(b"1")
        second.write_bytes(b"2")
    assert (tmp_path / "x").read_bytes() == b"1"  # the last to end


def test_the_mode_is_the_umasks_whatever_the_writer_makes(tmp_path):
    old = os.umask(0o027)
    try:
        with files.replacing(tmp_path / "t.safetensors") as temporary:
            save_file({"x": torch.zeros(1)}, temporary)
        files.write_atomically(tmp_path / "x", b"")
    finally:
        os.umask(old)
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o640}


def test_read_json_gives_objects_only(tmp_path):
    path = tmp_path / "x.json"
    assert files.read_json(path) == {}
    for text, value in (("{", {}), ("[1]", {}), ('{"a": 1}', {"a": 1})):
        path.write_text(text)
        assert files.read_json(path) == value


@pytest.mark.parametrize("url", ["s3://a/b", Path("s3://a/b"), "file:///a", "memory://a"], ids=str)
def test_a_url_is_no_place_to_write_to(url):
    refused(re.escape(str(url)), files.local, url)
    assert files.local("a:b/c://d") == Path("a:b/c://d") and files.local("C:/a") == Path("C:/a")


def test_a_link_out_of_a_folder_is_read_only_where_its_checksum_is_listed(tmp_path):
    """Or where it leads into the hub's cache, whose snapshots are made of links."""
    folder, secret, blob = tmp_path / "data", tmp_path / "secret", tmp_path / "models--a--b/blobs" / ("0" * 40)
    for path in (secret, blob, folder / "own.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"a": 1}')
    links = {"out": secret, "within": folder / "own.json", "blob": blob, "device": "/dev/zero", "gone": tmp_path / "x"}
    for name, target in links.items():
        (folder / f"{name}.json").symlink_to(target)
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    (folder / "down").symlink_to(tmp_path)
    found = {name for name in (*links, "folder", "pipe") if files.read_json(folder / f"{name}.json")}
    assert found == {"within", "blob"} and not files.read_json(folder / "down/secret", folder)
    for name in ("out", "pipe", "folder", "device"):
        refused(name, files.plain, folder / f"{name}.json")
    files.seal(folder / files.CHECKSUMS, {"out.json": files.listed_as(secret)})
    assert files.read_json(folder / "out.json") == {"a": 1}
    secret.write_text('{"a": 2}')
    assert files.read_json(folder / "out.json") == {}


def test_a_full_disk_is_named_by_the_file_that_was_written(tmp_path):
    full = OSError(errno.ENOSPC, "full")
    with pytest.raises(OSError) as caught, files.replacing(tmp_path / "x"):
        raise full
    assert caught.value.filename == str(tmp_path / "x") and not list(tmp_path.iterdir())
    assert str(tmp_path / "x") in str(argv.mistake(full))
    with pytest.raises(OSError, match="x"), files.replacing(tmp_path / "x"):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 125120 vs 125040")
    ours = ValueError(f"a/checkpoints: {os.strerror(errno.ENOSPC)}")
    assert argv.mistake(ours) == str(ours)
    # as torch says it of the ranks' store
    assert (os.environ.get("TMPDIR") or tempfile.gettempdir()) in str(
        argv.mistake(RuntimeError(os.strerror(errno.ENOSPC)))
    )
