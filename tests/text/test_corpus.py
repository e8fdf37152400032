"""preprocess and merge: Megatron's bytes, whatever the workers, the stops and the parts; bad input is named."""

import dataclasses
import gzip
import io
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dfm_nb.text import corpus as text_corpus
from dfm_nb.text import encode as text_encode
from dfm_nb.text import parts as text_parts
from dfm_nb.text import tokenizer as text_tokenizer
from dfm_nb.text.check import alike
from dfm_nb.text.corpus import PreprocessConfig, find_parts, merge, preprocess
from dfm_nb.text.indexed import optimal_dtype, read_meta
from tests.json_files import read_json, write_json, write_lines
from tests.refusals import refused
from tests.text.conftest import KINDS
from tests.text.text_tokenizers import build, sample_text, save


def texts(n: int = 300) -> list[str]:
    return ["" if i % 37 == 5 else sample_text(i, words=5 + i % 70, foreign=0.03 * (i % 2)) for i in range(n)]


def write_jsonl(path: Path, documents: list) -> Path:
    write_lines(path, ({"id": i, "text": t} for i, t in enumerate(documents)))
    return path


def config(source, prefix, folder, **changes) -> PreprocessConfig:
    inputs = source if isinstance(source, list) else [str(source)]
    files = {"input": inputs, "output_prefix": prefix, "tokenizer_model": folder}
    return PreprocessConfig(**files, **({"append_eod": True, "progress": False, "chunk_bytes": 4096} | changes))


def pair(prefix, key: str = "text") -> tuple[bytes, bytes]:
    name = f"{prefix}_{key}_document"
    return Path(f"{name}.bin").read_bytes(), Path(f"{name}.idx").read_bytes()


