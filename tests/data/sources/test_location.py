"""Pictures and tables at a URL are those of the same folder here."""

import shutil
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from dfm_nb.base.records import SampleError
from dfm_nb.data.sources import _location, folder, table
from dfm_nb.data.sources._location import fetched
from tests.data.sources.test_folder import fault
from tests.data.sources.test_table import png
from tests.frames import animate, counting_clip, picture, pictures
from tests.json_files import write_lines
from tests.refusals import refused
from tests.servers import Quiet, serving


@pytest.fixture
def photos(tmp_path):
    """A folder as Hugging Face's datasets have it: splits, a list of captions in each, a table, a clip."""
    root = tmp_path / "served" / "photos"
    for name in ("train/red fox.png", "train/b.png", "test/c.png", "validation/d.png", ".hidden/e.png"):
        picture(root / name, "red" if "fox" in name else "blue")
    animate(root / "train/clip.webp", counting_clip(5), duration=100, lossless=True)
    rows = [{"file_name": "red fox.png", "text": "a fox"}, {"file_name": "gone.png", "text": "gone"}]
    write_lines(root / "train/metadata.jsonl", rows)
    (root / "train/b.txt").write_text("blue")
    (root / "test/metadata.csv").write_text("file_name,text\nc.png,also blue\n")
    (root / "t.csv").write_text("image,caption\ntrain/red fox.png,one\ntest/c.png,two\nnone.png,three\n")
    shutil.make_archive(str(root), "zip", root)
    return root


@pytest.fixture
def http(photos):
    with serving(partial(Quiet, directory=str(photos.parent))) as httpd:
        yield httpd.url


class Hub(DirFileSystem):
    """A stand-in for the hub, which no test reaches: `hf://datasets/OWNER/NAME/PATH` is a file of a folder here."""

    protocol, cachable = "hf", False
    folder = ""

    def __init__(self, **options):
        super().__init__(path=self.folder, fs=LocalFileSystem())

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("hf://").rstrip("/")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    known = fsspec.get_filesystem_class("hf")
    monkeypatch.setattr(Hub, "folder", str(tmp_path / "hub"))
    fsspec.register_implementation("hf", Hub, clobber=True)
    yield tmp_path / "hub" / "datasets" / "OWNER" / "NAME"
    fsspec.register_implementation("hf", known, clobber=True)


def everything(source):
    """Of each item its name, its split, and its clips or why there are none."""
    found = []
    for index in range(len(source)):
        try:
            clips = [(c.caption, c.fps, c.video.tobytes()) for c in source.read(index)]
        except SampleError as error:
            clips = error.reason
        found.append((source.item_key(index), source.item_split(index), clips))
    return found


def same(here, there):
    for (*named, clips), (*also, others) in zip(everything(here), everything(there), strict=True):
        assert named == also and (clips == others or (isinstance(clips, str) and isinstance(others, str)))
    hashed = [source.identity()["listing_sha256"] for source in (here, there)]
    return hashed[0] == hashed[1]


def in_memory(photos):
    server = fsspec.filesystem("memory")
    server.rm("/", recursive=True)
    server.put(f"{photos.parent}/", "/in/", recursive=True)


WEB = ["{http}/photos", "{http}/photos.zip"]  # whose files have no hash before they are read


@pytest.mark.parametrize(
    "spec", ["memory://in/photos", "{zip}", "zip://::memory://in/photos.zip", "file://{photos}", *WEB]
)
def test_a_folder_at_a_url_or_in_a_zip_is_that_folder(photos, http, spec):
    in_memory(photos)
    there = folder.build(spec.format(photos=photos, zip=photos.with_suffix(".zip"), http=http))
    here = folder.build(str(photos))
    assert (same(here, there) or spec in WEB) and len(here) == 6 and here.splits.count("train") == 4
    assert everything(there)[0][2][0][0] == "blue"


def test_names_of_a_zip_are_utf8_without_its_mark_and_no_password_is_needed(tmp_path):
    picture(tmp_path / "in/caf__.png", "red")
    (tmp_path / "in/metadata.csv").write_text("file_name,text\ncafé.png,a red café\n", encoding="utf-8")
    path = Path(shutil.make_archive(str(tmp_path / "in"), "zip", tmp_path / "in"))
    plain = path.read_bytes().replace(b"caf__", "café".encode())
    path.write_bytes(plain)
    ((_, _, [(caption, *_)]),) = everything(folder.build(str(path)))
    assert caption == "a red café"
    at = plain.index(b"PK\1\2") + 8
    path.write_bytes(plain[:at] + b"\1" + plain[at + 1 :])
    refused(r"in\.zip .*password", folder.build, str(path))


