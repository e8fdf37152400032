"""`dfm prepare`, `torchrun ... -m dfm_nb.prepare`, `prepare_dataset(...)`; the work is `data.preparation`'s."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfm_nb.base.argv import guard
from dfm_nb.base.torchrun import launch
from dfm_nb.data.preparation import PrepareConfig

if TYPE_CHECKING:
    import pandas as pd


class PreparedDataset(dict):
    """A finished data set: its manifest (`["counts"]`, `["latent_mean"]`, ...), usable as the path of its folder."""

    def __init__(self, folder: str | os.PathLike, manifest: dict):
        super().__init__(manifest)
        self.path = Path(folder).absolute()  # also after os.chdir

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def drops(self) -> pd.DataFrame:
        """Dropped samples: columns key, reason, detail."""
        import pandas as pd

        return pd.DataFrame(self["drops"], columns=["key", "reason", "detail"])

    def __repr__(self) -> str:
        counts = self["counts"]
        return (
            f"PreparedDataset({str(self.path)!r}: {counts['samples']} samples, train {counts['train']}, "
            f"val {counts['val']}, test {counts['test']}, dropped {counts['dropped']})"
        )


def prepare_dataset(
    source: str | pd.DataFrame = "synthetic", *, output_dir: str | os.PathLike, num_processes: int = 1, **flags: Any
) -> PreparedDataset:
    """Encode captioned images and clips into shards.

    Parameters
    ----------
    source : as for `dfm prepare --source`, or a table: columns as in `table:FILE`, whose media column may also hold PIL
        images and uint8 arrays [H, W], [H, W, 3] or [H, W, 4].
    output_dir : folder for the shards.
    num_processes : more than 1 start `torchrun`; under torchrun, leave it at 1.
    **flags : the other flags of `dfm prepare` with underscores, those of the source, the tokenizer and the text encoder
        among them (`num_images`, `short_side`, `tokenizer`, `resume`, ...).

    Raises
    ------
    ValueError, FileNotFoundError, FileExistsError : wrong input; the message has the fix.

    >>> prepare_dataset(source="folder:photos", output_dir="data/photos", short_side=64)  # doctest: +SKIP
    """
    if isinstance(source, str):
        config = PrepareConfig(source=source, output_dir=output_dir, **flags)
    else:
        config = PrepareConfig(source="table", output_dir=output_dir, table=source, **flags)
    if num_processes == 1:
        return PreparedDataset(config.output_dir, config.run())
    if config.table is not None:
        raise ValueError("a DataFrame is in this process alone; save it as .parquet and give source='table:FILE'")
    config.preflight(num_processes)
    launch("prepare", config.words(), num_processes)
    return PreparedDataset(config.output_dir, json.loads(Path(config.output_dir, "manifest.json").read_text()))


main = PrepareConfig.main


if __name__ == "__main__":
    # as one of torchrun's: when another has failed this one is ended, and leaves no half shard
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    raise SystemExit(guard(main))
