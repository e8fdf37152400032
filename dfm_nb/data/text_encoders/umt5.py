"""`umt5`: token states of a UMT5 encoder in bfloat16, as Wan uses it; google/umt5-xxl, or the one in a Wan folder.

Loaded and run as `t5`, on captions cleaned as Wan's pipeline does. It pads the states with zeros to 512 rows, all of
which its network attends to; here a caption has the states of its own tokens.
"""

from __future__ import annotations

import html
from pathlib import Path

import torch

from dfm_nb.data.text_encoders.t5 import T5, place_of

PATH_FLAG = "--umt5-path"
DEFAULT = "google/umt5-xxl"


class UMT5(T5):
    """See the module."""

    name = "umt5"
    network = "UMT5EncoderModel"
    flag = PATH_FLAG

    def encode(self, captions: list[str]) -> list[torch.Tensor]:
        """As `T5.encode`; entities of HTML, which scraped captions hold (twice escaped, too), are read first."""
        return super().encode([" ".join(html.unescape(html.unescape(c)).split()) for c in captions])


def build(path: str | Path | None = None, device: str = "cpu", max_tokens: int = 512) -> UMT5:
    """Load the encoder.

    Parameters
    ----------
    path : as for `t5`; also a folder of diffusers' with text_encoder/ and tokenizer/.
    max_tokens : longer captions are cut.
    """
    if path is not None and (Path(path).expanduser() / "text_encoder" / "config.json").is_file():
        return UMT5(str(Path(path).expanduser()), None, device, max_tokens, "text_encoder", "tokenizer")
    return UMT5(*place_of(path, DEFAULT), device, max_tokens)
