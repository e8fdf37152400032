"""`dfm index DIR`: the index of a data set that was prepared without one; the work is `data.sample_index`'s."""

from __future__ import annotations

from typing import Any

from dfm_nb.base.log import log, start_logging
from dfm_nb.base.options import Options, option
from dfm_nb.data.prepared_folder import summary
from dfm_nb.data.sample_index import index_dataset

__all__ = ["index_dataset", "main"]


class IndexOptions(Options):
    """Write the index with which training opens a folder of shards."""

    prog = "dfm index"
    folder: str = option(help="folder with .tar shards and .nv-meta; they are not changed", positional=True)


def result(argv: list[str]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return summary(IndexOptions.parse(argv).folder)


def main(argv: list[str] | None = None) -> int:
    options = IndexOptions.parse(argv)
    start_logging()
    counts = index_dataset(options.folder)
    log.info("Indexed %s", ", ".join(f"{n} samples of {split}" for split, n in counts.items()))
    return 0
