"""`dfm index DIR`: the index of a data set that was prepared without one; the work is `data.sample_index`'s."""

from dfm_nb.base.log import log
from dfm_nb.base.options import option
from dfm_nb.base.verb import Report, Verb
from dfm_nb.data.prepared_folder import summary
from dfm_nb.data.sample_index import index_dataset

__all__ = ["index_dataset", "main"]


class IndexOptions(Verb):
    """Write the index with which training opens a folder of shards."""

    prog = "dfm index"
    logs = True
    folder: str = option(help="folder with .tar shards and .nv-meta; they are not changed", positional=True)

    def run(self) -> None:
        counts = index_dataset(self.folder)
        log.info("Indexed %s", ", ".join(f"{n} samples of {split}" for split, n in counts.items()))

    def report(self, result: None) -> Report:
        return Report(summary(self.folder))


main = IndexOptions.main
