"""Nothing of others is replaced, and nothing is written through a link below a folder that somebody named."""

import os
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest

from dfm_nb.base import files, process, video
from dfm_nb.base.metrics import Metrics
from dfm_nb.data import shards
from dfm_nb.data.prepared_folder import PreparedFolder
from dfm_nb.import_ import import_weights
from dfm_nb.text import mixture
from dfm_nb.text.check import sound
from dfm_nb.text.indexed import Index
from dfm_nb.text.parts import Parts
from tests.frames import black
from tests.json_files import write_json
from tests.refusals import refused
from workbench import lab, notebook_run
from workbench.studio import Studio


@pytest.fixture
def theirs(tmp_path) -> Path:
    """A file of the user's that a foreign folder's links lead to."""
    path = tmp_path / "theirs"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious" and not path.is_symlink()


def corpus(folder: Path, name: str = "c") -> None:
    with Parts.open(f"{folder}/{name}", {"text": f"{folder}/{name}_text_document"}, {"of": "test"}) as parts:
        parts.append("text", np.arange(3, dtype=np.uint16), np.array([3], np.int32), np.array([1], np.int32))
        parts.progress.counts["documents"] = 1
        parts.save()
        parts.finish(np.dtype(np.uint16), {"made": "here"})


LINKS = {
    "metrics": lambda link: Metrics(link),
    "log": lambda link: process.start(["true"], link, own_session=False).wait(),
    "appended": lambda link: files.appending(link).close(),
}


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_appended_through_a_link(theirs, tmp_path, name):
    for target in (theirs, tmp_path / "dangling"):
        link = tmp_path / f"{target.name}.link"
        link.symlink_to(target)
        refused(link.name, LINKS[name], link)
    assert not (tmp_path / "dangling").exists()
    os.mkfifo(tmp_path / "pipe")
    refused("pipe", files.appending, tmp_path / "pipe")


def test_a_link_in_a_files_place_is_replaced_and_its_target_stays(theirs, tmp_path):
    (tmp_path / "link").symlink_to(theirs)
    files.write_atomically(tmp_path / "link", b"ours")
    assert (tmp_path / "link").read_bytes() == b"ours" and not (tmp_path / "link").is_symlink()


def test_a_name_that_was_free_is_taken_once(tmp_path):
    """Two processes found it free, and both write it."""
    for name in ("a", "b", "c"):
        files.check_free(tmp_path / name, False)
    files.check_free(tmp_path / "c", True)  # --overwrite
    for name in ("a", "c"):
        (tmp_path / name).write_text("the other's")
    refused("a exists", files.write_atomically, tmp_path / "a", b"ours", error=FileExistsError)
    files.write_atomically(tmp_path / "b", b"ours")
    files.write_atomically(tmp_path / "b", b"again")
    files.write_atomically(tmp_path / "c", b"ours")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "the other's", "b": "again", "c": "ours"}


def test_a_free_name_is_written_without_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "none"))
    files.check_free(tmp_path / "a", False)
    files.write_atomically(tmp_path / "a", b"ours")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_folder_below_ours_is_no_link_and_one_above_may_be(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    assert files.subfolder(tmp_path / "runs", "a", "b").is_dir()
    for name, target in (("c", "disk"), ("d", "nowhere")):
        (tmp_path / name).symlink_to(target)
        refused(name, files.subfolder, tmp_path, name, "b")
    assert {p.name for p in (tmp_path / "disk").iterdir()} == {"a"} and not (tmp_path / "nowhere").exists()


# ---- text corpora -------------------------------------------------------------------------------------------------

BESIDE = (
    *("c.skipped.jsonl", "c.progress.json", "c.lock", "c.progress.json.tmp", "c_text_document.bin.part"),
    *("c_text_document.lengths.part", "c_text_document.meta.part", "c_text_document.idx.part", "c.unfinished.txt"),
)


def test_a_corpus_keeps_what_lies_beside_it(tmp_path):
    for name in BESIDE:
        (tmp_path / name).write_text("theirs")
    for text in ("theirs", '{"file": "theirs"}'):  # as ours begin
        (tmp_path / "c.skipped.jsonl").write_text(text)
        refused("skipped", corpus, tmp_path, error=FileExistsError)
    (tmp_path / "c.skipped.jsonl").unlink()
    for _ in range(2):
        corpus(tmp_path)
    assert {p.read_text() for p in map(tmp_path.joinpath, BESIDE[1:])} == {"theirs"}
    made = {f"c_text_document.{end}" for end in ("bin", "idx", "meta.json")}
    assert {p.name for p in tmp_path.iterdir()} == {*BESIDE[1:], *made}


@pytest.mark.parametrize(
    "name", ["_text_document.bin", "_text_document.idx", "_text_document.meta.json", ".unfinished/lock"]
)
def test_a_corpus_replaces_no_file_of_others(tmp_path, name):
    """A `{}` beside it, or a record of a run that was never begun, does not make it ours."""
    place = tmp_path / f"c{name}"
    place.parent.mkdir(exist_ok=True)
    place.write_text("theirs")
    if not name.endswith("json"):
        (tmp_path / "c_text_document.meta.json").write_text("{}")
    (tmp_path / "c.progress.json").write_text('{"signature": {}, "progress": {}}')
    refused("c[._]", corpus, tmp_path, error=FileExistsError)
    assert place.read_text() == "theirs"


@pytest.mark.parametrize("end", ["bin", "idx", "meta.json"])
def test_links_within_a_corpus_are_followed_and_none_out_of_it(tmp_path, end):
    for name in ("here", "away"):
        (tmp_path / name).mkdir()
        corpus(tmp_path / name)
    link = tmp_path / f"here/c_text_document.{end}"
    link.rename(tmp_path / "here/moved")
    link.symlink_to("moved")
    assert sound(tmp_path / "here/c_text_document").num_tokens == 3
    link.unlink()
    link.symlink_to(tmp_path / "away" / link.name)
    if end == "meta.json":
        assert files.read_json(link) == {}
    else:
        refused(link.name, sound, tmp_path / "here/c_text_document")
    (tmp_path / "typed").symlink_to("away")
    assert sound(tmp_path / "typed/c_text_document").num_tokens == 3


def test_a_corpus_is_not_written_through_links(theirs, tmp_path):
    (tmp_path / "c.skipped.jsonl").symlink_to(theirs)
    refused("skipped", corpus, tmp_path, error=FileExistsError)
    with pytest.raises(KeyboardInterrupt), Parts.open(f"{tmp_path}/e", {}, {}) as parts:
        parts.save()
        raise KeyboardInterrupt
    (tmp_path / "e.unfinished/e_text_document.bin").symlink_to(theirs)
    refused(r"e_text_document\.bin", corpus, tmp_path, "e")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "l.unfinished").symlink_to("elsewhere")
    refused(r"l\.unfinished", corpus, tmp_path, "l")
    corpus(tmp_path, "d")
    assert not any((tmp_path / "elsewhere").iterdir())
    (tmp_path / "d_text_document.bin").rename(tmp_path / "moved.bin")  # to a larger disk
    (tmp_path / "d_text_document.bin").symlink_to("moved.bin")
    corpus(tmp_path, "d")
    assert (tmp_path / "moved.bin").exists() and not (tmp_path / "d_text_document.bin").is_symlink()


