"""`dfm adopt DIR`: make third-party shards a complete data set; the work is `data.adoption`'s."""

import os
from typing import Any

from dfm_nb.data.adoption import AdoptOptions


def adopt_dataset(folder: str | os.PathLike, tokenizer: str, text_encoder: str, **flags: Any) -> dict:
    """The manifest of a folder of third-party shards that has got what it lacked.

    Parameters
    ----------
    folder : holds tars of samples; they are not changed.
    tokenizer, text_encoder : names of the plug-ins that encoded the latents and the texts.
    **flags : the other flags of `dfm adopt` with underscores (`tokenizer_path`, `val_fraction`, ...).
    """
    return AdoptOptions(folder=os.fspath(folder), tokenizer=tokenizer, text_encoder=text_encoder, **flags).run()


main = AdoptOptions.main
