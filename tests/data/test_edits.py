"""Captions changed and samples set aside by hand: what is kept of it, and who follows."""

import pytest

from dfm_nb.base.records import SampleError
from dfm_nb.data.captioning import EDITS, Edit, read_edits, write_edit
from dfm_nb.data.stores import ShardStore
from tests.refusals import refused


def test_an_edit_replaces_the_one_before_it_and_an_empty_one_takes_it_away(tmp_path):
    first, second = Edit(key="a", caption="a cat, \u00e9\n"), Edit(key="b/1", left_out=True)
    write_edit(tmp_path, first)
    write_edit(tmp_path, second)
    assert read_edits(tmp_path) == {"a": first, "b/1": second}
    write_edit(tmp_path, Edit(key="a"))
    assert (tmp_path / EDITS).read_text() == '{"key":"b/1","left_out":true}\n'
    write_edit(tmp_path, Edit(key="b/1"))
    assert not (tmp_path / EDITS).exists() and read_edits(tmp_path) == {}


@pytest.mark.parametrize(
    "line",
    ["", "[]", '{"caption": "x"}', '{"key": "a", "caption": 3}', '{"key": "a", "left_out": 1}', '{"key": "a"', "\xff"],
)
def test_a_line_that_is_no_edit_is_named(tmp_path, line):
    (tmp_path / EDITS).write_bytes(b'{"key": "a", "left_out": true}\n' + line.encode("latin-1") + b"\n")
    refused("line 2", read_edits, tmp_path)


def test_training_leaves_out_at_once(data):
    """What a preparation makes of all edits: tests/test_prepare.py, --texts-only."""
    keys = ShardStore(data).keys
    write_edit(data, Edit(key=keys[3], left_out=True))
    store = ShardStore(data)
    assert store.keys == keys and store.read(4).key == keys[4], "all have their places"
    refused("set aside", store.read, 3, error=SampleError)