def megatron_pair(documents: list, folder: Path, prefix: Path, eod: bool = True, dtype=None) -> tuple[bytes, bytes]:
    """The reference: megatron.core's tokenizer, one document a call, and its own builder."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(str(folder), include_special_tokens=False)  # the default until 0.19
    dtype = dtype or DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        ids, lengths = [], []
        for sentence in document if isinstance(document, list) else [document]:
            new = tokenizer.text_to_ids(sentence)
            if new:
                ids += new
                lengths.append(len(new))
        if ids and eod:
            ids.append(tokenizer.eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def made(folders, tmp_path):
    """`made(source)`: what `preprocess` tells of a corpus `out`, by the tokenizer `gpt2`."""

    def run(source, name="out", kind="gpt2", **changes):
        return preprocess(config(source, tmp_path / name, folders[kind], **changes))

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, np.int32])
def test_preprocess_bytes_equal_megatrons(made, folders, tmp_path, kind, dtype):
    """With the data type that Megatron chooses and with another, whatever the workers, the chunks and the path."""
    documents = [*texts(80), ["the fox jumps.", "", "over a dog"], ["", ""]]
    source = write_jsonl(tmp_path / "in.jsonl", documents)
    for eod in (True, False):
        want = megatron_pair(documents, folders[kind], tmp_path / "reference", eod, dtype)
        flags = {"append_eod": eod} | ({"dtype": "int32"} if dtype else {})
        for way in ({}, {"tokenizer_backend": "tokenizers", "chunk_size": 3, "chunk_bytes": 1000}) if eod else ({},):
            made(source, kind=kind, **flags, **way)
            assert pair(tmp_path / "out") == want
    if kind == "gpt2":
        made(source, "two", kind, workers=2, chunk_size=7, **flags)
        assert pair(tmp_path / "two") == want


def test_compressed_globs_and_stdin_equal_the_plain_file(made, tmp_path, monkeypatch):
    whole = write_jsonl(tmp_path / "whole.jsonl", texts(90))
    made(whole, "base")
    lines = whole.read_bytes().splitlines(keepends=True)
    (tmp_path / "p0.jsonl").write_bytes(b"".join(lines[:30]).rstrip(b"\n"))  # no newline at the end
    (tmp_path / "p1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[30:60])))
    frames = [pa.Codec("zstd").compress(b"".join(part), asbytes=True) for part in (lines[60:70], lines[70:])]
    (tmp_path / "p2.jsonl.zst").write_bytes(b"".join(frames))
    made(str(tmp_path / "p*.jsonl*"), "mixed")
    assert pair(tmp_path / "mixed") == pair(tmp_path / "base")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(whole.read_bytes())))
    made("-", "stdin")
    assert pair(tmp_path / "stdin") == pair(tmp_path / "base")
    pipe, end = os.pipe()  # as a shell's <(zcat FILE), which cannot seek
    os.write(end, whole.read_bytes())
    os.close(end)
    made(f"/dev/fd/{pipe}", "pipe")
    assert pair(tmp_path / "pipe") == pair(tmp_path / "base")


def test_several_keys_give_a_corpus_each(made, folders, tmp_path):
    rows = [{"text": sample_text(i), "title": sample_text(i + 500, words=4)} for i in range(60)]
    write_lines(tmp_path / "in.jsonl", rows)
    made(tmp_path / "in.jsonl", kind="bpe", json_keys=("text", "title"))
    for key in ("text", "title"):
        want = megatron_pair([r[key] for r in rows], folders["bpe"], tmp_path / f"reference_{key}")
        assert pair(tmp_path / "out", key) == want


def test_partitions_merge_to_one_run(made, folders, tmp_path):
    """Of files of both kinds: a compressed one is never cut."""
    documents = texts(200)
    for part in range(5):
        path = write_jsonl(tmp_path / f"in{part}.jsonl", documents[part * 40 : part * 40 + 40])
        if part % 2:
            (tmp_path / f"in{part}.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    source = str(tmp_path / "in*.jsonl*")
    made(source, "one")
    for count in (2, 7):
        prefix = tmp_path / f"many{count}"
        shares = [config(source, prefix, folders["gpt2"], partition=f"{i}/{count}") for i in range(count)]
        total = sum(preprocess(share).documents for share in shares)
        assert total == 200
        merge(find_parts(str(prefix)), f"{prefix}_text_document", progress=False)
        assert pair(prefix) == pair(tmp_path / "one")
    meta = [read_json(f"{tmp_path}/{n}_text_document.meta.json") for n in ("one", "many7")]
    assert all(meta[0][k] == meta[1][k] for k in ("documents", "tokens", "empty_documents", "tokenizer_sha256"))


@pytest.mark.parametrize("count", [1, 3, 400])
def test_partitions_of_one_file_cover_each_line_once(tmp_path, count):
    from dfm_nb.text.input import START, chunks, partition

    path = tmp_path / "in.txt"
    path.write_bytes(b"".join(b"%d" % i * (i % 9) + b"\n" for i in range(60)) + b"last")
    data = b""
    for i in range(count):
        for chunk in chunks(partition([str(path)], i, count), 5, START, 64):
            data += b"".join(chunk.lines)
    assert data == path.read_bytes()


class Killed(BaseException):
    """Stands in for the end of the process at one instant."""


def stops_at_each(monkeypatch, owner, name: str, run, folder: Path) -> int:
    """Run until it ends, stopped before the first call of `name`, then the second, and so on; parts are left torn."""
    state, function = {"count": 0, "limit": 1}, getattr(owner, name)

    def stopping(*args, **kwargs):
        if state["count"] >= state["limit"]:
            state["count"], state["limit"] = 0, state["limit"] + 1
            raise Killed
        state["count"] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, stopping)
    for stops in range(60):
        try:
            run()
            return stops
        except Killed:
            for part in folder.glob("*.unfinished/*.bin"):
                with open(part, "ab") as f:
                    f.write(b"torn")
    raise AssertionError("it does not end")


STEPS = {"write": text_parts.Parts, "save": text_parts.Parts, "replace": os}


@pytest.mark.parametrize("where", STEPS)
@pytest.mark.parametrize("verb", [preprocess, merge])
def test_resume_after_a_stop_at_any_step_gives_the_same_bytes(made, folders, tmp_path, monkeypatch, verb, where):
    """Stop at each chunk, before and after its state is written, and between the renames; leave torn part files."""
    source = write_jsonl(tmp_path / "in.jsonl", texts(60))
    made(source, "base", chunk_bytes=2048)
    out = tmp_path / "out" / "out"
    if verb is merge:
        parts = [made(source, "in", partition=f"{i}/8") for i in range(8)]

    def run():
        if verb is merge:
            merge([p.prefixes["text"] for p in parts], f"{out}_text_document", progress=False)
        else:
            preprocess(config(source, out, folders["gpt2"], chunk_bytes=2048))

    assert stops_at_each(monkeypatch, STEPS[where], where, run, out.parent) >= 3
    assert pair(out) == pair(tmp_path / "base")
    names = [f"out_text_document.{s}" for s in ("bin", "idx", "meta.json")]
    assert sorted(p.name for p in out.parent.iterdir()) == names


BAD_LINES = {
    "missing key": (b'{"body": "x", "url": "y"}', r"'text'"),
    "not an object": (b'["text"]', r"list"),
    "not a string": (b'{"text": 3}', r"int"),
    "invalid UTF-8": (b'{"text": "caf\xe9 x"}', r"0xe9"),
    "surrogate": (b'{"text": "\\ud83d"}', r"surrogate"),
    "two objects": (b'{"text": "a"} {"text": "b"}', r"JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_is_named_or_skipped_and_counted(made, folders, tmp_path, name):
    """A second run with `skip` resumes behind the lines that are done."""
    (line, message), first = BAD_LINES[name], 23
    good = [t for t in texts(60) if len(json.dumps(t)) < 1500]
    lines = [json.dumps({"text": t}).encode() for t in good]
    lines.insert(first, line)
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    flags = {"chunk_bytes": 2048}
    refused(rf"in\.jsonl, line {first + 1}: .*{message}", made, source, **flags)
    assert not [*tmp_path.glob("*.bin"), *tmp_path.glob("*.idx")]
    result = made(source, on_error="skip", **flags)
    assert (result.skipped, result.documents) == (1, len(good)) and result.resumed_documents > 0
    record = read_json(result.skipped_path)
    assert record["line"] == first + 1 and record["file"] == str(source)
    assert pair(tmp_path / "out") == megatron_pair(good, folders["gpt2"], tmp_path / "reference")


def test_values_of_other_keys_need_not_be_usable(made, folders, tmp_path):
    """Integers beyond what Python converts, half of a surrogate pair, a byte order mark, blank lines, a key twice;
    nesting that no parser follows is named.
    """
    good = [b'{"id": ' + b"9" * n + b', "text": "a fox"}' for n in (30, 5000)]
    good += [b'{"title": "\\ud83d", "text": "a fox"}', b'{"text": "x", "text": "a fox", "score": NaN}']
    good[0] = b"\xef\xbb\xbf" + good[0] + b"\r\n\n   "
    deep = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b', "text": "a fox"}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([*good, deep]))
    refused("line 7: ", made, tmp_path / "in.jsonl")
    result = made(tmp_path / "in.jsonl", on_error="skip")
    assert (result.documents, result.skipped, result.blank_lines) == (4, 1, 2)
    assert pair(tmp_path / "out") == megatron_pair(["a fox"] * 4, folders["gpt2"], tmp_path / "reference")


def test_partition_is_a_part_or_that_of_an_indexed_job(monkeypatch):
    for text in ("x", "1", "-1/3", "auto"):
        refused(text, text_corpus.part_of, text)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    monkeypatch.setenv("JOB_COMPLETIONS", "5")
    assert text_corpus.part_of("auto") == (2, 5) and text_corpus.part_of("0/4") == (0, 4)
    for world, part in (("1", (2, 5)), ("4", (1, 4))):  # an image's WORLD_SIZE=1 is no reason to write all in each pod
        monkeypatch.setenv("RANK", str(int(world) // 4))
        monkeypatch.setenv("WORLD_SIZE", world)
        assert text_corpus.part_of("auto") == part
    refused("--partition", text_corpus.part_of, None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert text_corpus.part_of(None) == (0, 1)


def test_two_runs_on_one_prefix_are_refused(made, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", texts(5))
    with text_parts.Parts.open(str(tmp_path / "out"), {}, {}):
        refused("out", made, source)


def test_input_that_has_changed_begins_from_the_start(made, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [*texts(50), 3])
    refused("line 51", made, source, chunk_bytes=512)
    assert (tmp_path / "out.unfinished/progress.json").exists()
    result = made(source, on_error="skip", append_eod=False)
    assert result.resumed_documents == 0 and result.documents == 50 and result.skipped == 1


@pytest.mark.parametrize(
    "name, content",
    [
        ("in.jsonl", b"\n\n"),
        ("in.jsonl", gzip.compress(b"{}", mtime=0)),
        ("in.zst", b"no"),
        ("in.zst", pa.Codec("zstd").compress(b'{"text": "a"}\n' * 9, asbytes=True)[:-2]),
        ("in.gz", gzip.compress(b"{}", mtime=0)[:-9]),
    ],
)
def test_input_without_documents_and_truncated_input_are_named(made, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refused(name, made, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_difference_of_the_back_ends_starts_again_and_one_corpus_has_one(made, folders, tmp_path, monkeypatch):
    """The rest of a run that has started again continues with `tokenizers`."""
    pytest.importorskip("gigatoken")
    source = write_jsonl(tmp_path / "in.jsonl", [*texts(60), 3])
    want = megatron_pair(texts(60), folders["gpt2"], tmp_path / "reference")
    settings = {"on_error": "skip", "chunk_bytes": 2048}
    parts = [config(source, tmp_path / "parts", folders["gpt2"], partition=f"{i}/2", **settings) for i in range(2)]
    assert preprocess(parts[0]).tokenizer_backend == "gigatoken"
    monkeypatch.setattr(text_encode.GigatokenEncoder, "takes", lambda *_: True)
    encode, calls = text_encode._tokenizers, []

    def other(spec):
        reference = encode(spec)
        calls.append(spec)
        return lambda texts: [ids + (len(calls) == 1) for ids in reference(texts)]

    monkeypatch.setattr(text_encode, "_tokenizers", other)
    refused("line 61", made, source, chunk_bytes=2048)  # started again, and then stopped
    result = made(source, **settings)
    assert result.tokenizer_backend == "tokenizers" and result.resumed_documents and pair(tmp_path / "out") == want
    calls.clear()
    refused(
        "token 0 .*; use --tokenizer-backend tokenizers",
        made,
        source,
        "more",
        tokenizer_backend="gigatoken",
        **settings,
    )
    calls.clear()
    assert "token 0" in preprocess(parts[1]).warnings[0]
    refused("tokenizer_backend", merge, find_parts(str(tmp_path / "parts")), str(tmp_path / "joined"), progress=False)


def test_a_glob_leaves_out_the_files_of_the_run(made, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [*texts(20), 3])
    for _ in range(2):
        result = made(tmp_path / "*.json*", "in", on_error="skip")
        assert (result.documents, result.skipped) == (20, 1) and source.exists()


def test_special_tokens_in_a_text_can_be_text(folders, tmp_path):
    """`split_special_tokens` and a file of another name are read as transformers reads them, or refused."""
    folder = shutil.copytree(folders["gpt2"], tmp_path / "split")
    settings = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", settings | {"split_special_tokens": True})
    documents = ["a <|endoftext|> b"]
    preprocess(config(write_jsonl(tmp_path / "in.jsonl", documents), tmp_path / "out", folder))
    assert pair(tmp_path / "out") == megatron_pair(documents, folder, tmp_path / "reference")
    assert text_tokenizer.load(folder).sha256 != text_tokenizer.load(folders["gpt2"]).sha256
    (folder / "other.json").write_text((folders["bpe"] / "tokenizer.json").read_text())
    refused(r"other\.json", text_tokenizer.load, folder / "other.json")


@pytest.mark.parametrize("kind", (*KINDS, "no_eos"))
def test_a_tokenizer_is_read_as_transformers_reads_it(folders, kind, monkeypatch):
    """Without transformers, so in a tenth of the time; the hash is that of earlier corpora."""
    spec = text_tokenizer.load(folders[kind])
    monkeypatch.setattr(text_tokenizer, "_plain", lambda _: None)
    assert text_tokenizer.load(folders[kind]) == spec


@pytest.mark.parametrize(
    "kind, name, eos, model_type",
    [
        ("llama3", "GPT2Tokenizer", "<|endoftext|>", "olmo2"),
        ("llama3", "GPT2Tokenizer", None, None),  # the class's own EOD
        ("gpt2", "Qwen2Tokenizer", "<|endoftext|>", None),
    ],
)
def test_a_tokenizer_json_encodes_whatever_class_is_recorded(tmp_path, kind, name, eos, model_type):
    """As of OLMo 2 and Granite, from which transformers takes the vocabulary, and GPT-2's pattern."""
    tokenizer = build(kind)
    folder = save(tokenizer, tmp_path / kind)
    settings = {"tokenizer_class": name} | ({"eos_token": eos} if eos else {})
    write_json(folder / "tokenizer_config.json", settings)
    if model_type:
        write_json(folder / "config.json", {"model_type": model_type})
    text = "in 1234567 days, he'll see 42 naïve e\u0301tudes"
    want = tokenizer.encode(text, add_special_tokens=False).ids
    source = write_jsonl(tmp_path / "in.jsonl", [text])
    for model in (folder, folder / "tokenizer.json"):
        preprocess(config(source, tmp_path / "out", model))
        assert np.frombuffer(pair(tmp_path / "out")[0], np.uint16).tolist() == [*want, 0]


