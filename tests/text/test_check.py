"""inspect's counts against the definition; each check of verify fails on the fault that it is for."""

import struct
from pathlib import Path

import numpy as np
import pytest

from dfm_nb.text import check as text_check
from dfm_nb.text import commands
from dfm_nb.text.corpus import preprocess
from dfm_nb.text.indexed import Index, read_meta
from tests.refusals import refused
from tests.text.corpora import write_pair
from tests.text.test_corpus import config, write_jsonl
from tests.text.text_tokenizers import sample_text

TEXTS = [sample_text(i, words=3 + i) for i in range(40)]


@pytest.fixture
def corpus(folders, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)

    def make(name: str = "out", kind: str = "gpt2", **changes) -> str:
        return preprocess(config(source, tmp_path / name, folders[kind], **changes)).prefixes["text"]

    return make


def failed(checks) -> list[str]:
    return [c.name for c in checks if c.passed is False]


def passed(prefixes) -> list[bool | None]:
    return [c.passed for c in text_check.alike(prefixes)]


def edit(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(data)


def _truncate(prefix: str) -> None:
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-10])


def _last_token(prefix: str, value: int) -> None:
    index = Index.open(prefix)
    at = int(index.pointers[5]) + 2 * int(index.lengths[5]) - 2
    edit(f"{prefix}.bin", at, struct.pack("<H", value))


FAULTS = {
    "both files are there and not empty": lambda p: Path(f"{p}.bin").write_bytes(b""),
    "the index can be read": lambda p: edit(f"{p}.idx", 0, b"NOTANIDX"),
    "the sizes agree": _truncate,
    "every sequence has tokens": lambda p: edit(f"{p}.idx", 34, struct.pack("<i", 0)),
    "the pointers follow the lengths": lambda p: edit(f"{p}.idx", 34 + 4 * 40 + 8, struct.pack("<q", 2)),
    "the document bounds rise": lambda p: edit(f"{p}.idx", 34 + 12 * 40 + 8, struct.pack("<q", 30)),
    "token ids are in the vocabulary": lambda p: edit(f"{p}.bin", 0, struct.pack("<H", 60_000)),
    "documents end with EOD": lambda p: _last_token(p, 7),
}


def test_verify_finds_each_fault_and_none_in_a_sound_corpus(corpus, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    for name, damage in FAULTS.items():
        prefix = corpus()
        checks = text_check.verify(prefix, append_eod=True, inputs=[str(source)], progress=False)
        assert all(c.passed for c in checks) and len(checks) == 10
        damage(prefix)
        assert name in failed(text_check.verify(prefix, append_eod=True, progress=False))
    prefix = corpus(append_eod=False)
    assert failed(text_check.verify(prefix, append_eod=True, progress=False)) == ["documents end with EOD"]
    unasked = text_check.verify(prefix, progress=False)
    assert failed(unasked) == [] and any(c.passed is None for c in unasked)
    source.write_text(source.read_text() + '{"text": "one more"}\n')
    checks = text_check.verify(prefix, inputs=[str(source)], progress=False)
    assert failed(checks) == ["all documents of the JSONL are there"]
    capsys.readouterr()
    assert commands.main(["verify", prefix]) == 0 and commands.main(["verify", prefix, "--append-eod", "--json"]) == 1


def test_inspect_decodes_and_refuses_a_pair_that_does_not_fit(corpus):
    prefix = corpus()
    assert text_check.inspect(prefix)["first_documents"][0]["text"] == TEXTS[0] + "<|endoftext|>"
    _truncate(prefix)
    refused("out_text_document", text_check.inspect, prefix)


def test_verify_compares_tokenizers(corpus, folders):
    prefix, other = corpus(), corpus("other", "bpe")
    assert failed(text_check.verify(prefix, str(folders["gpt2"]), progress=False)) == []
    assert "made with this tokenizer" in failed(text_check.verify(prefix, str(folders["bpe"]), progress=False))
    assert passed([prefix, corpus("again")]) == [True, True, True]
    assert passed([prefix, other]) == [True, False, True]
    assert passed([prefix, corpus("open", append_eod=False)]) == [True, True, False]
    Path(f"{other}.meta.json").unlink()
    assert passed([prefix, other]) == [True, None, None]
    wide = corpus("wide", dtype="int32")
    assert passed([prefix, wide]) == [False, True, True]
    for suffix in ("bin", "idx"):  # the .meta.json beside them is of other tokens
        Path(f"{wide}.{suffix}").write_bytes(Path(f"{other}.{suffix}").read_bytes())
    assert read_meta(prefix)["tokenizer_backend"] and read_meta(wide) == {}
    for name, result in ((wide, False), (other, None)):  # the line is there, also of a corpus without .meta.json
        checks = text_check.verify(name, str(folders["bpe"]), progress=False)
        assert [c.passed for c in checks if c.name == "made with this tokenizer"] == [result]


def test_inspect_counts_are_those_of_the_arrays(tmp_path):
    documents = [[[1, 2, 2]], [], [[3], [2, 2]], [[9] * 10]]
    index = write_pair(tmp_path / "c", [[np.array(s) for s in d] for d in documents], np.uint16)
    report = text_check.inspect(tmp_path / "c")
    assert (report["documents"], report["sequences"], report["tokens"]) == (4, 4, 16)
    assert report["empty_documents"] == 1 and report["distinct_tokens"] == 4
    assert index.document_tokens().tolist() == [3, 0, 3, 10]
    assert report["length_percentiles"]["0"] == 0 and report["length_percentiles"]["100"] == 10
    assert report["length_percentiles"]["50"] == 3
    top = report["frequent_tokens"][:2]
    assert [(r["id"], r["count"]) for r in top] == [(9, 10), (2, 4)] and top[0]["share"] == 10 / 16
    assert report["first_documents"][2]["ids"] == [3, 2, 2]
