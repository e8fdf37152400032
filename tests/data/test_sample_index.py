"""A split's index: equal to the shards, refused when it does not fit them."""

import json
import tarfile

import numpy as np
import pytest

from dfm_nb import adopt, prepare_dataset
from dfm_nb.base.argv import guard
from dfm_nb.config import Config
from dfm_nb.data import sample_index
from dfm_nb.data.adoption import index_dataset
from dfm_nb.data.order import PackOrder
from dfm_nb.data.sample_index import SampleIndex
from dfm_nb.data.stores import ShardStore
from dfm_nb.inspect import inspect_dataset
from dfm_nb.packs.packs import PackSettings
from tests.frames import picture
from tests.refusals import refused

SETTINGS = PackSettings(Config())


def test_rows_are_what_tarfile_finds(data):
    index = SampleIndex(data, "train")
    with tarfile.open(data / "rank0-000000.tar") as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}
    described = [json.loads(content) for name, content in members.items() if name.endswith(".json")]
    found = [index.entry(i) for i in range(len(index))]
    assert {f"{e.key}.{part}": content for e in found for part, content in e.parts().items()} == members
    assert [index.grid(i) for i in range(11)] == [tuple(meta["latent_shape"][-3:]) for meta in described]
    assert [index.text_tokens(i) for i in range(11)] == [meta["text_tokens"] for meta in described]


def test_sizes_are_those_of_the_grids(data):
    index = SampleIndex(data, "train")
    assert index.most_frames() == max(index.grid(i)[0] for i in range(11))
    voxels = np.prod([index.grid(i) for i in range(11)], axis=1)
    assert index.voxels(np.arange(11)).tolist() == voxels.tolist() and index.shards[0].voxels == voxels.sum()
    for limit in (0, 15, 16, 48, 10**6):
        found = list(index.larger_than(limit))
        assert sorted(found) == np.flatnonzero(voxels > limit).tolist()
        assert not found or voxels[found[0]] == voxels.max()


def test_weights_are_in_the_index_when_a_sample_has_one(tmp_path, data):
    assert SampleIndex(data, "train").weights(1.0) is None, "a usual weight takes no column"
    for i in range(4):
        picture(tmp_path / f"{i}.png", size=(32, 32))
    (tmp_path / "metadata.csv").write_text("file_name,text,weight\n0.png,a,2.5\n1.png,b,\n2.png,c,7\n3.png,d,0\n")
    prepared = tmp_path / "prepared"
    prepare_dataset(f"folder:{tmp_path}", output_dir=prepared, val_fraction=0)
    index = SampleIndex(prepared, "train")
    assert index.weights(1.0).tolist() == [2.5, 1, 7] and index.weights(0.5).tolist() == [2.5, 1, 7], "no clips"
    assert "bad_weight" in (prepared / "manifest.json").read_text()


def test_opening_reads_no_sample_but_the_first(data, monkeypatch):
    def no(*_):
        raise AssertionError("a shard is walked")

    monkeypatch.setattr(sample_index, "samples_of", no)
    (data / "rank0-000000.tar.idx").unlink()
    store = ShardStore(data)
    assert len(store) == 11 and store.read(10).key == store.keys[10]


def test_tars_that_are_not_of_the_preparation_are_named(data, caplog):
    ShardStore(data, progress=True)
    assert not caplog.text
    (data / "rank7-000000.tar").touch()
    ShardStore(data, progress=True)
    assert "rank7-000000.tar" in caplog.text


def test_fingerprint_follows_the_shards_content(data):
    before = ShardStore(data)
    plan = PackOrder(before, SETTINGS, 64, 4)
    tar = data / "rank0-000000.tar"
    content = bytearray(tar.read_bytes())
    content[1500] ^= 1  # in a sample, which then cannot be used
    tar.write_bytes(content)
    index_dataset(data)
    assert ShardStore(data).fingerprint != before.fingerprint
    refused("other data", PackOrder(ShardStore(data), SETTINGS, 64, 4).restore, plan.state())


def longer(data):
    with (data / "rank0-000000.tar").open("ab") as f:
        f.write(bytes(10240))


def other_split(data):
    path = data / ".nv-meta" / "split.yaml"
    path.write_text(path.read_text() + "# another\n")


STALE = {"longer": longer, "gone": lambda d: (d / "rank0-000000.tar").unlink(), "splits": other_split}


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_index_of_other_shards_is_refused_until_it_is_written_again(data, change):
    change(data)
    refused(r"rank0-000000.tar|split.yaml", ShardStore, data)
    if (data / "rank0-000000.tar").exists():
        assert guard(adopt.main, [str(data), "--reindex"]) == 0 and len(ShardStore(data)) == 11


def test_verify_compares_the_index_with_the_shards(data, monkeypatch):
    assert inspect_dataset(data, verify=True, samples=0)["faults"] == []
    monkeypatch.setattr(sample_index.described, "__code__", (lambda entry: [7, 7, 7, 7]).__code__)
    index_dataset(data)
    faults = inspect_dataset(data, verify=True, samples=0)["faults"]
    assert len(faults) == 2 and all(".index.arrow is wrong for" in fault for fault in faults)
