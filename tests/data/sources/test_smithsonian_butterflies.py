"""The Smithsonian source on a small parquet of the real schema: names as captions, with and without a hub."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dfm_nb.base.records import SampleError
from dfm_nb.data.sources import smithsonian_butterflies
from tests.data.sources.test_location import hub  # noqa: F401
from tests.data.sources.test_table import png
from tests.refusals import refused


@pytest.fixture
def parquet(tmp_path):
    """Three rows of the columns that the data set has."""
    path = tmp_path / "local" / smithsonian_butterflies.FILE
    path.parent.mkdir(parents=True)
    data = {
        "image_url": ["http://127.0.0.1:9/a.jpg", "http://127.0.0.1:9/b.jpg", "http://127.0.0.1:9/c.jpg"],
        "image_alt": ["view Aholibah Underwing digital asset number 1"] * 3,
        "id": ["edanmdm-a", "edanmdm-b", "edanmdm-c"],
        "name": ["Aholibah Underwing", "Grass Jewel", None],
        "scientific_name": ["Catocala aholibah", "Freyeria trochylus", "Lycaena xanthoides"],
        "sim_score": [0.9, 0.8, 0.7],
    }
    data["image"] = [{"bytes": png(), "path": None}] * 3
    pq.write_table(pa.table(data), path)
    return path


def test_a_row_without_a_name_is_dropped_by_name_and_another_column_can_be_asked_for(parquet):
    read = smithsonian_butterflies.build(str(parquet)).read(2)
    assert refused("row 3 of data/train", next, read, error=SampleError).reason == "no_caption"
    other = smithsonian_butterflies.build(str(parquet), caption_column="scientific_name")
    assert next(other.read(2)).caption == "Lycaena xanthoides"


def test_a_file_its_folder_and_the_hub_give_the_same_source(parquet, hub):  # noqa: F811
    there = hub.parents[1] / "huggan/smithsonian_butterflies_subset" / smithsonian_butterflies.FILE
    there.parent.mkdir(parents=True)
    there.write_bytes(parquet.read_bytes())
    root = parquet.parents[1]
    sources = [smithsonian_butterflies.build(spec) for spec in (str(parquet), str(root), str(parquet.parent), None)]
    assert all(s.identity() == sources[0].identity() and s.item_key(1) == sources[0].item_key(1) for s in sources)


def test_what_cannot_be_had_is_named(hub, tmp_path):  # noqa: F811
    refused("hf download huggan/smithsonian_butterflies_subset", smithsonian_butterflies.build)
    refused(smithsonian_butterflies.FILE, smithsonian_butterflies.build, str(tmp_path), error=FileNotFoundError)
