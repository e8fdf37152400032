"""A damaged index is one sentence; one made to lie, under checksums that fit, is one sentence or costs samples."""

import numpy as np
import pyarrow as pa
import pytest

from dfm_nb.base.records import SampleError
from dfm_nb.data.prepared_folder import read_checksums, seal_folder
from dfm_nb.data.sample_index import SampleIndex, Shard, index_path, schema_with, write_index
from dfm_nb.data.stores import ShardStore
from tests.attacks.sample_files import seal_as_it_is
from tests.conftest import STORED
from tests.refusals import refused


def check_refused(folder) -> None:
    assert not isinstance(refused(r"train\.index\.arrow", ShardStore, folder), SampleError)


def replaced(folder, content: bytes) -> None:
    path = index_path(folder, "train")
    path.unlink()  # a file that is mapped is never written to
    path.write_bytes(content)


def rewritten(data, change):
    """The index again, with other columns (by name, as lists) under checksums that fit."""
    path = index_path(data, "train")
    columns = pa.ipc.open_file(path.read_bytes()).read_all().to_pydict()
    shards = [shard._asdict() for shard in SampleIndex(data, "train").shards]
    change(columns, shards)
    path.unlink()
    schema = schema_with(["weight"] if "weight" in columns else [])
    write_index(path, pa.table(columns, schema=schema), [Shard(**s) for s in shards], [])
    seal_as_it_is(data)


def column(name, value):
    return lambda columns, shards: columns[name].__setitem__(3, value)


def shard(**values):
    return lambda columns, shards: shards[0].update(values)


REFUSED = {
    "shard that is not there": column("shard", 7),
    "weight that would fill memory": lambda columns, shards: columns.update(weight=[1e9] * len(columns["key"])),
    "shard of another folder": shard(name="../data/rank0-000000.tar"),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_lie_that_leaves_the_shards_is_refused(data, change):
    rewritten(data, change)
    check_refused(data)


NAMED = {
    "other size": column("t", 9),
    "key with a slash": column("key", "../../etc/passwd"),
    "offset beyond the end": column("offset", 2**62),
    "into the middle": column("offset", 5000),
    "shorter sample": column("size", 100),
    "longer sample": column("size", 60_000),
}


@pytest.mark.parametrize("change", NAMED.values(), ids=NAMED)
def test_lie_about_a_sample_costs_that_sample(data, change):
    wanted = ShardStore(data)
    rewritten(data, change)
    store = ShardStore(data)
    for i in range(11):
        if i == 3:
            refused("sample ", store.read, i, error=SampleError)
        else:
            assert np.array_equal(store.read(i).latent.float(), wanted.read(i).latent.float())


@pytest.mark.parametrize("kind", ["other columns", "nulls", "no metadata"])
def test_other_arrow_file_is_one_sentence(data, kind):
    path = index_path(data, "train")
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    path.unlink()
    if kind == "other columns":
        table = table.drop_columns(["t"])
    if kind == "nulls":
        table = table.set_column(2, "t", pa.array([None] * len(table), pa.uint16()))
    if kind == "no metadata":
        table = table.replace_schema_metadata({})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    seal_as_it_is(data)
    check_refused(data)


def test_checksums_name_only_what_is_in_the_folder(data):
    for name, size in (("/proc/kmsg", 1), ("../secret", 1), ("a/" * 2000 + "b", 1), ("a.tar", "1")):
        seal_folder(data, {**read_checksums(STORED / "data"), name: {"bytes": size, "sha256": "0" * 64}})
        refused(r"checksums\.json", ShardStore, data)
