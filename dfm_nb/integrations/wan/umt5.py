"""`umt5`: token states of a UMT5 encoder in bfloat16, as Wan uses it; google/umt5-xxl, or the one in a Wan folder.

Loaded and run as `t5`, on captions cleaned as Wan's pipeline does. It pads the states with zeros to 512 rows, all of
which its network attends to; here a caption has the states of its own tokens.
"""

import html

from dfm_nb.data.text_encoders.t5 import T5


class UMT5(T5):
    """See the module."""

    name = "umt5"
    network = "UMT5EncoderModel"
    default = "google/umt5-xxl"

    def clean(self, caption: str) -> str:
        """Entities of HTML, which scraped captions hold (twice escaped, too), are read first."""
        return " ".join(html.unescape(html.unescape(caption)).split())


build = UMT5
