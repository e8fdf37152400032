"""`dfm index DIR`: the index of a data set that was prepared without one; the work is `data.sample_index`'s."""

from __future__ import annotations

from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.log import log, start_logging
from dfm_nb.data.sample_index import index_dataset

__all__ = ["index_dataset", "main"]


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="dfm index", description="Write the index with which training opens a folder of shards.")
    p.add_argument("folder", help="folder with .tar shards and .nv-meta; they are not changed")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    start_logging()
    counts = index_dataset(args.folder)
    log.info("Indexed %s", ", ".join(f"{n} samples of {split}" for split, n in counts.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
