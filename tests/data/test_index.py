"""A split's index: equal to the shards, independent of its batches, refused when it does not fit them."""

import json
import shutil
import tarfile

import numpy as np
import pytest
import torch

from dfm_nb.base.argv import guard
from dfm_nb.config import Config
from dfm_nb.data import index as indexing
from dfm_nb.data.index import index_dataset, open_index
from dfm_nb.data.order import PackOrder
from dfm_nb.data.stores import EnergonStore
from dfm_nb.index import main
from dfm_nb.inspect import inspect_dataset
from dfm_nb.packs.packs import PackSettings
from tests.attacks.sample_files import STORED

SETTINGS = PackSettings.of(Config(), seed=1)


@pytest.fixture
def data(tmp_path):
    """A folder without an index."""
    return shutil.copytree(STORED / "data", tmp_path / "data")


@pytest.fixture
def indexed(data):
    assert index_dataset(data) == {"train": 11, "val": 1}
    return data


def packs_of(order, count=12):
    return [order.next() for _ in range(count)]


def test_rows_are_what_tarfile_finds(indexed):
    index = open_index(indexed, "train")
    with tarfile.open(indexed / "rank0-000000.tar") as tar:
        members = {m.name: (m.offset_data, m.size) for m in tar}
        described = [json.load(tar.extractfile(m)) for m in tar if m.name.endswith(".json")]
    found = [index.entry(i) for i in range(len(index))]
    assert {f"{e.key}.{part}": span for e in found for part, span in e.parts.items()} == members
    assert [index.grid(i) for i in range(11)] == [tuple(meta["latent_shape"][-3:]) for meta in described]
    assert index.batch(0)["text_tokens"].tolist() == [meta["text_tokens"] for meta in described]


@pytest.mark.parametrize("rows", [1, 3])
def test_batches_make_no_difference(data, monkeypatch, rows):
    before = EnergonStore(data)
    monkeypatch.setattr(indexing, "BATCH_ROWS", rows)
    index_dataset(data)
    store = EnergonStore(data)
    index = open_index(data, "train")
    assert index._reader.num_record_batches == -(-11 // rows)
    assert store.keys == before.keys and [store.grid(i) for i in range(11)] == [before.grid(i) for i in range(11)]
    for i in range(11):
        a, b = before.read(i), store.read(i)
        assert a.key == b.key and a.meta == b.meta
        assert torch.equal(a.latent, b.latent) and torch.equal(a.text_emb, b.text_emb)
    voxels = np.prod([store.grid(i) for i in range(11)], axis=1)
    for limit in (0, 15, 16, 48, 10**6):
        found = list(index.larger_than(limit))
        assert sorted(found) == np.flatnonzero(voxels > limit).tolist()
        assert not found or voxels[found[0]] == voxels.max()


def test_opening_reads_no_sample_but_the_first(indexed, monkeypatch):
    def no(*_):
        raise AssertionError("a shard is scanned")

    monkeypatch.setattr(indexing, "entries_at", no)
    (indexed / "rank0-000000.tar.idx").unlink()
    store = EnergonStore(indexed)
    assert len(store) == 11 and store.read(10).key == store.keys[10]


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("gains", [True, False])
def test_training_continues_when_a_folder_gains_or_loses_its_index(data, gains, manifest):
    if not manifest:
        (data / "manifest.json").unlink()
        shutil.rmtree(data / ".dfm")
    without = EnergonStore(data)
    index_dataset(data)
    both = [without, EnergonStore(data)]
    before, after = both if gains else both[::-1]
    assert before.fingerprint == after.fingerprint
    plan, other = (PackOrder(store, SETTINGS, 64, 4) for store in (before, after))
    assert packs_of(plan, 3) == packs_of(other, 3)
    resumed = PackOrder(after, SETTINGS, 64, 4)
    resumed.restore(json.loads(json.dumps(plan.state())))
    assert packs_of(resumed) == packs_of(plan)


def test_fingerprint_follows_the_shards_content(indexed):
    before = EnergonStore(indexed)
    manifest = json.loads((indexed / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = "0" * 64
    (indexed / "manifest.json").write_text(json.dumps(manifest))
    index_dataset(indexed)
    assert EnergonStore(indexed).fingerprint != before.fingerprint
    plan = PackOrder(EnergonStore(indexed), SETTINGS, 64, 4)
    with pytest.raises(ValueError, match="data set"):
        plan.restore(plan.state() | {"fingerprint": before.fingerprint})


def longer(data):
    with (data / "rank0-000000.tar").open("ab") as f:
        f.write(bytes(10240))


def other_split(data):
    path = data / ".nv-meta" / "split.yaml"
    path.write_text(path.read_text() + "# another\n")


STALE = {"longer": longer, "gone": lambda d: (d / "rank0-000000.tar").unlink(), "splits": other_split}


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_index_of_other_shards_is_refused_until_dfm_index_mends_it(indexed, change):
    change(indexed)
    with pytest.raises(ValueError, match=r"train\.index\.arrow"):
        EnergonStore(indexed)
    if (indexed / "rank0-000000.tar").exists():
        assert guard(main, [str(indexed)]) == 0 and len(EnergonStore(indexed)) == 11


def test_verify_compares_the_index_with_the_shards(indexed, monkeypatch):
    assert inspect_dataset(indexed, verify=True, samples=0)["faults"] == []
    scan = indexing._scan

    def other(*args):
        rows, dropped = scan(*args)
        return rows.set_column(2, "t", [[7] * len(rows)]).cast(indexing.SCHEMA), dropped

    monkeypatch.setattr(indexing, "_scan", other)
    index_dataset(indexed)
    faults = inspect_dataset(indexed, verify=True, samples=0)["faults"]
    assert len(faults) == 2 and all(".index.arrow is wrong for" in fault for fault in faults)
