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

FLIPS = 150


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


def refused(folder) -> None:
    with pytest.raises(ValueError, match=r"train\.index\.arrow") as error:
        content(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000 and not isinstance(error.value, SampleError)


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
    "shard of another folder": shard(name="../data/rank0-000000.tar"),
    "absolute shard": shard(name="/etc/passwd", bytes=1),
    "shard of other bytes": shard(bytes=2**62),
    "other checksum": shard(sha256="0" * 64),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_lie_that_leaves_the_shards_is_refused(data, change):
    rewritten(data, change)
    refused(data)


NAMED = {
    "other size": column("t", 9),
    "other key": column("key", "image-000000"),
    "key with a slash": column("key", "../../etc/passwd"),
    "into the middle": column("pth_offset", 5000),
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
    "deep": "[" * 100_000,
    "rows as text": {"rows": "x"},
    "negative rows": {"rows": -5},
    "shards as texts": {"shards": ["x"]},
    "batches as texts": {"batches": ["x"]},
    "other largest": {"batches": [[0, 0]]},
    "other split": {"split": "val"},
}


@pytest.mark.parametrize("change", SEALS.values(), ids=SEALS)
def test_seal_of_wrong_form_is_one_sentence(data, monkeypatch, change):
    def seal(self, true):
        text = change if isinstance(change, str) else json.dumps(change)
        text = json.dumps(json.loads(true(self)["seal"]) | change) if isinstance(change, dict) else text
        return {"seal": text, "sha256": indexing.hashlib.sha256(text.encode()).hexdigest()}

    monkeypatch.setattr(IndexWriter, "_seal", functools.partialmethod(seal, IndexWriter._seal))
    index_path(data, "train").unlink()
    index_dataset(data)
    refused(data)


@pytest.mark.parametrize("kind", ["other columns", "nulls", "no batch", "cut"])
def test_other_arrow_file_is_one_sentence(data, kind):
    path = index_path(data, "train")
    batch, seal = open_index(data, "train")._reader.get_batch_with_custom_metadata(0)
    whole = path.read_bytes()
    path.unlink()
    if kind == "other columns":
        batch = batch.drop_columns(["t"])
    if kind == "nulls":
        batch = batch.set_column(2, "t", pa.array([None] * len(batch), pa.uint16()))
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        if kind != "no batch":
            writer.write_batch(batch, seal)
    if kind == "cut":
        path.write_bytes(whole[:-8])
    refused(data)
