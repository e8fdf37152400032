"""A damaged index is one sentence or makes no difference; one made to lie is one sentence, or names samples."""

import functools
import json
import random
import shutil

import numpy as np
import pyarrow as pa
import pytest

from dfm_nb.base.records import SampleError
from dfm_nb.data import index as indexing
from dfm_nb.data.index import IndexWriter, Shard, index_dataset, index_path, open_index
from dfm_nb.data.stores import EnergonStore
from tests.attacks.sample_files import STORED

FLIPS = 300


@pytest.fixture
def data(tmp_path):
    folder = shutil.copytree(STORED / "data", tmp_path / "data")
    index_dataset(folder)
    return folder


def content(folder):
    """All that training takes from an index."""
    store = EnergonStore(folder)
    entries = [store._index.entry(i) for i in range(len(store))]
    tokens = store._index.batch(0)["text_tokens"].tolist()
    return entries, [store.grid(i) for i in range(len(store))], tokens, store.dropped, store.fingerprint


def test_flipped_bits_are_refused_or_make_no_difference(data):
    path, wanted, rng = index_path(data, "train"), content(data), random.Random(0)
    whole = path.read_bytes()
    refused = 0
    for _ in range(FLIPS):
        bad = bytearray(whole)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.unlink()  # a file that is mapped is never written to
        path.write_bytes(bad)
        try:
            assert content(data) == wanted
        except ValueError as error:
            assert path.name in str(error) and "\n" not in str(error) and not isinstance(error, SampleError)
            refused += 1
    assert refused > FLIPS // 3


@pytest.mark.parametrize("length", [0, 1, 8, 100, 1000, -1, -8, -100])
def test_cut_index_is_refused(data, length):
    path = index_path(data, "train")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"train\.index\.arrow is damaged .*dfm index"):
        content(data)


def rewritten(data, change):
    """The index again, with other columns (by name, as lists) under checksums that fit."""
    index = open_index(data, "train")
    columns = index._reader.get_batch(0).to_pydict()
    shards = [shard._asdict() for shard in index.shards]
    change(columns, shards)
    path = index_path(data, "train")
    path.unlink()
    writer = IndexWriter(str(path), "train", [Shard(**s) for s in shards], indexing.split_files(data))
    writer.add(pa.table(columns, schema=indexing.SCHEMA))
    writer.close()


def column(name, value):
    return lambda columns, shards: columns[name].__setitem__(3, value)


def shard(**values):
    return lambda columns, shards: shards[0].update(values)


REFUSED = {
    "shard that is not listed": column("shard", 7),
    "offset beyond the end": column("pth_offset", 2**63),
    "size beyond the end": column("json_size", 2**32 - 1),
    "sum that overflows": column("pickle_offset", 2**64 - 1),
    "shard of another folder": shard(name="../data/rank0-000000.tar"),
    "absolute shard": shard(name="/etc/passwd", bytes=1),
    "shard of other bytes": shard(bytes=2**62),
    "shard of negative bytes": shard(bytes=-1),
    "other checksum": shard(sha256="0" * 64),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_lie_that_leaves_the_shards_is_refused(data, change):
    rewritten(data, change)
    with pytest.raises(ValueError, match=r"train\.index\.arrow") as error:
        content(data)
    assert "\n" not in str(error.value) and not isinstance(error.value, SampleError)


NAMED = {
    "other size": column("t", 9),
    "huge size": column("h", 65535),
    "no size": column("w", 0),
    "other key": column("key", "image-000000"),
    "key with a slash": column("key", "../../etc/passwd"),
    "into the middle": column("pth_offset", 5000),
    "before the start": column("pth_offset", 1),
    "shorter part": column("pickle_size", 100),
    "no pth": column("pth_offset", 0),
}


@pytest.mark.parametrize("change", NAMED.values(), ids=NAMED)
def test_lie_about_a_sample_costs_that_sample(data, change):
    wanted = EnergonStore(data)
    rewritten(data, change)
    store = EnergonStore(data)
    for i in range(11):
        if i == 3:
            with pytest.raises(SampleError, match="sample "):
                store.read(i)
        else:
            assert np.array_equal(store.read(i).latent.float(), wanted.read(i).latent.float())


SEALS = {
    "a list": [],
    "rows as text": {"rows": "x"},
    "many rows": {"rows": 10**15},
    "negative rows": {"rows": -5},
    "batches of no rows": {"batch_rows": 0},
    "no shards": {"shards": []},
    "shards as texts": {"shards": ["x"]},
    "batches as texts": {"batches": ["x"]},
    "huge checksum": {"batches": [[10**30, 1]]},
    "other largest": {"batches": [[0, 0]]},
    "dropped as number": {"dropped": 7},
    "metadata as list": {"metadata": [1]},
    "other split": {"split": "val"},
}


@pytest.mark.parametrize("change", SEALS.values(), ids=SEALS)
def test_seal_of_wrong_form_is_one_sentence(data, monkeypatch, change):
    def seal(self, true):
        said = json.loads(true(self)["seal"])
        text = json.dumps(said | change if isinstance(change, dict) else change)
        return {"seal": text, "sha256": indexing.hashlib.sha256(text.encode()).hexdigest()}

    monkeypatch.setattr(IndexWriter, "_seal", functools.partialmethod(seal, IndexWriter._seal))
    index_path(data, "train").unlink()
    index_dataset(data)
    with pytest.raises(ValueError, match=r"train\.index\.arrow") as error:
        content(data)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_seal_nested_too_deep_is_one_sentence(data, monkeypatch):
    text = "[" * 100_000
    digest = indexing.hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setattr(IndexWriter, "_seal", lambda self: {"seal": text, "sha256": digest})
    index_dataset(data)
    with pytest.raises(ValueError, match=r"train\.index\.arrow is damaged"):
        content(data)


@pytest.mark.parametrize("kind", ["other columns", "nulls", "no batch", "a stream"])
def test_other_arrow_file_is_one_sentence(data, kind):
    index = open_index(data, "train")
    batch, seal = index._reader.get_batch_with_custom_metadata(0)
    path = index_path(data, "train")
    path.unlink()
    if kind == "other columns":
        batch = batch.drop_columns(["t"])
    if kind == "nulls":
        batch = batch.set_column(2, "t", pa.array([None] * len(batch), pa.uint16()))
    make = pa.ipc.new_stream if kind == "a stream" else pa.ipc.new_file
    with make(str(path), batch.schema) as writer:
        if kind != "no batch":
            writer.write_batch(batch, seal)
    with pytest.raises(ValueError, match=r"train\.index\.arrow is damaged"):
        content(data)
