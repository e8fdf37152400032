"""`dfm adopt DIR`: make third-party shards a complete data set; `data.adoption` does the work."""

import os
from typing import Any

from dfm_nb.base import plugins
from dfm_nb.base.options import option
from dfm_nb.base.verb import Report, Verb
from dfm_nb.data import adoption
from dfm_nb.data.prepared_folder import summary


class AdoptOptions(Verb):
    """Add what is missing to a folder of third-party shards."""

    prog, logs = "dfm adopt", True

    folder: str = option(help="folder with .tar shards; they are not changed", positional=True)
    tokenizer: str = option(help="of the latents: " + ", ".join(plugins.names("tokenizers")))
    text_encoder: str = option(help="of the texts: " + ", ".join(plugins.names("text_encoders")))
    tokenizer_path: str | None = option(None, "its file or folder", flags=("--tokenizer-cache-dir",))
    text_encoder_path: str | None = option(
        None, "its folder; without it the empty caption is one token of zeros", flags=("--t5-cache-dir",)
    )
    val_fraction: float = option(0.0, "share of the samples for validation, in complete shards", ge=0, lt=1)
    device: str = option("cpu", "where the encoders run")

    def run(self) -> dict[str, Any]:
        """The manifest."""
        return adoption.adopt_dataset(**self.model_dump(exclude={"as_json"}))

    def report(self, result: dict[str, Any]) -> Report:
        return Report(summary(self.folder))


def adopt_dataset(folder: str | os.PathLike, tokenizer: str, text_encoder: str, **flags: Any) -> dict[str, Any]:
    """`data.adoption.adopt_dataset`, whose other parameters are `flags`; values are checked as the command's."""
    return AdoptOptions(folder=os.fspath(folder), tokenizer=tokenizer, text_encoder=text_encoder, **flags).run()


main = AdoptOptions.main