TABLES = [
    "memory://in/photos/t.csv",
    "zip://t.csv::{zip}",
    "file://{photos}/t.csv",
    "{http}/photos/t.csv?signed=yes/no",
]


@pytest.mark.parametrize("spec", TABLES)
def test_a_table_at_a_url_has_the_files_of_its_place(photos, http, spec):
    in_memory(photos)
    there = table.build(spec.format(photos=photos, zip=photos.with_suffix(".zip"), http=http))
    assert same(table.build(str(photos / "t.csv")), there) and len(there) == 3


def test_what_cannot_be_had_is_said_with_its_url(photos, monkeypatch):
    in_memory(photos)
    for spec in ("memory://in/none", "nothing://in", "zip://::memory://in/none.zip", "none.zip"):
        with pytest.raises((ValueError, FileNotFoundError), match=spec.rpartition("/")[2]):
            folder.build(spec)
    fsspec.filesystem("memory").pipe("/in/photos/train/b.png", b"no picture")
    source = folder.build("memory://in/photos")
    damaged = fault(source)
    assert damaged.reason == "unreadable_image" and "memory://in/photos/train/b.png" in damaged.detail
    monkeypatch.setattr(_location, "MOST_BYTES", 5)
    assert fault(source, source.files.index("train/red fox.png")).reason == "too_large"


def parquet(path, colours, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = [{"bytes": png(colour), "path": None} for colour in colours]
    pq.write_table(pa.table({"image": image, "text": [f"a {c} square" for c in colours]}), path, **options)


@pytest.mark.parametrize("source", ["table", "folder"])
@pytest.mark.parametrize("validation", [True, False])
def test_parquet_files_of_a_hub_data_set_are_one_table_with_its_splits(hub, source, validation):
    """No hub is reachable in tests: `Hub` replaces it."""
    parquet(hub / "data/test-00000-of-00001.parquet", ["lime"])
    parquet(hub / "data/train-00000-of-00002.parquet", ["red", "blue", "red"], row_group_size=2)
    parquet(hub / "data/train-00001-of-00002.parquet", ["white"])
    if validation:
        parquet(hub / "data/validation-00000-of-00001.parquet", ["black", "red"])
    build = {"table": table, "folder": folder}[source].build
    found = build("hf://datasets/OWNER/NAME")
    rest = "train" if validation else None
    assert [found.item_split(i) for i in range(len(found))] == [rest] * 4 + ["test"] + ["val"] * 2 * validation
    captions = [next(found.read(i)).caption for i in range(5)]
    assert captions == ["a red square", "a blue square", "a red square", "a white square", "a lime square"]
    assert np.array_equal(next(found.read(3)).video[0, 0, 0], [255, 255, 255])
    assert found.identity() == build("hf://datasets/OWNER/NAME").identity() and same(found, build(str(hub)))


def test_a_folder_of_tables_names_files_inside_it_alone(tmp_path):
    pictures(tmp_path, "in/a.png", "secret.png")
    image = [{"bytes": None, "path": path} for path in ("a.png", "../secret.png", "http://127.0.0.1:9/a.png")]
    (tmp_path / "in/a.png").rename(tmp_path / "in/.a.png")
    image[0]["path"] = ".a.png"
    pq.write_table(pa.table({"image": image, "text": ["a"] * 3}), tmp_path / "in/t.parquet")
    for build in (folder.build, table.build):
        source = build(str(tmp_path / "in"))
        assert [clips if isinstance(clips, str) else "read" for _, _, clips in everything(source)] == [
            "read",
            "outside",
            "refused",
        ]


def test_tables_of_other_columns_are_not_joined(tmp_path):
    parquet(tmp_path / "a.parquet", ["red"])
    pq.write_table(pa.table({"image": [b"x"], "caption": ["x"]}), tmp_path / "b.parquet")
    refused("caption", table.build, str(tmp_path))


class Recording(Quiet):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", self.path.replace("/moved", "/there"))
            return self.end_headers()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize(
    "written, asked",
    [
        ("/a.png?sig=a%2Fb%2bc+d%3D&t=%20", None),
        ("/a%2Fb.png", None),
        ("/a b/\u00e9 100%.png", "/a%20b/%C3%A9%20100%25.png"),
    ],
)
def test_a_url_is_asked_for_as_it_is_written(written, asked):
    with serving(Recording, asked=[]) as server:
        for place in ("", "/moved"):
            with fetched(f"{server.url}{place}{written}"):
                pass
    assert [path for path in server.asked if not path.startswith("/moved")] == [
        f"{place}{asked or written}" for place in ("", "/there")
    ]
