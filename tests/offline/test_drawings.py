"""The drawings that come with the package: what its other tests and figures rely on."""

import csv

from dfm_nb.offline import drawings


def test_held_out_drawings_are_by_other_authors_and_each_has_its_caption():
    source = drawings.build()
    tables = {
        split: list(csv.DictReader((drawings.FOLDER / split / "metadata.csv").open())) for split in ("train", "test")
    }
    splits = [source.item_split(i) for i in range(len(source))]
    assert (splits.count(None), splits.count("test")) == (200, 40)
    authors = {split: {row["author"] for row in rows} for split, rows in tables.items()}
    assert not authors["train"] & authors["test"]
    rows = {f"{split}/{row['file_name']}": row["text"] for split in tables for row in tables[split]}
    clips = {file: next(source.read(i)) for i, file in enumerate(source.files)}
    assert {file: clip.caption for file, clip in clips.items()} == rows and len(set(rows.values())) == 240
