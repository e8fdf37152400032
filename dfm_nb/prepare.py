"""`dfm prepare`, `torchrun ... -m dfm_nb.prepare`, `prepare_dataset(...)`; the work is `data.preparation`'s."""

from __future__ import annotations

import json
import os
import signal
import sys
import typing
from pathlib import Path

from dfm_nb.base import plugins
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.files import local
from dfm_nb.base.log import silent, start_logging
from dfm_nb.base.torchrun import launch
from dfm_nb.data.preparation import PrepareConfig, check, prepare
from dfm_nb.data.prepared_folder import summary

if typing.TYPE_CHECKING:
    import pandas as pd


def parser() -> ArgumentParser:
    """A flag for each field of `PrepareConfig`, and those that the plugins bring along."""
    p = PrepareConfig.parser()
    for kind in plugins.BUILT_IN:
        group = p.add_argument_group(f"flags of {kind.replace('_', ' ')}: {', '.join(plugins.names(kind))}")
        plugins.all_flags().add_flags(group, plugins.flags(kind))
    return p


def parse(argv: list[str] | None) -> PrepareConfig:
    return PrepareConfig(**vars(parser().parse_args(argv)))


def preflight(argv: list[str], nproc: int) -> None:
    """Report mistakes once, before torchrun starts processes."""
    with silent():
        check(parse(argv), nproc)


class PreparedDataset(dict):
    """A finished data set: its manifest (`["counts"]`, `["latent_mean"]`, ...), usable as the path of its folder."""

    def __init__(self, folder: str | os.PathLike, manifest: dict[str, typing.Any]):
        super().__init__(manifest)
        self.path = Path(folder).expanduser().absolute()  # also after os.chdir

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
    source: str | pd.DataFrame = "synthetic",
    *,
    output_dir: str | os.PathLike,
    num_processes: int = 1,
    **flags: typing.Any,
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
    table = None if isinstance(source, str) else source
    name = source if isinstance(source, str) else "table"
    config = PrepareConfig(source=name, output_dir=output_dir, table=table, **flags)
    if num_processes == 1:
        return PreparedDataset(output_dir, prepare(config))
    if table is not None:
        raise ValueError("a DataFrame is in this process alone; save it as .parquet and give source='table:FILE'")
    with silent():
        check(config, num_processes)
    launch("prepare", config.words(), num_processes)
    return PreparedDataset(output_dir, json.loads((Path(output_dir).expanduser() / "manifest.json").read_text()))


def result(argv: list[str]) -> dict[str, typing.Any]:
    """The object that `--json` prints."""
    return summary(local(parse(argv).output_dir))


def main(argv: list[str] | None = None) -> int:
    config = parse(argv)
    start_logging(rank=int(os.environ.get("RANK", 0)))
    prepare(config)
    return 0


if __name__ == "__main__":
    # as one of torchrun's: when another has failed this one is ended, and leaves no half shard
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    raise SystemExit(guard(main))