def test_tokenizers_that_do_not_fit_are_named(folders, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", texts(3))
    for folder in (folders["no_eos"], "some/hub-model"):  # the tests run without the hub
        refused(str(folder), preprocess, config(source, tmp_path / "out", folder))
    large = dataclasses.replace(text_tokenizer.load(folders["gpt2"]), max_id=69_999)
    refused("uint16.* 69999", large.check, np.dtype(np.uint16), False)
    assert [optimal_dtype(n).name for n in (65_499, 65_500)] == ["uint16", "int32"]


@pytest.mark.parametrize("change", [{"dropout": 0.3}, {"vocab": 0}])
def test_a_tokenizer_of_other_ids_in_each_run_is_refused(folders, tmp_path, change):
    folder = shutil.copytree(folders["gpt2"], tmp_path / "other")
    about = read_json(folder / "tokenizer.json")
    about["model"] |= {"vocab": about["model"]["vocab"] | {"fo": 5, "dog": 5}} if "vocab" in change else change
    write_json(folder / "tokenizer.json", about)
    refused("other", text_tokenizer.load, folder)


def test_what_tokenizers_reads_is_read(folders, tmp_path):
    """A file without the keys that have defaults, and without a class that could tell its EOD."""
    folder = shutil.copytree(folders["no_eos"], tmp_path / "short")
    about = read_json(folder / "tokenizer.json")
    del about["truncation"], about["padding"]
    write_json(folder / "tokenizer.json", about)
    want = text_tokenizer.load(folders["no_eos"])
    for settings in (
        {"tokenizer_class": "TokenizersBackend"},
        {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}},
    ):
        write_json(folder / "tokenizer_config.json", settings)
        assert text_tokenizer.load(folder) == dataclasses.replace(want, name=str(folder))


