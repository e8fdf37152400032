"""A corpus from a URL has the bytes of the one from the same files here."""

import gzip
import os
import zipfile
from functools import partial
from pathlib import Path

import fsspec
import pytest

from dfm_nb.text.corpus import merge, preprocess
from dfm_nb.text.input import expand_inputs, open_input
from tests.refusals import refused
from tests.servers import Quiet, serving
from tests.text.test_corpus import config, pair, texts, write_jsonl


@pytest.fixture
def served(tmp_path):
    """The URL of a folder with two files of lines, one of them as .gz too, and a .zip of both; and the folder."""
    place = tmp_path / "served"
    place.mkdir()
    write_jsonl(place / "a.jsonl", texts(60))
    write_jsonl(place / "b.jsonl", texts(90))
    (place / "a.jsonl.gz").write_bytes(gzip.compress((place / "a.jsonl").read_bytes()))
    with zipfile.ZipFile(place / "all.zip", "w") as archive:
        for name in ("a.jsonl", "b.jsonl"):
            archive.write(place / name, name)
    server = fsspec.filesystem("memory")
    server.rm("/", recursive=True)
    server.put(f"{place}/", "/text/", recursive=True)
    with serving(partial(Quiet, directory=str(place))) as httpd:
        yield httpd.url, place


def corpus(inputs, prefix, tokenizer, **changes):
    assert preprocess(config(inputs, prefix, tokenizer, **changes)).documents
    return prefix


BOTH = ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize(
    "urls, names",
    [
        (["{http}/*.jsonl"], BOTH),
        (["memory://text/a.jsonl.gz", "{http}/b.jsonl?signed=yes"], BOTH),
        (["{place}/all.zip"], BOTH),
        (["{http}/all.zip"], BOTH),
        (["zip://b*::memory://text/all.zip"], ["b.jsonl"]),
    ],
)
def test_a_corpus_from_urls_has_the_bytes_of_the_local_one(urls, names, served, folders, tmp_path):
    http, place = served
    here = corpus([str(place / name) for name in names], tmp_path / "here", folders["bpe"])
    there = corpus([url.format(http=http, place=place) for url in urls], tmp_path / "there", folders["bpe"])
    assert pair(here) == pair(there)


@pytest.mark.parametrize("url", ["memory://text/*.jsonl", "{http}/*.jsonl"])
def test_parts_of_a_url_join_to_the_bytes_of_one_run(url, served, folders, tmp_path):
    url = url.format(http=served[0])
    whole = corpus([url], tmp_path / "whole", folders["bpe"])
    for part in range(3):
        corpus([url], tmp_path / "parts", folders["bpe"], partition=f"{part}/3")
    parts = [str(tmp_path / f"parts_part{part:05d}-of-00003_text_document") for part in range(3)]
    merge(parts, f"{tmp_path / 'joined'}_text_document", progress=False)
    assert pair(whole) == pair(tmp_path / "joined")


def test_a_url_without_files_and_a_name_that_is_a_chain_are_refused(served, tmp_path):
    refused("none", expand_inputs, ["memory://text/none*.jsonl"], error=FileNotFoundError)
    refused("none", expand_inputs, ["zip://*::memory://text/none.zip"])
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as archive:
        archive.writestr("a.jsonl::file:///etc/passwd", "{}")
    refused("passwd", expand_inputs, [str(tmp_path / "odd.zip")])
    with zipfile.ZipFile(tmp_path / "url.zip", "w") as archive:
        archive.writestr("http://127.0.0.1:9/a.jsonl", "{}")
    assert expand_inputs([str(tmp_path / "url.zip")])[0].startswith("zip://")


def test_what_a_glob_finds_is_a_file_inside(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("in/a.jsonl", "secret"):
        (tmp_path / name).write_text("{}\n")
    os.mkfifo(tmp_path / "in/b.jsonl")
    (tmp_path / "in/c.jsonl").symlink_to(tmp_path / "secret")
    (tmp_path / "in/d.jsonl").symlink_to("a.jsonl")
    assert [Path(name).name for name in expand_inputs([f"{tmp_path}/in/*.jsonl"])] == ["a.jsonl", "d.jsonl"]
    named = [f"{tmp_path}/in/b.jsonl", f"{tmp_path}/in/c.jsonl"]
    assert expand_inputs(named) == named, "a person may name a pipe, or a link"


def test_a_compressed_line_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"1" * 100_000 + b"\n" + b"2" * (5 << 20) + b"\n3\n"))
    with open_input(str(path)) as lines:
        assert [len(line) for line in lines] == [100_001, (5 << 20) + 1, 2]
    monkeypatch.setattr("dfm_nb.text.input.MOST_BYTES", 3 << 20)
    with pytest.raises(ValueError, match="split"), open_input(str(path)) as lines:
        list(lines)


def test_a_file_that_two_globs_find_is_named(tmp_path, caplog):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").touch()
    assert len(expand_inputs([f"{tmp_path}/*.jsonl"])) == 2 and not caplog.text
    assert len(expand_inputs([f"{tmp_path}/*.jsonl", f"{tmp_path}/./a*"])) == 3 and "--input" in caplog.text