# ---- folders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["images", "00_tour.ipynb", "images/noising.png"])
def test_lab_follows_no_link_and_keeps_what_is_there(theirs, tmp_path, name):
    place = tmp_path / "foreign/notebooks"
    source = lab.shipped()
    place.mkdir(parents=True)
    (place / "01_prepare.ipynb").write_bytes((source / "01_prepare.ipynb").read_bytes())
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).symlink_to(tmp_path / "created" if name == "images" else theirs)
    if name == "images":
        refused("images", lab.provide, place)
        assert not (tmp_path / "created").exists()
    else:
        lab.provide(place)
        assert (place / name).is_symlink() and (place / "02_train.ipynb").is_file()


@pytest.mark.parametrize("name", [".nv-meta", shards.RECORDS])
def test_a_data_folders_records_are_no_link(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=name), PreparedFolder(tmp_path / "data").turn():
        pass
    assert not any((tmp_path / "elsewhere").iterdir())


def test_an_upload_replaces_no_file_and_follows_no_link(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_text("mine")
    (tmp_path / "opened").symlink_to("pictures")
    files_of = [{"name": "../a.png", "content": memoryview(b"x")}]
    said: list[str] = []
    studio = SimpleNamespace(folder=None, controls={}, open=lambda path: said.append(path.read_text()), _say=str)
    Studio._on_upload(studio, files_of)
    studio.folder = tmp_path
    refused("opened", Studio._on_upload, studio, files_of)
    assert said == ["x"] and (tmp_path / "pictures/a.png").read_text() == "mine"


# ---- one file -----------------------------------------------------------------------------------------------------


def page(path: Path) -> None:
    notebook = path.with_suffix(".ipynb")
    nbformat.write(nbformat.v4.new_notebook(), notebook)
    notebook_run.write_report(notebook)


VIEWS = {
    "sheet.png": lambda path: video.write_png(path, black(8, 8)),
    "page.html": page,
    "blend.yaml": lambda path: mixture.write_yaml(mixture.parse_list(["1.0", "a"]), path),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_replaced_where_it_has_our_mark(theirs, tmp_path, name):
    """By another view: a clip, or weights, of its name are refused."""
    link = tmp_path / f"link.{name}"
    own = tmp_path / name
    other = tmp_path / f"theirs.{name}"
    link.symlink_to(theirs)
    VIEWS[name](link)
    VIEWS[name](own)
    other.write_bytes(b"theirs")
    files.check_free(own, False, mark=files.MARK)
    files.check_free(tmp_path / "absent", False)
    for taken in (own, other, tmp_path):
        refused(taken.name, files.check_free, taken, False, error=FileExistsError)
        files.check_free(taken, True)


def test_import_replaces_a_file_where_it_is_told(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_text("theirs")
    refused(file.name, import_weights, tmp_path, file, error=FileExistsError)
    refused("no weights", import_weights, tmp_path, file, overwrite=True)
    assert file.read_text() == "theirs"


def test_a_notebook_replaces_what_it_wrote_before_alone(theirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nbformat.write(nbformat.v4.new_notebook(), "a.ipynb")
    for name in ("o.ipynb", "o.html"):
        Path(name).symlink_to(theirs)
        refused(name, notebook_run.execute, "a.ipynb", "o.ipynb", {}, progress=False, error=FileExistsError)
        if name == "o.ipynb":
            Path(name).unlink()
    Path("o.html").unlink()
    Path("o.ipynb").write_bytes(Path("a.ipynb").read_bytes())
    refused("o.ipynb", notebook_run.execute, "a.ipynb", "o.ipynb", {}, progress=False, error=FileExistsError)


@pytest.mark.parametrize("progress", [{}, [1], {"at": [0] * 9}, {"sizes": {"text.bin": -1}}, {"counts": 1}], ids=str)
def test_the_progress_of_others_is_not_believed(tmp_path, progress):
    (tmp_path / "c.unfinished").mkdir()
    told = {"signature": {"of": "test"}, "progress": progress}
    write_json(tmp_path / "c.unfinished/progress.json", told)
    corpus(tmp_path)
    assert Index.open(tmp_path / "c_text_document").num_tokens == 3