def test_a_text_is_short_enough_for_the_library_that_encodes_it(made, tmp_path, monkeypatch):
    monkeypatch.setattr(text_encode, "MAX_CHARS", 20)
    documents = ["a fox " * 9, "a \u0295 fox " * 9, "a \u0295 fox"]  # gigatoken leaves the last two to tokenizers
    source = write_jsonl(tmp_path / "in.jsonl", documents)
    for backend, skipped in (("gigatoken", 1), ("tokenizers", 2)):
        result = made(source, on_error="skip", tokenizer_backend=backend)
        assert result.skipped == skipped


def test_where_the_hub_is_unknown_its_cache_alone_is_asked(monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    asked = {}
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _, **more: asked.update(more))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: (_ for _ in ()).throw(socket.gaierror))
    refused("some/hub-model", text_tokenizer.load, "some/hub-model")
    assert asked["local_files_only"]


def test_merge_refuses_a_missing_part_and_mixed_or_damaged_corpora(made, folders, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", texts(30))
    for i in (0, 2):
        made(source, partition=f"{i}/3")
    refused("00001-of-00003", find_parts, str(tmp_path / "out"), error=FileNotFoundError)
    changed = write_jsonl(tmp_path / "changed.jsonl", texts(40))
    made(changed, partition="1/3")
    refused("00001-of-00003", merge, find_parts(str(tmp_path / "out")), str(tmp_path / "m"), progress=False)
    for name, kind, more in (("a", "gpt2", {}), ("b", "gpt2", {"dtype": "int32"}), ("c", "bpe", {})):
        preprocess(config(source, tmp_path / name, folders[kind], **more))
    a, b, c = (f"{tmp_path}/{n}_text_document" for n in "abc")
    made(source, "d", append_eod=False)
    d = f"{tmp_path}/d_text_document"
    faults = (([a, b], "uint16 in .* int32 in"), ([a, c], "c_text_docu"), ([a], "a_text_docu"), ([a, d], "append_eod"))
    for parts, named in faults:
        refused(named, merge, parts, a if parts == [a] else str(tmp_path / "m"), progress=False)
    assert not list(tmp_path.glob("m.*"))


def test_parts_of_a_folder_that_grew_or_under_another_number_are_refused(folders, tmp_path, caplog):
    """With files of equal sizes each part ends where a file does, so that nothing but the listing tells."""
    for name in "abcd":
        write_jsonl(tmp_path / f"{name}.jsonl", ["a fox"])

    def parts(count: int = 2) -> list[str]:
        shares = [config(tmp_path / "*.jsonl", tmp_path / "out", folders["gpt2"], partition=f"{i}/2") for i in (0, 1)]
        return [preprocess(share).prefixes["text"] for share in shares[:count]]

    first, last = parts()
    text_corpus.merge([first, last], str(tmp_path / "m"), progress=False)
    assert not caplog.records and "part" not in read_meta(tmp_path / "m")
    for name in "ef":
        write_jsonl(tmp_path / f"{name}.jsonl", ["a fox"])
    parts(1)
    assert [c.passed for c in alike([first, last])] == [True, True, True, False]
    parts()
    for suffix in ("bin", "idx", "meta.json"):
        shutil.copy(f"{first}.{suffix}", f"{last}.{suffix}")
    refused("00001-of-00002", merge, [first, last], str(tmp_path / "m"), progress=False)
